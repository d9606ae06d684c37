"""`python -m benchmarks study`: train a grid of recipes under equal conditions and compare the
results.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.study.grid import Grid
from benchmarks.study.results import Results, comparison, read_results, table, write_study
from benchmarks.study.running import StudyRun
from distap.cli.options import OVERRIDES, RANKS, ranks_to_start
from distap.errors import DistapError
from distap.processes.stopping import leave_when_asked
from distap.telemetry.terminal import (
    print_progress,
    print_result,
    set_up_logging,
    text_table,
    track,
)

FOLDER = "Folder of the study."
ONLY = (
    "Name on an axis to train, or several with commas between them; an axis without one keeps all."
)
SEEDS = "Number of trainings of each point, with seeds 0, 1, ..."
JOBS = "Number of trainings that run at once and share the CPU cores."


def study_command(
    file: Annotated[Path, typer.Argument(help="Study: a YAML file.", show_default=False)],
    overrides: OVERRIDES = None,
    output: Annotated[
        Path | None, typer.Option(help=FOLDER, show_default="runs/, then the name")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help=ONLY, show_default="all")] = None,
    seeds: Annotated[
        int | None, typer.Option(help=SEEDS, min=1, show_default="as the study says")
    ] = None,
    jobs: Annotated[int, typer.Option(help=JOBS, min=1)] = 1,
    ranks: RANKS = "1",
) -> None:
    """Train a grid of recipes under equal conditions, and compare the results in a table, a drawing
    and a page.

    Each finished training is kept in results.jsonl of the output folder; a study that was stopped
    goes on with what is missing. Published results next to the study's file, NAME.jsonl, are
    compared with the new ones.
    """
    set_up_logging(0)
    grid = Grid(file, output or Path("runs") / file.stem, only or [], overrides or [])
    run = StudyRun(grid, seeds or grid.study.seeds, jobs, ranks_to_start(ranks))
    leave_when_asked()
    for number, line in enumerate(track(run.train(), "trainings", run.total), 1):
        print_progress(f"{number} of {run.total}  {line}")
    if run.results.rows():
        page = write_study(run.results, file)
        headings, cells, notes = table(run.results)
        print_result(text_table(grid.study.title, "\n".join(notes), headings, cells))
        published = Results(grid, grid.study.seeds, read_results(file.with_suffix(".jsonl")))
        print_result(*comparison(run.results, published), f"page: {page}")
    if run.problems:
        raise DistapError("run.failed", "\n".join(run.problems))
