"""`distap train`, `watch`, `report`, `study` and `plan`: what is done with a recipe and its runs."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from distap.apps.serve.settings import AddressSettings
from distap.cli.commands import JSON, print_json
from distap.cli.options import AUTO, CONFIG, OVERRIDES, RANKS, ranks_to_start, with_options
from distap.errors import DistapError
from distap.processes.startup import Startup
from distap.processes.stopping import end_when_asked, go_deaf, leave_when_asked

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
OUTPUT = "Folder to write report.html and summary.json to; by default the run's, or the parent of all runs."
BEFORE = "Evaluation before the training, a folder that `distap eval --output` wrote; by default the run's."
AFTER = "Evaluation after the training, a folder like --before; by default the run's."
CARD = "GPU to predict for: b200, h200, h100, a100, a100-40gb, l40s, l4 or rtx4090."
LINK = "Network rate of a host per second: 400Gb is in bits, 50GB in bytes."
ONLY = "Name on an axis to train, or several with commas between them; an axis without one keeps all."
RESTARTS = "Start ranks again after a failure, at most this many times; they go on from the newest checkpoint."
WATCHED = "Folder of a training run; the training may begin later."
DRY_RUN = "Only look for mistakes, load the weights, and say what would be done."
MEASURE = "Measure this machine and predict for more machines like it."


def train_rank(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Train on this process's rank: alone, or as one of the ranks that torchrun starts.

    The run goes on from its newest checkpoint, if there is one. On SIGTERM or SIGINT it finishes the step or breaks
    off the evaluation, writes a checkpoint and exits with status 75: start it again. Other exit statuses: 0 all steps
    are done, 2 a mistake that a person must mend, 1 a failure.
    """
    end_when_asked()
    startup = Startup()
    # Imported here, so that --help does not wait for torch.
    from distap.config.reading import load_recipe
    from distap.telemetry.terminal import set_up_early_logging

    set_up_early_logging(overrides or [], int(os.environ.get("RANK", "0")))
    recipe = load_recipe(config, overrides or [], data_at_hand=True)
    from distap.trainer import trained

    with trained(recipe, startup) as status:
        go_deaf()
    sys.exit(status)


def train_command(
    config: CONFIG,
    overrides: OVERRIDES = None,
    ranks: RANKS = 1,
    max_restarts: Annotated[int, typer.Option(help=RESTARTS, min=0)] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)] = False,
) -> None:
    """Train a recipe with the three-stage step; an interrupted run goes on from its newest checkpoint.

    To train on several machines, start `python -m distap.launcher CONFIG` on each, with torchrun's options.
    """
    overrides = overrides or []
    if ranks == AUTO:
        from distap.config.reading import load_recipe
        from distap.telemetry.terminal import set_up_early_logging

        set_up_early_logging(overrides, rank=None)
        ranks = ranks_to_start(AUTO, load_recipe(config, overrides, data_at_hand=True).device)
    if dry_run:
        check_training(config, overrides, ranks)
        return
    if ranks == 1 and max_restarts == 0:
        train_rank(config, overrides)
        return
    from distap.launcher import launch_training

    end_when_asked()
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    raise typer.Exit(launch_training(options, config, overrides))


def check_training(config: Path, overrides: list[str], ranks: int) -> None:
    """Build all parts of a training in this process, and tell what `ranks` of them would do."""
    from distap.config.reading import load_recipe
    from distap.telemetry.terminal import print_result, set_up_logging
    from distap.trainer import Trainer
    from distap.training.checks import check_start
    from distap.world import joined_world

    set_up_logging(0, as_results=True)
    recipe = load_recipe(config, overrides, data_at_hand=True)
    check_start(recipe, ranks)
    with joined_world(recipe.timeout_seconds, recipe.device) as world:
        trainer = Trainer(recipe, world, only_check=True)
        trainer.report.world = replace(world, size=ranks)
        begin = None if trainer.is_begun else 0
        trainer.report.begins(begin, trainer.length, trainer.images, trainer.network, list(trainer.evaluations))
    print_result(f"{config}: nothing is wrong")


@with_options(AddressSettings)
def watch_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=WATCHED, show_default=False)], **address: Any
) -> None:
    """Show a run in a browser while it trains: how far it is, curves, times, ranks, and the newest neighbours.

    The page changes by itself while somebody looks at it. Ranks of this machine are asked what they do if the recipe
    sets metrics.port. There is no password: pages of other sites are refused, and so are other names of this server.
    """
    from distap.apps.watch import watch

    watch(run, AddressSettings(**address))


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folder of a training run. Several runs are compared.")
    ],
    output: Annotated[Path | None, typer.Option(help=OUTPUT)] = None,
    before: Annotated[Path | None, typer.Option(help=BEFORE)] = None,
    after: Annotated[Path | None, typer.Option(help=AFTER)] = None,
    as_json: JSON = False,
) -> None:
    """Write a page about one run, or several side by side: curves, times, figures, neighbours, hardest queries.

    With --json: `report`, the page; and `summary`, what summary.json has: figures `before` and `after` (1 is all),
    `train_seconds` and `outside_network_share`; of several runs these by name, in `runs`.
    """
    from distap.pages.report import report
    from distap.telemetry.terminal import figures_table, print_result

    page, summary = report(runs, output, before, after)
    if as_json:
        print_json({"report": str(page), "summary": summary})
        return
    of_runs = summary.get("runs", {"": summary})
    columns = {
        f"{name} {when}".strip(): of_run[when]
        for name, of_run in of_runs.items()
        for when in ("before", "after")
        if of_run[when]
    }
    if columns:
        print_result(figures_table(columns))
    for name, of_run in of_runs.items():
        share = of_run["outside_network_share"]
        outside = "" if share is None else f", {100 * share:.1f}% of a step outside the network"
        print_result(f"{name}: trained in {of_run['train_seconds']:.0f} s{outside}".removeprefix(": "))
    print_result(f"report: {page}")


