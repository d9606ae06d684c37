"""Start ranks at once, by forking a server that has already imported everything.

A new interpreter imports torch and timm for seconds. The launcher imports them anyway, to check the recipe; it forks
this server before it has threads, sockets or a GPU, and the server forks a rank whenever the agent asks for one:

    launcher -- server -- between -- rank     `between` leaves at once, so that the kernel makes the rank a child
    launcher -- rank                          of the launcher, which can wait for it and takes it along when it dies
"""

import atexit
import ctypes
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from distap.processes.exit_statuses import die_with_parent
from distap.processes.stopping import SIGNALS, TRACE_SIGNAL, go_deaf

PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
OMP_PAUSE_HARD = 2  # of OpenMP 5
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dxg")  # of drivers, which do not work in a fork
POLL_SECONDS = 0.02
ANSWER_SECONDS = 60.0


class ForkedRank:
    """A forked rank with the methods that torch's agent calls on a SubprocessHandler and its Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.proc = self
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, minus a signal's number if it killed the rank, or None while the rank runs."""
        if self.returncode is None:
            # Without a lock, which torch's signal handlers would leave taken: several threads may look, one reaps.
            with suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    self.returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    os.waitpid(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait at most `timeout` seconds for the exit status; then raise a TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the rank and its own children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, death_sig)


@contextmanager
def rank_server(module: str) -> Iterator[Callable[..., Any]]:
    """Yield the function that starts a rank: `RankServer.start`, or a new interpreter where forks are unsafe."""
    hears_ends = signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN  # which a supervisor may have set
    if sys.platform != "linux" or threading.active_count() > 1 or not hears_ends or _torch_forbids_forks():
        yield get_subprocess_handler
        return
    server = RankServer(module)
    try:
        yield server.start
    finally:
        server.close()


def _torch_forbids_forks() -> bool:
    """Tell whether a GPU is open (even before torch.cuda.is_initialized) or autograd has started threads."""
    try:
        opened = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        threads = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # a file or a thread that ended meanwhile
        return True
    return any(each.startswith(GPU_FILES) for each in opened) or any("pt_autograd" in each for each in threads)


class RankServer:
    """Fork ranks that run `python -u -m module`, with everything that this process has imported by now."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._socket, theirs = socket.socketpair()
        sys.stdout.flush()  # or each rank would write it again
        if pause := getattr(ctypes.CDLL(torch._C.__file__), "omp_pause_resource_all", None):
            pause(OMP_PAUSE_HARD)  # a fork would wait for its threads
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _end_process_after(lambda: _be_rank(module, _serve(theirs)))
        self._socket.settimeout(ANSWER_SECONDS)  # the server may be killed in the midst of a fork
        theirs.close()

    def start(
        self, entrypoint: str, args: tuple[str, ...], env: dict[str, str], stdout: str, stderr: str, **of_torch: Any
    ) -> Any:
        """Start a rank like torch's `get_subprocess_handler`, which also starts any other command."""
        ours, numa = ("-u", "-m", self._module), of_torch.get("numa_options")
        libc, is_other = ctypes.CDLL(None), args[: len(ours)] != ours or numa is not None
        if is_other or libc.prctl(PR_SET_CHILD_SUBREAPER, 1):  # which not every system allows
            return get_subprocess_handler(entrypoint, args, env, stdout, stderr, **of_torch)
        asked = {"arguments": args[len(ours) :], "environment": dict(os.environ) | env, "files": [stdout, stderr]}
        try:
            self._socket.sendall(json.dumps(asked).encode() + b"\n")
            with self._socket.makefile("r") as answers:
                pid = int(answers.readline() or 0)
            if pid == 0:
                raise OSError("a rank could not be forked; the reason is above")
            return ForkedRank(pid)
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0)  # loader workers of a dead rank go to the system, as ever

    def close(self) -> None:
        """End the server; running ranks continue."""
        self._socket.close()
        os.waitpid(self._pid, 0)


def _serve(launcher: socket.socket) -> dict[str, Any]:
    """Fork a rank for each request. Only the ranks return, each with its own request."""
    die_with_parent()
    heard = {number: signal.getsignal(number) for number in (*SIGNALS, TRACE_SIGNAL)}
    go_deaf()  # Ctrl-C reaches all processes of a terminal
    gc.freeze()  # the collector would write to pages that the ranks share
    with launcher, launcher.makefile("r") as requests:
        for request in requests:
            between = os.fork()
            if between:
                if os.waitpid(between, 0)[1]:
                    launcher.sendall(b"0\n")
                continue
            between = os.getpid()
            if os.fork():
                os._exit(0)
            os.setsid()
            while os.getppid() == between:
                time.sleep(0.001)
            die_with_parent()
            for number, handler in heard.items():
                signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_BLOCK, [TRACE_SIGNAL])  # until the rank listens
            launcher.sendall(b"%d\n" % os.getpid())
            asked: dict[str, Any] = json.loads(request)
            return asked
    os._exit(0)


def _be_rank(module: str, asked: dict[str, Any]) -> None:
    """Turn a forked process into what a new interpreter with this request would be."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    for stream, file in zip((sys.stdout, sys.stderr), asked["files"], strict=True):
        if file:
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if threads := os.environ.get("OMP_NUM_THREADS"):  # which is read when torch is imported
        torch.set_num_threads(int(threads.partition(",")[0]))
    random.seed()
    numpy.random.seed()
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = [module, *asked["arguments"]]
    sys.modules.pop(module, None)  # it runs once more, as __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_process_after(work: Callable[[], None]) -> NoReturn:
    """Do `work` and end like an interpreter, without returning into the launcher's caller, which must run once."""
    status = 1
    try:
        try:
            work()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        ctypes.CDLL(None).fflush(None)  # what C libraries have not written yet
    finally:
        os._exit(status)
