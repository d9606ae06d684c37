"""Run this host's ranks: start and watch them, pass signals on, and restart them after a failure.

The launcher imports what its ranks need, forks them, and computes nothing itself, since forks of a
process that has computed with threads, or opened a GPU, hang or fail:

    launcher -- store     where the ranks of a single host meet; of several, rank 0 serves it
             -- ranks     each a session of its own, so that Ctrl-C reaches the launcher alone
"""

import gc
import itertools
import os
import runpy
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import numpy
import torch
from torch.distributed import TCPStore

from distap.errors import FAILED, FINISHED, MISTAKE, RESTART, logger
from distap.processes.forks import die_with_parent, forking_context
from distap.processes.meeting import POLL_SECONDS
from distap.processes.shared_values import SECRET, secret_of_run
from distap.processes.stopping import MARGIN_SECONDS, SIGNALS, TRACE_SIGNAL, call_on_signal, go_deaf

LOOPBACK = "127.0.0.1"  # a host's own name may be one that nobody can resolve
LEAVE_SECONDS = 10  # for the other ranks, after one has left with an error


@dataclass(frozen=True)
class Place:
    """The ranks of this host among all, and the address of their store."""

    ranks: int  # on this host
    first: int  # of them
    size: int  # of all hosts
    address: str = LOOPBACK
    port: int = 0  # 0 if the launcher has to serve the store, which rank 0 serves otherwise


class Agent:
    """Run `python -m PROGRAM...` on this host's ranks.

    They have `grace_seconds` to leave after a signal.
    """

    def __init__(self, place: Place, program: Sequence[str], grace_seconds: float) -> None:
        self._place = place
        self._program = program
        self._patience = grace_seconds + MARGIN_SECONDS
        self._signals: list[int] = []  # to pass on
        self._is_asked = False  # to stop
        self._ranks: dict[int, Any] = {}  # processes

    def run(self, restarts: int) -> int:
        """Start the ranks, again after each of at most `restarts` failures; return the exit status.

        Afterwards this process ignores signals: all that is left is to leave.
        """
        call_on_signal(self._hear, self._hear)
        # a supervisor may ignore it, and the end of ranks is not seen
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = FAILED
        port = self._place.port
        store = None
        try:
            # On one host the store has a process of its own: whichever rank is lost, the others can
            # still ask it who that is. Of several hosts only rank 0 is at an address that all know,
            # so it serves the store.
            if port == 0:
                # Other users of this host can reach its loopback address.
                if not secret_of_run():
                    os.environ[SECRET] = secrets.token_hex()
                receiver, sender = Pipe()
                store = forking_context().Process(target=_serve_store, args=(sender, os.getpid()))
                store.start()
                sender.close()  # or this process would wait for ever for a store that has died
                port = receiver.recv()
            for failures in itertools.count():
                self._start(port, failures)
                self._watch()
                status = status_of(self._statuses(), self._is_asked)
                # Ranks that have finished, stopped on request or met a mistake would only do the
                # same again.
                if status != FAILED or failures == restarts or self._is_asked:
                    break
            self._log_end(status)
        finally:
            go_deaf()
            self._kill()
            if store is not None:
                store.kill()
                store.join()
        return status

    def _hear(self, number: int, frame: FrameType | None) -> None:
        # A handler runs between any two lines of Python, also while ranks are being forked. So it
        # takes a note, and `_watch` passes the signal on.
        self._signals.append(number)
        self._is_asked = self._is_asked or number != TRACE_SIGNAL

    def _start(self, port: int, failures: int) -> None:
        place = self._place
        if place.port:
            logger.info(
                "starting ranks %d to %d of %d, which all meet at %s:%d, and wait there for all",
                place.first,
                place.first + place.ranks - 1,
                place.size,
                place.address,
                place.port,
            )
        self._ranks.clear()
        # A fork has this process's handlers until it sets its own. A signal in between would be
        # noted there, where nobody reads the notes, so signals wait until then.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, TRACE_SIGNAL])
        try:
            for local_rank in range(place.ranks):
                rank = place.first + local_rank
                # The same names as torchrun's: a rank need not know which of the two has started
                # it.
                environment = {
                    "RANK": f"{rank}",
                    "LOCAL_RANK": f"{local_rank}",
                    "WORLD_SIZE": f"{place.size}",
                    "MASTER_ADDR": place.address,
                    "MASTER_PORT": f"{port}",
                    "LOCAL_WORLD_SIZE": f"{place.ranks}",
                    "TORCHELASTIC_USE_AGENT_STORE": f"{place.port == 0}",
                    "TORCHELASTIC_RUN_ID": "distap",
                    "TORCHELASTIC_RESTART_COUNT": f"{failures}",
                }
                if place.port == 0 and sys.platform == "linux":
                    # Or gloo would listen at the address that the host's name stands for.
                    environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
                self._ranks[rank] = forking_context().Process(
                    target=_be_rank, args=(os.getpid(), self._program, environment)
                )
                self._ranks[rank].start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _watch(self) -> None:
        """Wait until all ranks have left."""
        deadline = float("inf")
        while len(statuses := self._statuses()) < len(self._ranks):
            patience = None
            # Ctrl-C, SIGHUP and SIGTERM ask for the same, so ranks get SIGTERM for each; a trace
            # asks for no end.
            while self._signals:
                number = self._signals.pop(0)
                if number != TRACE_SIGNAL:
                    number = signal.SIGTERM
                    patience = self._patience
                for rank in self._ranks.keys() - statuses:
                    os.kill(self._ranks[rank].pid, number)
            if any(statuses.values()):
                # The watchdog tells the other ranks to leave; those that stop on request have their
                # grace time.
                patience = self._patience if RESTART in statuses.values() else LEAVE_SECONDS
            # A deadline only comes nearer: neither a second signal nor a further failure gives
            # anybody more time.
            if patience is not None:
                deadline = min(deadline, time.monotonic() + patience)
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL_SECONDS)

    def _statuses(self) -> dict[int, int]:
        """Return the exit statuses of ranks that have left; of a killed one, minus the signal."""
        return {
            rank: process.exitcode
            for rank, process in self._ranks.items()
            if process.exitcode is not None
        }

    def _kill(self) -> None:
        """Kill the ranks that still run, with their own processes, and wait for their end."""
        # A rank leads a session, so its loader workers go with it; `kill` is for one that was not
        # that far yet.
        for rank in self._ranks.keys() - self._statuses():
            with suppress(ProcessLookupError):  # not yet a session of its own
                os.killpg(self._ranks[rank].pid, signal.SIGKILL)
            self._ranks[rank].kill()
        for process in self._ranks.values():
            process.join(LEAVE_SECONDS)  # a rank that the kernel holds cannot be killed

    def _log_end(self, status: int) -> None:
        ends = []
        for rank, left_with in self._statuses().items():
            if left_with != FINISHED:
                end = f"status {left_with}" if left_with > 0 else signal.Signals(-left_with).name
                ends.append(f"rank {rank} (pid {self._ranks[rank].pid}): {end}")
        if status == RESTART:
            logger.warning("stopped on request: %s", ", ".join(ends))
        elif status != FINISHED:
            logger.error("not all ranks finished: %s", ", ".join(ends))


