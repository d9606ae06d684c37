"""One shard, read strictly from its first byte to its last: its samples, and its checksum by the way."""

import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, image_size
from distap.data.shards.columns import read_columns
from distap.data.shards.sources import IMAGE_SUFFIXES
from distap.data.shards.tar import DamagedShardError, Member, Readable, read_members
from distap.storage.atomic import write_whole
from distap.storage.hashed import Hashed
from distap.storage.reads import About, Storage, storage_of
from distap.storage.remotes import MissingFileError, RemoteSettings

LABEL_FIELD = "cls"
MAX_DIGITS = 18  # of a label: what surely fits int64
RECORD_VERSION = 1
COLUMNS = {
    "key": "U",
    "label": "int64",
    "offset": "int64",
    "size": "int64",
    "crc32": "uint32",
    "width": "int32",
    "height": "int32",
}
RECORD_COLUMNS = {**COLUMNS, "left_out": "U", "reason": "U", "sha256": "U"}
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Skipped:
    """An image that was left out, and why."""

    name: str
    reason: str


class IncompleteSampleError(DamagedImageError):
    """A sample without its image, or without a class that can be read."""

    def __init__(self, detail: str) -> None:
        super().__init__("missing_field", detail)
        self.detail = detail


class LabelledImage(NamedTuple):
    """An image with its class, as a shard has them."""

    label: int
    image: Member
    size: tuple[int, int]  # width and height, pixels


@dataclass(frozen=True)
class Sample:
    """An image of a shard."""

    key: str
    label: int
    offset: int
    size: int
    crc32: int
    width: int
    height: int


@dataclass(frozen=True)
class ScanJob:
    """A shard to scan, and the folder that keeps what was found in case the rest is interrupted."""

    base: str
    name: str
    remote: RemoteSettings
    records: Path


@dataclass(frozen=True)
class Scanned:
    """What a shard holds; or why it cannot be used."""

    size: int = 0  # bytes
    sha256: str = ""
    samples: dict[str, Any] | None = None  # an array by column; none where it is damaged
    skipped: tuple[Skipped, ...] = ()
    damage: str = ""


def scan_shard(job: ScanJob) -> Scanned:
    """Scan a shard, unless it was scanned before and has not changed since.

    Raises:
        DistapError: it cannot be reached.
    """
    storage = storage_of(job.base, job.remote)
    try:
        about = storage.about(job.name)
        record = job.records / f"{_record_name(job.name, about)}.npz"
        scanned = _read_record(record, about)
        if scanned is None:
            scanned = _scan(storage, job.name, about)
            _write_record(record, scanned)
    except (DamagedShardError, MissingFileError) as error:
        return Scanned(damage=str(error))
    return scanned


def _scan(storage: Storage, name: str, about: About) -> Scanned:
    skipped: list[Skipped] = []
    with storage.open(name) as file:
        hashed = Hashed(file)
        samples = list(read_samples(hashed, about.size, storage.where(name), skipped))
    if storage.about(name) != about:
        raise DamagedShardError(f"{storage.where(name)}: it has changed while it was read")
    columns: dict[str, Any] = {
        column: np.array([getattr(sample, column) for sample in samples], dtype=np.str_ if dtype == "U" else dtype)
        for column, dtype in COLUMNS.items()
    }
    named = tuple(Skipped(f"{name}:{image.name}", image.reason) for image in skipped)
    return Scanned(about.size, hashed.sha256, columns, named)


def read_samples(file: Readable, length: int, where: str, skipped: list[Skipped]) -> Iterator[Sample]:
    """The samples of one shard, in order; the keys of those whose image has no readable header go to `skipped`.

    Args:
        file: the shard from its first byte.
        length: bytes of the shard.
        where: its name, for messages.
        skipped: is added to.
    Raises:
        DamagedShardError: the tar is damaged, or a sample is incomplete.
    """
    for key, members in read_groups(file, length, where):
        try:
            label, image, (width, height) = labelled_image(key, members)
        except IncompleteSampleError as error:
            raise DamagedShardError(f"{where}: {error.detail}") from error
        except DamagedImageError as error:
            skipped.append(Skipped(key, str(error)))
        else:
            yield Sample(key, label, image.offset, len(image.data), zlib.crc32(image.data), width, height)


