"""The checkpoints of a run on disk: list them, put a new one in place, remove old ones.

A checkpoint is a folder step-00000012. It is written under another name and renamed when it is complete.
"""

import json
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from distap.checkpoint.manifest import STATE_FILE, DamagedCheckpointError, Manifest, best_of, read_manifest
from distap.checkpoint.tensors import read_tensors
from distap.storage.atomic import sync_path

FOLDER = "checkpoints"  # within the folder of a run
# In a store each attempt at a step has an ending of its own; on disk a name has one while it replaces another.
NAME = re.compile(r"step-\d{8}(\.[0-9a-f]{8})?")
STEP = len("step-00000000")  # characters of a name that tell the step
UNFINISHED, DAMAGED = ".step-", "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this host's disk that has been verified."""

    path: Path
    manifest: Manifest
    url: str | None = None  # in the store that it was downloaded from

    @property
    def where(self) -> str:
        """Path or URL, for messages."""
        return self.url or str(self.path)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.manifest.step

    def state(self, *names: str) -> dict[str, Any]:
        """Return what was saved beside the tensors; each of `names` in it is a dictionary, or the file is damaged."""
        try:
            state = json.loads((self.path / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(self.path, f"{STATE_FILE}: {error}") from error
        missing = [name for name in names if not (isinstance(state, dict) and isinstance(state.get(name), dict))]
        if missing or not isinstance(state, dict):
            raise DamagedCheckpointError(self.path, f"{STATE_FILE} has no {', '.join(missing)}")
        return state

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Read the tensors whose name starts with `prefix`, to the CPU."""
        return read_tensors(self.path, self.manifest.files, prefix)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first, damaged ones included."""
    return sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name))


def best_checkpoint(folder: Path) -> tuple[float, Path] | tuple[None, None]:
    """Return the highest validation mAP of a checkpoint, and the newest such checkpoint."""
    return best_of(list_checkpoints(folder), read_manifest)


def put_in_place(written: Path, path: Path) -> None:
    """Rename a complete checkpoint to its final name; at every moment it or an earlier one of its step is there."""
    earlier = [old for old in list_checkpoints(path.parent) if old.name.startswith(path.name)]
    if earlier:  # the run was started again from an older checkpoint
        written = written.rename(f"{path}.{uuid.uuid4().hex[:8]}")
        sync_path(path.parent)
    superfluous = [_hide(old) for old in earlier]
    written.rename(path)
    sync_path(path.parent)
    for old in superfluous:
        shutil.rmtree(old, ignore_errors=True)


def remove_old(newest: Path, keep: int, keep_best: bool) -> None:
    names = [path.name for path in list_checkpoints(newest.parent)]
    best = best_checkpoint(newest.parent)[1] if keep_best else None
    for name in replaced(names, newest.name, keep, best.name if best else None):
        shutil.rmtree(_hide(newest.with_name(name)), ignore_errors=True)


def replaced(names: list[str], newest: str, keep: int, best: str | None) -> set[str]:
    """Return those of a run's checkpoints, oldest first, that are not among the `keep` up to `newest`, nor the best.

    Checkpoints of later steps stay: the run went back behind them, which only a person can judge.
    """
    past = [name for name in names if name[:STEP] <= newest[:STEP]]
    earlier = [name for name in past if name[:STEP] < newest[:STEP]]
    return set(past) - {newest, best, *earlier[::-1][: keep - 1]}


def remove_unfinished(folder: Path, but: Path) -> None:
    """Remove what interrupted writing has left, apart from `but`."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is no longer listed; only the last such one is kept."""
    for older in path.parent.glob(f"{DAMAGED}*"):
        shutil.rmtree(older, ignore_errors=True)
    return path.rename(path.with_name(f"{DAMAGED}{path.name}"))


def _hide(path: Path) -> Path:
    """Rename a checkpoint before it is removed, since half of one must not be taken for a whole one."""
    return path.rename(path.with_name(f".{path.name}.old-{uuid.uuid4().hex[:8]}"))
