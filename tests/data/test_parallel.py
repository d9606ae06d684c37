import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from raising import raises

from distap.data.shards.parallel import LostWorkerError, map_in_processes
from distap.errors import DistapError


def square(number):
    return number**2


def refuse(number):
    if number == 3:
        raise DistapError("data.job", "job 3: no")
    return number


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_jobs(workers):
    assert map_in_processes(square, range(50), workers) == [number**2 for number in range(50)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_for_a_person_reaches_the_caller_as_it_is(workers):
    with pytest.raises(DistapError, match=r"^job 3: no$"):
        map_in_processes(refuse, range(9), workers)


SPREADER = """
    import os, signal, sys, time
    from distap.data.shards.parallel import map_in_processes

    def work(number):
        if number:
            time.sleep(600)
        return number

    def stop_after_one(results, about, total):
        yield next(results)
        os.kill(os.getpid(), int(sys.argv[1]))

    if __name__ == "__main__":
        map_in_processes(work, range(4), 2, track=stop_after_one)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_in_the_middle_of_their_jobs_with_their_parent(tmp_path, number):
    script = tmp_path / "spreader.py"
    script.write_text(textwrap.dedent(SPREADER))
    # Every process inherits the pipe: reading it to its end waits until the last one is gone.
    stopped = subprocess.run(
        [sys.executable, str(script), str(int(number))], capture_output=True, timeout=300
    )
    assert stopped.returncode == -number


def exhaust(number):
    return torch.empty(2**48 + number)


def test_memory_that_runs_out_in_a_worker_is_told_as_a_lost_worker():
    with raises("run.lost_worker", "DefaultCPUAllocator", kind=LostWorkerError):
        map_in_processes(exhaust, range(4), 2)
