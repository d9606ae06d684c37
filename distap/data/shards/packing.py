"""Pack images into WebDataset tar shards, in parallel, continuing where an earlier packing was stopped.

Shards are written into a hidden folder beside the output, and one rename makes the output appear when it is complete.
The list of images and the layout alone decide the contents of each shard, so neither the number of processes nor an
interruption changes a byte.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import chain
from pathlib import Path

from distap.data.shards.image_files import ImageFile, list_images
from distap.data.shards.index import Index
from distap.data.shards.indexing import NAMES_FILE, merge_scans
from distap.data.shards.parallel import Track, spread, untracked
from distap.data.shards.samples import Skipped
from distap.data.shards.writing import Entry, ShardJob, Written, entry_bytes, write_shard
from distap.errors import DistapError
from distap.randomness import permutation
from distap.storage.atomic import UnwritableError, sync_path, write_whole
from distap.storage.locations import parse_source
from distap.storage.reads import storage_of

PLAN_VERSION = 2
STAT_THREADS = 32  # a network file system answers slowly, but many questions at once


def pack(
    images: Path | Sequence[ImageFile],
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

    When an interrupted packing is called again with the same images and layout, it keeps the shards that are whole.

    Args:
        images: in the order in which to pack them; or a folder or CSV, as in `list_images`.
        output: folder of the shards; it must not exist, or be empty, and appears when everything is in it.
        images_per_shard: at most; the last shard, and those with damaged images, have fewer.
        track: wraps a loop to show its progress.
        max_shard_bytes: at most; a larger image has a shard of its own.
        shuffle: seed of a random order. The given order mostly keeps a class together, which is the fastest to pack
            and to read by an index; streamed reading takes shards as they come and needs their classes mixed.
        decode: find damage by decoding every image instead of reading its header only.
        workers: processes that write shards.
    Returns:
        The index, and the images left out because they are damaged.
    Raises:
        DistapError: no image is usable, a class is in two groups, the output holds something already, an image cannot
            be read or has changed meanwhile, or the output cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DistapError(f"{output}: there is something already; choose another folder or remove it")
    if output.is_mount():
        raise DistapError(f"{output}: the root of a file system cannot appear by a rename; choose a folder in it")
    listed = list_images(images) if isinstance(images, Path) else images
    if not listed:
        raise DistapError(f"{output}: there are no images to pack")
    groups = _groups(listed)
    aside = output.with_name(f".{output.name}.packing")
    packing = _Packing(aside, images_per_shard, max_shard_bytes, shuffle, decode, workers, track)
    try:
        with _locked(aside):
            index, skipped = packing.run(listed, groups)
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
    return index, skipped


@dataclass(frozen=True)
class _Packing:
    """A packing in its hidden folder: the plan, the shards, and a record for each shard."""

    aside: Path
    images_per_shard: int
    max_shard_bytes: int | None
    shuffle: int | None
    decode: bool
    workers: int
    track: Track

    @property
    def shards(self) -> Path:
        return self.aside / "shards"

    @property
    def records(self) -> Path:
        return self.aside / "records"

    @property
    def plan(self) -> Path:
        return self.aside / "plan.json"

    def run(self, images: Sequence[ImageFile], groups: dict[str, str]) -> tuple[Index, list[Skipped]]:
        """Write the shards that are not there yet, and the index; return it with the images left out.

        Classes are numbered before their images are read. If a class or a shard turns out to hold no sound image, all
        shards are packed once more without the damaged images, so that every class number has an image.
        """
        with ThreadPoolExecutor(STAT_THREADS) as pool:
            entries = list(self.track(pool.map(_entry, images), "listing images", len(images)))
        if self.shuffle is not None:
            entries = [entries[place] for place in permutation(len(entries), self.shuffle)]
        fingerprint = self._fingerprint(entries)
        left_out = self._resume(fingerprint)
        while True:
            damaged = {image.name for image in left_out}
            sound = [entry for entry in entries if str(entry.image.path) not in damaged]
            if not sound:
                first = f"{left_out[0].name}: {left_out[0].reason}"
                raise DistapError(f"none of the {len(entries)} images can be read; first: {first}")
            # The labels of a CSV are numbers already; other classes are numbered in the order of their names.
            names = sorted(_class_names(sound), key=lambda name: (len(name) if name.isdigit() else 0, name))
            lines = [f"{name}\t{groups[name]}\n" if groups[name] else f"{name}\n" for name in names]
            write_whole(self.shards / NAMES_FILE, "".join(lines))
            written = self._write_shards(sound, {name: number for number, name in enumerate(names)})
            parts = [part for part, _ in written if part is not None]
            found = [image for _, skipped in written for image in skipped]
            left_out += found
            gone = {image.name for image in found}
            remaining = _class_names(entry for entry in sound if str(entry.image.path) not in gone)
            if len(parts) == len(written) and len(remaining) == len(names):
                break
            self._start(fingerprint, left_out)
        source = parse_source(self.shards)
        index = merge_scans(source, storage_of(source.base), parts)
        index.save(source)
        return index, left_out

    def _resume(self, fingerprint: str) -> list[Skipped]:
        """Return the images that an earlier packing of the same list left out; remove one of another list."""
        try:
            plan = json.loads(self.plan.read_text(encoding="utf-8"))
            left_out = [Skipped(*image) for image in plan["left_out"]]
            if plan["fingerprint"] == fingerprint:
                return left_out
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self._start(fingerprint, [])
        return []

    def _start(self, fingerprint: str, left_out: list[Skipped]) -> None:
        # Without a plan, the next call removes whatever is there.
        self.plan.unlink(missing_ok=True)
        for folder in (self.shards, self.records):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        write_whole(self.plan, json.dumps({"fingerprint": fingerprint, "left_out": left_out}))

    def _fingerprint(self, entries: list[Entry]) -> str:
        layout = [self.images_per_shard, self.max_shard_bytes, self.shuffle, self.decode]
        digest = hashlib.sha256(json.dumps([PLAN_VERSION, layout]).encode())
        for (path, class_name, group), size, modified in entries:
            digest.update(json.dumps([os.path.abspath(path), class_name, group, size, modified]).encode())  # noqa: PTH100
        return digest.hexdigest()

    def _write_shards(self, entries: list[Entry], numbers: dict[str, int]) -> list[Written]:
        jobs = []
        for number, (start, end) in enumerate(self._slices(entries)):
            part = tuple(entries[start:end])
            shard, record = self.shards / f"{number:06d}.tar", self.records / f"{number:06d}.json"
            labels = {name: numbers[name] for name in _class_names(part)}
            jobs.append(ShardJob(shard, record, start, part, labels, self.decode))
        try:
            with spread(write_shard, jobs, self.workers) as written:
                return list(self.track(written, "packing shards", len(jobs)))
        finally:
            for leftover in (*self.shards.glob("*.part"), *self.aside.glob("*/.*.tmp")):
                leftover.unlink()

    def _slices(self, entries: list[Entry]) -> Iterator[tuple[int, int]]:
        """Yield the first image of each shard, and the first behind it."""
        most = self.max_shard_bytes
        start, held = 0, 0
        for position, entry in enumerate(entries):
            size = entry_bytes(entry.size)
            full = position - start == self.images_per_shard
            if position > start and (full or (most is not None and held + size > most)):
                yield start, position
                start, held = position, 0
            held += size
        yield start, len(entries)


def _class_names(entries: Iterable[Entry]) -> set[str]:
    return {entry.image.class_name for entry in entries}


def _groups(images: Sequence[ImageFile]) -> dict[str, str]:
    """Return the group of each class."""
    groups: dict[str, str] = {}
    for path, name, group in images:
        known = groups.setdefault(name, group)
        if known != group:
            raise DistapError(f"{path}: class {name!r} is in group {group!r}, but in {known!r} before")
    for name in chain(groups, groups.values()):
        # classes.txt has a line for each class, with a tab before its group. Bytes that are no UTF-8 are surrogates.
        is_line = len(name.splitlines()) <= 1 and name == name.strip() and "\t" not in name
        if not is_line or name != name.encode(errors="replace").decode():
            raise DistapError(
                f"{name!r} cannot name a class or group: tabs, line breaks, outer spaces and bytes that are no UTF-8 "
                "are not allowed"
            )
    if "" in groups:
        raise DistapError("a class has an empty name")
    return groups


def _entry(image: ImageFile) -> Entry:
    try:
        status = image.path.stat()
    except OSError as error:
        raise DistapError(f"{image.path}: the image cannot be read: {error.strerror or error}") from error
    return Entry(image, status.st_size, status.st_mtime_ns)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and keep other processes from packing there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise DistapError(
                f"{folder}: another process is packing there; wait for it or choose another output"
            ) from error
        yield
