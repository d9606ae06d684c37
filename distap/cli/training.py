"""`distap init`, `recipes`, `train`, `report`, `study` and `plan`: what is done with a recipe and its runs."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from distap.cli.options import CONFIG, OVERRIDES
from distap.errors import DistapError
from distap.processes.startup import Startup
from distap.processes.stopping import end_when_asked, go_deaf, leave_when_asked

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
OUTPUT = "Folder to write report.html and summary.json to; by default the run's, or the parent of all runs."
BEFORE = "Evaluation before the training, a folder that `distap eval --output` wrote; by default the run's."
AFTER = "Evaluation after the training, a folder like --before; by default the run's."
RECIPE_HEAD = ("paper", "data", "expected")  # of the comment that each of distap's recipes begins with
WIDE = 250  # columns, so that a recipe is one line of a file or pipe
CARD = "GPU to predict for: b200, h200, h100, a100, a100-40gb, l40s, l4 or rtx4090."
LINK = "Network rate of a host per second: 400Gb is in bits, 50GB in bytes."
ONLY = "Name on an axis to train, or several with commas between them; an axis without one keeps all."
IMAGES = "Folder with a sub-folder a class, shards, or a folder with `train` and `test` of either."
MEASURE = "Measure this machine and predict for more machines like it."


def init_command(
    images: Annotated[str, typer.Argument(help=IMAGES, show_default=False)],
    output: Annotated[Path, typer.Option(help="Recipe to write.")] = Path("recipe.yaml"),
    run: Annotated[str | None, typer.Option(help="Folder of the run.", show_default="runs/, then the name")] = None,
    backbone: Annotated[str | None, typer.Option(help="Name of timm.", show_default="by the machine")] = None,
    weights: Annotated[str, typer.Option(help="Where training begins: timm, random, or as in a recipe.")] = "timm",
    image_size: Annotated[int | None, typer.Option(min=1, show_default="by images and machine")] = None,
) -> None:
    """Look at your images and write a recipe to begin with, which says why it is as it is.

    It trains with `distap train recipe.yaml`; change in it what you know better.
    """
    import yaml

    from distap.apps.advice import look, recipe_for
    from distap.config.reading import recipe_from
    from distap.storage.atomic import write_whole
    from distap.telemetry.terminal import console

    if output.exists():
        raise DistapError(f"{output}: there is such a file already; give another --output")
    seen, classes = look(images)
    folder = run or str(Path("runs") / output.stem)
    text = recipe_for(seen, classes, folder, backbone, weights, image_size)
    try:
        recipe_from(yaml.safe_load(text), f"{output} (not written)")
    except yaml.YAMLError as error:
        raise DistapError(f"--weights {weights}: not valid YAML: {error}") from error
    write_whole(output, text)
    console.print(text, markup=False, end="")
    if seen.alone:
        console.print(f"{seen.alone:,} classes have one image, which is never learned from", style="yellow")
    console.print(f"{output}: written. Next: distap train {output} --check, and without --check", markup=False)


def recipes_command(
    name: Annotated[str | None, typer.Argument(help="Recipe to print.", show_default="list them all")] = None,
) -> None:
    """List the recipes of the papers, or print one.

    `distap train NAME key=value` trains one by its name; `distap recipes NAME > mine.yaml` makes it yours to change.
    """
    from rich.console import Console
    from rich.table import Table

    from distap.config.reading import RECIPES, named_recipe

    if name is not None:
        typer.echo(named_recipe(name).read_text("utf-8"), nl=False)
        return
    table = Table("name", *RECIPE_HEAD, box=None, pad_edge=False)
    for path in sorted(RECIPES.glob("*.yaml"), key=lambda path: path.stem):
        head = dict(re.findall(r"^# (\w+): (.*)$", path.read_text("utf-8"), re.MULTILINE))
        table.add_row(path.stem, *(head[key] for key in RECIPE_HEAD))
    Console(width=None if sys.stdout.isatty() else WIDE, markup=False).print(table)


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
    ranks: Annotated[int, typer.Option(help="Number of processes on this machine, one a GPU.", min=1)] = 1,
    check: Annotated[
        bool, typer.Option("--check", help="Only look for mistakes, and say what would be done.")
    ] = False,
) -> None:
    """Train a recipe with the three-stage step; an interrupted run goes on from its newest checkpoint.

    To train on several machines, start `python -m distap.launcher CONFIG` on each, with torchrun's options.
    """
    if check:
        check_training(config, overrides or [], ranks)
        return
    if ranks == 1:
        train_rank(config, overrides)
        return
    from distap.launcher import launch_training

    end_when_asked()
    status = launch_training(["--standalone", f"--nproc-per-node={ranks}"], config, overrides or [])
    raise typer.Exit(status)


def check_training(config: Path, overrides: list[str], ranks: int) -> None:
    """Build all parts of a training in this process, and tell what `ranks` of them would do."""
    from distap.config.reading import load_recipe
    from distap.telemetry.terminal import console, set_up_logging
    from distap.trainer import Trainer
    from distap.training.checks import check_start
    from distap.world import joined_world

    set_up_logging(0)
    recipe = load_recipe(config, overrides, data_at_hand=True)
    check_start(recipe, ranks)
    with joined_world(recipe.timeout_seconds, recipe.device) as world:
        trainer = Trainer(recipe, world, only_check=True)
        trainer.report.world = replace(world, size=ranks)
        begin = None if trainer.is_begun else 0
        trainer.report.begins(begin, trainer.length, trainer.images, trainer.network, list(trainer.evaluations))
    console.print(f"{config}: nothing is wrong", markup=False)


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folder of a training run. Several runs are compared.")
    ],
    output: Annotated[Path | None, typer.Option(help=OUTPUT)] = None,
    before: Annotated[Path | None, typer.Option(help=BEFORE)] = None,
    after: Annotated[Path | None, typer.Option(help=AFTER)] = None,
) -> None:
    """Write a page about one run, or several side by side: curves, times, figures, neighbours, hardest queries."""
    from distap.pages.report import report
    from distap.telemetry.terminal import console, figures_table

    page, summary = report(runs, output, before, after)
    of_runs = summary.get("runs", {"": summary})
    columns = {
        f"{name} {when}".strip(): of_run[when]
        for name, of_run in of_runs.items()
        for when in ("before", "after")
        if of_run[when]
    }
    if columns:
        console.print(figures_table(columns))
    for name, of_run in of_runs.items():
        share = of_run["outside_network_share"]
        outside = "" if share is None else f", {100 * share:.1f}% of a step outside the network"
        console.print(f"{name}: trained in {of_run['train_seconds']:.0f} s{outside}".removeprefix(": "), markup=False)
    console.print(f"report: {page}", markup=False)


def study_command(
    file: Annotated[Path, typer.Argument(help="Study: a YAML file.", show_default=False)],
    overrides: OVERRIDES = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the study.", show_default="runs/, then the name")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help=ONLY, show_default="all")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds.", min=1, show_default="as the study says")] = None,
    jobs: Annotated[int, typer.Option(help="Trainings at once, which share the CPU cores.", min=1)] = 1,
    ranks: Annotated[int, typer.Option(help="Processes of each training.", min=1)] = 1,
) -> None:
    """Train a grid of recipes under equal conditions, and compare what they reach: a table, a drawing and a page.

    What is done is kept in results.jsonl of the output folder; a study that was stopped goes on with what is missing.
    Results that were published beside the study's file, as NAME.jsonl, are compared with.
    """
    from distap.apps.study.grid import Grid
    from distap.apps.study.results import Results, comparison, read_results, table, write_study
    from distap.apps.study.running import StudyRun
    from distap.telemetry.terminal import console, set_up_logging, text_table, track

    set_up_logging(0)
    grid = Grid(file, output or Path("runs") / file.stem, only or [], overrides or [])
    run = StudyRun(grid, seeds or grid.study.seeds, jobs, ranks)
    leave_when_asked()
    for number, line in enumerate(track(run.train(), "trainings", run.total), 1):
        console.print(f"{number} of {run.total}  {line}", markup=False)
    if run.results.rows():
        page = write_study(run.results, file)
        headings, cells, notes = table(run.results)
        console.print(text_table(grid.study.title, "\n".join(notes), headings, cells))
        published = Results(grid, grid.study.seeds, read_results(file.with_suffix(".jsonl")))
        for line in comparison(run.results, published):
            console.print(line, markup=False)
        console.print(f"page: {page}", markup=False)
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
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write the figures to.", show_default="printed only")
    ] = None,
) -> None:
    """Predict seconds a step, memory, bytes on the wire and hours of a recipe, from one GPU to thousands.

    A prediction needs no GPU, no data and no weights, and prints its assumptions. With --measure, a minute of steps
    of the recipe's network on this machine replaces the data sheet of the card; started by torchrun (`torchrun
    --nproc-per-node 2 --no-python distap plan ...`), it measures the link between the ranks as well.
    """
    from distap.apps.plan.planning import cost_plan, plan_tables
    from distap.config.reading import load_recipe
    from distap.storage.atomic import write_whole
    from distap.telemetry.terminal import console

    recipe = load_recipe(config, overrides or [])
    size = batch or recipe.sampling.size
    rate, ranks = parse_rate(link), parse_gpus(gpus, size)
    plan = cost_plan(recipe, size, ranks, rate, gpus_a_host, card, rounds if measure else None)
    if plan is None:  # rank 0 prints
        return
    console.print(plan["network"], *plan_tables(plan["steps"]), sep="\n", markup=False)
    for line in plan["assumptions"]:
        console.print(f"- {line}", markup=False, highlight=False)
    console.print(f"advice: {plan['advice']}", markup=False, highlight=False)
    if json_file is not None:
        write_whole(json_file, json.dumps(plan, indent=2) + "\n")
        console.print(f"{json_file}: written", markup=False)


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
