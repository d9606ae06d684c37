import socket

import pytest
from raising import raises
from ranks import RankFailedError, on_ranks

from distap.checkpoint.agreement import on_rank_0
from distap.checkpoint.lease import Lease
from distap.errors import MISTAKE, DistapError
from distap.storage import remotes
from distap.storage.files import Storage
from distap.storage.locations import parse_store
from distap.storage.remotes import UnreachableError


def _another_store_on_each(world, folder):
    lease = Lease("checkpoint.store", Storage(f"file://{folder}/store-{world.rank}"))
    name = on_rank_0(world, lease.take)
    lease.require_seen(name)


def test_a_store_that_is_not_the_same_to_all_hosts_is_refused_at_the_start(tmp_path):
    with pytest.raises(
        RankFailedError, match=r"checkpoint\.store: .*store-1: not the place of rank 0"
    ) as error:
        on_ranks(2, _another_store_on_each, tmp_path)
    assert "store-0" not in str(error.value)


def test_a_bucket_that_is_not_there_is_refused_at_the_start(s3):
    lease = Lease("checkpoint.store", Storage("s3://nowhere/run"))
    with raises("storage.no_bucket", "checkpoint.store", "s3://nowhere/run") as error:
        lease.take()
    assert error.value.status == MISTAKE


def test_a_store_that_never_answers_fails_in_bounded_time(tmp_path, s3, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(1000))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(remotes, "ATTEMPTS", 2)
        monkeypatch.setattr(remotes, "TIMEOUT_SECONDS", 0.3)
        store = Storage("s3://shards/run")
        for call in (
            lambda: store.upload("file", tmp_path / "file"),
            lambda: store.download("file", tmp_path / "fetched"),
            lambda: store.sizes("folder"),
        ):
            with raises("storage.unreachable", "2", kind=UnreachableError):
                call()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/mnt/runs", "is no URL; expected one such as s3://bucket/folder"),
        ("http://host/run", "a web server keeps no checkpoints"),
        ("memory://run", "the memory of one process keeps no checkpoints"),
        ("s3://key:secret@bucket/run", r"s3://\.\.\.@bucket: credentials in a URL"),
        ("s3://", "expected a bucket after ://"),
        ("file://host/run", "expected a bucket after ://, or of file:// a whole path"),
    ],
)
def test_a_url_where_nothing_can_be_kept_is_refused(url, message):
    with pytest.raises(DistapError, match=message):
        parse_store(url)
