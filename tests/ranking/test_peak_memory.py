"""Peak memory of ranking, in a process of its own, whose allocator gives all memory back."""

import json
import math
import os
import subprocess
import sys

import pytest
from ranks import skip_if_fast

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process"),
]
BUDGET = 2**18
# Uncompiled: the compiler's own memory would hide what is measured.
MEASURE = """
import json, sys, torch
from torch.nn.functional import normalize
from benchmarks.measuring import peak_bytes
from distap.ranking import compiling
from distap.ranking.rank import rank
compiling.PAYS_FROM_PAIRS = 2**62

def peak(loss, batch, budget):
    labels = (torch.arange(batch) // 8)[torch.randperm(batch)]
    descriptors = normalize(torch.randn(batch, 32))
    ranked = lambda: rank(descriptors, labels, loss, memory_bytes=budget)
    return peak_bytes(ranked, descriptors.device)

for loss, budget, *batches in json.loads(sys.argv[1]):
    peaks = [peak(loss, batch, budget) for batch in (256, *batches)]
    print(json.dumps(peaks[1:]))  # the first sets things up
"""


@pytest.fixture(scope="module")
def peaks():
    skip_if_fast("a process")
    asked = [("ap_q", BUDGET, 512, 2048), ("smooth_ap", None, 2048), ("sup_ap", None, 2048)]
    # A mapping for each tensor, so that none lies where another's memory was freed and goes
    # uncounted.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(64 * 1024),
        "MALLOC_MMAP_MAX_": "1000000",
    }
    command = [sys.executable, "-c", MEASURE, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_without_kept_bins_memory_grows_no_faster_than_the_batch(peaks):
    small, large = peaks[0]
    # bytes of the bins: they do not fit the half of the budget that is theirs
    assert BUDGET / 2 < 2048**2 / 2
    assert math.log(large / small) / math.log(4) <= 1.1


def test_smooth_ranks_of_2048_images_take_less_than_200_mb(peaks):
    assert max(peaks[1] + peaks[2]) < 200e6
