"""Packing images into WebDataset tar shards: in parallel, and going on where an earlier packing was stopped.

Shards are written into a hidden folder beside the output, each aside first, and the output appears by one rename when
everything is in it. What a shard holds follows from the list of images and the settings alone, so neither the number
of processes nor an interruption changes a byte.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import chain
from pathlib import Path

from distap.data.shards.index import Index
from distap.data.shards.indexing import NAMES_FILE, Skipped, index_shards
from distap.data.shards.parallel import spread
from distap.data.shards.progress import Track, untracked
from distap.data.shards.sources import ImageFile, list_images
from distap.data.shards.writing import Entry, Packed, ShardJob, entry_bytes, read_record, write_shard
from distap.errors import DistapError
from distap.randomness import permutation
from distap.storage.atomic import UnwritableError, sync_path, write_whole

PLAN_VERSION = 1
PLAN_FILE = "plan.json"
STAT_THREADS = 32  # asking a network file system for sizes is all waiting


@dataclass(frozen=True)
class Layout:
    """What decides, beside the images, which bytes a shard holds; `pack_images` explains the fields."""

    images_per_shard: int
    max_shard_bytes: int | None
    shuffle: int | None
    decode: bool


def pack(
    source: Path,
    output: Path,
    images_per_shard: int = 1000,
    track: Track = untracked,
    *,
    max_shard_bytes: int | None = None,
    shuffle: int | None = None,
    decode: bool = False,
    workers: int = 1,
) -> tuple[Index, list[Skipped]]:
    """Pack a folder with a sub-folder a class, or a CSV as in `list_images`; the rest is as in `pack_images`."""
    _require_free(output)
    layout = Layout(images_per_shard, max_shard_bytes, shuffle, decode)
    return _pack(list_images(source), output, layout, workers, track)


def pack_images(
    images: Sequence[ImageFile],
    output: Path,
    images_per_shard: int = 1000,
    track: Track = untracked,
    *,
    max_shard_bytes: int | None = None,
    shuffle: int | None = None,
    decode: bool = False,
    workers: int = 1,
) -> tuple[Index, list[Skipped]]:
    """Pack images into shards with an index beside them; each image is read once, and its bytes stay as they are.

    An interrupted packing goes on from its whole shards when it is called again with the same images and layout.

    Args:
        images: in the order in which they are packed.
        output: folder of the shards; it must not exist, or be empty. It appears when everything is in it.
        images_per_shard: at most; fewer in the last shard, and where images are damaged.
        track: wraps a loop to show its progress.
        max_shard_bytes: at most; a larger image has a shard of its own.
        shuffle: the seed of another order than that of `images`. The given order mostly keeps a class together, which
            is the fastest to pack and to read by an index; streamed reading takes shards as they come and needs their
            classes mixed.
        decode: find damage by decoding every image instead of reading its header only.
        workers: processes that write shards.
    Returns:
        The index, and the images that were left out since they are damaged.
    Raises:
        DistapError: no image is usable, a class is in two groups, there is something at the output already, an image
            cannot be read or has changed meanwhile, or the output cannot be written.
    """
    _require_free(output)
    return _pack(images, output, Layout(images_per_shard, max_shard_bytes, shuffle, decode), workers, track)


def _pack(
    images: Sequence[ImageFile], output: Path, layout: Layout, workers: int, track: Track
) -> tuple[Index, list[Skipped]]:
    if not images:
        raise DistapError(f"{output}: there are no images to pack")
    groups = _groups(images)
    aside = output.with_name(f".{output.name}.packing")
    try:
        with _locked(aside):
            packing = _Packing(aside, layout, workers, track)
            skipped = packing.write(_sized(images, layout.shuffle, track), groups)
            index, undecodable = packing.index()
            sync_path(packing.shards)
            packing.shards.replace(output)
            sync_path(output.parent)
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, UnwritableError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DistapError(
            f"{aside}: {reason}; the shards that are whole are kept there: mend this, and the same command goes on "
            "from them"
        ) from error
    return index, skipped + undecodable


class _Packing:
    """What is packed so far, in a folder: the plan, the shards, and what each worker said of its shard."""

    def __init__(self, aside: Path, layout: Layout, workers: int, track: Track) -> None:
        self.shards, self.records, self.plan = aside / "shards", aside / "records", aside / PLAN_FILE
        self.layout, self.workers, self.track = layout, workers, track

    def write(self, entries: list[Entry], groups: dict[str, str]) -> list[Skipped]:
        """Write all shards that are not there yet; the images that were left out.

        Classes are numbered before their images are read. Where a class or a shard turns out to hold no sound image,
        everything is packed once more without the damaged ones, so that no number goes without an image.
        """
        left_out = self._resume(entries)
        while True:
            damaged = {skipped.name for skipped in left_out}
            sound = [entry for entry in entries if str(entry.image.path) not in damaged]
            if not sound:
                first = f"{left_out[0].name}: {left_out[0].reason}"
                raise DistapError(f"none of the {len(entries)} images can be read; first: {first}")
            names = _class_order({entry.image.class_name for entry in sound})
            packed = self._write_shards(sound, names)
            found = [skipped for shard in packed for skipped in shard.skipped]
            if found and not (all(shard.images for shard in packed) and _all_classes_left(sound, found)):
                left_out = left_out + found
                self._start(entries, left_out)
                continue
            lines = [f"{name}\t{groups[name]}\n" if groups[name] else f"{name}\n" for name in names]
            write_whole(self.shards / NAMES_FILE, "".join(lines).encode())
            return left_out + found

    def index(self) -> tuple[Index, list[Skipped]]:
        """Index the shards by reading them back, and compare that with what went into them."""
        try:
            index, undecodable = index_shards(self.shards, self.track, self.workers)
        except DistapError:
            self._require_as_written({shard.name: _sha256(shard) for shard in sorted(self.shards.glob("*.tar"))})
            raise
        self._require_as_written(dict(zip(index.shard_name.tolist(), index.shard_sha256.tolist(), strict=True)))
        return index, undecodable

    def _require_as_written(self, digests: dict[str, str]) -> None:
        for name, digest in digests.items():
            packed = read_record(self.records / f"{Path(name).stem}.json")
            if packed is None or packed.sha256 != digest:
                (self.shards / name).unlink()
                raise DistapError(
                    f"{self.shards / name}: reads back otherwise than it was written: mistrust the disk; "
                    "the same command writes this shard again"
                )

    def _resume(self, entries: list[Entry]) -> list[Skipped]:
        """The images that an earlier packing of the same list left out; of another list, all is removed."""
        try:
            plan = json.loads(self.plan.read_text(encoding="utf-8"))
            left_out = [Skipped(**skipped) for skipped in plan["left_out"]]
            same = plan["fingerprint"] == self._fingerprint(entries)
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if same:
            return left_out
        self._start(entries, [])
        return []

    def _start(self, entries: list[Entry], left_out: list[Skipped]) -> None:
        # Without a plan, whatever is there is removed by the next call.
        self.plan.unlink(missing_ok=True)
        for folder in (self.shards, self.records):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        plan = {"fingerprint": self._fingerprint(entries), "left_out": [asdict(skipped) for skipped in left_out]}
        write_whole(self.plan, json.dumps(plan).encode())

    def _fingerprint(self, entries: list[Entry]) -> str:
        digest = hashlib.sha256(json.dumps([PLAN_VERSION, asdict(self.layout)]).encode())
        for entry in entries:
            image = entry.image
            row = [os.path.abspath(image.path), image.class_name, image.group, entry.size, entry.modified]  # noqa: PTH100
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()

    def _write_shards(self, entries: list[Entry], names: list[str]) -> list[Packed]:
        numbers = {name: number for number, name in enumerate(names)}
        done: list[Packed] = []
        jobs: list[ShardJob] = []
        slices = list(self._slices(entries))
        for number, (start, end) in enumerate(slices):
            shard, record = self.shards / f"{number:06d}.tar", self.records / f"{number:06d}.json"
            packed = read_record(record)
            if packed and (shard.exists() or not packed.images):
                done.append(packed)
            else:
                part = tuple(entries[start:end])
                labels = {entry.image.class_name: numbers[entry.image.class_name] for entry in part}
                jobs.append(ShardJob(shard, record, start, part, labels, self.layout.decode))
        try:
            with spread(write_shard, jobs, self.workers) as written:
                return list(self.track(chain(done, written), "packing shards", len(slices)))
        finally:
            for leftover in chain(
                self.shards.glob("*.part"), self.shards.glob(".*.tmp"), self.records.glob(".*.tmp")
            ):
                leftover.unlink()

    def _slices(self, entries: list[Entry]) -> Iterator[tuple[int, int]]:
        """First and last-but-one image of each shard."""
        most = self.layout.max_shard_bytes
        start, held = 0, 0
        for position, entry in enumerate(entries):
            size = entry_bytes(entry.size)
            full = position - start == self.layout.images_per_shard
            if position > start and (full or (most is not None and held + size > most)):
                yield start, position
                start, held = position, 0
            held += size
        yield start, len(entries)


def _require_free(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DistapError(f"{output}: there is something already; choose another folder or remove it")
    if output.is_mount():
        raise DistapError(f"{output}: the root of a file system cannot appear by a rename; choose a folder in it")


def _groups(images: Sequence[ImageFile]) -> dict[str, str]:
    """The group of each class."""
    groups: dict[str, str] = {}
    for image in images:
        known = groups.setdefault(image.class_name, image.group)
        if known != image.group:
            raise DistapError(
                f"{image.path}: class {image.class_name!r} is in group {image.group!r}, but in {known!r} before"
            )
    for name in chain(groups, groups.values()):
        # Each class is a line of a text file, with a tab before its group.
        if len(name.splitlines()) > 1 or name != name.strip() or "\t" in name or not _in_utf8(name):
            raise DistapError(
                f"{name!r} cannot name a class or group: tabs, line breaks and outer spaces are no text"
            )
    if "" in groups:
        raise DistapError("a class has an empty name")
    return groups


def _in_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _class_order(names: set[str]) -> list[str]:
    """Labels of a CSV are numbers already; the others are numbered in the order of their names."""
    return sorted(names, key=lambda name: (len(name) if name.isdigit() else 0, name))


def _all_classes_left(entries: list[Entry], skipped: list[Skipped]) -> bool:
    damaged = {image.name for image in skipped}
    left = {entry.image.class_name for entry in entries if str(entry.image.path) not in damaged}
    return left == {entry.image.class_name for entry in entries}


def _sized(images: Sequence[ImageFile], shuffle: int | None, track: Track) -> list[Entry]:
    """The images in the order in which they are packed."""
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        entries = list(track(pool.map(_entry, images), "listing images", len(images)))
    return entries if shuffle is None else [entries[place] for place in permutation(len(entries), shuffle)]


def _entry(image: ImageFile) -> Entry:
    try:
        status = image.path.stat()
    except OSError as error:
        raise DistapError(f"{image.path}: the image cannot be read: {error.strerror or error}") from error
    return Entry(image, status.st_size, status.st_mtime_ns)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise DistapError(
                f"{folder}: another process is packing there; wait for it or choose another output"
            ) from error
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
