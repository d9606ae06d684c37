"""`distap compare`: whether one network retrieves better than another."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from distap.cli import options
from distap.cli.options import JSON, data_option, print_json
from distap.evaluation.comparing import RESAMPLES
from distap.telemetry.terminal import print_text, set_up_logging

SEPARATOR = ":"
SIDES = (
    "Two networks or more, the baseline first: runs, checkpoints, exports, folders of `distap eval"
    " --output` or `distap extract`, or .npy files of descriptors. Runs from several seeds stand"
    " together, between colons: A1 A2 : B1 B2."
)
COMPARED_ON = "Data set to compare on: shards, or a folder that `distap data convert` wrote."
ROW_LABELS = (
    "Labels of the rows of .npy files, in place of a data set: a .npy file, or a text file of a"
    " label a line."
)
ROW_NAMES = "Names of these rows, by which queries are joined: a .npy file or a line each."
KEPT_SET = (
    "Read the newest evaluation of this set that each run keeps, such as a name of"
    " evaluation.also. Without it, those of data.validation of runs without checkpoints are read."
)
SIDE_NAMES = "Names of the networks in verdict, table and page, with commas between them."
TABLE = "Print the figures as a table for a paper: latex, markdown or csv."
COMPARISON_PAGE = "Page to write: figures, a scatter of the queries, and those that changed most."


def compare_command(
    sides: Annotated[list[str], typer.Argument(help=SIDES, metavar="RUN...", show_default=False)],
    data: Annotated[
        str | None, data_option(help=COMPARED_ON, show_default="the first run's validation set")
    ] = None,
    gallery: options.GALLERY_SET = None,
    gallery_draws: options.GALLERY_DRAWS = 0,
    truth: options.TRUTH_FILE = None,
    labels: Annotated[Path | None, data_option(help=ROW_LABELS)] = None,
    names: Annotated[Path | None, data_option(help=ROW_NAMES)] = None,
    figures: Annotated[
        str,
        data_option(
            help="Figures, such as mAP,R@1; the first is judged.",
            show_default="the recipes', if they agree, or the set's own",
        ),
    ] = "",
    set_name: Annotated[
        str | None, data_option("--set", help=KEPT_SET, metavar="NAME", show_default=False)
    ] = None,
    side_names: Annotated[
        str,
        typer.Option(
            "--as",
            help=SIDE_NAMES,
            metavar="NAME,NAME...",
            show_default="what their paths do not share",
        ),
    ] = "",
    best: options.BEST = False,
    trust: options.TRUST = False,
    resamples: Annotated[
        int, typer.Option(help="Random flips of the signs of classes.", min=20)
    ] = RESAMPLES,
    seed: Annotated[int, typer.Option(help="Seed of these flips.", min=0)] = 0,
    table: Annotated[
        str | None, typer.Option(help=TABLE, metavar="latex|markdown|csv", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(help=COMPARISON_PAGE, show_default=False)] = None,
    as_json: JSON = False,
) -> None:
    """Tell whether networks retrieve better than a baseline, by query, with the doubt about it.

    The first network is the baseline, and each other one is compared with it on the queries of one
    data set. Each difference has its 95% interval, and a p-value corrected for the number of
    figures (Holm), of a test that takes the queries of a class together. With several runs a side,
    the variation of seeds counts too. A star in the table marks a difference that is shown.
    """
    from distap.apps.compare import column, compare
    from distap.evaluation.comparison_tables import require_form
    from distap.pages.comparison import write_comparison
    from distap.world import joined_world

    require_form(table or "markdown")
    with joined_world() as world:
        set_up_logging(world.rank)
        comparison = compare(
            *grouped(sides),
            data=data,
            gallery=gallery,
            gallery_draws=gallery_draws,
            truth=truth,
            labels=None if labels is None else column(labels),
            names=None if names is None else column(names),
            figures=figures.replace(",", " ").split(),
            best=best,
            trust=trust,
            set_name=set_name,
            side_names=[name.strip() for name in side_names.split(",")] if side_names else (),
            resamples=resamples,
            seed=seed,
            world=world,
        )
        if world.rank > 0:
            return
        if output is not None:
            write_comparison(output, comparison.compared, comparison.evaluations)
        if as_json:
            print_json(comparison.record())
        elif table is not None:
            print_text(comparison.table(table))
        else:
            print_text(str(comparison))


def grouped(sides: Sequence[str]) -> list[Any]:
    """Return each side: a source, or between colons the list of its runs."""
    if SEPARATOR not in sides:
        return list(sides)
    groups = groupby(sides, SEPARATOR.__eq__)
    return [list(runs) for is_separator, runs in groups if not is_separator]
