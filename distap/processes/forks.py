"""Forks, which start at once with everything that this process has imported, and daemon threads."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
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
