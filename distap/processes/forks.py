"""Start forks, which have all that this process has imported, other trainings, and threads."""

import atexit
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from distap.errors import FAILED

PR_SET_PDEATHSIG = 1  # of Linux's prctl
END_SECONDS = 5.0  # that the end of a process waits for daemon threads
_DAEMONS = weakref.WeakSet[threading.Thread]()
T = TypeVar("T")


def forking_context() -> Any:
    """Return the multiprocessing context that forks, on Linux alone, where forking is safe."""
    # The default of Python 3.14 is a server that forks: it would import torch again, and outlive
    # this process.
    return multiprocessing.get_context("fork" if sys.platform == "linux" else None)


def stop_listening() -> None:
    """Let go of the sockets at which the parent of this fork listens, such as gloo's.

    This process would hold their ports after its parent.
    """
    with Path(os.devnull).open("rb") as nothing:
        for entry in Path("/dev/fd").glob("*"):  # none where it is missing
            descriptor = int(entry.name)
            # C++ may close the number later, so it has to stay taken.
            if _listens(descriptor):
                os.dup2(nothing.fileno(), descriptor)


def _listens(descriptor: int) -> bool:
    """Return whether an open file is a socket that waits for connections."""
    try:
        opened = socket.socket(fileno=descriptor)
    except OSError:  # no socket, or closed since it was listed
        return False
    listens = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    opened.detach()
    return bool(listens)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies.

    End it now if the process `parent` has died already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent not in (None, os.getppid()):
            os._exit(FAILED)


def start_training(
    recipe: Path, ranks: int, output: Path, **environment: str
) -> subprocess.Popen[bytes]:
    """Start `distap train` on a recipe, and append what it prints to `output`.

    It ends with this process, and has the variables of `environment` on top of those here.
    """
    command = [sys.executable, "-m", "distap.cli", "train", str(recipe), "--ranks", str(ranks)]
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env=os.environ | environment,
            preexec_fn=die_with_parent,
        )


def last_error(output: Path) -> str:
    """Return the last line about an error that a training printed."""
    lines = output.read_text(errors="replace").splitlines()
    return next(
        (line for line in reversed(lines) if "error" in line.lower()), "no error was printed"
    )


def in_daemon(work: Callable[[], T], name: str, here: bool = False) -> Future[T]:
    """Run `work` in a thread that does not keep the process alive, as an executor's would.

    With `here`, run it in this thread.
    """
    future = Future[T]()

    def run() -> None:
        nonlocal work
        finish: Callable[[], None]
        try:
            finish = partial(future.set_result, work())
        except BaseException as error:
            finish = partial(future.set_exception, error)
        # Before the result is known, after which the process may end: a thread that frees a tensor
        # while Python ends aborts the process.
        del work
        finish()

    if here:
        run()
    else:
        start_daemon(run, name)
    return future


def start_daemon(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread that keeps the process alive for a while at most: see `end_daemons`."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _DAEMONS.add(thread)
    thread.start()
    return thread


@atexit.register
def end_daemons() -> list[str]:
    """Wait END_SECONDS at most for the threads of `start_daemon`; return the names of the others.

    Python ends a thread that asks for its lock while Python ends. One that does so on its way back
    from C++, such as from a call to torch's store, aborts the process: 'terminate called without an
    active exception'. This runs before Python begins to end.
    """
    deadline = time.monotonic() + END_SECONDS
    threads = list(_DAEMONS)
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return sorted(thread.name for thread in threads if thread.is_alive())


def leave(status: int) -> NoReturn:
    """Exit with this status, whatever daemon threads do.

    A call to a store over a broken network never returns, or returns while Python ends. So the
    process ends around such a thread, once all output is written.
    """
    if not end_daemons():
        sys.exit(status)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(status)
