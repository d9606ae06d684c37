"""Run this host's ranks: start them, watch them, pass signals on to them, and start them again after a failure.

The launcher imports what its ranks need, forks them, and computes nothing itself (see `forks.in_fork`):

    launcher -- meeting   where the hosts meet (see `distap.processes.meeting`)
             -- ranks     each a session of its own, so that Ctrl-C reaches the launcher alone
"""

import itertools
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from distap.errors import FAILED, FINISHED, MISTAKE, RESTART, CollectiveError
from distap.processes.forks import die_with_parent, forking_context
from distap.processes.meeting import Hosts, Meeting, Place
from distap.processes.startup import STARTED, process_started
from distap.processes.stopping import MARGIN_SECONDS, SIGNALS, TRACE_SIGNAL, call_on_signal, go_deaf

LEAVE_SECONDS = 10  # for the ranks beside one that has left with an error
POLL_SECONDS = 0.05
logger = logging.getLogger("distap")


class Agent:
    """Run `python -m PROGRAM...` on this host's ranks.

    Ranks have `grace_seconds` to leave after a signal. When they have left, other hosts have `linger_seconds`.
    """

    def __init__(self, hosts: Hosts, program: Sequence[str], grace_seconds: float, linger_seconds: float) -> None:
        self._hosts, self._program = hosts, program
        self._patience, self._linger_seconds = grace_seconds + MARGIN_SECONDS, linger_seconds
        self._heard: list[int] = []  # signals to pass on
        self._is_asked = False  # to stop
        self._ranks: dict[int, Any] = {}  # processes

    def run(self, restarts: int) -> int:
        """Start the ranks, and again after `restarts` failures at most; return the host's exit status.

        Afterwards this process ignores signals: all that is left is to leave.
        """
        call_on_signal(self._hear)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a supervisor may ignore it, and the end of ranks is not seen
        meeting, status = Meeting(self._hosts), FAILED
        try:
            place = meeting.place(lambda: self._is_asked)
            if place is None:
                return RESTART
            started = process_started()
            for failures in itertools.count():
                self._start(place, failures, started)
                self._watch(meeting)
                status = status_of(self._statuses(), self._is_asked)
                if status != FAILED or failures == restarts or self._is_asked:
                    break
                started = time.time()
            go_deaf()
            self._tell(status)
            # Hosts that were asked to stop may come back, and the others wait for them.
            if status == FINISHED or not self._is_asked:
                meeting.end(status == FINISHED, self._linger_seconds)
        except CollectiveError as error:
            logger.error("%s", error)
        finally:
            go_deaf()
            self._kill()
            meeting.close()
        return status

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.append(number)
        self._is_asked = self._is_asked or number != TRACE_SIGNAL

    def _start(self, place: Place, failures: int, started: float) -> None:
        self._ranks.clear()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, TRACE_SIGNAL])  # until a rank has its handlers
        try:
            for local_rank in range(self._hosts.ranks):
                rank = place.first + local_rank
                environment = {
                    **{"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": place.size},
                    **{"MASTER_ADDR": place.address, "MASTER_PORT": place.port, STARTED: started},
                    **{"LOCAL_WORLD_SIZE": self._hosts.ranks, "TORCHELASTIC_USE_AGENT_STORE": place.is_served},
                    **{"TORCHELASTIC_RUN_ID": "distap", "TORCHELASTIC_RESTART_COUNT": failures},
                }
                given = os.getpid(), self._program, {name: str(value) for name, value in environment.items()}
                process = forking_context().Process(target=_be_rank, args=given)
                process.start()
                self._ranks[rank] = process
        except OSError as error:
            raise CollectiveError(f"rank {rank} cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _watch(self, meeting: Meeting) -> None:
        """Wait until all ranks have left."""
        deadline = float("inf")
        while len(statuses := self._statuses()) < len(self._ranks):
            patience = None
            if meeting.others_wait():
                logger.warning("more hosts have come: stopping, to train with them when all are started again")
                self._hear(signal.SIGTERM, None)
            while self._heard:
                if (number := self._heard.pop(0)) != TRACE_SIGNAL:
                    number, patience = signal.SIGTERM, self._patience
                for rank in self._ranks.keys() - statuses:
                    os.kill(self._ranks[rank].pid, number)
            if any(statuses.values()):
                # The watchdog tells the other ranks to leave; those that stop on request have their grace time.
                patience = self._patience if RESTART in statuses.values() else LEAVE_SECONDS
            if patience is not None:
                deadline = min(deadline, time.monotonic() + patience)
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL_SECONDS)

    def _statuses(self) -> dict[int, int]:
        """Return the exit statuses of ranks that have left, minus a signal's number if it killed one."""
        left = {rank: process.exitcode for rank, process in self._ranks.items()}
        return {rank: status for rank, status in left.items() if status is not None}

    def _kill(self) -> None:
        """Kill the ranks that still run, with their own processes, and wait for their end."""
        for rank in self._ranks.keys() - self._statuses():
            with suppress(ProcessLookupError):  # not yet a session of its own
                os.killpg(self._ranks[rank].pid, signal.SIGKILL)
            self._ranks[rank].kill()
        for process in self._ranks.values():
            process.join(LEAVE_SECONDS)  # a rank that the kernel holds cannot be killed

    def _tell(self, status: int) -> None:
        left = ", ".join(
            f"rank {rank} (pid {self._ranks[rank].pid}): "
            + (f"status {each}" if each > 0 else signal.Signals(-each).name)
            for rank, each in self._statuses().items()
            if each != FINISHED
        )
        if status == RESTART:
            logger.warning("stopped on request: %s", left)
        elif status != FINISHED:
            logger.error("not all ranks finished: %s", left)


def status_of(statuses: Mapping[int, int], is_asked: bool = False) -> int:
    """Return the exit status of a host whose ranks left with `statuses`, and which perhaps `is_asked` to stop."""
    left = set(statuses.values())
    if MISTAKE in left:
        return MISTAKE
    # A rank that was asked to stop, and could not wait for the others, has left them without it. One that a signal
    # killed while it was starting had nothing to save.
    if RESTART in left or (is_asked and any(-status in SIGNALS for status in left)):
        return RESTART
    return FINISHED if left == {FINISHED} else FAILED


def _be_rank(launcher: int, program: Sequence[str], environment: Mapping[str, str]) -> None:
    """Turn a fork of the launcher into what `python -u -m PROGRAM` with this environment would be."""
    die_with_parent(launcher)
    os.setsid()
    for number in (*SIGNALS, TRACE_SIGNAL):
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a trace is asked for in vain until the rank listens
    os.environ |= environment
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    import numpy
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):  # which is read when torch is imported
        torch.set_num_threads(int(threads.partition(",")[0]))
    numpy.random.seed()
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = list(program)
    sys.modules.pop(program[0], None)  # it runs once more, as __main__
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)
