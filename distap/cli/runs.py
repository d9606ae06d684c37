"""`distap runs`: list runs, and remove old checkpoints."""

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from distap.cli.options import JSON, print_json
from distap.errors import FAILED, DistapError
from distap.telemetry.terminal import print_result, print_warning, text_table

if TYPE_CHECKING:
    from distap.apps.runs import ListedRun

PLACE = "Folder or URL with runs: one itself, or the parent or grandparent of some."
PRUNES = "Remove checkpoints of runs that have ended, all but one of each."
STAYS = "Checkpoint of a run that stays: the one with the best figure, or the newest."
AGE = "Leave runs alone that wrote within this time: a number with m, h, d or w."
DRY = "Say what would be removed, and remove nothing."
HEADINGS = ["run", "state", "step", "best", "GB", "last wrote", "user"]


def runs_command(
    place: Annotated[str, typer.Argument(help=PLACE, show_default=False)] = "runs",
    prune: Annotated[bool, typer.Option("--prune", help=PRUNES)] = False,
    keep: Annotated[Literal["best", "newest"], typer.Option(help=STAYS)] = "best",
    older: Annotated[str, typer.Option(help=AGE)] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY)] = False,
    as_json: JSON = False,
) -> None:
    """List the runs of a folder or bucket, and remove checkpoints of old ones.

    A run is `live` while its lease is renewed or its process runs, `done` or `stopped` by its
    newest checkpoint, and `empty` without one. With --prune, a run keeps one checkpoint; if that is
    the best one and not the newest, a training that starts again goes on from there, also one that
    was done. Live runs stay as they are. With --json, a list of all this: sizes in bytes, times in
    seconds since 1970.
    """
    from distap.apps.runs import listed_runs, seconds_of, why_kept
    from distap.apps.runs import prune as prune_run

    age = seconds_of(older)
    if dry_run and not prune:
        raise typer.BadParameter("--dry-run: says what --prune would do")
    runs = list(listed_runs(place))
    if as_json:
        print_json([_as_json(run) for run in runs])
    else:
        print_result(text_table(place, "", HEADINGS, map(_row, runs)))
    show = print_warning if as_json else print_result  # the standard output holds JSON alone
    failed = False
    for run in runs if prune else ():
        reason = why_kept(run, keep, age)
        names = run.removable(keep)
        if reason:
            show(f"{run.name}: left alone: {reason}")
        elif dry_run:
            show(f"{run.name}: would remove {', '.join(names)}")
        else:
            try:
                prune_run(run, keep)
                show(f"{run.name}: removed {', '.join(names)}")
            except DistapError as error:
                print_warning(f"{run.name}: {error}")
                failed = True
    if failed:
        raise typer.Exit(FAILED)


def _as_json(run: "ListedRun") -> dict[str, Any]:
    return {
        "run": run.name,
        "state": run.state,
        "live": run.live,
        "step": run.step,
        "steps": run.steps,
        "best": run.score,
        "bytes": run.size,
        "written": run.written,
        "user": run.user,
    }


def _row(run: "ListedRun") -> list[str]:
    seconds = max(time.time() - run.written, 0)
    return [
        run.name,
        run.state,
        f"{'–' if run.step is None else run.step}/{run.steps or '?'}",
        "–" if run.score is None else f"{100 * run.score:.1f}",
        f"{run.size / 1e9:.2f}",
        f"{timedelta(seconds=round(seconds))} ago",
        run.user,
    ]