def study_command(
    file: Annotated[Path, typer.Argument(help="Study: a YAML file.", show_default=False)],
    overrides: OVERRIDES = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the study.", show_default="runs/, then the name")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help=ONLY, show_default="all")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds.", min=1, show_default="as the study says")] = None,
    jobs: Annotated[int, typer.Option(help="Trainings at once, which share the CPU cores.", min=1)] = 1,
    ranks: RANKS = 1,
) -> None:
    """Train a grid of recipes under equal conditions, and compare what they reach: a table, a drawing and a page.

    What is done is kept in results.jsonl of the output folder; a study that was stopped goes on with what is missing.
    Results that were published beside the study's file, as NAME.jsonl, are compared with.
    """
    from distap.apps.study.grid import Grid
    from distap.apps.study.results import Results, comparison, read_results, table, write_study
    from distap.apps.study.running import StudyRun
    from distap.telemetry.terminal import print_result, set_up_logging, tell, text_table, track

    set_up_logging(0)
    grid = Grid(file, output or Path("runs") / file.stem, only or [], overrides or [])
    run = StudyRun(grid, seeds or grid.study.seeds, jobs, ranks_to_start(ranks))
    leave_when_asked()
    for number, line in enumerate(track(run.train(), "trainings", run.total), 1):
        tell(f"{number} of {run.total}  {line}")
    if run.results.rows():
        page = write_study(run.results, file)
        headings, cells, notes = table(run.results)
        print_result(text_table(grid.study.title, "\n".join(notes), headings, cells))
        published = Results(grid, grid.study.seeds, read_results(file.with_suffix(".jsonl")))
        print_result(*comparison(run.results, published), f"page: {page}")
    if run.problems:
        raise DistapError("\n".join(run.problems))


def plan_command(
    config: CONFIG,
    overrides: OVERRIDES = None,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs to predict for.")] = "1,2,4,8,16,64,256,1024,4096",
    card: Annotated[str, typer.Option(help=CARD)] = "h100",
    link: Annotated[str, typer.Option(help=LINK)] = "400Gb",
    gpus_a_host: Annotated[int, typer.Option(help="GPUs in a host.", min=1)] = 8,
    batch: Annotated[
        int | None, typer.Option(help="Images of a global batch.", min=2, show_default="the recipe's")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help=MEASURE)] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of --measure; the medians count.", min=1)] = 5,
    as_json: JSON = False,
) -> None:
    """Predict seconds a step, memory, bytes on the wire and hours of a recipe, from one GPU to thousands.

    A prediction needs no GPU, no data and no weights, and prints its assumptions. With --measure, a minute of steps
    of the recipe's network on this machine replaces the data sheet of the card; started by torchrun (`torchrun
    --nproc-per-node 2 --no-python distap plan ...`), it measures the link between the ranks as well.
    With --json: `network`, `assumptions` and `advice` in words, and for each number of GPUs one of `steps`, in which
    times are seconds, sizes are bytes, and `days` is null if the length of the training is unknown.
    """
    from distap.apps.plan.planning import cost_plan, plan_tables
    from distap.config.reading import load_recipe
    from distap.telemetry.terminal import print_result

    recipe = load_recipe(config, overrides or [])
    size = batch or recipe.sampling.size
    rate, ranks = parse_rate(link), parse_gpus(gpus, size)
    plan = cost_plan(recipe, size, ranks, rate, gpus_a_host, card, rounds if measure else None)
    if plan is None:  # rank 0 prints
        return
    if as_json:
        print_json(plan)
        return
    assumptions = [f"- {line}" for line in plan["assumptions"]]
    print_result(plan["network"], *plan_tables(plan["steps"]), *assumptions, f"advice: {plan['advice']}")


def parse_gpus(text: str, batch: int) -> list[int]:
    """The numbers of GPUs in a text such as `1,8,64` for which a batch has images."""
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise DistapError(f"--gpus {text!r}: expected numbers with commas between them, such as 1,8,64")
    possible = [number for number in sorted({int(number) for number in text.split(",")}) if number <= batch]
    if not possible:
        raise DistapError(f"--gpus {text!r}: a batch of {batch} images has fewer images than GPUs; give fewer GPUs")
    return possible


def parse_rate(text: str) -> float:
    """Bytes a second of a rate: `400Gb` is in bits a second, `50GB` in bytes a second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(b|bit|B)(?:/s|ps)?", text.strip())
    if match is None or float(match[1]) == 0:
        raise DistapError(f"--link {text!r}: expected a rate, such as 400Gb for bits or 50GB for bytes a second")
    return float(match[1]) * UNITS[match[2]] / (1 if match[3] == "B" else 8)
