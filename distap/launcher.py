"""Start this host's ranks, as torchrun does: `python -m distap.launcher [OPTIONS] CONFIG [key=value ...]`.

It takes torchrun's options, and differs from `torchrun -m distap.train CONFIG` in five ways:
- Its exit status is one of `distap.errors`: 2 if a rank of this host met a mistake that a person must mend, otherwise
  75 if one stopped on request, 0 if all finished, 1 if they did not.
- It looks for mistakes in data, batch and network before it starts a rank.
- It does not start ranks again that left with 75 or 2, whatever --max-restarts says.
- After a signal it gives the ranks the recipe's grace time (stop.grace_seconds) to leave, not 30 seconds.
- It does not linger. If a rank has failed or all have left, and the rendezvous cannot be reached for `linger_seconds`
  (the recipe's timeout_seconds, a minute at most), it ends and takes its ranks with it. A host that is cut off from
  the others thus ends after timeout_seconds + `watchdog.LEAVE_SECONDS` + `agent.LEAVE_SECONDS` + `linger_seconds`.
"""

import os
import shutil
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from distap.errors import DistapError
from distap.processes.exit_statuses import FOLDER, JOB, LAUNCHER
from distap.processes.startup import STARTED, process_started
from distap.processes.stopping import MARGIN_SECONDS, TRACE_SIGNAL, end_when_asked, go_deaf

LONGEST_LINGER_SECONDS = 60.0


def launch_training(options: list[str], config: Path, overrides: list[str]) -> int:
    """Start this host's ranks with torchrun's `options`, such as --nnodes=2; wait for the exit status."""
    from distap.config.reading import load_recipe
    from distap.storage.remotes import UnreachableError
    from distap.telemetry.terminal import set_up_early_logging, set_up_run_logging

    set_up_early_logging(overrides, rank=None)
    recipe = load_recipe(config, overrides, data_at_hand=True)
    import_module("distap.trainer")  # for the ranks, which are forks
    from distap.training.start_checks import check_start

    set_up_run_logging(recipe.logs.format, recipe.run_id, rank=None)
    arguments, seconds = [str(config), *overrides], (recipe.stop.grace_seconds, recipe.timeout_seconds)

    def check(ranks: int) -> None:
        with suppress(UnreachableError):  # of which the ranks tell, and may be started again
            check_start(recipe, ranks)

    return launch(options, "distap.train", arguments, *seconds, check)


def launch(
    options: list[str],
    module: str,
    arguments: list[str],
    grace_seconds: float,
    timeout_seconds: float,
    check: Callable[[int], None] = lambda ranks: None,
) -> int:
    """Run `python -m module arguments...` on each rank of this host; return the exit status.

    Ranks are forks of this process, so import what the module needs before. It calls `exit_statuses.record_outcome`.
    `check` is told the number of ranks before they start. Ranks have `grace_seconds` to leave after a signal, and a
    collective takes `timeout_seconds` at most. Afterwards this process ignores signals: all that is left is to leave.
    """
    from torch.distributed import run as torchrun

    from distap.processes.agent import ranks_here, run_ranks
    from distap.processes.rank_server import rank_server

    settings = torchrun.get_args_parser().parse_args([*options, module, *arguments])
    settings.module = True
    ranks = ranks_here(settings)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # torch would hear it in spite of nohup
        heeded = [name for name in settings.signals_to_handle.split(",") if name != signal.SIGHUP.name]
        settings.signals_to_handle = ",".join(heeded)
    needed = int(grace_seconds + MARGIN_SECONDS)
    if settings.shutdown_timeout is None:
        settings.shutdown_timeout = needed
    elif settings.shutdown_timeout < grace_seconds:
        grace = f"their grace time of {grace_seconds:g} s (stop.grace_seconds)"
        given = f"--shutdown-timeout {settings.shutdown_timeout}"
        raise DistapError(f"{given}: ranks would be killed in {grace}; give at least {needed}")
    with rank_server(module) as start_rank:
        check(ranks)
        with _outcomes(job_of(settings)) as outcomes:
            return run_ranks(settings, outcomes, min(timeout_seconds, LONGEST_LINGER_SECONDS), start_rank)


def job_of(settings: Namespace) -> dict[str, str]:
    """Return the environment variable that identifies a job of several hosts, by id and meeting point.

    The id alone is often left at its default.
    """
    is_alone = settings.nnodes.rpartition(":")[2] == "1" or not settings.rdzv_endpoint
    return {} if is_alone else {JOB: f"{settings.rdzv_id} at {settings.rdzv_endpoint}"}


@contextmanager
def _outcomes(job: dict[str, str]) -> Iterator[Path]:
    """Make a folder for the ranks' exit statuses, and pass it and `job` in their environment.

    Until torch handles signals, a signal ends this process: there is nothing to lose yet.
    """
    folder = Path(tempfile.mkdtemp(prefix="distap-outcomes-"))
    ours = {FOLDER: str(folder), LAUNCHER: str(os.getpid()), STARTED: str(process_started()), **job}
    os.environ |= ours
    end_when_asked(partial(shutil.rmtree, folder, ignore_errors=True))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [TRACE_SIGNAL])  # a thread of the agent waits for it
    try:
        yield folder
    finally:
        go_deaf()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name in ours:
            del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Launch the training that the command line names."""
    end_when_asked()
    # Everything heavy is imported late, so that signals are handled from the first moment on.
    from torch.distributed import run as torchrun

    settings = torchrun.get_args_parser().parse_args()
    given = sys.argv[1:]
    options = given[: len(given) - 1 - len(settings.training_script_args)]
    try:
        status = launch_training(options, Path(settings.training_script), settings.training_script_args)
    except DistapError as error:
        from distap.telemetry.terminal import print_error

        print_error(error)
        status = error.status
    # Threads of torch's store may still run here, and C++ ends a process that destroys a running thread by SIGABRT.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
