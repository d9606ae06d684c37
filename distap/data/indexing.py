"""The strict pass over WebDataset tar shards that makes their index."""

import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distap.data.decoding import MAX_PIXELS, DamagedImageError, image_size
from distap.data.index import Index
from distap.data.progress import Track, untracked
from distap.data.sources import IMAGE_SUFFIXES
from distap.data.tar import read_members
from distap.errors import DistapError

LABEL_FIELD = "cls"
NAMES_FILE = "classes.txt"  # line k: the name of class k and, after a tab, its super-category where it has one


@dataclass(frozen=True)
class Skipped:
    """An image that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Sample:
    """One row of the index, before shards are numbered."""

    key: str
    label: int
    offset: int
    size: int
    crc32: int
    width: int
    height: int


def index_shards(folder: Path, track: Track = untracked) -> tuple[Index, list[Skipped]]:
    """Read every byte of a folder's tar shards once and write the index.

    A file classes.txt beside the shards names the classes, a line each; without it a class's name is its number.

    Returns:
        The index, and the samples left out since their image has no readable header.
    Raises:
        DistapError: there are no shards, one is damaged as a tar, or a sample lacks its image or integer label.
    """
    shards = sorted(folder.glob("*.tar"))
    if not shards:
        raise DistapError(f"{folder}: the data set is empty: no .tar shards in it")
    rows: list[tuple[int, Sample]] = []
    skipped: list[Skipped] = []
    for number, shard in enumerate(track(shards, "indexing shards", len(shards))):
        rows += [(number, sample) for sample in read_samples(shard, skipped)]
    if not rows:
        raise DistapError(f"{folder}: the data set is empty: no usable image in its shards")
    numbers, samples = zip(*rows, strict=True)
    given = np.array([sample.label for sample in samples], dtype=np.int64)
    present = np.unique(given)
    names, groups = _classes(folder / NAMES_FILE, present.tolist())
    index = Index(
        shard=np.array(numbers, dtype=np.int32),
        offset=np.array([sample.offset for sample in samples], dtype=np.int64),
        size=np.array([sample.size for sample in samples], dtype=np.int64),
        crc32=np.array([sample.crc32 for sample in samples], dtype=np.uint32),
        label=np.searchsorted(present, given).astype(np.int64),
        width=np.array([sample.width for sample in samples], dtype=np.int32),
        height=np.array([sample.height for sample in samples], dtype=np.int32),
        key=np.array([sample.key for sample in samples]),
        shard_name=np.array([shard.name for shard in shards]),
        shard_size=np.array([shard.stat().st_size for shard in shards], dtype=np.int64),
        shard_sha256=np.array([_sha256(shard) for shard in shards]),
        class_name=np.array(names),
        class_group=np.array(groups),
    )
    index.save(folder)
    return index, skipped


def read_samples(shard: Path, skipped: list[Skipped]) -> Iterator[Sample]:
    """The samples of one shard, in order; those whose image header cannot be read are added to `skipped`.

    Raises:
        DistapError: the tar is damaged, or a sample is incomplete.
    """
    seen: set[str] = set()
    members: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
    present: str | None = None

    def close(key: str | None) -> Iterator[Sample]:
        if key is not None:
            try:
                yield _sample(shard, key, members)
            except DamagedImageError as error:
                skipped.append(Skipped(f"{shard.name}:{key}", str(error)))
        members.clear()

    for member, data in read_members(shard):
        folder, _, name = member.name.rpartition("/")
        stem, _, field = name.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if key != present:
            yield from close(present)
            if key in seen:
                raise DistapError(f"{shard}: the members of key {key!r} do not stand together")
            seen.add(key)
            present = key
        if field in members:
            raise DistapError(f"{shard}: key {key!r} has two members .{field}")
        members[field] = (member, data)
    yield from close(present)


def _sample(shard: Path, key: str, members: dict[str, tuple[tarfile.TarInfo, bytes]]) -> Sample:
    images = [field for field in members if f".{field.lower()}" in IMAGE_SUFFIXES]
    if len(images) != 1:
        found = ", ".join(f".{field}" for field in members)
        raise DistapError(f"{shard}: key {key!r} needs one image member; it has {found}")
    if LABEL_FIELD not in members:
        raise DistapError(f"{shard}: key {key!r} has no .{LABEL_FIELD} member with its class number")
    text = members[LABEL_FIELD][1].strip()
    if not text.isdigit():
        shown = text[:40].decode(errors="replace")
        raise DistapError(f"{shard}: label {shown!r} of key {key!r} is no integer of 0 or more")
    member, data = members[images[0]]
    width, height = image_size(data, MAX_PIXELS)
    return Sample(key, int(text), member.offset_data, member.size, zlib.crc32(data), width, height)


def _classes(file: Path, present: list[int]) -> tuple[list[str], list[str]]:
    """Names and super-categories of the classes that occur, in the order of their numbers."""
    if not file.is_file():
        return [str(number) for number in present], [""] * len(present)
    lines = file.read_text(encoding="utf-8").splitlines()
    if present[-1] >= len(lines):
        raise DistapError(f"{file}: {len(lines)} names, but a shard has class {present[-1]}")
    pairs = [lines[number].partition("\t") for number in present]
    return [name for name, _, _ in pairs], [group for _, _, group in pairs]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
