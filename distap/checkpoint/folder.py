"""The checkpoints of a run: which there are, which is the newest good one, which may go.

A checkpoint is a folder step-00000012. It is written under another name and renamed when it is whole.
"""

import json
import logging
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from distap.checkpoint.manifest import STATE_FILE, DamagedCheckpointError, Manifest, read_manifest, verify_files
from distap.checkpoint.tensors import read_tensors
from distap.errors import DistapError
from distap.storage.atomic import sync_path
from distap.world import World

NAME = re.compile(r"step-(\d{8})(\.[0-9a-f]{8})?")  # an ending where it left a store, or replaces one
UNFINISHED, DAMAGED = ".step-", "damaged-"
LISTING_SECONDS = 60.0  # for which a network file system may go on showing what a folder held before
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been verified."""

    path: Path
    manifest: Manifest
    url: str | None = None  # of the store that it was downloaded from

    @property
    def where(self) -> str:
        """Path, or URL, for messages."""
        return self.url or str(self.path)

    @property
    def step(self) -> int:
        """Steps behind its state."""
        return self.manifest.step

    def state(self, *names: str) -> dict[str, Any]:
        """What was saved beside the tensors; `names` have to be in it, as dictionaries.

        Raises:
            DamagedCheckpointError: they are not.
        """
        try:
            state = json.loads((self.path / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(self.path, f"{STATE_FILE}: {error}") from error
        missing = [name for name in names if not (isinstance(state, dict) and isinstance(state.get(name), dict))]
        if missing or not isinstance(state, dict):
            raise DamagedCheckpointError(self.path, f"{STATE_FILE} has no {', '.join(missing)}")
        return state

    def tensors(self, prefix: str = "", into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors whose name starts with `prefix`, on the CPU, or filled into those of `into`."""
        return read_tensors(self.path, self.manifest.files, prefix, into)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a run's folder of checkpoints, oldest first; damaged ones are among them."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def newest_checkpoint(folder: Path, world: World) -> tuple[Checkpoint | None, list[Path]]:
    """The newest checkpoint that every rank finds undamaged, and those that were passed over.

    The ranks share the work: each verifies some of the files. All of them get the same answer.

    Raises:
        DistapError: the ranks see different checkpoints, or there are some, but all of them are damaged.
    """
    passed_over: list[Path] = []
    damage = ""
    for path in reversed(_seen_by_all(folder, world)):
        checkpoint, detail = _verified(path, world)
        if checkpoint is not None:
            return checkpoint, passed_over
        damage = damage or detail
        passed_over.append(path)
    if passed_over:
        raise DistapError(
            f"{folder}: none of its {len(passed_over)} checkpoints can be used; the newest: "
            f"{damage or 'another rank found damage'}. Remove them to start anew"
        )
    return None, []


def find_checkpoint(path: Path, best: bool = False) -> Checkpoint:
    """The checkpoint that `path` means: itself, or the newest good one of a run folder, or its best.

    Raises:
        DistapError: there is none, or the one that is named is damaged.
    """
    if NAME.fullmatch(path.name):
        if not path.is_dir():
            raise DistapError(f"{path}: no such checkpoint")
        manifest = read_manifest(path)
        verify_files(path, manifest, manifest.files)
        return Checkpoint(path, manifest)
    folder = path / "checkpoints"
    if best:
        chosen = best_checkpoint(folder)
        if chosen is None:
            raise DistapError(f"{path}: no checkpoint there has been evaluated; evaluation.every does that")
        return find_checkpoint(chosen)
    checkpoint, _ = newest_checkpoint(folder, World())
    if checkpoint is None:
        raise DistapError(f"{path}: no checkpoint there; expected a run's folder or one of its step-NNNNNNNN folders")
    return checkpoint


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the highest validation mAP, of several the newest; None where none was evaluated."""
    scores = []
    for path in list_checkpoints(folder):
        try:
            score = read_manifest(path).score
        except DistapError:
            continue
        if score is not None:
            scores.append((score, path))
    return max(scores)[1] if scores else None


def put_in_place(written: Path, path: Path) -> None:
    """Give a whole checkpoint its name; until then an earlier one of its step is there, however it ends."""
    earlier = [old for old in list_checkpoints(path.parent) if old.name.startswith(path.name)]
    if earlier:  # a run that was started again from an older checkpoint
        written = written.rename(f"{path}.{uuid.uuid4().hex[:8]}")
        sync_path(path.parent)
    superfluous = [old.rename(path.with_name(f".{old.name}.old-{uuid.uuid4().hex[:8]}")) for old in earlier]
    written.rename(path)
    sync_path(path.parent)
    for old in superfluous:
        shutil.rmtree(old, ignore_errors=True)


def remove_old(folder: Path, keep: int, keep_best: bool) -> None:
    """Remove all checkpoints but the newest `keep`, and the best where it is to stay."""
    stays = list_checkpoints(folder)[-keep:]
    best = best_checkpoint(folder) if keep_best else None
    for path in list_checkpoints(folder):
        if path not in stays and path != best:
            # Under another name first: half a checkpoint must not be taken for one.
            path = path.rename(folder / f".{path.name}.old-{uuid.uuid4().hex[:8]}")
            shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(folder: Path, but: Path | None = None) -> None:
    """Remove what interrupted writing has left, `but` what is being written."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name under which nothing takes it for a good one; the last such one is kept."""
    for older in path.parent.glob(f"{DAMAGED}*"):
        shutil.rmtree(older, ignore_errors=True)
    return path.rename(path.with_name(f"{DAMAGED}{path.name}"))


def _seen_by_all(folder: Path, world: World) -> list[Path]:
    """The checkpoints that there are, which must be the same ones on all ranks."""
    deadline = time.monotonic() + LISTING_SECONDS
    found = list_checkpoints(folder)
    while not world.all_same(zlib.crc32("".join(path.name for path in found).encode())):
        if world.maximum(time.monotonic() - deadline) < 0:
            time.sleep(1)
            found = list_checkpoints(folder)
            continue
        newest = f"has {found[-1].name} as its newest" if found else "sees none"
        raise DistapError(
            f"{folder}: the ranks see different checkpoints; rank {world.rank} {newest}. The run folder has to be "
            "one that all hosts share"
        )
    return found


def _verified(path: Path, world: World) -> tuple[Checkpoint | None, str]:
    """The checkpoint, if no rank found damage; and what this rank found."""
    checkpoint, damage = None, ""
    try:
        manifest = read_manifest(path)
        verify_files(path, manifest, sorted(manifest.files)[world.rank :: world.size])
        checkpoint = Checkpoint(path, manifest)
    except DamagedCheckpointError as error:
        damage = str(error)
        logger.warning("%s; going on from the one before, if there is one", error)
    if not world.all_agree(checkpoint is not None):
        return None, damage
    return checkpoint, ""
