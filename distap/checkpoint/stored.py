"""The checkpoints of a run in a store, and the other files of its folder that go there with them.

RUN/checkpoints/step-00000012.1a2b3c4d/    the files of a checkpoint, as on disk; its manifest comes last
RUN/metrics.jsonl, ...                     what rank 0 writes beside them, overwritten with each checkpoint

A checkpoint without its manifest does not exist. Each attempt at a step has a name of its own, so that none writes
over the files of another, and a bucket needs no rename.
"""

import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from distap.checkpoint.folder import FOLDER, NAME, Checkpoint, replaced
from distap.checkpoint.manifest import (
    MANIFEST_FILE,
    DamagedCheckpointError,
    Manifest,
    best_of,
    damaged_files,
    parse_manifest,
)
from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.files import Storage
from distap.storage.remotes import MissingFileError, UnreachableError

DAMAGED_MANIFEST = "damaged-manifest.json"
DOWNLOADS = 4  # files at once
logger = logging.getLogger("distap")


@dataclass
class StoredRun:
    """A run's folder in a store, as one process sees it."""

    store: Storage
    beside: tuple[str, ...] = ()  # patterns of the files beside the checkpoints that go to the store too
    merged: str = ""  # one of these files, a log whose lines only this host may have; they are kept
    _sent: dict[str, tuple[int, int]] = field(default_factory=dict)  # versions of the files beside, as sent

    def where(self, name: str) -> str:
        return self.store.where(f"{FOLDER}/{name}")

    def names(self) -> list[str]:
        """Return the checkpoints that have a manifest, oldest first, damaged ones included."""
        return [name for name, files in self._listed().items() if MANIFEST_FILE in files]

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint, verified; if it is missing, the checkpoint is damaged."""
        try:
            data = self.store.read_whole(f"{FOLDER}/{name}/{MANIFEST_FILE}")
        except MissingFileError as error:
            raise DamagedCheckpointError(self.where(name), f"{MANIFEST_FILE} is not there") from error
        return parse_manifest(data, self.where(name))

    def best(self) -> tuple[float, str] | tuple[None, None]:
        """Return the highest validation mAP of a checkpoint, and the newest such checkpoint."""
        return best_of(self.names(), self.manifest)

    def by(self, deadline: float) -> "StoredRun":
        """Return a copy that begins nothing after `deadline`, in seconds of time.monotonic()."""
        return replace(self, store=self.store.by(deadline))

    def upload(self, name: str, folder: Path, files: Iterable[str]) -> None:
        for file in files:
            self.store.upload(f"{FOLDER}/{name}/{file}", folder / file)

    def publish(self, name: str, manifest: Manifest) -> None:
        """Make a checkpoint exist after all its files were sent, and are seen in the store with their sizes."""
        present = self.store.sizes(f"{FOLDER}/{name}")
        for file, identity in sorted(manifest.files.items()):
            size = present.get(f"{FOLDER}/{name}/{file}")
            if size != identity.bytes:
                found = "is not there" if size is None else f"has {size:,} bytes"
                sent = f"{self.where(name)}: {file} was sent, {identity.bytes:,} bytes"
                raise UnreachableError(f"{sent}, and {found}; do all hosts write to the same store?")
        self.store.write(f"{FOLDER}/{name}/{MANIFEST_FILE}", manifest.text().encode())

    def add(self, folder: Path, manifest: Manifest) -> None:
        """Send a complete checkpoint from disk as a new one, with the files beside it."""
        name = f"step-{manifest.step:08d}.{uuid.uuid4().hex[:8]}"
        self.upload(name, folder, manifest.files)
        self.send_beside(folder.parent.parent)
        self.publish(name, manifest)

    def remove_old(self, newest: str, keep: int, keep_best: bool) -> None:
        """Remove what interrupted uploads left, and the checkpoints that a new one replaces."""
        listed = self._listed()
        whole = [name for name, files in listed.items() if MANIFEST_FILE in files]
        best = best_of(whole, self.manifest)[1] if keep_best else None
        old = replaced(whole, newest, keep, best)
        for name, files in listed.items():
            is_unfinished = not files & {MANIFEST_FILE, DAMAGED_MANIFEST} and name != newest
            if name in old or is_unfinished:
                self._remove(name, files)

    def set_aside(self, name: str) -> None:
        """Rename the manifest of a damaged checkpoint; only the last such checkpoint is kept."""
        for other, files in self._listed().items():
            if DAMAGED_MANIFEST in files:
                self._remove(other, files)
        folder = f"{FOLDER}/{name}"
        self.store.write(f"{folder}/{DAMAGED_MANIFEST}", self.store.read_whole(f"{folder}/{MANIFEST_FILE}"))
        self.store.remove(f"{folder}/{MANIFEST_FILE}")

    def fetch(self, name: str, folder: Path) -> Checkpoint:
        """Download a checkpoint into an existing folder, and what differs a second time; raise if it is damaged."""
        manifest = self.manifest(name)
        write_whole(folder / MANIFEST_FILE, manifest.text())
        wanted = list(manifest.files)
        for attempt in (1, 2):
            try:
                with ThreadPoolExecutor(DOWNLOADS) as pool:
                    list(pool.map(lambda file: self.store.download(f"{FOLDER}/{name}/{file}", folder / file), wanted))
            except MissingFileError as error:
                raise DamagedCheckpointError(self.where(name), str(error)) from error
            damage = dict(damaged_files(folder, manifest, wanted))
            if not damage:
                return Checkpoint(folder, manifest, self.where(name))
            wanted = list(damage)
            if attempt == 1:
                logger.warning("%s: %s arrived damaged; downloading again", self.where(name), ", ".join(wanted))
        raise DamagedCheckpointError(self.where(name), damage[wanted[0]])

    def send_beside(self, run: Path) -> None:
        """Send changed files beside checkpoints, and remove those that are gone here; a failure is only logged."""
        try:
            here = {file.relative_to(run).as_posix() for pattern in self.beside for file in run.glob(pattern)}
            for name in sorted(here):
                # The training replaces its evaluations meanwhile.
                with suppress(FileNotFoundError, MissingFileError):
                    version = _version(run / name)
                    if self._sent.get(name) != version:
                        self.store.upload(name, run / name)
                        self._sent[name] = version
            # Remove only what came from here: others may use the same folder.
            for name in sorted(self._sent.keys() - here):
                self.store.remove(name)
                del self._sent[name]
        except (OSError, DistapError) as error:
            logger.warning("not in the store, but in %s: %s", run, error)

    def fetch_beside(self, run: Path) -> None:
        """Bring the files beside checkpoints from the store into a run's folder."""
        for name in (name for pattern in self.beside for name in self.store.names(pattern)):
            if ".." in name.split("/"):
                continue
            data, path = self.store.read_whole(name), run / name
            if name == self.merged and path.exists():
                there = set(data.splitlines())
                mine = [line + b"\n" for line in path.read_bytes().splitlines() if line not in there]
                write_whole(path, data + b"".join(mine))
            else:
                write_whole(path, data)
                self._sent[name] = _version(path)

    def _listed(self) -> dict[str, set[str]]:
        """List the files of each checkpoint, with or without a manifest, oldest first."""
        listed = defaultdict(set)
        for path in sorted(self.store.sizes(FOLDER)):
            _, name, *rest = path.split("/")
            if "." in name and NAME.fullmatch(name) and len(rest) == 1:
                listed[name].add(rest[0])
        return listed

    def _remove(self, name: str, files: set[str]) -> None:
        # The manifest first, since half a checkpoint must not be taken for a whole one.
        for file in sorted(files, key=lambda file: (file not in (MANIFEST_FILE, DAMAGED_MANIFEST), file)):
            self.store.remove(f"{FOLDER}/{name}/{file}")


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
