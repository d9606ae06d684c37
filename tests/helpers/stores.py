"""Runs in stores, for tests."""

from distap.checkpoint.stored import StoredRun
from distap.storage.files import storage_of
from distap.storage.remotes import RemoteSettings

BESIDE = ("metrics.jsonl", "not_finite.jsonl", "evaluations/*/*")


def stored_at(url, options=None, keep=9, **settings):
    settings = RemoteSettings(attempts=2, timeout_seconds=20, backoff_seconds=0, options=options or {}, **settings)
    return StoredRun(storage_of(str(url), settings, "checkpoint.remote"), keep, True, BESIDE, "not_finite.jsonl")
