"""WebDataset tar shards: packing images into them, and the strict pass that indexes them.

webdataset reads on after most kinds of damage and silently drops samples. What trains from an index needs to
know of every sample, so the pass here refuses a shard with anything wrong in it.
"""

import hashlib
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import webdataset

from distap.data.decoding import MAX_PIXELS, DamagedImageError, image_size
from distap.data.index import Index
from distap.data.progress import Track, untracked
from distap.data.sources import IMAGE_SUFFIXES, ImageFile, list_images
from distap.errors import DistapError

BLOCK = 512  # bytes of a tar block; two of zeros end an archive
LABEL_FIELD = "cls"
NAMES_FILE = "classes.txt"  # line k is the name of class k


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


def pack(
    source: Path, output: Path, images_per_shard: int = 1000, track: Track = untracked
) -> tuple[Index, list[Skipped]]:
    """Pack images into shards with an index beside them.

    Args:
        source: a folder with a sub-folder a class, or a CSV of path,label.
        output: folder of the shards; it must not exist, or be empty. It appears when everything is in it.
        images_per_shard: the last shard has fewer.
        track: wraps a loop to show its progress.
    Returns:
        The index, and the images that were left out since they are damaged.
    Raises:
        DistapError: the source has no usable image, or there is something at the output already.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DistapError(f"{output}: there is something already; choose another folder or remove it")
    images = list_images(source)
    skipped: list[Skipped] = []
    sound = list(_sound(track(images, f"checking {source}", len(images)), skipped))
    if not sound:
        raise DistapError(f"{source}: none of its {len(images)} images can be read; first: {skipped[0]}")
    # Labels of a CSV are numbers already; the others are numbered in the order of their names.
    names = sorted({image.class_name for image in sound}, key=lambda name: (len(name) if name.isdigit() else 0, name))
    numbers = {name: number for number, name in enumerate(names)}
    aside = output.with_name(f".{output.name}.packing")
    shutil.rmtree(aside, ignore_errors=True)  # of a packing that was interrupted
    aside.mkdir(parents=True)
    starts = range(0, len(sound), images_per_shard)
    for shard, start in enumerate(track(starts, "packing shards", len(starts))):
        _write_shard(aside / f"{shard:06d}.tar", sound[start : start + images_per_shard], start, numbers)
    (aside / NAMES_FILE).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    index, undecodable = index_shards(aside, track)
    aside.replace(output)
    return index, skipped + undecodable


def _sound(images: Iterable[ImageFile], skipped: list[Skipped]) -> Iterator[ImageFile]:
    for image in images:
        try:
            image_size(image.path.read_bytes())
        except DamagedImageError as error:
            skipped.append(Skipped(str(image.path), str(error)))
        else:
            yield image


def _write_shard(path: Path, images: list[ImageFile], first: int, numbers: dict[str, int]) -> None:
    with path.open("wb") as file, webdataset.TarWriter(file, mtime=0, encoder=False) as writer:
        for number, image in enumerate(images, first):
            field = image.path.suffix.lower().removeprefix(".")
            writer.write(
                {
                    "__key__": f"{number:08d}-{re.sub(r'[^A-Za-z0-9_-]+', '_', image.path.stem)[:60]}",
                    field: image.path.read_bytes(),
                    LABEL_FIELD: str(numbers[image.class_name]).encode(),
                }
            )


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
        class_name=np.array(_class_names(folder / NAMES_FILE, present.tolist())),
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

    for member, data in _members(shard):
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


def _members(shard: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Files of a tar with their contents; anything but a whole archive is refused."""
    length = shard.stat().st_size
    with shard.open("rb") as file:
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - closed with the file
            for member in tar:
                end = member.offset_data + member.size
                if end > length:
                    raise DistapError(f"{shard}: {member.name} ends at byte {end}, beyond the file's {length}")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise DistapError(f"{shard}: {member.name} is no plain file")
                file.seek(member.offset_data)
                yield member, file.read(member.size)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise DistapError(f"{shard}: damaged tar: {error}") from error
        # tarfile takes any block that it cannot read as the end; only zeros are one.
        file.seek(tar.offset)
        rest = length - tar.offset
        if rest < 2 * BLOCK or rest % BLOCK or any(any(chunk) for chunk in iter(lambda: file.read(2**20), b"")):
            raise DistapError(
                f"{shard}: damaged tar: no proper end after byte {tar.offset} of {length}; expected zeros alone"
            )


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


def _class_names(file: Path, present: list[int]) -> list[str]:
    """Names of the classes that occur, in the order of their numbers."""
    if not file.is_file():
        return [str(number) for number in present]
    names = file.read_text(encoding="utf-8").splitlines()
    if present[-1] >= len(names):
        raise DistapError(f"{file}: {len(names)} names, but a shard has class {present[-1]}")
    return [names[number] for number in present]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
