"""Peak memory of ranking, in a process of its own, since a process never gives its peak back."""

import json
import math
import os
import subprocess
import sys

import pytest

MEASURE = """
import json, sys, torch
from torch.nn.functional import normalize
from benchmarks.measuring import peak_bytes
from distap.ranking.rank import rank
loss, budget, bins, *batches = sys.argv[1], *map(json.loads, sys.argv[2:])
options = {"bins": bins} if bins else {}
peaks = []
for batch in (256, *batches):  # the first also pays for what a process sets up once
    labels = (torch.arange(batch) // 8)[torch.randperm(batch)]
    descriptors = normalize(torch.randn(batch, 32))
    action = lambda: rank(descriptors, labels, loss, memory_bytes=budget, **options)
    peaks.append(peak_bytes(action, descriptors.device))
print(json.dumps(peaks[1:]))
"""


def peaks(loss, *batches, budget=None, bins=None):
    arguments = [loss, json.dumps(budget), json.dumps(bins), *map(str, batches)]
    # Uncompiled: the compiler's own memory would hide what is measured.
    code = "from distap.ranking import compiling\ncompiling.PAYS_FROM_PAIRS = 2**62\n" + MEASURE
    # A mapping for each tensor, so that none lies where another's memory was freed and goes uncounted.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_MMAP_MAX_": "1000000"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
def test_without_kept_bins_memory_grows_no_faster_than_the_batch():
    small, large = peaks("ap_q", 4096, 16384, budget=4 * 2**20)
    assert 16384**2 / 2 > 2 * 2**20  # bytes of the bins: they do not fit the half of the budget that is theirs
    assert math.log(large / small) / math.log(4) <= 1.1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
@pytest.mark.parametrize("loss", ["smooth_ap", "sup_ap"])
def test_smooth_ranks_of_4096_images_take_less_than_3_gb(loss):
    assert peaks(loss, 4096)[0] < 3e9
