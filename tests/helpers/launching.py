"""Launchers with their ranks, in processes of their own: what they said, how they left, and whether any is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ranks import skip_if_fast

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
MARK = "DISTAP_TEST_JOB"
OF_JOBS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
LAUNCH = """
import sys
from distap.launcher import launch
options, module, arguments = (text.split() for text in sys.argv[1:4])
sys.exit(launch(options, *module, arguments, grace_seconds=20, timeout_seconds=float(sys.argv[4])))
"""


class Job:
    """A launcher that was started."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._said = folder / f"said-{self._mark}"
        with self._said.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=HELPERS,
                env=os.environ | OF_JOBS | {MARK: self._mark} | environment,
            )

    @property
    def said(self) -> str:
        """All output of launcher and ranks so far."""
        return self._said.read_text()

    def pid(self, rank: int, attempt: int = 0) -> int:
        """The process of a rank of `launched.py`, once it has started."""
        file = self.folder / f"{rank}.{attempt}"
        self.wait_until(lambda: file.exists() and file.read_text() != "")
        return int(file.read_text())

    def wait_for_step(self, rank: int, step: int) -> None:
        """Wait until a rank of `launched.py` has done the step."""
        file = self.folder / f"step-{rank}"
        self.wait_until(lambda: file.exists() and int(file.read_text() or -1) >= step)

    def wait_until(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for something that the processes do."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.said}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.said}"
            time.sleep(0.05)

    def status(self, seconds: float = 60) -> int:
        """How the launcher left; it is an error when it does not within so long."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the launcher did not leave within {seconds} s: {self.said}") from error

    def wait_until_none_is_left(self, seconds: float = 10) -> None:
        """Wait for the kernel to take the last process away."""
        deadline = time.monotonic() + seconds
        while self.left():
            assert time.monotonic() < deadline, f"{self.left()} still run"
            time.sleep(0.05)

    def left(self) -> list[int]:
        """Processes of this job that still run."""
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if self._is_ours(entry)]

    def _is_ours(self, process: Path) -> bool:
        try:
            return f"{MARK}={self._mark}".encode() in (process / "environ").read_bytes()  # a zombie has none
        except OSError:
            return False


@contextmanager
def started(command: Sequence[str], folder: Path, **environment: str) -> Iterator[Job]:
    """Start a job, and kill all that belongs to it at the end."""
    skip_if_fast("launchers")
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(command, folder, environment)
    try:
        yield job
    finally:
        for pid in job.left():
            os.kill(pid, signal.SIGKILL)
        job.process.wait()


def launcher(options: str, behaviour: str, folder: Path, timeout_seconds: float = 5) -> list[str]:
    """The command that launches ranks of `launched.py`."""
    arguments = f"{behaviour} {folder} {timeout_seconds}"
    return [sys.executable, "-c", LAUNCH, options, "launched", arguments, str(timeout_seconds)]
