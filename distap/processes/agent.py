"""The agent of a launcher: torch's, which starts a host's ranks, watches them and meets the other hosts."""

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.launcher.api as torch_launcher
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from distap.errors import FINISHED, MISTAKE, RESTART, DistapError
from distap.processes.exit_statuses import recorded_outcomes, status_of
from distap.processes.rendezvous import C10D_PORT, answers, await_meeting_point
from distap.processes.startup import STARTED
from distap.processes.stopping import TRACE_SIGNAL, go_deaf

LEAVE_SECONDS = 10  # for the ranks beside one that has left with an error
POLL_SECONDS = 0.1
PROBE_SECONDS = 1.0
logger = logging.getLogger("distap")


def require_possible(settings: Namespace) -> None:
    """Refuse torchrun's settings where there can be no such hosts or ranks.

    Raises:
        DistapError: there cannot.
    """
    try:
        ranks = torchrun.determine_local_world_size(settings.nproc_per_node)
    except ValueError as error:
        raise DistapError(f"--nproc-per-node {settings.nproc_per_node}: {error}") from error
    if ranks < 1:
        raise DistapError(f"--nproc-per-node {settings.nproc_per_node}: expected one rank at least on this host")
    with suppress(ValueError, RuntimeError):
        least, most = torchrun.parse_min_max_nnodes(settings.nnodes)
        if 0 < least <= most:
            return
    raise DistapError(f"--nnodes {settings.nnodes}: expected a number of hosts, or MIN:MAX")


def run_ranks(settings: Namespace, outcomes: Path, linger_seconds: float) -> int:
    """Start this host's ranks and wait for them; returns the host's exit status.

    Args:
        settings: torchrun's.
        outcomes: the folder of the ranks' exit statuses.
        linger_seconds: without rendezvous, after a rank has failed.
    """
    returned = threading.Event()
    agent = partial(Agent, outcomes, linger_seconds, settings, returned)
    try:
        await_meeting_point(settings)
        with _agents_made_by(agent):
            record(torchrun.run)(settings)
        return FINISHED
    except ChildFailedError as error:
        failures = [f"rank {rank} (pid {one.pid}): {_how(one.exitcode)}" for rank, one in error.failures.items()]
        logger.error("not all ranks finished: %s", ", ".join(failures))
    except SignalException as error:
        logger.warning("stopped by %s", error.sigval.name)
        if not recorded_outcomes(outcomes):
            return RESTART  # ranks that were still starting die of the signal: there was nothing to save
    except RendezvousError as error:
        logger.error("the hosts did not meet: %s", str(error) or "one of them has ended the meeting of all")
    finally:
        returned.set()
    return status_of(recorded_outcomes(outcomes))