def status_of(statuses: Mapping[int, int], is_asked: bool = False) -> int:
    """Return a host's exit status, given those of its ranks and whether it `is_asked` to stop."""
    left = set(statuses.values())
    if MISTAKE in left:
        return MISTAKE
    # A rank that was asked to stop, and could not wait for the others, has left them without it.
    # One that a signal killed while it was starting had nothing to save.
    if RESTART in left or (is_asked and any(-status in SIGNALS for status in left)):
        return RESTART
    return FINISHED if left == {FINISHED} else FAILED


def _serve_store(pipe: Connection, launcher: int) -> None:
    """Serve the ranks' store, which outlives any rank, and send its port through the pipe."""
    go_deaf()
    die_with_parent(launcher)
    # torch's own socket would listen at all addresses of this host.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    pipe.send(store.port)
    signal.pause()


def _be_rank(launcher: int, program: Sequence[str], environment: Mapping[str, str]) -> None:
    """Turn a fork of the launcher into what `python -u -m PROGRAM` with this environment would be.

    It imports from where the launcher does. Python would look into the working folder first, which
    may be of a stranger whose checkpoint is read there.
    """
    gc.freeze()  # or a collection would copy all memory of the launcher
    die_with_parent(launcher)
    # A session of its own: Ctrl-C reaches the launcher alone, and the rank and its workers can be
    # killed as a group.
    os.setsid()
    # Out with the launcher's handlers. Python's own action for SIGINT is an exception, for the
    # others the end.
    for number in (*SIGNALS, TRACE_SIGNAL):
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    # A trace cannot be had until the rank listens.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ |= environment
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:  # which is read when torch is imported
        torch.set_num_threads(int(threads.partition(",")[0]))
    # Forks begin with the launcher's state, and so would all draw the same numbers.
    numpy.random.seed()
    sys.argv = list(program)
    sys.modules.pop(program[0], None)  # it runs once more, as __main__
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)
