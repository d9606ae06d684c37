"""The strict pass over WebDataset tar shards that makes their index."""

import hashlib
import os
import shutil
import stat
from pathlib import Path

import numpy as np

from distap.data.shards.index import Index
from distap.data.shards.parallel import spread
from distap.data.shards.progress import Track, untracked
from distap.data.shards.scanning import COLUMNS, LABEL_FIELD, ScanJob, Scanned, Skipped, scan_shard
from distap.errors import DistapError
from distap.storage.locations import LISTABLE, Source, joined, parse_source, shard_names
from distap.storage.reads import Storage, storage_of
from distap.storage.remotes import MissingFileError, RemoteSettings

__all__ = ["LABEL_FIELD", "NAMES_FILE", "Skipped", "index_shards"]

NAMES_FILE = "classes.txt"  # line k: the name of class k and, after a tab, its super-category where it has one


def index_shards(
    source: Source | Path | str,
    track: Track = untracked,
    workers: int = 1,
    remote: RemoteSettings | None = None,
) -> tuple[Index, list[Skipped]]:
    """Read every byte of a source's tar shards once and write their index.

    A file classes.txt beside the shards names the classes, a line each; without it a class's name is its number.
    An interrupted pass goes on where it stopped: what was found in a shard is kept until all are done, in the
    user's cache folder, and holds while its size and time of change, or ETag, stay as they are.

    Args:
        source: where the shards are.
        track: wraps a loop to show its progress.
        workers: processes that read shards.
        remote: how a remote source is reached.
    Returns:
        The index, and the samples left out since their image has no readable header.
    Raises:
        DistapError: there are no shards, some are damaged as tars, or a sample lacks its image or integer label; all
            such shards are listed.
    """
    source = parse_source(source)
    if source.kept_index is None and source.scheme not in LISTABLE:
        raise DistapError(f"{source}: nothing can be written behind {source.scheme}://; say where with --index PATH")
    settings = remote or RemoteSettings()
    storage = storage_of(source.base, settings)
    names = shard_names(source, storage)
    records = _records(source)
    jobs = [ScanJob(source.base, name, settings, records) for name in names]
    with spread(scan_shard, jobs, workers) as results:
        scanned = list(track(results, "indexing shards", len(jobs)))
    _refuse_damaged(source, scanned)
    index = _merged(source, storage, names, scanned)
    index.save(source, settings)
    shutil.rmtree(records, ignore_errors=True)
    return index, [image for shard in scanned for image in shard.skipped]


def _records(source: Source) -> Path:
    """The folder that keeps what was found in single shards, of this user alone.

    What is found in it is believed without reading the shard, so it must not lie where the data came from. Nor does
    it depend on where the index goes, which may have to be chosen again after a long scan.
    """
    base = source.base if source.scheme else str(Path(source.base).resolve())
    place = hashlib.sha256(joined(base, source.index_name).encode(errors="surrogateescape")).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = cache / "distap" / "scan" / place
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise DistapError(
            f"{folder}: cannot be made: {error.strerror}; set XDG_CACHE_HOME to a folder of your own"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise DistapError(f"{folder}: somebody else's; set XDG_CACHE_HOME to a folder of your own")
    return folder


def _refuse_damaged(source: Source, scanned: list[Scanned]) -> None:
    damaged = [shard.damage for shard in scanned if shard.damage]
    if damaged:
        raise DistapError(
            f"{source}: {len(damaged)} of {len(scanned)} shards cannot be used; make them anew, or take them out:\n"
            + "\n".join(damaged)
        )


def _merged(source: Source, storage: Storage, names: list[str], scanned: list[Scanned]) -> Index:
    parts = [shard.samples for shard in scanned if shard.samples is not None]
    columns = {column: np.concatenate([part[column] for part in parts]) for column in COLUMNS}
    given = columns.pop("label")
    if not len(given):
        raise DistapError(f"{source}: the data set is empty: no usable image in its shards")
    present, label = np.unique(given, return_inverse=True)
    class_names, groups = _classes(storage, present.tolist())
    return Index(
        shard=np.repeat(np.arange(len(parts), dtype=np.int32), [len(part["label"]) for part in parts]),
        label=label.astype(np.int64),
        shard_name=np.array(names),
        shard_size=np.array([shard.size for shard in scanned], dtype=np.int64),
        shard_sha256=np.array([shard.sha256 for shard in scanned]),
        class_name=np.array(class_names),
        class_group=np.array(groups),
        **columns,
    )


def _classes(storage: Storage, present: list[int]) -> tuple[list[str], list[str]]:
    """Names and super-categories of the classes that occur, in the order of their numbers."""
    where = storage.where(NAMES_FILE)
    try:
        with storage.open(NAMES_FILE) as file:
            lines = file.read().decode("utf-8").splitlines()
    except MissingFileError:
        return [str(number) for number in present], [""] * len(present)
    except UnicodeDecodeError as error:
        raise DistapError(f"{where}: not UTF-8: {error}") from error
    if present[-1] >= len(lines):
        raise DistapError(f"{where}: {len(lines)} names, but a shard has class {present[-1]}")
    pairs = [lines[number].partition("\t") for number in present]
    return [name for name, _, _ in pairs], [group for _, _, group in pairs]
