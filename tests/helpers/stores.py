"""Runs in stores, for tests."""

from distap.checkpoint.finding import newest_checkpoint, opened_checkpoint
from distap.checkpoint.stored import StoredRun
from distap.storage.files import storage_of
from distap.storage.remotes import RemoteSettings

BESIDE = ("metrics.jsonl", "not_finite.jsonl", "evaluations/*/*")


def stored_at(url, options=None, **settings):
    settings = RemoteSettings(attempts=2, timeout_seconds=20, backoff_seconds=0, options=options or {}, **settings)
    return StoredRun(storage_of(str(url), settings, "checkpoint.remote"), BESIDE, "not_finite.jsonl")


def newest_on_disk(folder, world):
    """The newest good checkpoint of a folder, and the names of those that were passed over."""
    with newest_checkpoint(folder, world) as found:
        return found.checkpoint, found.passed_over


def found_checkpoint(path, best=False):
    """The checkpoint that a path on disk means."""
    with opened_checkpoint(path, best) as checkpoint:
        return checkpoint
