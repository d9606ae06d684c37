"""Name the sides of a comparison, for its verdict, tables and page."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distap.errors import DistapError


def names_of_sides(runs_of: Sequence[Sequence[Any]], chosen: Sequence[str] = ()) -> list[str]:
    """Return a name for each side: the chosen ones, or what the sides' paths do not share.

    Args:
        runs_of: of each side, its runs: paths, or descriptors without one.
    Raises:
        DistapError: the chosen names are not one for each side, or two are the same.
    """
    if chosen:
        if len({*chosen}) != len(runs_of) or len(chosen) != len(runs_of):
            raise DistapError(
                "comparison.wrong_names",
                f"names {', '.join(chosen)}: expected {len(runs_of)} different ones, one for each"
                " side",
            )
        return list(chosen)
    names = _unshared([_path_of(runs) for runs in runs_of])
    if len({*names}) < len(names):
        names = _unshared([_path_of(runs[:1]) for runs in runs_of])
    if len({*names}) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return [
        name if len(runs) == 1 else f"{name} ({len(runs)} runs)"
        for name, runs in zip(names, runs_of, strict=True)
    ]


def _path_of(runs: Sequence[Any]) -> str:
    """Return the words that the runs' paths begin with; the first path if these are folders."""
    paths = [str(run) if isinstance(run, str | Path) else "descriptors" for run in runs]
    if len({*paths}) == 1:
        return paths[0]
    shared = re.sub("[^-_./]*$", "", paths[0][: _shared_start(paths)])
    return paths[0] if shared.endswith("/") else shared.rstrip("-_.") or paths[0]


def _unshared(paths: Sequence[str]) -> list[str]:
    """Cut off the parts that all paths begin and end with; keep one of each at least.

    Parts stand between `/`, or `--` as in the runs of a study.
    """
    parts_of = [re.split("(/|--)", path.rstrip("/")) for path in paths]
    shortest = min(map(len, parts_of))
    first = min(_shared_start(parts_of), shortest - 1)
    last = min(_shared_start([parts[::-1] for parts in parts_of]), shortest - first - 1)
    return ["".join(parts[first : len(parts) - last]).strip("/-") for parts in parts_of]


def _shared_start(sequences: Sequence[Sequence[str]]) -> int:
    """Return how many first items all sequences share."""
    count = 0
    for items in zip(*sequences, strict=False):
        if len({*items}) > 1:
            break
        count += 1
    return count
