"""The checkpoints of a run and the files next to them, on disk or in a store.

    checkpoints/step-00000012/
        shard-00001-model-00001-of-00001.safetensors    the tensors that rank 0 wrote
        state.json                                      the state next to the tensors
        manifest.json                                   size and SHA-256 of each file, written last

A folder without manifest is no checkpoint, so that neither a disk nor a bucket needs a rename. A
step that is written again, while the first checkpoint of this step is still there, goes to
step-00000012.1.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from distap.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    DamagedCheckpointError,
    Manifest,
    ShardOf,
    damaged,
    parse_manifest,
    read_tensors,
)
from distap.errors import DistapError, logger
from distap.storage.atomic import make_folder, write_whole
from distap.storage.files import Storage
from distap.storage.remotes import DamagedFileError, MissingFileError, UnreachableError
from distap.storage.texts import read_json

CHECKPOINTS_FOLDER = "checkpoints"  # within the folder of a run
EARLIER_SCORE = "validation mAP"  # of checkpoints that do not name their score
NAME = re.compile(r"step-\d{8}(\.\d+)?")
STEP = len("step-00000000")  # characters of a name up to the end of the step
DOWNLOADS = 4  # files at once


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been verified, with its files on this host's disk."""

    path: Path
    manifest: Manifest
    where: str  # its path or URL, for messages

    @property
    def step(self) -> int:
        """Number of training steps that were done when the checkpoint was written."""
        return self.manifest.step

    def state(self, *names: str) -> dict[str, Any]:
        """Return the state that was saved next to the tensors.

        Raises:
            DamagedCheckpointError: the state is no JSON, or an entry of `names` is no dictionary.
        """
        try:
            state: dict[str, Any] = read_json(self.path / STATE_FILE)
        except (OSError, ValueError) as error:
            raise damaged(self.where, f"{STATE_FILE}: {error}") from error
        missing = [name for name in names if not isinstance(state.get(name), dict)]
        if missing:
            raise damaged(self.where, f"{STATE_FILE} has no {', '.join(missing)}")
        return state

    def tensors(self, prefix: str = "", shard_of: ShardOf | None = None) -> dict[str, Tensor]:
        """Read the tensors whose name starts with `prefix`; see `read_tensors`."""
        return read_tensors(self.path, self.manifest.files, prefix, shard_of)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in one folder of a storage; each process has its own object."""

    storage: Storage
    folder: str = CHECKPOINTS_FOLDER

    @property
    def is_on_disk(self) -> bool:
        """True if checkpoints lie on a disk, where they are read and written in place."""
        return self.storage.disk is not None

    def where(self, name: str) -> str:
        return self.storage.where(f"{self.folder}/{name}")

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint on disk."""
        return Path(self.where(name).removeprefix("file://"))

    def names(self) -> list[str]:
        """Return the names of the checkpoints with a manifest, damaged or not, oldest first."""
        return [name for name, files in self._listed().items() if MANIFEST_FILE in files]

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest, verified; a checkpoint without one is damaged."""
        try:
            data = self.storage.read_whole(f"{self.folder}/{name}/{MANIFEST_FILE}")
        except MissingFileError as error:
            raise damaged(self.where(name), f"{MANIFEST_FILE} is not there") from error
        except DamagedFileError as error:
            raise damaged(self.where(name), error) from error
        return parse_manifest(data, self.where(name))

    def best(self, scored_by: str | None = None) -> tuple[float, str] | tuple[None, None]:
        """Return the best score of undamaged checkpoints, and the newest one with it.

        Args:
            scored_by: figure whose scores are compared; None takes that of the newest score.
        """
        scored = list[tuple[str, float, str]]()
        for name in self.names():
            with suppress(DamagedCheckpointError):
                manifest = self.manifest(name)
                if manifest.score is not None:
                    figure = manifest.about.get("scored_by", EARLIER_SCORE)
                    scored.append((figure, manifest.score, name))
        if scored_by is None and scored:
            scored_by = scored[-1][0]
        scores = [(score, name) for figure, score, name in scored if figure == scored_by]
        return max(scores) if scores else (None, None)

    def begin(self, step: int) -> str:
        """Remove the remains of interrupted or failed writes; return a new checkpoint's name."""
        listed = self._listed()
        for name, files in listed.items():
            if MANIFEST_FILE not in files:
                self._remove(name, files)
        base = name = f"step-{step:08d}"
        for again in count(1):
            if MANIFEST_FILE not in listed.get(name, ()):
                break
            name = f"{base}.{again}"
        return name

    @contextmanager
    def place(self, name: str, spool: Path) -> Iterator[Path]:
        """Yield a folder to write a checkpoint into: on disk its own, else one to upload from."""
        if self.is_on_disk:
            make_folder(self.path(name))
            yield self.path(name)
            return
        make_folder(spool)
        with TemporaryDirectory(prefix=".sending-", dir=spool) as temporary:
            yield Path(temporary)

    def send(self, name: str, folder: Path, files: Iterable[str]) -> None:
        """Upload a checkpoint's files from the folder of `place`, unless that is its own."""
        if not self.is_on_disk:
            for file in files:
                self.storage.upload(f"{self.folder}/{name}/{file}", folder / file)

    def publish(self, name: str, manifest: Manifest) -> None:
        """Write the manifest, which makes the checkpoint exist.

        Raises:
            UnreachableError: a rank's file is not there with its size.
        """
        # Each host finds its own files where it wrote them. Only this look shows that all wrote to
        # one place.
        present = self.storage.sizes(f"{self.folder}/{name}")
        for file, identity in sorted(manifest.files.items()):
            size = present.get(f"{self.folder}/{name}/{file}")
            if size != identity.bytes:
                state = "is not there" if size is None else f"has {size:,} bytes"
                raise UnreachableError(
                    "checkpoint.file_missing",
                    f"{self.where(name)}: {file} was written, {identity.bytes:,} bytes, and"
                    f" {state}; do all hosts write to the same place?",
                )
        self.storage.write(f"{self.folder}/{name}/{MANIFEST_FILE}", manifest.text().encode())

    def remove_old(self, newest: str, keep: int) -> None:
        """Remove old checkpoints: all up to `newest` but the best one and the last `keep`.

        Checkpoints of later steps stay: only a person can judge why the run went back behind them.
        """
        best = self.best()[1]
        past = [name for name in self.names() if name[:STEP] <= newest[:STEP]]
        earlier = [name for name in past if name[:STEP] < newest[:STEP]]
        self.remove(set(past) - {newest, best, *earlier[::-1][: keep - 1]})

    def remove(self, names: Iterable[str]) -> None:
        """Remove these checkpoints."""
        listed = self._listed()
        for name in names:
            self._remove(name, listed[name])

    def fetch(self, name: str, files: Iterable[str], folder: Path) -> None:
        """Download files of a checkpoint from a store into an existing folder."""

        def download(file: str) -> None:
            self.storage.download(f"{self.folder}/{name}/{file}", folder / file)

        try:
            with ThreadPoolExecutor(DOWNLOADS) as pool:
                list(pool.map(download, files))
        except (MissingFileError, DamagedFileError) as error:
            raise damaged(self.where(name), error) from error

    def _listed(self) -> dict[str, set[str]]:
        # The files of each checkpoint, with or without a manifest, oldest first.
        listed = defaultdict(set)
        for path in sorted(self.storage.sizes(self.folder)):
            name, _, file = path.removeprefix(f"{self.folder}/").partition("/")
            if NAME.fullmatch(name) and file and "/" not in file:
                listed[name].add(file)
        return dict(sorted(listed.items()))

    def _remove(self, name: str, files: Iterable[str]) -> None:
        # The manifest first, since half a checkpoint must not be taken for a whole one.
        for file in sorted(files, key=lambda file: (file != MANIFEST_FILE, file)):
            self.storage.remove(f"{self.folder}/{name}/{file}")


@dataclass
class FilesBeside:
    """Copy the files of a run that match `patterns` to a store, and back."""

    storage: Storage
    run: Path
    patterns: tuple[str, ...]
    _sent: set[str] = field(default_factory=set)  # names of the files that are there

    def send(self) -> None:
        """Upload the files and remove deleted ones from the store; only log a failure."""
        try:
            here = {
                path.relative_to(self.run).as_posix()
                for pattern in self.patterns
                for path in self.run.glob(pattern)
                if path.is_file()
            }
            for name in sorted(here):
                # The training replaces its evaluations meanwhile.
                with suppress(FileNotFoundError, MissingFileError):
                    self.storage.upload(name, self.run / name)
                    self._sent.add(name)
            # Remove only what came from here: others may use the same folder.
            for name in sorted(self._sent - here):
                self.storage.remove(name)
                self._sent.remove(name)
        except (OSError, DistapError) as error:
            logger.warning("not in the store, but in %s: %s", self.run, error)

    def fetch(self) -> None:
        """Download the files of the store into the run's folder."""
        for pattern in self.patterns:
            for name in self.storage.names(pattern):
                if ".." not in name.split("/"):
                    write_whole(self.run / name, self.storage.read_whole(name))
                    self._sent.add(name)
