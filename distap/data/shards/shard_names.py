"""List the shards of a data set, from the brace pattern or glob that names them."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from braceexpand import braceexpand

from distap.errors import DistapError
from distap.storage.files import Storage
from distap.storage.locations import GLOB, LISTABLE, Source, safe_name

MAX_SHARDS = 1_000_000


def shard_names(source: Source, storage: Storage) -> list[str]:
    """Return a source's shards in the order of the index: names relative to its base, which
    `storage` reads.
    """
    if source.kind != "shards":
        raise DistapError(
            f"{source}: images that are not packed are no shards; `distap data pack` makes some"
        )
    if source.pattern is None and source.scheme not in LISTABLE:
        url = f"{source.base}/{{000..009}}.tar"
        raise DistapError(
            f"{source}: a web server cannot list its files; name the shards by a brace pattern:"
            f" {url}"
        )
    names: list[str] = []
    for pattern in ["*.tar"] if source.pattern is None else _expanded(source):
        safe_name(pattern, str(source))
        if not any(sign in pattern for sign in GLOB):
            names.append(pattern)
            continue
        # A glob may match the index too, and macOS leaves a ._ file next to each that it copies.
        found = [
            name for name in storage.names(pattern) if not name.rpartition("/")[2].startswith("._")
        ]
        names += [name for name in found if name.endswith(".tar")] or found
    if not names:
        lacking = (
            "no .tar shards in it" if source.pattern is None else "no shards match the pattern"
        )
        if source.pattern is None and (
            packed := [*storage.names("*.tar.*"), *storage.names("*.tgz")]
        ):
            lacking += (
                f", but {packed[0]}; images are found by their offset, so unpack it to a plain .tar"
            )
        raise DistapError(f"{source}: the data set is empty: {lacking}")
    if len(set(names)) < len(names):
        [(twice, _)] = Counter(names).most_common(1)
        raise DistapError(f"{source}: the pattern names the shard {twice} twice")
    return [safe_name(name, str(source)) for name in names]


def _expanded(source: Source) -> Iterator[str]:
    pattern = source.pattern or ""
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
            f"{source}: not a brace pattern: {error}; expected one such as {{000..009}}.tar"
        ) from error
    if is_long or len(patterns) > MAX_SHARDS:
        raise DistapError(f"{source}: the pattern names more than {MAX_SHARDS:,} shards")
    yield from patterns
