"""Positioned reads of local files, of which the last used stay open."""

import os
import weakref
from collections import OrderedDict
from pathlib import Path


class OpenFiles:
    """Keep the `limit` local files that were read last open; a copy in another process opens its own."""

    def __init__(self, limit: int = 128) -> None:
        self.limit = limit
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()

    def __reduce__(self) -> tuple[type["OpenFiles"], tuple[int]]:
        return OpenFiles, (self.limit,)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer only at the end of the file."""
        file, parts = self._file(path), []
        try:
            while size > 0 and (part := os.pread(file.number, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        except OSError:
            self.close(path)  # a stale handle is mended by opening the file again
            raise
        return b"".join(parts)

    def is_at(self, path: str) -> bool:
        """Return whether the open file is still the one at `path`. Raises OSError if nothing is there."""
        return os.path.samestat(os.fstat(self._file(path).number), Path(path).stat())

    def close(self, path: str) -> None:
        self._files.pop(path, None)

    def _file(self, path: str) -> "_OpenFile":
        file = self._files.pop(path, None) or _OpenFile(path)
        self._files[path] = file
        if len(self._files) > self.limit:
            self._files.popitem(last=False)
        return file


class _OpenFile:
    """A file descriptor that is closed when nothing refers to it any more, a read in another thread included."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)
