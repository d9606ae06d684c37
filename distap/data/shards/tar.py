"""Read the samples of WebDataset tar shards strictly: damage raises an error, and no sample is lost
in silence.

webdataset and tarfile read on after most kinds of damage: tarfile takes a header that it cannot
read, or a file that is cut between two members, for the end of the archive. An index has to know
every sample. So tarfile parses the headers here, and this module checks that what it took for the
end is one.
"""

import tarfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import image_size
from distap.data.images.formats import IMAGE_SUFFIXES
from distap.data.labels import NO_CLASS, class_name
from distap.data.shards.image_folders import Skipped
from distap.errors import DistapError
from distap.storage.texts import MAX_NAME, is_line, parsed_json

TAR_BLOCK = 512  # bytes of a tar block; two blocks of zeros end an archive
MAX_MEMBER = 2**30  # bytes; no image is larger
MAX_HEADER = 2**20  # bytes of a header that a long name makes
# The beginnings of compressed files, and what unpacks them.
PACKERS = {
    b"\x1f\x8b": "gunzip",
    b"\xfd7zXZ\0": "unxz",
    b"BZh": "bunzip2",
    b"\x28\xb5\x2f\xfd": "unzstd",
}
APPLE_DOUBLE = b"\0\5\x16\7"  # the beginning of a ._ file, in which macOS keeps what a tar cannot
LABEL_FIELD = "cls"  # suffix of the member that holds a sample's class number
LETTERS_TOLD = 200  # of the names of a sample's members, in a message
MAX_DIGITS = 18  # of a class number, so that it fits int64


class DamagedShardError(DistapError):
    """Raised if a shard is not whole, or holds something that cannot be trained on."""


class UnlabelledError(DamagedImageError):
    """Raised if the label of an image stands for no class."""


class TarMember(NamedTuple):
    name: str
    offset: int  # of its first byte within the archive
    data: bytes


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
    levels: tuple[str, ...] = ()  # names of the coarser classes of its class, finer first


def read_samples(
    file: BinaryIO, length: int, where: str, levels: Sequence[str] = (), digest: Any = None
) -> Iterator[Sample | Skipped]:
    """Yield each sample of a shard, or Skipped if its image has no readable header.

    `read_groups` lists arguments and errors. A sample that lacks its image, its class or one of the
    keys `levels` of its .json member is a DamagedShardError too.
    """
    for key, members in read_groups(file, length, where, digest):
        try:
            label, image, (width, height) = labelled_image(key, members)
            known = parsed_json(members["json"].data, dict) if levels else {}
            above = tuple(class_name(known[each]) for each in levels)
        except UnlabelledError as error:
            yield Skipped(key, str(error).partition(": ")[2])
        except DamagedImageError as error:
            if error.reason == "missing_field":
                raise DamagedShardError(f"{where}: {error}") from error
            yield Skipped(key, str(error))
        except (KeyError, ValueError) as error:
            raise DamagedShardError(
                f"{where}: key {key!r} lacks levels in its .json: {error!r}"
            ) from error
        else:
            yield Sample(
                key,
                label,
                image.offset,
                len(image.data),
                zlib.crc32(image.data),
                width,
                height,
                above,
            )


def read_groups(file: BinaryIO, length: int, where: str, digest: Any = None) -> Iterator[Group]:
    """Yield each key of a shard with its members by field, in order; the field of `a/b.seg.PNG` is
    `seg.png`.

    Args:
        file: the archive from its first byte; it is read once and never seeked.
        length: bytes of the archive.
        where: name of the archive, for messages.
        digest: one of hashlib's, to update with every byte.
    Raises:
        DamagedShardError: it is not a whole archive of plain files and folders, or a key's members
            are not adjacent.
    """
    seen: set[str] = set()
    for key, group in groupby(
        _members(file, length, where, digest), lambda member: _split_name(member.name)[0]
    ):
        if not is_line(key):
            limit = f"one line of text of at most {MAX_NAME:,} bytes"
            raise DamagedShardError(
                f"{where}: key {key[:60]!r} of {len(key):,} letters is not {limit}"
            )
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


