"""The SHA-256 of a file that is read or written once from its first byte to its last, by the way."""

import hashlib
from typing import Any


class Hashed:
    """A file that keeps the SHA-256 of what came out of it or went in.

    Args:
        file: open for reading or for writing.
    """

    def __init__(self, file: Any) -> None:
        self._digest = hashlib.sha256()
        self._file = file

    @property
    def sha256(self) -> str:
        """Hexadecimal, of the bytes so far."""
        return self._digest.hexdigest()

    def read(self, size: int) -> bytes:
        """The next bytes."""
        data: bytes = self._file.read(size)
        self._digest.update(data)
        return data

    def write(self, data: bytes) -> int:
        """Add bytes."""
        self._digest.update(data)
        return int(self._file.write(data))
