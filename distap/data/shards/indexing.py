"""Index WebDataset tar shards in one strict pass over every byte."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.data.labels import Levels, nesting, table_of_levels
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import DataSet, Index, load_index, with_composed_names
from distap.data.shards.index_rules import COLUMNS
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
OF_SAMPLES = Sample._fields[:-2]  # columns of an index

Packed = tuple[Index, list[Skipped]]  # the index of shards, and files that are not in it


class Scan(NamedTuple):
    """The contents of one shard."""

    name: str
    size: int  # bytes
    sha256: str
    # of the samples, as in an index, but labels are the numbers in the shard
    columns: dict[str, NDArray[Any]]
    # place, label and coarser classes of samples, each once
    levels: list[tuple[str, int, Levels]]
    left_out: list[Skipped]
    # further columns of the list that was packed: the cell of each sample, "" for none
    further: dict[str, list[str]]


def index_shards(
    source: DataSet,
    track: Track = untracked,
    workers: int = 1,
    levels: Sequence[str] = (),
) -> Packed:
    """Read every byte of a source's tar shards once and write their index.

    Returns the index, and the samples whose image has no readable header. `levels` are the keys of
    samples' .json members that name the coarser classes of their class, finer first; without them
    classes.txt may name the coarser classes.

    Raises:
        DistapError: there are no shards, or some cannot be used; the message lists all such shards.
    """
    source = parse_source(source)
    if source.scheme not in LISTABLE:
        raise DistapError(
            "data.read_only",
            f"{source}: nothing can be written behind {source.scheme}://; index the same pattern on"
            " disk, and put the index next to the shards",
        )
    storage = Storage(source.base)
    names = shard_names(source, storage)
    check_numbering(source, storage, names)
    scan = partial(_scan, storage, levels)
    results = map_in_processes(scan, names, workers, "indexing shards", track)
    scans = [result for result in results if isinstance(result, Scan)]
    problems = [result for result in results if isinstance(result, str)]
    if problems:
        heading = (
            f"{source}: {len(problems)} of {len(names)} shards cannot be used; make them anew, or"
            " take them out:"
        )
        raise DistapError("data.damaged_shard", "\n".join([heading, *problems]))
    paths = dict[str, str]()
    scaling = None
    # only an earlier index knows which files were packed, and how they were scaled
    with suppress(DistapError):
        before = load_index(source, compare=False)
        paths = dict(zip(before.key.tolist(), before.path.tolist(), strict=True))
        scaling = before.scaling
    index = merge_scans(source, storage, scans, paths)
    if index.path.all():  # no image is new
        index = replace(index, scaling=scaling)
    index.save(source)
    return index, [skipped for scan in scans for skipped in scan.left_out]


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
            raise DistapError(
                "data.several_numberings",
                f"{source}: {storage.where(f'{folder}/{NAMES_FILE}')} numbers the classes of its"
                " folder alone: pack all images together",
            )
    if warns and len(folders) > 1:
        logger.warning(
            "%s: its shards are in %d folders, such as %s and %s: a class number is taken for the"
            " same class in all",
            source,
            len(folders),
            *folders[:2],
        )


def scan_shard(storage: Storage, name: str, levels: Sequence[str] = ()) -> Scan:
    """Index one shard; see `read_samples` for `levels` and the errors."""
    digest = hashlib.sha256()
    length = storage.size(name)
    where = storage.where(name)
    samples = list[Sample]()
    left_out = list[Skipped]()
    first_key = dict[tuple[int, Levels], str]()
    with storage.open(name, length) as file:
        for sample in read_samples(file, length, where, levels, digest):
            if isinstance(sample, Skipped):
                left_out.append(Skipped(f"{name}:{sample.name}", sample.reason))
            else:
                samples.append(sample)
                first_key.setdefault((sample.label, sample.levels), sample.key)
    columns = {
        field: np.array([getattr(sample, field) for sample in samples], COLUMNS[field])
        for field in OF_SAMPLES
    }
    rows = [(f"{where}: key {key!r}", *place) for place, key in first_key.items()] if levels else []
    names = dict.fromkeys(chain.from_iterable(sample.columns for sample in samples))
    further = {name: [sample.columns.get(name, "") for sample in samples] for name in names}
    return Scan(name, length, digest.hexdigest(), columns, rows, left_out, further)


def merge_scans(
    source: Source, storage: Storage, scans: Sequence[Scan], paths: Mapping[str, str]
) -> Index:
    """Join the scans of a source's shards, numbering classes from 0.

    The classes are named by classes.txt if it exists. `paths` are those of the files that were
    packed, by key.
    """
    columns: dict[str, Any] = {
        name: np.concatenate([scan.columns[name] for scan in scans]) for name in OF_SAMPLES
    }
    if not len(columns["label"]):
        raise DistapError(
            "data.empty", f"{source}: the data set is empty: no usable image in its shards"
        )
    # Shards may use any class numbers, with gaps; an index numbers the classes that are there.
    numbers, columns["label"] = np.unique(columns["label"], return_inverse=True)
    counts = [len(scan.columns["label"]) for scan in scans]
    columns["shard"] = np.repeat(np.arange(len(scans), dtype=np.int32), counts)
    columns["path"] = np.array([paths.get(key, "") for key in columns["key"].tolist()])
    name_of, levels = _named_classes(storage, numbers.tolist(), scans)
    index = Index(
        **columns,
        further=_further_columns(scans),
        shard_name=np.array([scan.name for scan in scans]),
        shard_size=np.array([scan.size for scan in scans]),
        shard_sha256=np.array([scan.sha256 for scan in scans]),
        class_name=np.array(list(name_of.values())),
        class_levels=table_of_levels([levels[name] for name in name_of.values()]),
    )
    return with_composed_names(index, storage.where(NAMES_FILE))


def _further_columns(scans: Sequence[Scan]) -> dict[str, NDArray[Any]]:
    """Return the further columns of all samples, with "" in shards that lack one."""
    columns = {}
    for name in dict.fromkeys(chain.from_iterable(scan.further for scan in scans)):
        cells = [scan.further.get(name, [""] * len(scan.columns["label"])) for scan in scans]
        columns[name] = np.array([*chain.from_iterable(cells)], np.str_)
    return columns


def _named_classes(
    storage: Storage, numbers: list[int], scans: Sequence[Scan]
) -> tuple[dict[int, str], dict[str, Levels]]:
    """Return the name of each class by its number, and the coarser classes by its name."""
    rows = _class_rows(storage, numbers)
    name_of = {number: name for number, (_, name, _) in zip(numbers, rows, strict=True)}
    by_samples = [
        (where, name_of[label], levels) for scan in scans for where, label, levels in scan.levels
    ]
    return name_of, nesting(by_samples or rows)


def _lines(storage: Storage, name: str) -> list[str] | None:
    """Return the lines of a text next to the shards; None if there is no such file."""
    try:
        return storage.read_whole(name).decode("utf-8").splitlines()
    except MissingFileError:
        return None
    except UnicodeDecodeError as error:
        raise DistapError(
            "data.unreadable", f"{storage.where(name)}: not UTF-8: {error}"
        ) from error


def _class_rows(storage: Storage, numbers: list[int]) -> list[tuple[str, str, Levels]]:
    """Return place, name and coarser classes of the classes with these ascending numbers.

    Without classes.txt, their names are the numbers.
    """
    lines = _lines(storage, NAMES_FILE)
    if lines is None:
        return [("", str(number), ()) for number in numbers]
    if numbers[-1] >= len(lines):
        raise DistapError(
            "data.missing_class_name",
            f"{storage.where(NAMES_FILE)}: {len(lines)} names, but a shard has class {numbers[-1]}",
        )
    rows = []
    seen = set[str]()
    for number in numbers:
        where = f"{storage.where(NAMES_FILE)}, line {number + 1}"
        name, *above = lines[number].split("\t")
        problem = ""
        if not name:
            problem = "empty"
        elif name in seen:  # an evaluation tells classes apart by their names
            problem = "used twice"
        elif not all(is_line(text) for text in (name, *above) if text):
            problem = "no line of text, or too long"
        if problem:
            raise DistapError(
                "data.wrong_class_name",
                f"{where}: class name {name[:60]!r} is {problem}; each class needs its own",
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
