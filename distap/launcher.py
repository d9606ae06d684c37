"""`python -m distap.launcher [OPTIONS] CONFIG [key=value ...]`: a host's ranks, by torchrun's own machinery.

It takes torchrun's options, and differs from `torchrun -m distap.train CONFIG` in four things:
- its exit status is one of `distap.exits`: 75 when all ranks of this host stopped behind a checkpoint, 2 when one
  met a mistake that a person must mend, 0 when all finished, or else 1;
- ranks that left with 75 or 2 are not started again, whatever --max-restarts says;
- after a signal the ranks have the recipe's grace time (stop.grace_seconds) to leave, not 30 seconds;
- it never lingers. Once a rank has failed, or none is left, and the rendezvous cannot be reached for
  `linger_seconds` (the recipe's timeout_seconds, a minute at most), it ends, and its ranks with it. A host that was
  cut off is so gone after timeout_seconds + `watchdog.LEAVE_SECONDS` + LEAVE_SECONDS + `linger_seconds`.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from distap.errors import DistapError
from distap.exits import FAILED, FINISHED, FOLDER, LAUNCHER, MISTAKE, RESTART, recorded_outcomes
from distap.meeting import C10D_PORT, answers, await_meeting_point
from distap.startup import STARTED, process_started
from distap.stopping import SIGNALS, TRACE_SIGNAL, leave_when_asked

LEAVE_SECONDS = 10  # for the ranks beside one that has left with an error
POLL_SECONDS = 0.1
MARGIN_SECONDS = 15  # beyond the grace time, before torchrun kills a rank
LONGEST_LINGER_SECONDS = 60.0
PROBE_SECONDS = 1.0
logger = logging.getLogger("distap")


def launch_training(options: list[str], config: Path, overrides: list[str]) -> int:
    """Start this host's ranks of a training and wait for them; returns the exit status.

    Args:
        options: torchrun's, such as ["--nnodes=2", "--nproc-per-node=8"].
        config: the recipe.
        overrides: changes to it.
    Raises:
        DistapError: the recipe is wrong, or does not fit the options; no rank was started.
    """
    from distap.config import load_recipe
    from distap.telemetry.terminal import set_up_early_logging, set_up_run_logging

    set_up_early_logging(overrides, rank=None)
    recipe = load_recipe(config, overrides)
    set_up_run_logging(recipe.logs.format, recipe.run_id, rank=None)
    return launch(
        options, "distap.train", [str(config), *overrides], recipe.stop.grace_seconds, recipe.timeout_seconds
    )


def launch(
    options: list[str], module: str, arguments: list[str], grace_seconds: float, timeout_seconds: float
) -> int:
    """Run `python -m module arguments...` on each rank of this host; returns the exit status.

    Args:
        options: torchrun's.
        module: calls `exits.record_outcome`.
        arguments: of the module.
        grace_seconds: that ranks have to leave after a signal.
        timeout_seconds: of a collective.
    """
    settings = torchrun.get_args_parser().parse_args([*options, module, *arguments])
    settings.module = True
    _require_ranks(settings.nproc_per_node)
    needed = int(grace_seconds + MARGIN_SECONDS)
    if settings.shutdown_timeout is None:
        settings.shutdown_timeout = needed
    elif settings.shutdown_timeout < grace_seconds:
        raise DistapError(
            f"--shutdown-timeout {settings.shutdown_timeout}: ranks would be killed in their grace time of "
            f"{grace_seconds:g} s (stop.grace_seconds); give at least {needed}"
        )
    with _outcomes() as outcomes, _early_signals():
        returned = threading.Event()
        agent = partial(Agent, outcomes, min(timeout_seconds, LONGEST_LINGER_SECONDS), settings, returned)
        try:
            await_meeting_point(settings)
            with _agents_made_by(agent):
                return _run(settings, outcomes)
        finally:
            returned.set()


def _require_ranks(given: str) -> None:
    try:
        ranks = torchrun.determine_local_world_size(given)
    except ValueError as error:
        raise DistapError(f"--nproc-per-node {given}: {error}") from error
    if ranks < 1:
        raise DistapError(f"--nproc-per-node {given}: expected one rank at least on this host")


def _run(settings: Namespace, outcomes: Path) -> int:
    try:
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
        logger.error("the hosts did not meet: %s", error)
    return status_of(recorded_outcomes(outcomes))


def _how(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def status_of(outcomes: dict[int, int]) -> int:
    """The exit status of a host whose ranks did not all finish; one without an outcome crashed."""
    if MISTAKE in outcomes.values():
        return MISTAKE
    # One that was asked to stop and could not wait for the others has left them without it.
    return RESTART if RESTART in outcomes.values() else FAILED


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
            _go_deaf()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch keeps the ranks' store of the first round, and tells no launcher that comes later where that is.
        handler: Any = worker_group.spec.rdzv_handler
        handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._outcomes.mkdir(mode=0o700, exist_ok=True)  # temporary folders are tidied
        for file in self._outcomes.iterdir():
            file.unlink()
        if self._has_started:
            os.environ[STARTED] = str(time.time())
        self._has_started = True
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _shutdown(self, *arguments: Any, **more: Any) -> None:
        for process in self._processes():
            free_lock(process)
        super()._shutdown(*arguments, **more)

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
        deadline = time.monotonic() + LEAVE_SECONDS
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
def _outcomes() -> Iterator[Path]:
    """A folder for the ranks' exit statuses, named in their environment."""
    folder = Path(tempfile.mkdtemp(prefix="distap-outcomes-"))
    ours = {FOLDER: str(folder), LAUNCHER: str(os.getpid()), STARTED: str(process_started())}
    os.environ |= ours
    try:
        yield folder
    finally:
        for name in ours:
            del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _early_signals() -> Iterator[None]:
    """Until torch takes the signals over with the first ranks, there is nothing to lose."""
    leave_when_asked()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [TRACE_SIGNAL])  # a thread of the agent waits for it
    try:
        yield
    finally:
        _go_deaf()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _go_deaf() -> None:
    """Once no rank is left, a request to stop would only take the place of the status that says how they left.

    Ranks leave together, and the launchers of other hosts may be asked a moment later.
    """
    for number in (*SIGNALS, TRACE_SIGNAL):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _agents_made_by(make: Callable[..., LocalElasticAgent]) -> Iterator[None]:
    """torchrun makes its agent itself, and can be given none: the name that it looks up is exchanged."""
    torchs = torch_launcher.LocalElasticAgent  # type: ignore[attr-defined]
    torch_launcher.LocalElasticAgent = make  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        torch_launcher.LocalElasticAgent = torchs  # type: ignore[attr-defined]


def main() -> None:
    """Launch what the command line says."""
    settings = torchrun.get_args_parser().parse_args()
    given = sys.argv[1:]
    options = given[: len(given) - 1 - len(settings.training_script_args)]
    try:
        status = launch_training(options, Path(settings.training_script), settings.training_script_args)
    except DistapError as error:
        from distap.telemetry.terminal import print_error

        print_error(error)
        status = error.status
    sys.exit(status)


if __name__ == "__main__":
    main()
