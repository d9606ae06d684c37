"""Runs on disk and in stores, for tests."""

from dataclasses import replace
from pathlib import Path

from distap.checkpoint.checkpoints import Checkpoints, FilesBeside
from distap.checkpoint.finding import newest_checkpoint, opened_checkpoint
from distap.checkpoint.manifest import MANIFEST_FILE
from distap.checkpoint.writer import CheckpointWriter
from distap.storage.atomic import file_identity
from distap.storage.files import Storage
from distap.world import World

SHARD = "shard-{:05d}-model-00001-of-00001.safetensors"
BESIDE = ("metrics.jsonl", "starts.jsonl", "evaluations/*/*")


def checkpoints_of(run):
    """The checkpoints of a run, by its folder or URL."""
    return Checkpoints(Storage(str(run)))


def beside(storage, run):
    return FilesBeside(storage, run, BESIDE)


def writer_to(run, world=None, keep=99, spool=Path(), **settings):
    checkpoints = run if isinstance(run, Checkpoints) else checkpoints_of(run)
    return CheckpointWriter(checkpoints, world or World(), keep, spool=spool, **settings)


def list_checkpoints(folder):
    """The folders of a run's checkpoints, oldest first."""
    return [folder / name for name in checkpoints_of(folder.parent).names()]


def newest_on_disk(run, world=None):
    """The newest good checkpoint of a run."""
    with newest_checkpoint(checkpoints_of(run), Path(), world or World()) as checkpoint:
        return checkpoint


def found_checkpoint(path, best=False):
    """The checkpoint that a path on disk means."""
    with opened_checkpoint(path, best) as checkpoint:
        return checkpoint


def rewrite_manifest(path, **changes):
    """Make the manifest fit what is in the folder of a checkpoint, as someone who means harm
    would."""
    checkpoints = Checkpoints(Storage(str(path.parent.parent)), path.parent.name)
    manifest = checkpoints.manifest(path.name)
    files = {name: file_identity(path / name) for name in manifest.files} | changes.get("files", {})
    (path / MANIFEST_FILE).write_text(replace(manifest, **changes | {"files": files}).text())
