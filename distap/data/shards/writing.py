"""One shard written from its images: what a worker of packing does."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import webdataset

from distap.data.images.decoding import DamagedImageError, decode, image_size
from distap.data.shards.indexing import LABEL_FIELD, Skipped
from distap.data.shards.sources import IMAGE_SUFFIXES, ImageFile
from distap.data.shards.tar import BLOCK
from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.hashed import Hashed

# How the formats that can be read begin.
BEGINNINGS = {
    b"\xff\xd8": "jpg",
    b"\x89PNG": "png",
    b"RIFF": "webp",
    b"BM": "bmp",
    b"GIF8": "gif",
    b"II": "tif",
    b"MM": "tif",
}


@dataclass(frozen=True)
class Entry:
    """An image to pack, with what tells later whether it has changed: bytes, and nanoseconds since 1970."""

    image: ImageFile
    size: int
    modified: int


@dataclass(frozen=True)
class ShardJob:
    """A shard to write."""

    shard: Path
    record: Path  # where to leave what was written
    first: int  # position of the first image in the data set, which begins its key
    entries: tuple[Entry, ...]
    numbers: dict[str, int]  # class name -> class number
    decode: bool


@dataclass(frozen=True)
class Packed:
    """What was written: sound images, the file's SHA-256 (hexadecimal), and the images left out."""

    images: int
    sha256: str
    skipped: tuple[Skipped, ...]


def entry_bytes(size: int) -> int:
    """Bytes of a shard that an image of `size` bytes takes: two headers, the image and its class number."""
    return 3 * BLOCK + -(-size // BLOCK) * BLOCK


def write_shard(job: ShardJob) -> Packed:
    """Write one shard and its record, each whole or not at all; no shard where all of its images are damaged.

    Raises:
        DistapError: an image cannot be read, or is no longer the one that was listed.
        OSError: the shard cannot be written.
        UnwritableError: its record cannot be written.
    """
    part = job.shard.with_suffix(".part")
    skipped: list[Skipped] = []
    try:
        with part.open("wb") as file:
            hashed = Hashed(file)
            with webdataset.TarWriter(hashed, mtime=0, encoder=False) as writer:
                for position, entry in enumerate(job.entries, job.first):
                    data = _read(entry)
                    try:
                        decode(data, name=str(entry.image.path)) if job.decode else image_size(data)
                    except DamagedImageError as error:
                        skipped.append(Skipped(str(entry.image.path), str(error)))
                    else:
                        writer.write(_sample(entry.image, position, data, job.numbers))
            _settle(file)
        packed = Packed(len(job.entries) - len(skipped), hashed.sha256, tuple(skipped))
        # The record first: a shard that is there has one.
        write_whole(job.record, json.dumps(asdict(packed)).encode())
        if packed.images:
            part.replace(job.shard)
    finally:
        part.unlink(missing_ok=True)
    return packed


def read_record(path: Path) -> Packed | None:
    """What a worker left of its shard; None where it cannot be read."""
    try:
        record = json.loads(path.read_bytes())
        skipped = tuple(Skipped(**image) for image in record["skipped"])
        return Packed(int(record["images"]), str(record["sha256"]), skipped)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sample(image: ImageFile, position: int, data: bytes, numbers: dict[str, int]) -> dict[str, str | bytes]:
    return {
        "__key__": f"{position:08d}-{re.sub(r'[^A-Za-z0-9_-]+', '_', image.path.stem)[:60]}",
        _field(image.path, data): data,
        LABEL_FIELD: str(numbers[image.class_name]).encode(),
    }


def _field(path: Path, data: bytes) -> str:
    """How the member ends: as the file does, or by what it is where the files of a data set have no suffix."""
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return path.suffix.lower().removeprefix(".")
    return next(field for mark, field in BEGINNINGS.items() if data.startswith(mark))


def _read(entry: Entry) -> bytes:
    path = entry.image.path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DistapError(f"{path}: the image cannot be read: {error.strerror or error}") from error
    if len(data) != entry.size:
        raise DistapError(f"{path}: {len(data)} bytes, but {entry.size} when packing began; pack again")
    return data


def _settle(file: BinaryIO) -> None:
    """Bring the file to the disk, and out of memory, so that reading it back reads the disk."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
