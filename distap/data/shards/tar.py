"""Read the samples of WebDataset tar shards strictly: no sample is lost in silence.

webdataset and tarfile read on after most kinds of damage: tarfile takes a header that it cannot
read, or a file that is cut between two members, for the end of the archive. An index has to know
every sample. So tarfile parses the headers here, and this module checks that what it took for the
end is one.
"""

import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import image_size
from distap.data.images.formats import FORMAT_BY_SUFFIX
from distap.data.labels import NO_CLASS, Levels, class_name
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
FACTS_FIELD = "json"  # suffix of the member with the coarser classes of a sample, or its columns
COLUMNS_START = b'{"columns": '  # of that member, if distap wrote columns into it
LETTERS_SHOWN = 200  # of the names of a sample's members, in a message
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
    levels: Levels = ()
    columns: Mapping[str, str] = MappingProxyType({})  # of the list that it was packed from


def columns_member(columns: Iterable[tuple[str, str]]) -> bytes:
    """Return the contents of a member that holds the columns of a sample."""
    return COLUMNS_START + json.dumps(dict(columns), ensure_ascii=False).encode() + b"}"


def _columns(data: bytes) -> dict[str, str]:
    """Return the columns in a member of `columns_member`; none in those of other makers."""
    # Captions and the like of other makers would make an index as wide as the longest one.
    if not data.startswith(COLUMNS_START):
        return {}
    columns = parsed_json(data, dict)["columns"]
    return {str(name): str(cell) for name, cell in columns.items() if is_line(str(name))}


def read_samples(
    file: BinaryIO, length: int, where: str, levels: Sequence[str] = (), digest: Any = None
) -> Iterator[Sample | Skipped]:
    """Yield each sample of a shard, or Skipped if its image has no readable header.

    `read_groups` lists arguments and errors. A sample that lacks its image, its class or one of the
    keys `levels` of its .json member is a DamagedShardError too.
    """
    for key, members in read_groups(file, length, where, digest):
        try:
            label, image, size = labelled_image(key, members)
            facts = parsed_json(members[FACTS_FIELD].data, dict) if levels else {}
            above = tuple(class_name(facts[level]) for level in levels)
            columns = _columns(members[FACTS_FIELD].data) if FACTS_FIELD in members else {}
        except UnlabelledError as error:
            yield Skipped(key, str(error).partition(": ")[2])
        except DamagedImageError as error:
            if error.reason == "missing_field":
                raise DamagedShardError("data.damaged_shard", f"{where}: {error}") from error
            yield Skipped(key, str(error))
        except (KeyError, ValueError) as error:
            raise DamagedShardError(
                "data.damaged_shard",
                f"{where}: key {key!r} lacks levels or columns in its .json: {error!r}",
            ) from error
        else:
            checksum = zlib.crc32(image.data)
            yield Sample(key, label, image.offset, len(image.data), checksum, *size, above, columns)


def read_groups(file: BinaryIO, length: int, where: str, digest: Any = None) -> Iterator[Group]:
    """Yield each key of a shard with its members by field, in order.

    The key of `a/b.seg.PNG` is `a/b`, and its field `seg.png`.

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
    archive = _members(file, length, where, digest)
    for key, group in groupby(archive, lambda member: _split_name(member.name)[0]):
        if not is_line(key):
            raise DamagedShardError(
                "data.damaged_shard",
                f"{where}: key {key[:60]!r} of {len(key):,} letters is not one line of text of at"
                f" most {MAX_NAME:,} bytes",
            )
        if key in seen:
            raise DamagedShardError(
                "data.damaged_shard", f"{where}: the members of key {key!r} are not adjacent"
            )
        seen.add(key)
        members: dict[str, TarMember] = {}
        for member in group:
            field = _split_name(member.name)[1]
            if field in members:
                raise DamagedShardError(
                    "data.damaged_shard", f"{where}: key {key!r} has two members .{field}"
                )
            members[field] = member
        yield key, members


def labelled_image(
    key: str, members: dict[str, TarMember]
) -> tuple[int, TarMember, tuple[int, int]]:
    """Return a sample's class number, its image, and the image's width and height in pixels.

    Raises DamagedImageError, with reason `missing_field` if the image or its integer label is
    missing, and UnlabelledError if the label stands for no class.
    """
    images = [field for field in members if f".{field}" in FORMAT_BY_SUFFIX]
    if len(images) != 1:
        fields = ", ".join(f".{field}" for field in members)[:LETTERS_SHOWN]
        remedy = ""
        if any("." in field for field in members):
            remedy = (
                "; a key ends at the first dot of a file's name, so rename files that have others"
            )
        raise DamagedImageError(
            "missing_field", f"key {key!r} needs one image member; it has {fields}{remedy}"
        )
    if LABEL_FIELD not in members:
        raise DamagedImageError(
            "missing_field", f"key {key!r} has no .{LABEL_FIELD} member with its class number"
        )
    label = _label(key, members[LABEL_FIELD].data)
    image = members[images[0]]
    return label, image, image_size(image.data)


def _label(key: str, data: bytes) -> int:
    text = data[:MAX_NAME].decode(errors="replace").strip()
    if text.lower() in NO_CLASS:
        raise UnlabelledError(
            "missing_field", f"images without a class: its .{LABEL_FIELD} is {text!r}"
        )
    if not (text.isascii() and text.isdecimal()) or len(text) > MAX_DIGITS:
        raise DamagedImageError(
            "missing_field",
            f"label {text[:40]!r} of key {key!r} is no integer of 0 or more, of {MAX_DIGITS}"
            " digits at most",
        )
    return int(text)


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

    def read(self, size: int, limit: int = MAX_HEADER) -> bytes:
        # A header may lie about a size: never ask for more than the file can hold.
        if size > limit:
            raise tarfile.ReadError(
                f"a member or header of {size:,} bytes; at most {limit:,} are read"
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
        while member := archive.next():
            last = repr(member.name)
            if member.isdir():
                continue
            data = _contents(forward, archive, member)
            is_apple_double = member.name.rpartition("/")[2].startswith("._")
            if not (is_apple_double and data.startswith(APPLE_DOUBLE)):
                yield TarMember(member.name, member.offset_data, data)
        _require_end(forward)
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
            "data.damaged_shard",
            f"{where}: damaged tar: after {last}, byte {forward.position}: {reason}",
        ) from error


def _contents(forward: _ForwardFile, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the contents of a file whose header tarfile has read."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        raise tarfile.ReadError("no plain file (a link, device or the like)")
    # tarfile has read the header alone and expects the next one at archive.offset: being elsewhere
    # means that a size in a header lied, or that the file ends within this member.
    data = forward.read(member.size, MAX_MEMBER)
    forward.read(-member.size % TAR_BLOCK)
    if forward.position != archive.offset:
        raise tarfile.ReadError("its contents are cut short")
    return data


def _require_end(forward: _ForwardFile) -> None:
    """Raise an error unless tarfile stopped at the end of the archive, which ends the file.

    tarfile stops without an error at anything that is no header, such as one with a flipped bit,
    and takes it for the end. The block that it read last has to be the first of two blocks of
    zeros, with only zeros behind.
    """
    is_zero = forward.block == bytes(TAR_BLOCK)
    start = forward.position
    while is_zero and forward.read(MAX_HEADER):
        is_zero = not any(forward.block)
    behind = forward.position - start
    if not is_zero or behind < TAR_BLOCK or behind % TAR_BLOCK:
        raise tarfile.ReadError(
            "neither a file nor the end, two blocks of zeros with nothing behind them"
        )
