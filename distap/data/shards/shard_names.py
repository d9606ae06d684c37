"""List the shards of a data set, from the brace pattern or glob that names them."""

import re
from collections import Counter
from itertools import islice

from braceexpand import braceexpand

from distap.errors import DistapError
from distap.storage.files import Storage
from distap.storage.locations import GLOB, LISTABLE, Source, safe_name

MAX_SHARDS = 1_000_000


def shard_names(source: Source, storage: Storage) -> list[str]:
    """Return a source's shards in the order of the index: names relative to its base.

    `storage` reads the base.
    """
    if source.kind != "shards":
        raise DistapError(
            "data.no_shards",
            f"{source}: images that are not packed are no shards; `distap data pack` makes some",
        )
    if source.pattern is None and source.scheme not in LISTABLE:
        raise DistapError(
            "data.not_listable",
            f"{source}: a web server cannot list its files; name the shards by a brace pattern:"
            f" {source.base}/{{000..009}}.tar",
        )
    patterns = ["*.tar"] if source.pattern is None else _expanded(source, source.pattern)
    names = [name for pattern in patterns for name in _matching(source, storage, pattern)]
    if not names:
        raise DistapError(
            "data.empty", f"{source}: the data set is empty: {_why_empty(source, storage)}"
        )
    if len(set(names)) < len(names):
        [(twice, _)] = Counter(names).most_common(1)
        raise DistapError(
            "data.repeated_shard", f"{source}: the pattern names the shard {twice} twice"
        )
    return [safe_name(name, str(source)) for name in names]


def _matching(source: Source, storage: Storage, pattern: str) -> list[str]:
    """Return the names that match a glob, or the pattern itself if it is none."""
    safe_name(pattern, str(source))
    if not any(sign in pattern for sign in GLOB):
        return [pattern]
    # A glob may match the index too, and macOS leaves a ._ file next to each that it copies.
    names = [
        name for name in storage.names(pattern) if not name.rpartition("/")[2].startswith("._")
    ]
    return [name for name in names if name.endswith(".tar")] or names


def _why_empty(source: Source, storage: Storage) -> str:
    if source.pattern is not None:
        return "no shards match the pattern"
    for name in (*storage.names("*.tar.*"), *storage.names("*.tgz")):
        return (
            f"no .tar shards in it, but {name}; images are found by their offset, so unpack it to a"
            " plain .tar"
        )
    return "no .tar shards in it"


def _expanded(source: Source, pattern: str) -> list[str]:
    # The library holds the whole of a range before it gives the first name, so look at its ends
    # first.
    is_long = any(
        abs(int(end) - int(start)) >= MAX_SHARDS
        for start, end in re.findall(r"\{(-?\d+)\.\.(-?\d+)", pattern)
    )
    try:
        patterns = [] if is_long else list(islice(braceexpand(pattern), MAX_SHARDS + 1))
    except (ValueError, RecursionError) as error:
        raise DistapError(
            "data.wrong_pattern",
            f"{source}: not a brace pattern: {error}; expected one such as {{000..009}}.tar",
        ) from error
    if is_long or len(patterns) > MAX_SHARDS:
        raise DistapError(
            "data.wrong_pattern", f"{source}: the pattern names more than {MAX_SHARDS:,} shards"
        )
    return patterns
