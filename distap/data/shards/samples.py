"""Read the samples of a shard: members that share a key, with one image and one class number."""

import zlib
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, image_size
from distap.data.shards.image_files import IMAGE_SUFFIXES
from distap.data.shards.tar import DamagedShardError, Readable, TarMember, read_members

LABEL_FIELD = "cls"  # suffix of the member that holds a sample's class number
MAX_DIGITS = 18  # of a class number, so that it fits int64

Group = tuple[str, dict[str, TarMember]]  # key of a sample, and its members by field


class Sample(NamedTuple):
    """Place and description of an image in a shard."""

    key: str
    label: int
    offset: int
    size: int  # bytes
    crc32: int
    width: int
    height: int


class Skipped(NamedTuple):
    """An image that was left out, and why."""

    name: str
    reason: str


def read_samples(file: Readable, length: int, where: str) -> Iterator[Sample | Skipped]:
    """Yield the samples of a shard in order, as Skipped if the image has no readable header.

    Raises:
        DamagedShardError: the tar is damaged, or a sample lacks its image or class.
    """
    for key, members in read_groups(file, length, where):
        try:
            label, image, (width, height) = labelled_image(key, members)
        except DamagedImageError as error:
            if error.reason == "missing_field":
                raise DamagedShardError(f"{where}: {error}") from error
            yield Skipped(key, str(error))
        else:
            yield Sample(key, label, image.offset, len(image.data), zlib.crc32(image.data), width, height)


def read_groups(file: Readable, length: int | None, where: str) -> Iterator[Group]:
    """Yield each key of a shard with its members by field, in order; the field of `a/b.seg.png` is `seg.png`.

    Raises:
        DamagedShardError: the tar is damaged, or the members of a key are not adjacent.
    """
    seen: set[str] = set()
    for key, group in groupby(read_members(file, length, where), lambda member: _split_name(member.name)[0]):
        if key in seen:
            raise DamagedShardError(f"{where}: the members of key {key!r} are not adjacent")
        seen.add(key)
        members: dict[str, TarMember] = {}
        for member in group:
            field = _split_name(member.name)[1]
            if field in members:
                raise DamagedShardError(f"{where}: key {key!r} has two members .{field}")
            members[field] = member
        yield key, members


def _split_name(name: str) -> tuple[str, str]:
    """Return the key and the field of a member."""
    folder, slash, name = name.rpartition("/")
    stem, _, field = name.partition(".")
    return folder + slash + stem, field


def labelled_image(key: str, members: dict[str, TarMember]) -> tuple[int, TarMember, tuple[int, int]]:
    """Find a sample's class number, its image, and the image's width and height in pixels among its members.

    Raises:
        DamagedImageError: with reason `missing_field` if the image or its integer label is missing; with another
            reason if the image has no readable header or is too large for any use.
    """
    images = [field for field in members if f".{field.lower()}" in IMAGE_SUFFIXES]
    if len(images) != 1:
        found = ", ".join(f".{field}" for field in members)
        raise DamagedImageError("missing_field", f"key {key!r} needs one image member; it has {found}")
    if LABEL_FIELD not in members:
        raise DamagedImageError("missing_field", f"key {key!r} has no .{LABEL_FIELD} member with its class number")
    text = members[LABEL_FIELD].data.strip()
    if not text.isdigit() or len(text) > MAX_DIGITS:
        shown = text[:40].decode(errors="replace")
        problem = f"label {shown!r} of key {key!r} is no integer of 0 or more, of {MAX_DIGITS} digits at most"
        raise DamagedImageError("missing_field", problem)
    image = members[images[0]]
    return int(text), image, image_size(image.data, MAX_PIXELS)
