"""The checkpoints of a run in a store, and what else of its folder goes there with them.

RUN/checkpoints/step-00000012.1a2b3c4d/    the files of a checkpoint, as on disk; its manifest comes last
RUN/metrics.jsonl, ...                     what rank 0 writes beside them, overwritten with each checkpoint

A checkpoint without its manifest does not exist. Each attempt at a step has a name of its own, so that nothing ever
writes over the files of another, and a bucket needs no rename.
"""

import logging
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distap.checkpoint.folder import Checkpoint
from distap.checkpoint.manifest import (
    MANIFEST_FILE,
    DamagedCheckpointError,
    Manifest,
    parsed_manifest,
    verify_files,
)
from distap.checkpoint.store import Store
from distap.storage.atomic import write_whole
from distap.storage.remotes import MissingFileError, UnreachableError

FOLDER, DAMAGED_MANIFEST = "checkpoints", "damaged-manifest.json"
NAME = re.compile(r"step-(\d{8})\.[0-9a-f]{8}")
logger = logging.getLogger("distap")


def step_of(name: str) -> int:
    """Steps behind a checkpoint in a store, by its name."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


@dataclass
class StoredRun:
    """A run's folder in a store, as one process sees it.

    Args:
        store: of the run.
        keep: checkpoints that stay, the newest.
        keep_best: the one with the highest validation mAP stays as well.
        beside: patterns of the files beside the checkpoints that go there too.
        joined: of these, the one whose lines are kept that only this host has.
    """

    store: Store
    keep: int = 1
    keep_best: bool = True
    beside: tuple[str, ...] = ()
    joined: str = ""
    _sent: dict[str, tuple[int, int]] = field(default_factory=dict)  # versions of the files beside that are there
    _manifests: dict[str, Manifest] = field(default_factory=dict)

    def where(self, name: str) -> str:
        """URL of a checkpoint."""
        return self.store.where(f"{FOLDER}/{name}")

    def names(self) -> list[str]:
        """The checkpoints that have a manifest, oldest first; damaged ones are among them."""
        return _with_manifest(self._listed())

    def manifest(self, name: str) -> Manifest:
        """What a checkpoint consists of.

        Raises:
            DamagedCheckpointError: that cannot be told.
        """
        if name not in self._manifests:
            try:
                text = self.store.read(f"{FOLDER}/{name}/{MANIFEST_FILE}")
            except MissingFileError as error:
                raise DamagedCheckpointError(self.where(name), f"{MANIFEST_FILE} is not there") from error
            self._manifests[name] = parsed_manifest(text, self.where(name))
        return self._manifests[name]

    def best(self) -> str | None:
        """The checkpoint with the highest validation mAP, of several the newest; None where none was evaluated."""
        return self._best(self.names())

    def _best(self, names: list[str]) -> str | None:
        scores = []
        for name in names:
            try:
                score = self.manifest(name).score
            except DamagedCheckpointError:
                continue
            if score is not None:
                scores.append((score, name))
        return max(scores)[1] if scores else None

    def by(self, until: float) -> "StoredRun":
        """The same, which fails with what is not done `until` then, on the monotonic clock."""
        return replace(self, store=self.store.by(until))

    def upload(self, name: str, folder: Path, files: Iterable[str]) -> None:
        """Send some of a checkpoint's files."""
        for file in files:
            self.store.upload(folder / file, f"{FOLDER}/{name}/{file}")

    def publish(self, name: str, manifest: Manifest) -> None:
        """Make a checkpoint exist, all files of which have been sent.

        Raises:
            DistapError: the store has other files, or cannot be written to.
        """
        present = self.store.sizes(f"{FOLDER}/{name}")
        for file, identity in sorted(manifest.files.items()):
            size = present.get(f"{FOLDER}/{name}/{file}")
            if size != identity.bytes:
                found = "is not there" if size is None else f"has {size:,} bytes"
                raise UnreachableError(
                    f"{self.where(name)}: {file} was sent, {identity.bytes:,} bytes, and {found}; "
                    "do all hosts write to the same store?"
                )
        self.store.write(f"{FOLDER}/{name}/{MANIFEST_FILE}", manifest.text().encode())

    def add(self, folder: Path, manifest: Manifest) -> None:
        """Bring a checkpoint there that is on disk as a whole, as a new one, with what is beside it."""
        name = f"step-{manifest.step:08d}.{uuid.uuid4().hex[:8]}"
        self.upload(name, folder, manifest.files)
        self.save_beside(folder.parent.parent)
        self.publish(name, manifest)

    def remove_old(self, newest: str) -> None:
        """Remove all but the newest checkpoints up to `newest` and the best, and what interrupted uploads left.

        Those of later steps stay: the run went back behind them, which only a person may find right.
        """
        listed = self._listed()
        past = [name for name in _with_manifest(listed) if step_of(name) <= step_of(newest)]
        earlier = [name for name in past if step_of(name) != step_of(newest)]
        stays = {newest, *earlier[max(0, len(earlier) - self.keep + 1) :]}
        if self.keep_best and (best := self._best(_with_manifest(listed))) is not None:
            stays.add(best)
        for name, files in listed.items():
            is_unfinished = not files & {MANIFEST_FILE, DAMAGED_MANIFEST} and name != newest
            if (name in past and name not in stays) or is_unfinished:
                self._remove(name, files)

    def set_aside(self, name: str) -> None:
        """Take a damaged checkpoint's manifest away, under another name; the last such checkpoint is kept."""
        damaged = [(other, files) for other, files in self._listed().items() if DAMAGED_MANIFEST in files]
        for other, files in damaged:
            self._remove(other, files)
        folder = f"{FOLDER}/{name}"
        self.store.write(f"{folder}/{DAMAGED_MANIFEST}", self.store.read(f"{folder}/{MANIFEST_FILE}"))
        self.store.remove([f"{folder}/{MANIFEST_FILE}"])

    def fetch(self, name: str, folder: Path) -> Checkpoint:
        """Download a checkpoint into a folder that is there, and verify it.

        Raises:
            DamagedCheckpointError: it is not what was written; another attempt to download it made no difference.
            DistapError: the store cannot be reached, or another version of distap wrote the checkpoint.
        """
        self._manifests.pop(name, None)
        manifest = self.manifest(name)
        write_whole(folder / MANIFEST_FILE, manifest.text())
        wanted = list(manifest.files)
        for attempt in (1, 2):
            try:
                self.store.download([f"{FOLDER}/{name}/{file}" for file in wanted], folder)
            except MissingFileError as error:
                raise DamagedCheckpointError(self.where(name), str(error)) from error
            wanted = [file for file in wanted if not _is_whole(folder, manifest, file)]
            if not wanted:
                return Checkpoint(folder, manifest, self.where(name))
            if attempt == 1:
                logger.warning("%s: %s arrived damaged; once more", self.where(name), ", ".join(wanted))
        raise DamagedCheckpointError(
            self.where(name), f"{wanted[0]} is not the file that was written (size or SHA-256 differ)"
        )

    def save_beside(self, run: Path) -> None:
        """Send what rank 0 writes beside checkpoints, where it has changed; what is gone here goes there."""
        here = {file.relative_to(run).as_posix() for pattern in self.beside for file in run.glob(pattern)}
        for name in sorted(here):
            try:
                version = _version(run / name)
                if self._sent.get(name) != version:
                    self.store.upload(run / name, name)
                    self._sent[name] = version
            except (FileNotFoundError, MissingFileError):
                continue  # the training replaces its evaluations meanwhile
        # Nothing but what came from here: who named a folder that others use must not lose theirs.
        for name in sorted(self._sent.keys() - here):
            self.store.remove([name])
            del self._sent[name]

    def fetch_beside(self, run: Path) -> None:
        """Bring that back into a run's folder."""
        for name in [*(pattern for pattern in self.beside if "/" not in pattern), *self._in_folders()]:
            try:
                data = self.store.read(name)
            except MissingFileError:
                continue
            if name == self.joined and (run / name).exists():
                there = set(data.splitlines())
                mine = [line for line in (run / name).read_bytes().splitlines() if line not in there]
                write_whole(run / name, data + b"".join(line + b"\n" for line in mine))
                continue
            write_whole(run / name, data)
            self._sent[name] = _version(run / name)

    def _in_folders(self) -> list[str]:
        """The files beside checkpoints that are in folders of their own, which may hold more or fewer each time."""
        patterns = [pattern.split("/") for pattern in self.beside if "/" in pattern]
        return [
            name
            for folder in sorted({first for first, *_ in patterns})
            for name in self.store.sizes(folder)
            if ".." not in name.split("/")
            and any(len(name.split("/")) == len(pattern) for pattern in patterns if pattern[0] == folder)
        ]

    def _listed(self) -> dict[str, set[str]]:
        """Names of the files in each checkpoint's folder."""
        listed = defaultdict(set)
        for path in self.store.sizes(FOLDER):
            _, name, *rest = path.split("/")
            if NAME.fullmatch(name) and len(rest) == 1:
                listed[name].add(rest[0])
        return dict(sorted(listed.items()))

    def _remove(self, name: str, files: set[str]) -> None:
        # Without its manifest first: half a checkpoint must not be taken for one.
        ordered = sorted(files, key=lambda file: (file not in (MANIFEST_FILE, DAMAGED_MANIFEST), file))
        self.store.remove(f"{FOLDER}/{name}/{file}" for file in ordered)
        self._manifests.pop(name, None)


def _with_manifest(listed: Mapping[str, set[str]]) -> list[str]:
    return sorted(name for name, files in listed.items() if MANIFEST_FILE in files)


def _version(file: Path) -> tuple[int, int]:
    """What changes when a file does."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _is_whole(folder: Path, manifest: Manifest, file: str) -> bool:
    try:
        verify_files(folder, manifest, [file])
    except DamagedCheckpointError:
        return False
    return True
