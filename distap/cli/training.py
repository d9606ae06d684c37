"""`distap train`, `eval` and `report`."""

from pathlib import Path
from typing import Annotated

import typer

from distap.errors import DistapError
from distap.train import CONFIG, OVERRIDES, train


def train_command(
    config: CONFIG,
    overrides: OVERRIDES = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine, by torchrun; one a GPU.", min=1)] = 1,
) -> None:
    """Train a recipe with the three-stage step; an interrupted run goes on from its newest checkpoint.

    On several machines start `python -m distap.launcher CONFIG` on each, with torchrun's options.
    """
    if ranks == 1:
        train(config, overrides)
        return
    from distap.launcher import launch_training

    status = launch_training(["--standalone", f"--nproc-per-node={ranks}"], config, overrides or [])
    raise typer.Exit(status)


def eval_command(
    config: Annotated[
        Path | None, typer.Argument(help="A recipe: its network is evaluated as it is before training.")
    ] = None,
    overrides: OVERRIDES = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A run folder, or one of its checkpoints, to evaluate instead.")
    ] = None,
    best: Annotated[bool, typer.Option(help="With a run folder: its best checkpoint, not its newest.")] = False,
    data: Annotated[
        str | None, typer.Option(help="Folder, pattern or URL of shards; by default the recipe's validation set.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write result.json and each image's nearest neighbours to.")
    ] = None,
) -> None:
    """Evaluate on a labelled set: every image queries all others; prints mAP, mAP@R and R@1, 5, 10 in percent.

    Give a recipe to evaluate the network that training starts from, or --checkpoint for a trained one.
    """
    from distap.building import network_of, trained_network
    from distap.config import load_recipe
    from distap.data.locations import parse_source
    from distap.distributed import joined_world
    from distap.evaluation import evaluate
    from distap.telemetry.terminal import console, figures_table, set_up_logging

    if (config is None) == (checkpoint is None):
        raise DistapError("give either a recipe or --checkpoint")
    with joined_world() as world:
        set_up_logging(world.rank)
        if checkpoint is not None:
            recipe, network = trained_network(checkpoint, world, best)
        else:
            assert config is not None
            recipe = load_recipe(config, overrides or [])
            network = network_of(recipe, world)
        source = parse_source(data) if data else recipe.data.validation_source
        if source is None:
            raise DistapError("the recipe has no data.validation: name a data set with --data")
        evaluation = evaluate(
            network,
            source,
            world,
            image_size=recipe.data.image_size,
            batch_size=recipe.evaluation.batch_size,
            workers=recipe.data.workers,
            max_pixels=recipe.data.max_pixels,
            scaled_decoding=recipe.data.scaled_decoding,
            remote=recipe.data.remote,
            cache=recipe.data.cache,
            shown=world.rank == 0,
        )
        if world.rank == 0:
            if output is not None:
                evaluation.save(output, network=str(checkpoint or config))
            console.print(figures_table({str(source): evaluation.result.summary()}))


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folder of a training run; several are compared.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write report.html and summary.json to; by default the run's, or that around the runs."
        ),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="With one run: what `distap eval --output` wrote before it, instead of its own."),
    ] = None,
    after: Annotated[Path | None, typer.Option(help="The same after it.")] = None,
) -> None:
    """Write a page on one run or on several side by side: curves, time, figures, neighbours, hardest queries."""
    from distap.run_report import report
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
