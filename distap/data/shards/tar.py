"""Read the samples of WebDataset tar shards strictly: damage raises an error, and no sample is lost in silence.

webdataset and tarfile read on after most kinds of damage. tarfile takes an unreadable header for the end of the
archive, accepts two different checksums, and allows a member to be a link, to have holes or to change its size. An
index has to know every sample, so here tarfile only parses headers, and this module decides what may follow them.
"""

import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, image_size
from distap.data.images.formats import IMAGE_SUFFIXES
from distap.data.shards.left_out import Skipped
from distap.errors import DistapError

BLOCK = 512  # bytes of a tar block; two blocks of zeros end an archive
MAX_MEMBER = 2**30  # bytes; no image is larger
MAX_EXTENSION = 2**20  # bytes of a header that carries a long name
LABEL_FIELD = "cls"  # suffix of the member that holds a sample's class number
MAX_DIGITS = 18  # of a class number, so that it fits int64
_CHECKSUM = slice(148, 156)  # place of the checksum in a header
_OCTAL = re.compile(rb" *([0-7]+)[ \0]*")
_RECORD = re.compile(rb"(\d{1,7}) ([^=]+)=")  # starts each record of a PAX header


class DamagedShardError(DistapError):
    """A shard is not whole, or holds something that cannot be trained on."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


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


def read_samples(file: Readable, length: int, where: str) -> Iterator[Sample | Skipped]:
    """Yield the samples of a shard as `read_groups` does, as Skipped if the image has no readable header.

    A sample that lacks its image or class is a DamagedShardError too.
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

    Args:
        file: the archive from its first byte; it is read once and never seeked.
        length: bytes of the archive; None for a pipe, where only the end tells.
        where: name of the archive, for messages.
    Raises:
        DamagedShardError: it is not a whole archive of plain files and folders, or a key's members are not adjacent.
    """
    archive = _Archive(file, length, where)
    seen: set[str] = set()
    try:
        for key, group in groupby(archive.members(), lambda member: _split_name(member.name)[0]):
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
    except (tarfile.TarError, ValueError) as error:
        raise archive.damaged(str(error)) from error


def labelled_image(key: str, members: dict[str, TarMember]) -> tuple[int, TarMember, tuple[int, int]]:
    """Find a sample's class number, its image, and the image's width and height in pixels among its members.

    Raises DamagedImageError, with reason `missing_field` if the image or its integer label is missing.
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


def _split_name(name: str) -> tuple[str, str]:
    """Return the key and the field of a member."""
    folder, slash, name = name.rpartition("/")
    stem, _, field = name.partition(".")
    return folder + slash + stem, field


@dataclass
class _Archive:
    file: Readable
    length: int | None
    where: str
    position: int = 0  # of the next byte
    header: int = 0  # position of the header being read

    def members(self) -> Iterator[TarMember]:
        long_name: str | None = None  # given by an extension header to the member after it
        while True:
            self.header = self.position
            block = self.take(BLOCK)
            if not any(block):
                break
            member = self.parse(block)
            name = long_name or member.name
            if member.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
                found = self.name_in_extension(member)
                if found is not None and (long_name is not None or member.type == tarfile.XGLTYPE):
                    raise self.damaged("two long names for one file")
                long_name = found or long_name
                continue
            if member.type == tarfile.DIRTYPE or name.endswith("/"):
                if member.size:
                    raise self.damaged(f"the folder {member.name!r} has contents")
            elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                yield TarMember(name, self.position, self.contents(member.size, MAX_MEMBER))
            else:
                raise self.damaged(f"{name!r} is no plain file (a link, device or the like)")
            long_name = None
        if long_name is not None:
            raise self.damaged("a long name without its file")
        self.require_end()

    def parse(self, block: bytes) -> tarfile.TarInfo:
        """Parse a header. Its unsigned checksum must be right: no single changed byte leaves it so."""
        stored = _OCTAL.fullmatch(block[_CHECKSUM])
        if stored is None or int(stored[1], 8) != sum(block) - sum(block[_CHECKSUM]) + 8 * ord(" "):
            raise self.damaged("bad checksum")
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if not member.name.isascii():
            self.decode_name(member.name.encode("utf-8", "surrogateescape"))
        end = self.position + member.size
        if member.size < 0 or (self.length is not None and end > self.length):
            raise self.damaged(f"{member.name!r} ends at byte {end}, beyond the file's {self.length or 'end'}")
        return member

    def name_in_extension(self, header: tarfile.TarInfo) -> str | None:
        """Return the name that an extension header gives the next file; it may change nothing else of the file."""
        data = self.contents(header.size, MAX_EXTENSION)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            if data[-1:] != b"\0":
                raise self.damaged("a long name without its end")
            return self.decode_name(data[:-1])
        records: dict[bytes, bytes] = {}
        start = 0
        while start < len(data):  # lines of `LENGTH KEY=VALUE`, the length that of the whole line
            record = _RECORD.match(data, start)
            end = start + int(record[1]) if record else 0
            if record is None or not record.end() < end <= len(data) or data[end - 1 : end] != b"\n":
                raise self.damaged("a PAX header has a line without KEY=VALUE, or of another length than it says")
            key, start = record[2], end
            if key in records:
                raise self.damaged(f"{key!r} stands twice in one PAX header")
            if key in (b"size", b"linkpath", b"hdrcharset") or key.startswith(b"GNU.sparse"):
                raise self.damaged(f"a PAX header changes the {key.decode()} of a file, which images never need")
            records[key] = data[record.end() : end - 1]
        return self.decode_name(records[b"path"]) if b"path" in records else None

    def decode_name(self, name: bytes) -> str:
        if not name or b"\0" in name:
            raise self.damaged("a name is empty, or has a zero byte in it")
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"the name {name[:60]!r} is not UTF-8") from error

    def contents(self, size: int, limit: int) -> bytes:
        """Return the data after a header; zeros must fill its last block."""
        if size > limit:
            raise self.damaged(f"{size} bytes, more than the limit of {limit}")
        data = self.take(size)
        if any(self.take(-size % BLOCK)):
            raise self.damaged("data between two files, where zeros are expected")
        return data

    def require_end(self) -> None:
        """Read the rest, which must be one or more further blocks of zeros and nothing else."""
        zeros = True
        while zeros and (data := self.file.read(2**20)):
            self.position += len(data)
            zeros = not any(data)
        rest = self.position - self.header - BLOCK
        if not zeros or rest < BLOCK or rest % BLOCK or self.length not in (None, self.position):
            raise self.damaged("no proper end: expected two blocks of zeros or more, and nothing behind them")

    def take(self, size: int) -> bytes:
        # A header may lie about a size: never ask for more than the file can hold.
        data = self.file.read(size) if self.length is None or self.position + size <= self.length else b""
        if len(data) < size:
            end = self.length or self.position + len(data)
            raise self.damaged(f"the file ends at byte {end}, with no proper end of two blocks of zeros")
        self.position += size
        return data

    def damaged(self, reason: str) -> DamagedShardError:
        return DamagedShardError(f"{self.where}: damaged tar: at byte {self.header}: {reason}")