def _how(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


class Agent(LocalElasticAgent):
    """torch's agent, which starts ranks again only where that can help, and does not wait for what is gone.

    Args:
        outcomes: folder of the ranks' exit statuses.
        linger_seconds: without rendezvous, after a rank has failed.
        settings: torchrun's.
        returned: set once nothing can hang any more.
    """

    def __init__(
        self,
        outcomes: Path,
        linger_seconds: float,
        settings: Namespace,
        returned: threading.Event,
        *arguments: Any,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._returned = returned
        self._outcomes = outcomes
        self._linger_seconds = linger_seconds
        self._settings = settings
        self._is_over = False
        self._has_started = False
        self._is_trace_asked = False
        signal.signal(TRACE_SIGNAL, self._ask_trace)
        threading.Thread(target=self._end_in_time, name="distap-agent", daemon=True).start()
        threading.Thread(target=self._pass_trace_signals_on, name="distap-signals", daemon=True).start()

    def run(self, role: str = "default") -> RunResult:
        """Run the ranks; what torch does after that, such as closing the rendezvous, has `linger_seconds`."""
        try:
            result: RunResult = super().run(role)
            return result
        finally:
            self._is_over = True
            go_deaf()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch keeps the ranks' store of the first round, and tells no launcher that comes later where that is.
        handler: Any = worker_group.spec.rdzv_handler
        handler._bootstrap_store_info = None
        # How ranks of an earlier round left is settled: a signal that comes now finds nothing to save.
        self._outcomes.mkdir(mode=0o700, exist_ok=True)  # temporary folders are tidied
        for file in self._outcomes.iterdir():
            file.unlink()
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._has_started:
            os.environ[STARTED] = str(time.time())
        self._has_started = True
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _shutdown(self, *arguments: Any, **more: Any) -> None:
        """Ask the ranks to stop, and kill those that are late, whatever torch would ask and when it would kill.

        It passes SIGHUP and SIGQUIT on, and has half a minute for ranks that it stops since new hosts have come.
        """
        for process in self._processes():
            free_lock(process)
        super()._shutdown(signal.SIGTERM, self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._has_failed():
            self._let_leave()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            outcomes = recorded_outcomes(self._outcomes)
            if status_of(outcomes) in (MISTAKE, RESTART):
                self._remaining_restarts = 0
        return result

    def _let_leave(self) -> None:
        """Wait for the other ranks, then kill them.

        They know why to leave. Torch's SIGTERM would be a second request to stop for one that is about to leave with
        status 75, and nothing to one that is stopped, which it gives half a minute.
        """
        # Ranks that stop on request leave at the end of their grace time, whatever they still have to close.
        has_stopped = RESTART in recorded_outcomes(self._outcomes).values()
        deadline = time.monotonic() + (self._shutdown_timeout if has_stopped else LEAVE_SECONDS)
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes()):
            time.sleep(POLL_SECONDS)
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL, LEAVE_SECONDS)

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in list(handlers.values())]

    def _has_failed(self) -> bool:
        return any(process.poll() for process in self._processes())

    def _end_in_time(self) -> None:
        """The main thread may hang in a call to the rendezvous' store for ever, so this one ends the process."""
        since: float | None = None
        while not self._returned.wait(PROBE_SECONDS):
            processes = self._processes()
            has_lost = any(process.poll() for process in processes) or (
                bool(processes) and all(process.poll() is not None for process in processes)
            )
            if not (self._is_over or (has_lost and not self._meets())):
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > self._linger_seconds:
                outcomes = recorded_outcomes(self._outcomes)
                is_done = len(outcomes) == len(processes) and set(outcomes.values()) == {FINISHED}
                logger.error("the rendezvous of the hosts cannot be reached any more: leaving")
                shutil.rmtree(self._outcomes, ignore_errors=True)
                os._exit(FINISHED if is_done else status_of(outcomes))

    def _pass_trace_signals_on(self) -> None:
        """To the ranks, which take it once they listen: until then it stays blocked, as they inherit it."""
        while not self._returned.is_set():
            if signal.sigtimedwait([TRACE_SIGNAL], PROBE_SECONDS) is not None or self._is_trace_asked:
                self._is_trace_asked = False
                for process in self._processes():
                    process.send_signal(TRACE_SIGNAL)

    def _ask_trace(self, number: int, frame: FrameType | None) -> None:
        """The kernel gave the signal to a thread that numpy had started before it was blocked, and not to ours."""
        self._is_trace_asked = True

    def _meets(self) -> bool:
        """Whether the rendezvous of the hosts can be reached."""
        host, port = parse_rendezvous_endpoint(torchrun.get_rdzv_endpoint(self._settings), C10D_PORT)
        return port == 0 or answers(host, port)  # 0: a host alone, which chose its port itself


def free_lock(process: subprocess.Popen[bytes]) -> None:
    """Have the process waited for again, where a signal came in the middle of its `poll`.

    torch's signal handler raises wherever the main thread is. Where `poll` has just taken its lock, it stays taken,
    and a rank that has left is waited for until it would be killed, and as long again.
    """
    lock: threading.Lock = process._waitpid_lock  # type: ignore[attr-defined]
    lock.acquire(timeout=PROBE_SECONDS)  # another thread has it for an instant only
    lock.release()


@contextmanager
def _agents_made_by(make: Callable[..., LocalElasticAgent]) -> Iterator[None]:
    """torchrun makes its agent itself, and can be given none: the name that it looks up is exchanged."""
    torchs = torch_launcher.LocalElasticAgent  # type: ignore[attr-defined]
    torch_launcher.LocalElasticAgent = make  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        torch_launcher.LocalElasticAgent = torchs  # type: ignore[attr-defined]
