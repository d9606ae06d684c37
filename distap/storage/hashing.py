"""SHA-256 of whole files, and of files while they are read or written."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distap.storage.texts import open_regular


@dataclass(frozen=True)
class FileIdentity:
    """Size and SHA-256 of a file; they differ if the file is damaged or another one."""

    bytes: int
    sha256: str


def file_identity(path: Path) -> FileIdentity:
    with open_regular(path) as file:
        return FileIdentity(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


class Hashed:
    """Wrap a file that is read or written once from start to end, and hash its bytes."""

    def __init__(self, file: Any) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.position = 0  # bytes so far

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def read(self, size: int) -> bytes:
        return self._add(self._file.read(size))

    def write(self, data: bytes) -> int:
        self._file.write(self._add(data))
        return len(data)

    def _add(self, data: bytes) -> bytes:
        self._digest.update(data)
        self.position += len(data)
        return data
