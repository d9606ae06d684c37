"""Checkpoints: whole or not at all, verified before anything of them is loaded.

A checkpoint is a folder step-00000012 with the state and a manifest of its size and SHA-256. torch loads a file
with flipped bits without a word, so the manifest is checked first. The folder is written aside and renamed last.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from distap.errors import DistapError

STATE_FILE, MANIFEST_FILE = "state.pt", "manifest.json"
NAME = re.compile(r"step-(\d{8})")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write folder/step-N and remove all but the newest `keep`; call it on one rank only.

    Args:
        folder: of the run's checkpoints.
        step: number of steps that the state has behind it.
        state: tensors, numbers, strings, and lists and dicts of them.
        keep: at least 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}"
    aside = folder / f".{path.name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    with (aside / STATE_FILE).open("wb") as file:
        torch.save(state, file)
        _to_disk(file.fileno())
    manifest = {"step": step, "files": {STATE_FILE: _identity(aside / STATE_FILE)}}
    with (aside / MANIFEST_FILE).open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        _to_disk(file.fileno())
    if path.exists():  # a run that was started again from an older checkpoint
        shutil.rmtree(path)
    aside.rename(path)
    directory = os.open(folder, os.O_RDONLY)
    _to_disk(directory)
    os.close(directory)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a run's folder of checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run folder.

    Raises:
        DistapError: there is none.
    """
    if NAME.fullmatch(path.name):
        if not path.is_dir():
            raise DistapError(f"{path}: no such checkpoint")
        return path
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise DistapError(f"{path}: no checkpoint there; expected a run's folder or one of its step-NNNNNNNN folders")
    return found[-1]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU, after its manifest has been verified; runs no code of its own.

    Raises:
        DistapError: a file is missing, damaged, or not what the manifest says.
    """
    manifest_path, state_path = path / MANIFEST_FILE, path / STATE_FILE
    try:
        expected = json.loads(manifest_path.read_text())["files"][STATE_FILE]
        found = _identity(state_path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error
    if found != expected:
        raise _corrupt(path, f"{state_path} is not the file that was written (size or SHA-256 differ)")
    try:
        state: dict[str, Any] = torch.load(state_path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its pickle and zip readers raise
        raise _corrupt(path, str(error)) from error
    return state


def _corrupt(path: Path, detail: str) -> DistapError:
    older = [other for other in list_checkpoints(path.parent) if other.name < path.name]
    instead = f"remove it to go on from {older[-1]}" if older else "remove it to start anew"
    return DistapError(f"{path}: corrupt checkpoint: {detail}; {instead}")


def _identity(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _to_disk(file: int) -> None:
    os.fsync(file)
