"""The launcher's agent: torchrun's agent, which starts a host's ranks and meets other hosts, with five fixes.

- It reads each rank's exit status from a file, since torchrun reports 1 for all, and restarts only where that helps.
- It gives ranks the recipe's grace time after a signal, also when it stops them because new hosts have come.
- It ends in time when the rendezvous is gone, where torchrun's agent hangs in a call to it.
- It forgets the store of an earlier round, which a replaced launcher could never learn.
- It passes the signal that asks for a trace on to the ranks.
"""

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.launcher.api as torch_launcher
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as torch_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from distap.errors import FINISHED, MISTAKE, RESTART, DistapError
from distap.processes.exit_statuses import recorded_outcomes, status_of
from distap.processes.rank_server import ForkedRank
from distap.processes.rendezvous import C10D_PORT, answers, await_meeting_point, who_came
from distap.processes.startup import STARTED
from distap.processes.stopping import TRACE_SIGNAL, go_deaf

LEAVE_SECONDS = 10  # for the ranks beside one that has left with an error
POLL_SECONDS = 0.1
PROBE_SECONDS = 1.0
logger = logging.getLogger("distap")


def ranks_here(settings: Namespace) -> int:
    """Return the number of ranks on this host; raise a DistapError if torchrun's settings are impossible."""
    try:
        ranks = torchrun.determine_local_world_size(settings.nproc_per_node)
    except ValueError as error:
        raise DistapError(f"--nproc-per-node {settings.nproc_per_node}: {error}") from error
    if ranks < 1:
        raise DistapError(f"--nproc-per-node {settings.nproc_per_node}: expected one rank at least on this host")
    with suppress(ValueError, RuntimeError):
        least, most = torchrun.parse_min_max_nnodes(settings.nnodes)
        if 0 < least <= most:
            return ranks
    raise DistapError(f"--nnodes {settings.nnodes}: expected a number of hosts, or MIN:MAX")


def run_ranks(settings: Namespace, outcomes: Path, linger_seconds: float, start_rank: Callable[..., Any]) -> int:
    """Start this host's ranks with torchrun's settings, wait, and return the host's exit status.

    `start_rank` is called as torch's `get_subprocess_handler`. Ranks leave their exit statuses in `outcomes`. When a
    rank has failed and the rendezvous is gone, stay for `linger_seconds`.
    """
    returned = threading.Event()
    # torchrun builds its agent internally and offers no hook, so we swap what it looks up.
    agent: Any = partial(Agent, outcomes, linger_seconds, settings, returned)
    torch_launcher.LocalElasticAgent = agent  # type: ignore[attr-defined]
    torch_processes.get_subprocess_handler = start_rank  # type: ignore[attr-defined]
    try:
        await_meeting_point(settings)
        record(torchrun.run)(settings)
        return FINISHED
    except ChildFailedError as error:
        failures = [
            f"rank {rank} (pid {one.pid}): {one.signal_name() if one.exitcode < 0 else f'status {one.exitcode}'}"
            for rank, one in error.failures.items()
        ]
        on_request = all(one.exitcode == RESTART for one in error.failures.values())
        level, told = (
            (logging.WARNING, "stopped on request") if on_request else (logging.ERROR, "not all ranks finished")
        )
        logger.log(level, "%s: %s", told, ", ".join(failures))
    except SignalException as error:
        logger.warning("stopped by %s", error.sigval.name)
        if not recorded_outcomes(outcomes):
            return RESTART  # ranks that were still starting die of the signal: there was nothing to save
    except RendezvousError as error:
        logger.error("the hosts did not meet: %s", error)
    finally:
        returned.set()
    return status_of(recorded_outcomes(outcomes))