def read_groups(file: Readable, length: int | None, where: str) -> Iterator[tuple[str, dict[str, Member]]]:
    """The members of one shard that belong together, by field, with the key that they share; in order.

    Args:
        file: the shard from its first byte.
        length: bytes of the shard; None where only its end will tell.
        where: its name, for messages.
    Raises:
        DamagedShardError: the tar is damaged, or members of one key do not stand together.
    """
    seen: set[str] = set()
    members: dict[str, Member] = {}
    present: str | None = None
    for member in read_members(file, length, where):
        folder, _, name = member.name.rpartition("/")
        stem, _, field = name.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if key != present:
            if present is not None:
                yield present, members
            if key in seen:
                raise DamagedShardError(f"{where}: the members of key {key!r} do not stand together")
            seen.add(key)
            present, members = key, {}
        if field in members:
            raise DamagedShardError(f"{where}: key {key!r} has two members .{field}")
        members[field] = member
    if present is not None:
        yield present, members


def labelled_image(key: str, members: dict[str, Member]) -> LabelledImage:
    """What trains of a sample.

    Raises:
        IncompleteSampleError: it lacks its image or integer label.
        DamagedImageError: the image has no readable header, or is too large for any use.
    """
    images = [field for field in members if f".{field.lower()}" in IMAGE_SUFFIXES]
    if len(images) != 1:
        found = ", ".join(f".{field}" for field in members)
        raise IncompleteSampleError(f"key {key!r} needs one image member; it has {found}")
    if LABEL_FIELD not in members:
        raise IncompleteSampleError(f"key {key!r} has no .{LABEL_FIELD} member with its class number")
    text = members[LABEL_FIELD].data.strip()
    if not text.isdigit() or len(text) > MAX_DIGITS:
        shown = text[:40].decode(errors="replace")
        raise IncompleteSampleError(
            f"label {shown!r} of key {key!r} is no integer of 0 or more (at most {MAX_DIGITS} digits)"
        )
    image = members[images[0]]
    return LabelledImage(int(text), image, image_size(image.data, MAX_PIXELS))


def _record_name(name: str, about: About) -> str:
    return hashlib.sha256(json.dumps([RECORD_VERSION, name, *about]).encode()).hexdigest()[:32]


def _write_record(path: Path, scanned: Scanned) -> None:
    assert scanned.samples is not None
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        left_out=np.array([image.name for image in scanned.skipped], dtype=np.str_),
        reason=np.array([image.reason for image in scanned.skipped], dtype=np.str_),
        sha256=np.array([scanned.sha256]),
        **scanned.samples,
    )
    write_whole(path, buffer.getvalue())


def _read_record(path: Path, about: About) -> Scanned | None:
    """What an earlier scan left; None where there is nothing, or nothing readable."""
    try:
        columns: dict[str, Any] = read_columns(path.read_bytes(), RECORD_COLUMNS)
        left_out, reasons = columns.pop("left_out").tolist(), columns.pop("reason").tolist()
        skipped = tuple(Skipped(name, reason) for name, reason in zip(left_out, reasons, strict=True))
        (sha256,) = columns.pop("sha256").tolist()
    except (OSError, ValueError):
        return None
    return Scanned(about.size, sha256, columns, skipped) if _fits(sha256, columns, about.size) else None


def _fits(sha256: str, columns: dict[str, Any], length: int) -> bool:
    """Whether a record can be of a shard of `length` bytes."""
    label, offset, size = columns["label"], columns["offset"], columns["size"]
    return (
        _SHA256.fullmatch(sha256) is not None
        and len({len(column) for column in columns.values()}) == 1
        and bool(((label >= 0) & (offset >= 0) & (size >= 0) & (size <= length) & (offset <= length - size)).all())
    )
