"""Forks, which start at once with everything that this process has imported, other trainings, and daemon threads."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from distap.errors import FAILED

PR_SET_PDEATHSIG = 1  # of Linux's prctl
T = TypeVar("T")


def forking_context() -> Any:
    """Return the multiprocessing context that forks on Linux, where forking is safe, or else the default."""
    # The default of Python 3.14 is a server that forks: it would import torch again, and outlive this process.
    return multiprocessing.get_context("fork" if sys.platform == "linux" else None)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies; end it now if `parent` has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent not in (None, os.getppid()):
            os._exit(FAILED)


def start_training(recipe: Path, ranks: int, output: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start `distap train` on a recipe; it ends with this process, and what it prints is appended to `output`."""
    command = [sys.executable, "-m", "distap.cli", "train", str(recipe), "--ranks", str(ranks)]
    with output.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | more, preexec_fn=die_with_parent)


def last_error(output: Path) -> str:
    """Return the last line about an error that a training printed."""
    lines = output.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if "error" in line.lower()), "no error was printed")


def in_daemon(work: Callable[[], T], name: str, here: bool = False) -> Future[T]:
    """Run `work` in a thread that does not keep the process alive, as an executor's would; or `here`, in this one."""
    future = Future[T]()

    def run() -> None:
        nonlocal work
        tell: Callable[[], None]
        try:
            tell = partial(future.set_result, work())
        except BaseException as error:
            tell = partial(future.set_exception, error)
        # Before the result is told, after which the process may end: a thread that frees a tensor while Python ends
        # aborts the process.
        del work
        tell()

    thread = threading.Thread(target=run, name=name, daemon=True)
    (thread.run if here else thread.start)()
    return future