class Agent(LocalElasticAgent):
    """torch's agent with this module's fixes; `returned` is set when nothing can hang any more."""

    def __init__(
        self, outcomes: Path, linger_seconds: float, settings: Namespace, returned: threading.Event, **of_torch: Any
    ) -> None:
        super().__init__(**of_torch)
        self._outcomes, self._linger_seconds = outcomes, linger_seconds
        self._settings, self._returned = settings, returned
        self._is_over = self._has_started = self._is_trace_asked = False
        signal.signal(TRACE_SIGNAL, self._ask_trace)
        threading.Thread(target=self._end_in_time, name="distap-agent", daemon=True).start()
        threading.Thread(target=self._pass_trace_signals_on, name="distap-signals", daemon=True).start()

    def run(self, role: str = "default") -> RunResult:
        """Run the ranks; give torch's later work, such as closing the rendezvous, `linger_seconds`."""
        try:
            result: RunResult = super().run(role)
            return result
        finally:
            self._is_over = True
            go_deaf()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch keeps the ranks' store of the first round and never tells a launcher that comes later its address.
        handler: Any = worker_group.spec.rdzv_handler
        handler._bootstrap_store_info = None
        # Outcomes of an earlier round are settled: a signal that comes now finds nothing to save.
        self._outcomes.mkdir(mode=0o700, exist_ok=True)  # temporary folders are tidied
        for file in self._outcomes.iterdir():
            file.unlink()
        try:
            super()._rendezvous(worker_group)
        except RendezvousError as error:
            raise RendezvousError(who_came(handler)) from error

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._has_started:
            os.environ[STARTED] = str(time.time())
        self._has_started = True
        raising, heard = torch_processes._terminate_process_handler, list[SignalException]()

        def noting(signum: int, frame: FrameType | None) -> None:
            try:
                raising(signum, frame)
            except SignalException as error:
                heard.append(error)
                raise

        torch_processes._terminate_process_handler = noting  # torch installs it before it forks
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            torch_processes._terminate_process_handler = raising
        if heard:  # Python drops what a handler raises in the midst of a fork
            raise heard[0]
        return started

    def _shutdown(self, *arguments: Any, **more: Any) -> None:
        # torch would pass SIGHUP and SIGQUIT on as they are, and would give ranks half a minute when new hosts come.
        for process in self._processes():
            if isinstance(process, subprocess.Popen):
                free_lock(process)
        super()._shutdown(signal.SIGTERM, self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if any(process.poll() for process in self._processes()):
            self._let_leave()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and status_of(recorded_outcomes(self._outcomes)) in (MISTAKE, RESTART):
            self._remaining_restarts = 0
        return result

    def _let_leave(self) -> None:
        """Wait for the other ranks, which the watchdog told to leave, then kill them.

        torch would send SIGTERM, which a rank that is about to leave with status 75 takes for a second request, and
        which a suspended rank never sees.
        """
        # Ranks that stop on request leave by the end of their grace time.
        has_stopped = RESTART in recorded_outcomes(self._outcomes).values()
        deadline = time.monotonic() + (self._shutdown_timeout if has_stopped else LEAVE_SECONDS)
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes()):
            time.sleep(POLL_SECONDS)
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL, LEAVE_SECONDS)

    def _processes(self) -> list[subprocess.Popen[bytes] | ForkedRank]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in list(handlers.values())]

    def _end_in_time(self) -> None:
        """End the process from a thread, since the main thread may hang in the rendezvous' store."""
        since: float | None = None
        while not self._returned.wait(PROBE_SECONDS):
            left = [process.poll() for process in self._processes()]
            is_alone = any(left) or (bool(left) and None not in left)  # one has failed, or none is there any more
            if not (self._is_over or (is_alone and not self._meets())):
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > self._linger_seconds:
                outcomes = recorded_outcomes(self._outcomes)
                is_done = len(outcomes) == len(left) and set(outcomes.values()) == {FINISHED}
                logger.error("the rendezvous of the hosts cannot be reached any more: leaving")
                shutil.rmtree(self._outcomes, ignore_errors=True)
                os._exit(FINISHED if is_done else status_of(outcomes))

    def _pass_trace_signals_on(self) -> None:
        # Ranks inherit the signal blocked, so it waits until they listen.
        while not self._returned.is_set():
            if signal.sigtimedwait([TRACE_SIGNAL], PROBE_SECONDS) is not None or self._is_trace_asked:
                self._is_trace_asked = False
                for process in self._processes():
                    process.send_signal(TRACE_SIGNAL)

    def _ask_trace(self, number: int, frame: FrameType | None) -> None:
        """Take a trace signal that the kernel delivered to a numpy thread older than the blocking of signals."""
        self._is_trace_asked = True

    def _meets(self) -> bool:
        host, port = parse_rendezvous_endpoint(torchrun.get_rdzv_endpoint(self._settings), C10D_PORT)
        return port == 0 or answers(host, port)  # 0: a host alone, which chose its port itself


def free_lock(process: subprocess.Popen[bytes]) -> None:
    """Release the lock of `Popen.poll`, which torch's signal handler leaves locked if it raises inside `poll`.

    torch would then wait for a rank that has left long ago.
    """
    lock: threading.Lock = process._waitpid_lock  # type: ignore[attr-defined]
    lock.acquire(timeout=PROBE_SECONDS)  # another thread has it for an instant only
    lock.release()
