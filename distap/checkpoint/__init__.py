"""Checkpoints: sharded, written while training goes on, whole or not at all, verified before anything is loaded."""

from distap.checkpoint.folder import Checkpoint, best_checkpoint, find_checkpoint, list_checkpoints, newest_checkpoint
from distap.checkpoint.manifest import DamagedCheckpointError
from distap.checkpoint.opening import opened_checkpoint
from distap.checkpoint.writer import CheckpointWriter, Written

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "DamagedCheckpointError",
    "Written",
    "best_checkpoint",
    "find_checkpoint",
    "list_checkpoints",
    "newest_checkpoint",
    "opened_checkpoint",
]
