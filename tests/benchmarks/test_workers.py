"""Processes in which a benchmark measures."""

import signal
import sys

import pytest
from launching import started


@pytest.mark.parametrize(("ranks", "processes", "number"), [(1, 2, signal.SIGTERM), (2, 4, signal.SIGKILL)])
def test_workers_end_with_the_benchmark_that_started_them(ranks, processes, number, tmp_path):
    options = f"--loss ap_q --batch 64 --rounds 1000000 --ranks {ranks} --threads {ranks}"
    with started([sys.executable, "-m", "benchmarks", "ranking", *options.split()], tmp_path) as job:
        job.wait_until(lambda: len(job.left()) >= processes)
        job.process.send_signal(number)
        job.wait_until_none_is_left(60)
