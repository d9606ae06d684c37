"""SHA-256 of whole files, and of files while they are read."""

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
    """Wrap a file that is read once from start to end, and hash its bytes."""

    def __init__(self, file: Any) -> None:
        self._file, self._digest = file, hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        self._digest.update(data)
        return data
