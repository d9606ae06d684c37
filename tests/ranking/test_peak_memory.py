"""Peak memory of ranking, in a process of its own, since a process never gives its peak back."""

import json
import math
import subprocess
import sys

import pytest

MEASURE = """
import json, sys, torch
from torch.nn.functional import normalize
from distap.bench.peak import peak_bytes
from distap.ranking import rank
loss, budget, *batches = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:])
peaks = []
for batch in batches:
    labels = (torch.arange(batch) // 8)[torch.randperm(batch)]
    descriptors = normalize(torch.randn(batch, 32))
    peaks.append(peak_bytes(lambda: rank(descriptors, labels, loss, memory_budget=budget), descriptors.device))
print(json.dumps(peaks))
"""


def peaks(loss, budget, *batches):
    arguments = [loss, json.dumps(budget), *map(str, batches)]
    # Uncompiled: the compiler's own memory would hide what is measured.
    code = "from distap.ranking import compiled\ncompiled.PAYS_FROM_PAIRS = 2**62\n" + MEASURE
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
def test_without_kept_bins_memory_grows_no_faster_than_the_batch():
    small, large = peaks("ap_q", 4 * 2**20, 4096, 16384)
    assert 16384**2 / 2 > 2 * 2**20  # bytes of the bins: they do not fit the half of the budget that is theirs
    assert math.log(large / small) / math.log(4) <= 1.1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
@pytest.mark.parametrize("loss", ["smooth_ap", "sup_ap"])
def test_smooth_ranks_of_4096_images_take_less_than_3_gb(loss):
    assert peaks(loss, None, 4096)[0] < 3e9
