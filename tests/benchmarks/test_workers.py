"""Processes in which a benchmark measures."""

import sys

from launching import started


def test_workers_end_with_the_benchmark_that_started_them(tmp_path):
    options = "--loss ap_q --batch 64 --rounds 1000000 --ranks 2 --threads 2"
    with started([sys.executable, "-m", "benchmarks", "ranking", *options.split()], tmp_path) as job:
        job.wait_until(lambda: len(job.left()) >= 4)
        job.process.kill()
        job.wait_until_none_is_left(60)
