"""The end of a process whose daemon threads still call torch."""

import sys

import pytest
from launching import started

STORE = """
import sys
import time
from datetime import timedelta
from torch.distributed import TCPStore
from distap.processes.forks import in_daemon, leave

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
begun = time.monotonic()

def call_the_store(seconds):
    while time.monotonic() < begun + seconds:
        store.check(["x"])

"""


def end_of(code, folder):
    """The status and the output of a new interpreter."""
    with started([sys.executable, "-c", STORE + code], folder) as job:
        return job.status(), job.said


def test_a_thread_that_is_about_to_leave_the_store_does_not_abort_the_process(tmp_path):
    assert end_of("in_daemon(lambda: call_the_store(1), 'a test')", tmp_path) == (0, "")


@pytest.mark.parametrize("status", [0, 1, 75])
def test_a_process_leaves_with_its_status_and_its_output_around_a_thread_that_never_ends(
    tmp_path, status
):
    code = f"""
in_daemon(lambda: call_the_store(float("inf")), "a test")
sys.stdout.write("written")
leave({status})
"""
    assert end_of(code, tmp_path) == (status, "written")


def test_a_command_that_fails_while_a_rank_still_works_ends_with_its_status(tmp_path):
    code = """
from distap.cli import main

in_daemon(lambda: call_the_store(float("inf")), "a test")
sys.argv = ["distap", "train", "no-such-recipe.yaml"]
main()
"""
    status, output = end_of(code, tmp_path)
    assert status == 2 and "no such file" in " ".join(output.split())
