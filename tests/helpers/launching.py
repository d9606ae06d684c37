"""Launchers with their ranks as processes of their own: their output, their exit status, and
whether any is left.

A `Launch` or a `Program` is forked from a server that has imported distap, since a new interpreter
takes seconds to import torch. Parents, sessions, signals and exit statuses are those of new
interpreters. Any other command is started as it is; `Launch.command` is such a command.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from ranks import server, skip_if_fast

from distap.launcher import launch

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
PATIENCE = 300.0  # seconds, so that only a fault makes a test wait in vain, and not a busy machine
OF_JOBS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
LAUNCH = """
import sys
from distap.launcher import launch
options, module, arguments = (text.split() for text in sys.argv[1:4])
sys.exit(launch(options, *module, arguments, grace_seconds=20))
"""


@dataclass(frozen=True)
class Launch:
    """A call of `distap.launcher.launch` with torchrun's options."""

    options: str
    module: str
    arguments: str
    folder: Path = HELPERS  # where the module is

    @property
    def command(self) -> list[str]:
        """The same in new interpreters."""
        return [sys.executable, "-c", LAUNCH, self.options, self.module, self.arguments]


@dataclass(frozen=True)
class Program:
    """`python ARGUMENTS...`, which are `-m MODULE`, `-c CODE` or a file, and what follows."""

    arguments: tuple[str, ...]
    folder: Path = HELPERS


def launcher(options: str, behaviour: str, folder: Path, timeout_seconds: float = 5) -> Launch:
    """Launch ranks of `launched.py`."""
    return Launch(options, "launched", f"{behaviour} {folder} {timeout_seconds}")


class Forked:
    """A process of the fork server, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid: int = process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("launcher", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Job:
    """A launcher, or another command, that was started."""

    def __init__(
        self, command: Launch | Program | Sequence[str], folder: Path, environment: dict[str, str]
    ) -> None:
        self.folder = folder
        self._said = folder / f"said-{uuid.uuid4().hex}"
        self._said.touch()
        changes = OF_JOBS | environment
        self.process: Forked | subprocess.Popen[bytes]
        if isinstance(command, Launch | Program):
            self.process = _forked(command, self._said, self._said, changes)
        else:
            with self._said.open("a") as file:
                self.process = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=HELPERS,
                    env=os.environ | changes,
                )

    @property
    def said(self) -> str:
        """All output of launcher and ranks so far."""
        return self._said.read_text()

    def pid(self, rank: int, attempt: int = 0) -> int:
        """The process of a rank, which `launched.py` and `faults.py` write down when they start."""
        file = self.folder / f"{rank}.{attempt}"
        self.wait_until(lambda: file.exists() and file.read_text() != "")
        return int(file.read_text())

    def wait_for_step(self, rank: int, step: int) -> None:
        """Wait until a rank of `launched.py` has done the step."""
        file = self.folder / f"step-{rank}"
        self.wait_until(lambda: file.exists() and int(file.read_text() or -1) >= step)

    def wait_until(self, holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for something that the processes do."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, (
                f"it ended with {self.process.returncode}: {self.said}"
            )
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.said}"
            time.sleep(0.05)

    def status(self, seconds: float = PATIENCE) -> int:
        """The launcher's exit status; it is an error if it does not leave within so many
        seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"the launcher did not leave within {seconds} s: {self.said}"
            ) from error

    def wait_until_none_is_left(self, seconds: float = PATIENCE) -> None:
        """Wait for the kernel to take the last process away."""
        deadline = time.monotonic() + seconds
        while self.left():
            assert time.monotonic() < deadline, f"{self.left()} still run"
            time.sleep(0.05)

    def left(self) -> list[int]:
        """Processes of this job that still run: all have inherited its output. A zombie has closed
        it.
        """
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if self._is_ours(entry)]

    def _is_ours(self, process: Path) -> bool:
        for stream in ("1", "2"):
            try:
                if (process / "fd" / stream).readlink() == self._said:
                    return True
            except OSError:
                continue
        return False


@contextmanager
def started(
    command: Launch | Program | Sequence[str], folder: Path, **environment: str
) -> Iterator[Job]:
    """Start a job, and kill all that belongs to it at the end."""
    skip_if_fast("launchers")
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(command, folder.resolve(), environment)
    try:
        yield job
    finally:
        for pid in job.left():
            os.kill(pid, signal.SIGKILL)
        job.process.wait()


def output_of(command: Program, folder: Path, **environment: str) -> str:
    """Run a program, which has to succeed, and return what it writes to standard output; `folder`
    is for its logs.
    """
    skip_if_fast("a program")
    answer, output = (folder / f"{name}-{uuid.uuid4().hex}" for name in ("answer", "said"))
    status = _forked(command, answer, output, OF_JOBS | environment).wait()
    assert status == 0, f"{command.arguments}: status {status}: {output.read_text()}"
    return answer.read_text()


def _forked(
    command: Launch | Program, answer: Path, output: Path, changes: dict[str, str]
) -> Forked:
    process = server().Process(
        target=_launch, args=(command, answer, output, dict(os.environ) | changes)
    )
    process.start()
    return Forked(process)


def _launch(
    command: Launch | Program, answer: Path, printed: Path, environment: dict[str, str]
) -> None:
    """Be the launcher or the program: a fork of the server, whose ranks are forks of this
    process."""
    gc.freeze()  # or a collection would copy all memory of the server
    with (
        answer.open("ab") as output,
        printed.open("ab") as errors,
        Path(os.devnull).open("rb") as nothing,
    ):
        for stream, number in ((nothing, 0), (output, 1), (errors, 2)):
            os.dup2(stream.fileno(), number)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ |= environment
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup runs the tests
    tempfile.tempdir = None  # the server's, which TMPDIR of this environment may change
    # loader workers start as they do outside the tests
    multiprocessing.set_start_method(None, force=True)
    if isinstance(command, Program):
        _be_python(list(command.arguments), environment)
        return
    sys.path.insert(0, str(command.folder))  # as `python -m` in this folder does
    sys.exit(
        launch(command.options.split(), command.module, command.arguments.split(), grace_seconds=20)
    )


def _be_python(args: list[str], environment: dict[str, str]) -> None:
    """Run the module, code or file as a new interpreter would."""
    os.setsid()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.stdout.reconfigure(line_buffering=True)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = {"-m": args[1:], "-c": ["-c", *args[2:]]}.get(args[0], args)
    if args[0] == "-m":
        sys.modules.pop(args[1], None)  # which this file may have imported; runpy would warn
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif args[0] == "-c":
        exec(args[1], {"__name__": "__main__"})
    else:
        runpy.run_path(args[0], run_name="__main__")
