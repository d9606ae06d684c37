"""The members of a tar archive, read strictly and in one go.

webdataset and tarfile read on after most kinds of damage, and samples are lost without a word. What trains from an
index needs to know of every sample, so the pass here refuses an archive with anything wrong in it. Headers are
parsed by tarfile; what follows from them is decided here, since tarfile takes for the end what it cannot read,
admits two checksums, and lets a member change its size, be a link, or have holes.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from distap.errors import DistapError

BLOCK = 512  # bytes of a tar block; two of zeros end an archive
MAX_MEMBER = 2**30  # bytes; no image is larger
MAX_EXTENSION = 2**20  # bytes of the headers that carry a long name
_CHECKSUM = slice(148, 156)  # of a header
_OCTAL = re.compile(rb" *([0-7]+)[ \0]*")
_LENGTH = re.compile(rb"(\d{1,7}) ")  # of a record in a PAX header


class DamagedShardError(DistapError):
    """A shard that is not whole, or holds what cannot be trained on."""


class Readable(Protocol):
    """What an archive is read from."""

    def read(self, size: int, /) -> bytes:
        """The next bytes; fewer than asked for only at the end."""
        ...


class Member(NamedTuple):
    """A file of an archive."""

    name: str
    offset: int  # of its first byte within the archive
    data: bytes


def read_members(file: Readable, length: int | None, where: str) -> Iterator[Member]:
    """Files of a tar with their contents; anything but a whole archive is refused.

    Args:
        file: the archive from its first byte; it is read once to its end, never seeked.
        length: bytes of the archive; None where only its end will tell, as with a pipe.
        where: its name, for messages.
    Raises:
        DamagedShardError: it is damaged, or has something in it that is neither a plain file nor a folder.
    """
    tar = _Tar(file, length, where)
    try:
        yield from tar.members()
    except (tarfile.TarError, ValueError) as error:
        raise tar.damaged(str(error)) from error


class _Tar:
    def __init__(self, file: Readable, length: int | None, where: str) -> None:
        self.file, self.length, self.where = file, length, where
        self.offset = 0  # of what is read next
        self.header = 0  # offset of the header that is being looked at

    def members(self) -> Iterator[Member]:
        name: str | None = None  # that an extension gives the next member
        while True:
            self.header = self.offset
            block = self.take(BLOCK)
            if not any(block):
                break
            member = self.parsed(block)
            if member.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
                given = self.extension(member)
                if given is not None and (name is not None or member.type == tarfile.XGLTYPE):
                    raise self.damaged("two long names for one file")
                name = given or name
                continue
            if member.type == tarfile.DIRTYPE or (name or member.name).endswith("/"):
                if member.size:
                    raise self.damaged(f"the folder {member.name!r} has contents")
            elif member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                raise DamagedShardError(
                    f"{self.where}: {name or member.name!r} is no plain file (a link, device or the like)"
                )
            else:
                yield Member(name or member.name, self.offset, self.contents(member.size, MAX_MEMBER))
            name = None
        if name is not None:
            raise self.damaged("a long name without its file")
        self.end()

    def parsed(self, block: bytes) -> tarfile.TarInfo:
        """A header. Its plain sum has to be right, which one changed bit or byte never leaves so."""
        stored = _OCTAL.fullmatch(block[_CHECKSUM])
        if stored is None or int(stored.group(1), 8) != sum(block) - sum(block[_CHECKSUM]) + 8 * ord(" "):
            raise self.damaged("bad checksum")
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if not member.name.isascii():
            self.checked(member.name.encode("utf-8", "surrogateescape"))
        end = self.offset + member.size
        if member.size < 0 or (self.length is not None and end > self.length):
            raise DamagedShardError(
                f"{self.where}: damaged tar: {member.name!r} ends at byte {end}, beyond the file's "
                f"{self.length or 'end'}"
            )
        return member

    def extension(self, header: tarfile.TarInfo) -> str | None:
        """The name that an extension gives the file after it, if any; it must change nothing else of it."""
        data = self.contents(header.size, MAX_EXTENSION)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            if data[-1:] != b"\0":
                raise self.damaged("a long name without its end")
            return self.checked(data[:-1])
        name = None
        seen = set()
        for key, value in self.records(data):
            if key in seen:
                raise self.damaged(f"{key!r} stands twice in one PAX header")
            seen.add(key)
            if key == b"path":
                name = self.checked(value)
            elif key in (b"size", b"linkpath", b"hdrcharset") or key.startswith(b"GNU.sparse"):
                raise self.damaged(f"a PAX header changes the {key.decode()} of a file, which images never need")
        return name

    def records(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a PAX header: lines of LENGTH KEY=VALUE, the length that of the whole line."""
        start = 0
        while start < len(data):
            length = _LENGTH.match(data, start)
            end = start + int(length.group(1)) if length else 0
            if length is None or not length.end() < end <= len(data) or data[end - 1 : end] != b"\n":
                raise self.damaged("a PAX header with a line of another length than it says")
            key, equals, value = data[length.end() : end - 1].partition(b"=")
            if not key or not equals:
                raise self.damaged("a PAX header without KEY=VALUE")
            yield key, value
            start = end

    def checked(self, name: bytes) -> str:
        """The text of a name."""
        if not name or b"\0" in name:
            raise self.damaged("a name that is empty, or has a zero byte in it")
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"the name {name[:60]!r} is not UTF-8") from error

    def contents(self, size: int, limit: int) -> bytes:
        """What follows a header; the rest of its last block is zeros."""
        if size > limit:
            raise self.damaged(f"{size} bytes, more than the {limit} that are read at most")
        data = self.take(size)
        if any(self.take(-size % BLOCK)):
            raise self.damaged("data between two files, where zeros are expected")
        return data

    def end(self) -> None:
        """Two blocks of zeros at least, and nothing but zeros."""
        zeros = True
        while zeros and (data := self.file.read(2**20)):
            self.offset += len(data)
            zeros = not any(data)
        rest = self.offset - self.header - BLOCK
        if not zeros or rest < BLOCK or rest % BLOCK or self.length not in (None, self.offset):
            raise DamagedShardError(
                f"{self.where}: damaged tar: no proper end after byte {self.header} of {self.length or self.offset}; "
                "expected zeros alone"
            )

    def take(self, size: int) -> bytes:
        """The next bytes."""
        data = self.file.read(size) if self.length is None or self.offset + size <= self.length else b""
        if len(data) < size:
            end = self.length or self.offset + len(data)
            raise DamagedShardError(
                f"{self.where}: damaged tar: it ends at byte {end}, with no proper end of two blocks of zeros"
            )
        self.offset += size
        return data

    def damaged(self, reason: str) -> DamagedShardError:
        """An error that says where."""
        return DamagedShardError(f"{self.where}: damaged tar: at byte {self.header}: {reason}")
