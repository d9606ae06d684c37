"""Index WebDataset tar shards in one strict pass over every byte."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.data.labels import nesting, table_of_levels
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import COLUMNS, Index, load_index, with_composed_names
from distap.data.shards.parallel import Track, map_in_processes, untracked
from distap.data.shards.shard_names import shard_names
from distap.data.shards.tar import DamagedShardError, Sample, read_samples
from distap.errors import DistapError, logger
from distap.storage.files import Storage
from distap.storage.locations import LISTABLE, Source, parse_source
from distap.storage.remotes import MissingFileError
from distap.storage.texts import is_line

# line k: the name of class k and, after tabs, those of coarser classes that hold it
NAMES_FILE = "classes.txt"
OF_SAMPLES = Sample._fields[:-1]  # columns of an index


class Scan(NamedTuple):
    """The contents of one shard."""

    name: str
    size: int  # bytes
    sha256: str
    # of the samples, as in an index, but labels are the numbers in the shard
    columns: dict[str, NDArray[Any]]
    # place, number and coarser classes of samples, each once
    levels: list[tuple[str, str, tuple[str, ...]]]
    left_out: list[Skipped]


def index_shards(
    source: Source | Path | str,
    track: Track = untracked,
    workers: int = 1,
    levels: Sequence[str] = (),
) -> tuple[Index, list[Skipped]]:
    """Read every byte of a source's tar shards once and write their index.

    The samples whose image has no readable header are returned next to the index. `levels` are the
    keys of samples' .json members that name the coarser classes of their class, finer first;
    without them classes.txt may name them.

    Raises:
        DistapError: there are no shards, or some cannot be used; the message lists all such shards.
    """
    source = parse_source(source)
    if source.scheme not in LISTABLE:
        remedy = "index the same pattern on disk, and put the index next to the shards"
        raise DistapError(f"{source}: nothing can be written behind {source.scheme}://; {remedy}")
    storage = Storage(source.base)
    names = shard_names(source, storage)
    check_numbering(source, storage, names)
    scan = partial(_scan, storage, levels)
    scans = map_in_processes(scan, names, workers, "indexing shards", track)
    sound = [scan for scan in scans if isinstance(scan, Scan)]
    damaged = [scan for scan in scans if isinstance(scan, str)]
    if damaged:
        problem = (
            f"{len(damaged)} of {len(scans)} shards cannot be used; make them anew, or take"
            " them out"
        )
        raise DistapError("\n".join([f"{source}: {problem}:", *damaged]))
    known = dict[str, str]()
    with suppress(DistapError):  # only an earlier index knows what was packed
        before = load_index(source, compare=False)
        known = dict(zip(before.key.tolist(), before.path.tolist(), strict=True))
    index = merge_scans(source, storage, sound, known)
    index.save(source)
    return index, [skipped for scan in sound for skipped in scan.left_out]


def check_numbering(
    source: Source, storage: Storage, names: Sequence[str], warns: bool = True
) -> None:
    """Check that a class number means the same class in the folders of all shards.

    Raises a DistapError if a folder's classes.txt numbers its classes apart from those of other
    folders. If nothing says how the shards of several folders are numbered, log a warning.
    """
    folders = sorted({name.rpartition("/")[0] for name in names})
    if folders == [""] or _lines(storage, NAMES_FILE) is not None:
        return
    for folder in filter(None, folders):
        # class 0 of one folder is not that of another
        if _lines(storage, f"{folder}/{NAMES_FILE}") is not None:
            where = storage.where(f"{folder}/{NAMES_FILE}")
            raise DistapError(
                f"{source}: {where} numbers the classes of its folder alone: pack all images"
                " together"
            )
    if warns and len(folders) > 1:
        told = (
            "%s: its shards are in %d folders, such as %s and %s: a class number is taken for the"
            " same class in all"
        )
        logger.warning(told, source, len(folders), *folders[:2])


def scan_shard(storage: Storage, name: str, levels: Sequence[str] = ()) -> Scan:
    """Index one shard; see `read_samples` for `levels` and the errors."""
    digest = hashlib.sha256()
    length = storage.size(name)
    where = storage.where(name)
    with storage.open(name) as file:
        found = list(read_samples(file, length, where, levels, digest))
    samples = [sample for sample in found if isinstance(sample, Sample)]
    columns = {
        field: np.array([row[at] for row in samples], COLUMNS[field])
        for at, field in enumerate(OF_SAMPLES)
    }
    first: dict[tuple[int, tuple[str, ...]], str] = {}
    for one in samples if levels else ():
        first.setdefault((one.label, one.levels), one.key)
    rows = [(f"{where}: key {key!r}", str(label), above) for (label, above), key in first.items()]
    left_out = [
        Skipped(f"{name}:{image.name}", image.reason)
        for image in found
        if isinstance(image, Skipped)
    ]
    return Scan(name, length, digest.hexdigest(), columns, rows, left_out)


def merge_scans(
    source: Source, storage: Storage, scans: Sequence[Scan], paths: Mapping[str, str]
) -> Index:
    """Join the scans of a source's shards, numbering classes from 0 and naming them by classes.txt
    if it exists.

    `paths` are those of the files that were packed, by key.
    """
    columns: dict[str, Any] = {
        name: np.concatenate([scan.columns[name] for scan in scans]) for name in OF_SAMPLES
    }
    if not len(columns["label"]):
        raise DistapError(f"{source}: the data set is empty: no usable image in its shards")
    numbers, label = np.unique(columns["label"], return_inverse=True)
    counts = [len(scan.columns["label"]) for scan in scans]
    columns["shard"] = np.repeat(np.arange(len(scans), dtype=np.int32), counts)
    columns["label"] = label.astype(np.int64)
    columns["path"] = np.array([paths.get(key, "") for key in columns["key"].tolist()])
    rows = _class_rows(storage, numbers.tolist())
    names = [name for _, name, _ in rows]
    if any(scan.levels for scan in scans):  # as the samples say
        name_of = dict(zip(map(str, numbers), names, strict=True))
        rows = [
            (where, name_of[number], above)
            for scan in scans
            for where, number, above in scan.levels
        ]
    known = nesting(rows)
    index = Index(
        **columns,
        shard_name=np.array([scan.name for scan in scans]),
        shard_size=np.array([scan.size for scan in scans]),
        shard_sha256=np.array([scan.sha256 for scan in scans]),
        class_name=np.array(names),
        class_levels=table_of_levels([known[name] for name in names]),
    )
    return with_composed_names(index, storage.where(NAMES_FILE))


def _lines(storage: Storage, name: str) -> list[str] | None:
    """Return the lines of a text next to the shards; None if there is no such file."""
    try:
        return storage.read_whole(name).decode("utf-8").splitlines()
    except MissingFileError:
        return None
    except UnicodeDecodeError as error:
        raise DistapError(f"{storage.where(name)}: not UTF-8: {error}") from error


def _class_rows(storage: Storage, numbers: list[int]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return place, name and coarser classes of the classes with these ascending numbers, from
    classes.txt.
    """
    lines = _lines(storage, NAMES_FILE)
    if lines is None:
        return [("", str(number), ()) for number in numbers]
    if numbers[-1] >= len(lines):
        raise DistapError(
            f"{storage.where(NAMES_FILE)}: {len(lines)} names, but a shard has class {numbers[-1]}"
        )
    # an evaluation tells classes apart by their names
    rows = []
    seen = {""}
    for number in numbers:
        where = f"{storage.where(NAMES_FILE)}, line {number + 1}"
        name, *above = lines[number].split("\t")
        if name in seen or not all(map(is_line, filter(None, (name, *above)))):
            wrong = (
                "empty"
                if not name
                else "used twice"
                if name in seen
                else "no line of text, or too long"
            )
            raise DistapError(
                f"{where}: class name {name[:60]!r} is {wrong}; each class needs its own"
            )
        seen.add(name)
        rows.append((where, name, tuple(above)))
    return rows


def _scan(storage: Storage, levels: Sequence[str], name: str) -> Scan | str:
    """Scan a shard; return the reason if it is unusable."""
    try:
        return scan_shard(storage, name, levels)
    except (DamagedShardError, MissingFileError) as error:
        return str(error)
