"""The checkpoints of a run, in a folder on disk or in a store, through one interface; and the files
beside them.

checkpoints/step-00000012/shard-00001-model-00001-of-00001.safetensors    the tensors that rank 0
wrote checkpoints/step-00000012/state.json                                      what was saved next
to the tensors checkpoints/step-00000012/manifest.json                                   size and
SHA-256 of each file, written last

A folder without manifest is no checkpoint, so that neither a disk nor a bucket needs a rename. A
step that is written again, while the first checkpoint of this step is still there, goes to
step-00000012.1.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from re import compile as pattern
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from distap.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    DamagedCheckpointError,
    Manifest,
    parse_manifest,
    read_tensors,
)
from distap.errors import DistapError, logger
from distap.storage.atomic import make_folder, write_whole
from distap.storage.files import Storage
from distap.storage.remotes import DamagedFileError, MissingFileError, UnreachableError
from distap.storage.texts import read_json

CHECKPOINTS_FOLDER = "checkpoints"  # within the folder of a run
NAME = pattern(r"step-\d{8}(\.\d+)?")
STEP = len("step-00000000")  # characters of a name that tell the step
DOWNLOADS = 4  # files at once


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been verified, with its files on this host's disk."""

    path: Path
    manifest: Manifest
    where: str  # path or URL, for messages

    @property
    def step(self) -> int:
        """Number of training steps that were done when the checkpoint was written."""
        return self.manifest.step

    def state(self, *names: str) -> dict[str, Any]:
        """Return what was saved next to the tensors; raise if an entry in `names` is not a
        dictionary.
        """
        try:
            state: dict[str, Any] = read_json(self.path / STATE_FILE)
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(self.where, f"{STATE_FILE}: {error}") from error
        missing = [name for name in names if not isinstance(state.get(name), dict)]
        if missing:
            raise DamagedCheckpointError(self.where, f"{STATE_FILE} has no {', '.join(missing)}")
        return state

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Read the tensors whose name starts with `prefix` to the CPU."""
        return read_tensors(self.path, self.manifest.files, prefix)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in one folder of a storage; each process has its own object."""

    storage: Storage
    folder: str = CHECKPOINTS_FOLDER

    @property
    def is_on_disk(self) -> bool:
        """Tell whether checkpoints lie on a disk, where they are read and written in place."""
        return self.storage.disk is not None

    def where(self, name: str) -> str:
        return self.storage.where(f"{self.folder}/{name}")

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint on disk."""
        return Path(self.where(name).removeprefix("file://"))

    def names(self) -> list[str]:
        """Return the names of the checkpoints with a manifest, oldest first, damaged ones
        included."""
        return [name for name, files in self._listed().items() if MANIFEST_FILE in files]

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest, verified; a checkpoint without one is damaged."""
        try:
            data = self.storage.read_whole(f"{self.folder}/{name}/{MANIFEST_FILE}")
        except MissingFileError as error:
            raise DamagedCheckpointError(
                self.where(name), f"{MANIFEST_FILE} is not there"
            ) from error
        except DamagedFileError as error:
            raise DamagedCheckpointError(self.where(name), str(error)) from error
        return parse_manifest(data, self.where(name))

    def best(self) -> tuple[float, str] | tuple[None, None]:
        """Return the best validation mAP among undamaged checkpoints, and the newest checkpoint
        with it.
        """
        scores = []
        for name in self.names():
            with suppress(DamagedCheckpointError):
                score = self.manifest(name).score
                if score is not None:
                    scores.append((score, name))
        return max(scores) if scores else (None, None)

    def begin(self, step: int) -> str:
        """Remove what interrupted or failed writes left, and return the name of a new
        checkpoint."""
        listed = self._listed()
        for name, files in listed.items():
            if MANIFEST_FILE not in files:
                self._remove(name, files)
        names = (
            f"step-{step:08d}{ending}"
            for ending in ("", *(f".{again}" for again in range(1, 1000)))
        )
        return next(name for name in names if MANIFEST_FILE not in listed.get(name, ()))

    @contextmanager
    def place(self, name: str, spool: Path) -> Iterator[Path]:
        """Yield a folder to write a checkpoint into: its final one on disk, or a temporary one to
        upload.
        """
        if self.is_on_disk:
            make_folder(self.path(name))
            yield self.path(name)
            return
        make_folder(spool)
        with TemporaryDirectory(prefix=".sending-", dir=spool) as temporary:
            yield Path(temporary)

    def send(self, name: str, folder: Path, files: Iterable[str]) -> None:
        """Upload a checkpoint's files from the folder of `place`; do nothing for checkpoints on
        disk.
        """
        for file in [] if self.is_on_disk else files:
            self.storage.upload(f"{self.folder}/{name}/{file}", folder / file)

    def publish(self, name: str, manifest: Manifest) -> None:
        """Write the manifest, which makes the checkpoint exist, once all ranks' files are there
        with their sizes.
        """
        # Each host finds its own files where it wrote them. Only this look shows that all wrote to
        # one place.
        present = self.storage.sizes(f"{self.folder}/{name}")
        for file, identity in sorted(manifest.files.items()):
            size = present.get(f"{self.folder}/{name}/{file}")
            if size != identity.bytes:
                found = "is not there" if size is None else f"has {size:,} bytes"
                sent = f"{self.where(name)}: {file} was written, {identity.bytes:,} bytes"
                raise UnreachableError(
                    f"{sent}, and {found}; do all hosts write to the same place?"
                )
        self.storage.write(f"{self.folder}/{name}/{MANIFEST_FILE}", manifest.text().encode())

    def remove_old(self, newest: str, keep: int) -> None:
        """Remove old checkpoints: all up to `newest` but the best one and the last `keep`.

        Checkpoints of later steps stay: only a person can judge why the run went back behind them.
        """
        best = self.best()[1]
        past = [name for name in self.names() if name[:STEP] <= newest[:STEP]]
        earlier = [name for name in past if name[:STEP] < newest[:STEP]]
        listed = self._listed()
        for name in set(past) - {newest, best, *earlier[::-1][: keep - 1]}:
            self._remove(name, listed[name])

    def fetch(self, name: str, files: Iterable[str], folder: Path) -> None:
        """Download files of a checkpoint from a store into an existing folder."""

        def download(file: str) -> None:
            self.storage.download(f"{self.folder}/{name}/{file}", folder / file)

        try:
            with ThreadPoolExecutor(DOWNLOADS) as pool:
                list(pool.map(download, files))
        except (MissingFileError, DamagedFileError) as error:
            raise DamagedCheckpointError(self.where(name), str(error)) from error

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
                f.relative_to(self.run).as_posix()
                for pattern in self.patterns
                for f in self.run.glob(pattern)
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
        for name in (name for each in self.patterns for name in self.storage.names(each)):
            if ".." in name.split("/"):
                continue
            write_whole(self.run / name, self.storage.read_whole(name))
            self._sent.add(name)