def labelled_image(
    key: str, members: dict[str, TarMember]
) -> tuple[int, TarMember, tuple[int, int]]:
    """Return a sample's class number, its image, and the image's width and height in pixels, from
    its members.

    Raises DamagedImageError, with reason `missing_field` if the image or its integer label is
    missing, and UnlabelledError if the label stands for no class.
    """
    images = [field for field in members if f".{field.lower()}" in IMAGE_SUFFIXES]
    if len(images) != 1:
        found = ", ".join(f".{field}" for field in members)[:LETTERS_TOLD]
        dotted = any("." in field for field in members)
        remedy = (
            "; a key ends at the first dot of a file's name, so rename files that have others"
            if dotted
            else ""
        )
        raise DamagedImageError(
            "missing_field", f"key {key!r} needs one image member; it has {found}{remedy}"
        )
    if LABEL_FIELD not in members:
        raise DamagedImageError(
            "missing_field", f"key {key!r} has no .{LABEL_FIELD} member with its class number"
        )
    text = members[LABEL_FIELD].data[:MAX_NAME].decode(errors="replace").strip()
    if text.lower() in NO_CLASS:
        raise UnlabelledError(
            "missing_field", f"images without a class: its .{LABEL_FIELD} is {text!r}"
        )
    if not (text.isascii() and text.isdecimal()) or len(text) > MAX_DIGITS:
        shown = text[:40]
        problem = (
            f"label {shown!r} of key {key!r} is no integer of 0 or more, of {MAX_DIGITS} digits at"
            " most"
        )
        raise DamagedImageError("missing_field", problem)
    image = members[images[0]]
    return int(text), image, image_size(image.data)


def _split_name(name: str) -> tuple[str, str]:
    folder, slash, name = name.rpartition("/")
    stem, _, field = name.partition(".")
    return folder + slash + stem, field.lower()


class _ForwardFile:
    """A file for tarfile that can be read forwards only, and not beyond its end."""

    def __init__(self, file: BinaryIO, length: int, digest: Any) -> None:
        self._file = file
        self._length = length
        self._digest = digest
        self.position = 0  # of the next byte
        self.block = b""  # what was read last

    def tell(self) -> int:
        return self.position

    def read(self, size: int, most: int = MAX_HEADER) -> bytes:
        # A header may lie about a size: never ask for more than the file can hold.
        if size > most:
            raise tarfile.ReadError(
                f"a member or header of {size:,} bytes; at most {most:,} are read"
            )
        self.block = self._file.read(max(min(size, self._length - self.position), 0))
        self.position += len(self.block)
        if self._digest is not None:
            self._digest.update(self.block)
        return self.block


def _members(file: BinaryIO, length: int, where: str, digest: Any) -> Iterator[TarMember]:
    """Yield the files of an archive; check that it holds nothing else and ends properly."""
    forward = _ForwardFile(file, length, digest)
    last = "the beginning"
    try:
        archive = tarfile.TarFile(fileobj=forward, encoding="utf-8", errors="strict")  # type: ignore[arg-type]
        while (member := archive.next()) is not None:
            last = repr(member.name)
            if member.isdir():
                continue
            if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                raise tarfile.ReadError("no plain file (a link, device or the like)")
            # tarfile has read the header alone and expects the next one at archive.offset: being
            # elsewhere means that a size in a header lied, or that the file ends within this
            # member.
            data = forward.read(member.size, MAX_MEMBER)
            forward.read(-member.size % TAR_BLOCK)
            if forward.position != archive.offset:
                raise tarfile.ReadError("its contents are cut short")
            if not (
                member.name.rpartition("/")[2].startswith("._") and data.startswith(APPLE_DOUBLE)
            ):
                yield TarMember(member.name, member.offset_data, data)
        # tarfile stops without an error at anything that is no header, such as one with a flipped
        # bit, and takes it for the end. The block that it read last has to be the first of two
        # blocks of zeros, with only zeros behind.
        ended = forward.block == bytes(TAR_BLOCK)
        zeros = True
        rest = 0
        while ended and zeros and (more := forward.read(MAX_HEADER)):
            rest, zeros = rest + len(more), not any(more)
        if not (ended and zeros) or rest < TAR_BLOCK or rest % TAR_BLOCK:
            raise tarfile.ReadError(
                "neither a file nor the end, two blocks of zeros with nothing behind them"
            )
    except (DistapError, OSError, MemoryError):
        raise
    except Exception as error:  # damage makes tarfile raise errors of many kinds
        reason = str(error)
        packer = [name for start, name in PACKERS.items() if forward.block.startswith(start)]
        if forward.position <= TAR_BLOCK and packer:
            reason = (
                "compressed; images are found by their offset, so unpack it to a plain .tar by"
                f" {packer[0]}"
            )
        raise DamagedShardError(
            f"{where}: damaged tar: after {last}, byte {forward.position}: {reason}"
        ) from error
