"""List the runs below a folder or a URL, and remove old checkpoints of those that have ended."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json

from distap.checkpoint.checkpoints import CHECKPOINTS_FOLDER, NAME, Checkpoints
from distap.checkpoint.finding import opened_checkpoint
from distap.checkpoint.lease import Lease, why_live
from distap.checkpoint.manifest import STATE_FILE, DamagedCheckpointError
from distap.config.reading import parsed_yaml
from distap.errors import DistapError, logger
from distap.storage.files import Storage
from distap.storage.locations import parse_store, scheme_of
from distap.storage.remotes import MissingFileError, UnreachableError
from distap.storage.texts import parsed_json
from distap.telemetry.runlog import STARTS_LOG

RECIPE = "recipe.yaml"  # that each run has
# Of a run that was done when it was pruned: the checkpoint that stayed, the step of the newest.
PRUNED = "pruned.json"
# Runs lie in the folder, or up to two folders below it. Deeper ones would take a listing of all
# files of a bucket.
PATTERNS = (RECIPE, f"*/{RECIPE}", f"*/*/{RECIPE}")
Kept = Literal["best", "newest"]
UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@dataclass(frozen=True)
class ListedRun:
    """A run, as its folder or its place in a store tells it."""

    name: str  # below the folder that was listed; "." for that folder
    checkpoints: Checkpoints
    names: tuple[str, ...]  # of the checkpoints, oldest first
    live: str  # why a training may still write to it; "" if it has ended
    step: int | None  # of the newest checkpoint there was; None without one
    steps: int | None  # of the whole training, if it is known
    size: int  # bytes of all its checkpoints
    score: float | None  # best figure of an undamaged checkpoint
    best: str | None  # the checkpoint with it
    newest: str | None
    has_ended: bool  # whether it was done when it was pruned, or evaluation.patience ended it
    user: str  # who started it last; "" of an older run
    written: float  # when it last wrote a checkpoint or was started, in seconds since 1970

    @property
    def state(self) -> str:
        """Return `live`, `done`, `stopped` or `empty`."""
        if self.live:
            return "live"
        if self.step is None:
            return "empty"
        is_done = self.steps is not None and self.step >= self.steps
        return "done" if is_done or self.has_ended else "stopped"

    def kept(self, keep: Kept) -> str | None:
        """Return the checkpoint that stays: without a best one, which only an evaluated run has,
        the newest.
        """
        return (self.best if keep == "best" else None) or self.newest

    def removable(self, keep: Kept) -> list[str]:
        """Return the names of the other checkpoints, without any that were written since."""
        return [name for name in self.names if name != self.kept(keep)]


def listed_runs(place: str) -> Iterator[ListedRun]:
    """Yield the runs in a folder or below a URL, in the order of their names.

    Raises:
        DistapError: there is no run, or the place cannot be read.
    """
    base = parse_store(place) if scheme_of(place) else str(Path(place).absolute())
    storage = Storage(base.rstrip("/") or "/")
    recipes = sorted({name for pattern in PATTERNS for name in storage.names(pattern)})
    if not recipes:
        raise DistapError(
            "run.none",
            f"{place}: no run there, or up to two folders below it; expected a folder or URL with"
            f" runs, each of which has a {RECIPE}",
        )
    for recipe in recipes:
        folder = recipe.rpartition("/")[0]
        try:
            yield _listed(folder or ".", Storage(storage.where(folder) if folder else storage.base))
        except UnreachableError:
            raise
        except DistapError as error:  # of this run alone, such as a damaged recipe
            logger.warning("%s: left out of the list: %s", storage.where(recipe), error)


def _listed(name: str, storage: Storage) -> ListedRun:
    recipe = _recipe_of(storage)
    checkpoints = Checkpoints(storage)
    names = checkpoints.names()
    newest = names[-1] if names else None
    step = None if newest is None else int(newest.split("-")[1].split(".")[0])
    score: float | None = None
    best: str | None = None
    with suppress(DamagedCheckpointError):
        score, best = checkpoints.best()
    done = _step_when_pruned(storage, newest)
    start = _last_start(storage)
    steps = start.get("steps", recipe.get("steps"))
    last = RECIPE if newest is None else f"{CHECKPOINTS_FOLDER}/{newest}/manifest.json"
    return ListedRun(
        name=name,
        checkpoints=checkpoints,
        names=tuple(names),
        live=why_live(storage),
        step=step if done is None else done,
        steps=steps if isinstance(steps, int) else None,
        size=sum(storage.sizes(CHECKPOINTS_FOLDER).values()),
        score=score,
        best=best,
        newest=newest,
        has_ended=done is not None
        or (newest is not None and _has_lost_patience(checkpoints, newest)),
        user=str(start.get("user", "")),
        written=max(storage.modified(last), float(start.get("time", 0.0))),
    )


def _recipe_of(storage: Storage) -> Any:
    """Read the recipe of a run, without its defaults."""
    return parsed_yaml(storage.read_whole(RECIPE).decode(errors="replace"), storage.where(RECIPE))


def figures_of_recipes(places: Sequence[Any]) -> tuple[str, ...]:
    """Return evaluation.figures of the recipes of runs; () if they differ, or a place is no run.

    Args:
        places: folders or URLs of runs, or of their checkpoints; anything else is no run.
    """
    figures = {_figures_of(place) for place in places}
    return figures.pop() if len(figures) == 1 else ()


def _figures_of(place: Any) -> tuple[str, ...]:
    if not isinstance(place, str | Path) or Path(place).is_file():
        return ()
    where = str(place).rstrip("/")
    run = parse_store(where) if scheme_of(where) else str(Path(where).absolute())
    parent, _, name = run.rpartition("/")
    storage = Storage(parent.rpartition("/")[0] if NAME.fullmatch(name) else run)
    try:
        return tuple(_recipe_of(storage).get("evaluation", {}).get("figures") or ())
    except MissingFileError:
        return ()


def _step_when_pruned(storage: Storage, newest: str | None) -> int | None:
    """Return the step at which a run was done, if only its checkpoint `newest` has stayed since."""
    try:
        pruned = parsed_json(storage.read_whole(PRUNED))
        return int(pruned["step"]) if pruned["kept"] == newest else None
    except (MissingFileError, ValueError, KeyError, TypeError):
        return None


def _has_lost_patience(checkpoints: Checkpoints, name: str) -> bool:
    """Return whether the training ended at this checkpoint, by evaluation.patience."""
    try:
        text = checkpoints.storage.read_whole(f"{checkpoints.folder}/{name}/{STATE_FILE}")
        state = parsed_json(text)
        patience = state["recipe"]["evaluation"].get("patience")
        return patience is not None and int(state.get("since_best", 0)) >= patience
    except (MissingFileError, ValueError, KeyError, TypeError):
        return False


def _last_start(storage: Storage) -> dict[str, Any]:
    """Return the last readable line of starts.jsonl; {} of a run without one."""
    try:
        lines = storage.read_whole(STARTS_LOG).splitlines()
    except MissingFileError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):
            start: dict[str, Any] = parsed_json(line)
            return start
    return {}


def seconds_of(age: str) -> float:
    """Parse an age such as `30d`, `12h` or `2w`.

    Raises:
        DistapError: it is none.
    """
    parsed = re.fullmatch(r"(\d+)([mhdw])", age)
    if parsed is None:
        raise DistapError(
            "run.bad_age", f"--older {age!r}: expected a number with m, h, d or w, such as 30d"
        )
    return int(parsed[1]) * UNITS[parsed[2]]


def why_kept(run: ListedRun, keep: Kept, older: float) -> str:
    """Return why nothing of a run may be removed; "" if something may.

    Args:
        older: seconds since it last wrote, below which a run stays whole.
    """
    if run.live:
        return f"live: {run.live}"
    if time.time() - run.written < older:
        return "younger than --older"
    if not run.removable(keep):
        return "nothing to remove"
    return ""


def prune(run: ListedRun, keep: Kept) -> None:
    """Remove a run's checkpoints but the best or the newest, under the run's lease.

    The one that stays is read whole first, since the others may be its only replacement.

    Raises:
        DistapError: it is damaged, or a training has begun meanwhile, or the place cannot be read
            or written to.
    """
    lease = Lease("run", run.checkpoints.storage)
    lease.take()
    try:
        kept = run.kept(keep)
        assert kept is not None
        with opened_checkpoint(run.checkpoints.where(kept)):
            if run.state == "done":
                record = {"kept": kept, "step": run.step}
                run.checkpoints.storage.write(PRUNED, to_json(record))
            run.checkpoints.remove(run.removable(keep))
    finally:
        lease.release()
