"""Write one shard from its images and read it back: the work of one process while packing."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import webdataset

from distap.data.images.decoding import DamagedImageError, decode, image_size
from distap.data.shards.image_files import IMAGE_SUFFIXES, ImageFile, suffix_of
from distap.data.shards.index import Index
from distap.data.shards.indexing import scan_shard
from distap.data.shards.tar import LABEL_FIELD, DamagedShardError, Skipped
from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.hashing import Hashed


class Entry(NamedTuple):
    """An image to pack, with what tells of a later change."""

    image: ImageFile
    size: int  # bytes
    modified: int  # nanoseconds since 1970


class ShardJob(NamedTuple):
    """A shard to write."""

    shard: Path
    record: Path  # file that remembers what was written
    first: int  # position of the first image in the data set, which begins its key
    entries: list[Entry]
    numbers: dict[str, int]  # class number by class name
    decode: bool  # find damage by decoding whole images


def write_shard(job: ShardJob) -> tuple[Index | None, list[Skipped]]:
    """Write a shard and its record, each atomically, unless an earlier call did; then read the shard back.

    Returns the shard's index, None if no image was sound and so no shard exists, and the images left out. Besides a
    DistapError, an OSError is raised if the shard cannot be written.
    """
    try:
        record = json.loads(job.record.read_bytes())
        sha256, skipped = record["sha256"], [Skipped(*image) for image in record["skipped"]]
        written = job.shard.exists() or len(skipped) == len(job.entries)
    except (OSError, ValueError, KeyError, TypeError):
        written = False
    if not written:
        sha256, skipped = _write(job)
    if len(skipped) == len(job.entries):
        return None, skipped
    index = None
    with job.shard.open("rb") as file, suppress(DamagedShardError):
        index, _ = scan_shard(file, job.shard.name, job.shard.stat().st_size, str(job.shard))
    if index is None or index.shard_sha256.item() != sha256:
        job.shard.unlink()
        problem = "reads back otherwise than it was written: mistrust the disk"
        raise DistapError(f"{job.shard}: {problem}; the same command writes this shard again")
    return index, skipped


def _write(job: ShardJob) -> tuple[str, list[Skipped]]:
    """Write the shard and its record; return the shard's SHA-256 and the images left out."""
    part = job.shard.with_suffix(".part")
    skipped: list[Skipped] = []
    try:
        with part.open("wb") as file:
            hashed = Hashed(file)
            with webdataset.TarWriter(hashed, mtime=0, encoder=False) as writer:
                for position, entry in enumerate(job.entries, job.first):
                    data, path = _read(entry), entry.image.path
                    try:
                        decode(data, name=str(path)) if job.decode else image_size(data)
                    except DamagedImageError as error:
                        skipped.append(Skipped(str(path), str(error)))
                        continue
                    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem)[:60]
                    suffix = path.suffix.lower()
                    field = suffix.removeprefix(".") if suffix in IMAGE_SUFFIXES else suffix_of(data)
                    label = str(job.numbers[entry.image.class_name]).encode()
                    writer.write({"__key__": f"{position:08d}-{stem}", field: data, LABEL_FIELD: label})
            # Bring it to the disk and out of memory, so that reading it back reads the disk.
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        # The record comes first, so that every shard that exists has one.
        write_whole(job.record, json.dumps({"sha256": hashed.sha256, "skipped": skipped}))
        if len(skipped) < len(job.entries):
            part.replace(job.shard)
    finally:
        part.unlink(missing_ok=True)
    return hashed.sha256, skipped


def _read(entry: Entry) -> bytes:
    path = entry.image.path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DistapError(f"{path}: the image cannot be read: {error.strerror or error}") from error
    if len(data) != entry.size:
        raise DistapError(f"{path}: {len(data)} bytes, but {entry.size} when packing began; pack again")
    return data
