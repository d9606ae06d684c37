"""Start this host's ranks: `python -m distap.launcher [OPTIONS] CONFIG [key=value ...]`.

It takes the options of torchrun that say which hosts train and where they meet, also as PET_X in
the environment. It differs from `torchrun -m distap.train CONFIG` in five ways:
- Its exit status is one of `distap.errors`: 2 if a rank of this host met a mistake that a person
  must mend, otherwise 75 if one stopped on request, 0 if all finished, 1 if they did not.
- Its ranks are forks, which start at once.
- Several hosts meet at --master-addr, each with its --node-rank, and have timeout_seconds for it; a
  rendezvous, which numbers the hosts that come, is torchrun's alone.
- --max-restarts is for one host, and for failures: ranks that left with 75 or 2 are not started
  again. When one of several hosts is lost, all launchers leave, and whoever started them starts
  them again.
- After a signal it gives the ranks the recipe's grace time (stop.grace_seconds) to leave, not 30
  seconds. A host that is cut off ends after timeout_seconds + `watchdog.VERDICT_SECONDS` +
  `agent.LEAVE_SECONDS`.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from distap.errors import DistapError
from distap.processes.stopping import end_when_asked

if TYPE_CHECKING:
    from distap.processes.agent import Place

MASTER_PORT = 29500  # torchrun's default
# Options of torchrun that the launcher takes, about this host's ranks and about hosts.
OF_RANKS = {"nproc_per_node", "max_restarts", "training_script", "training_script_args"}
OF_HOSTS = {"nnodes", "standalone", "master_addr", "master_port", "node_rank"}


def launch_training(options: list[str], config: Path, overrides: list[str]) -> int:
    """Start this host's ranks with torchrun's `options`, such as --nnodes=2.

    Wait for them, and return the exit status.
    """
    from distap.config.reading import load_recipe
    from distap.telemetry.terminal import set_up_run_logging

    recipe = load_recipe(config, overrides)
    import_module("distap.trainer")  # for the ranks, which are forks
    set_up_run_logging(recipe.logs.format, recipe.run_id, rank=None)
    return launch(options, "distap.train", [str(config), *overrides], recipe.stop.grace_seconds)


def launch(options: list[str], module: str, arguments: list[str], grace_seconds: float) -> int:
    """Run `python -m module arguments...` on each rank of this host; return the exit status.

    Ranks are forks of this process, so import what the module needs before. They have
    `grace_seconds` to leave after a signal. Afterwards this process ignores signals: all that is
    left is to leave.
    """
    from distap.processes.agent import Agent

    end_when_asked()
    settings = _parser().parse_args([*options, module])
    place = ranks_here(settings)
    if place.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return Agent(place, [module, *arguments], grace_seconds).run(settings.max_restarts)


def ranks_here(settings: Namespace) -> "Place":
    """Return the ranks and hosts that torchrun's options describe.

    Raises:
        DistapError: the options are impossible, or not those of this launcher.
    """
    from distap.processes.agent import Place

    _refuse_other_options(settings)
    ranks = _ranks_per_host(settings.nproc_per_node)
    first, _, last = settings.nnodes.partition(":")
    hosts = int(first) if first.isdecimal() and last in ("", first) else 0
    if hosts < 1:
        raise DistapError(
            "command.wrong_hosts", f"--nnodes {settings.nnodes}: expected a number of hosts"
        )
    if hosts == 1 or settings.standalone:
        return Place(ranks, 0, ranks)
    if settings.max_restarts:
        raise DistapError(
            "command.unknown_option",
            "--max-restarts: is for one host: several meet when their launchers are started again",
        )
    if not 0 <= settings.node_rank < hosts:
        raise DistapError(
            "command.wrong_hosts",
            f"--node-rank {settings.node_rank}: expected one of 0 to {hosts - 1}",
        )
    port = settings.master_port or MASTER_PORT
    return Place(ranks, settings.node_rank * ranks, hosts * ranks, settings.master_addr, port)


def _refuse_other_options(settings: Namespace) -> None:
    """Raise a DistapError for an option of torchrun that would be ignored."""
    parser = _parser()
    for name in vars(settings).keys() - OF_RANKS - OF_HOSTS:
        # JobSet sets PET_RDZV_ID, which does no harm.
        is_in_environment = f"PET_{name.upper()}" in os.environ and name != "rdzv_id"
        if is_in_environment or getattr(settings, name) != parser.get_default(name):
            hint = ""
            if name.startswith(("rdzv", "local")):
                hint = "; several hosts meet at --master-addr, each with its --node-rank"
            raise DistapError(
                "command.unknown_option",
                f"--{name.replace('_', '-')}: distap.launcher has no such option{hint}",
            )


def _ranks_per_host(wanted: str) -> int:
    """Return the number of ranks for the value of --nproc-per-node, such as `gpu`."""
    from torch.distributed import run as torchrun

    from distap.data.shards.parallel import in_processes

    option = f"--nproc-per-node {wanted}"
    try:
        # In a fork, since the ranks are forks of this process, in which an opened GPU would not
        # work.
        [ranks] = in_processes(torchrun.determine_local_world_size, [wanted], 1)
    except ValueError as error:
        raise DistapError("command.wrong_ranks", f"{option}: {error}") from error
    if ranks < 1:
        raise DistapError(
            "command.wrong_ranks", f"{option}: expected one rank at least on this host"
        )
    return int(ranks)


def _parser() -> ArgumentParser:
    from torch.distributed import run as torchrun

    return torchrun.get_args_parser()


def main() -> None:
    """Launch the training that the command line names."""
    end_when_asked()
    # Everything heavy is imported late, so that signals are handled from the first moment on.
    settings = _parser().parse_args()
    options = sys.argv[1 : -1 - len(settings.training_script_args)]
    try:
        status = launch_training(
            options, Path(settings.training_script), settings.training_script_args
        )
    except DistapError as error:
        from distap.telemetry.terminal import print_error

        print_error(error)
        status = error.status
    sys.exit(status)


if __name__ == "__main__":
    main()
