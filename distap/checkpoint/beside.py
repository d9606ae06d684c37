"""Copy files of a run's folder to the store next to checkpoints, such as metrics and evaluations."""

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.files import Storage
from distap.storage.remotes import MissingFileError

logger = logging.getLogger("distap")


@dataclass
class FilesBeside:
    """Copy the files of a run that match `patterns` to a store, and back."""

    storage: Storage
    run: Path
    patterns: tuple[str, ...]
    _sent: dict[str, tuple[int, int]] = field(default_factory=dict)  # size and time of each file, as sent

    def send(self) -> None:
        """Upload changed files and remove deleted ones from the store; only log a failure."""
        try:
            here = {f.relative_to(self.run).as_posix() for pattern in self.patterns for f in self.run.glob(pattern)}
            for name in sorted(here):
                # The training replaces its evaluations meanwhile.
                with suppress(FileNotFoundError, MissingFileError):
                    version = _version(self.run / name)
                    if self._sent.get(name) != version:
                        self.storage.upload(name, self.run / name)
                        self._sent[name] = version
            # Remove only what came from here: others may use the same folder.
            for name in sorted(self._sent.keys() - here):
                self.storage.remove(name)
                del self._sent[name]
        except (OSError, DistapError) as error:
            logger.warning("not in the store, but in %s: %s", self.run, error)

    def fetch(self) -> None:
        """Download the files of the store into the run's folder."""
        for name in (name for pattern in self.patterns for name in self.storage.names(pattern)):
            if ".." in name.split("/"):
                continue
            write_whole(self.run / name, self.storage.read_whole(name))
            self._sent[name] = _version(self.run / name)


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
