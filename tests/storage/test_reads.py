import os
import resource
import sys
from collections import Counter

import fsspec
import numpy as np
import pytest
from fsspec.registry import _registry
from images import indexed_images
from raising import raises
from servers import gcs_server, s3_files, web_server

from distap.data.images.damage import DamagedImageError
from distap.data.loading.reader import ImageSet
from distap.data.shards.index import load_index
from distap.data.shards.indexing import index_shards
from distap.errors import DistapError
from distap.storage import files, remotes
from distap.storage.files import Storage
from distap.storage.remotes import MissingFileError, UnreachableError


def upload(shards, prefix):
    """The URL of a copy of the shards in the bucket."""
    s3_files().put(f"{shards}/", f"s3://shards/{prefix}/", recursive=True)
    return f"s3://shards/{prefix}"


def test_a_local_file_is_read_in_any_part(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    storage = Storage(str(tmp_path))
    assert storage.size("a") == 100
    assert storage.read("a", 10, 5) == bytes(range(10, 15))
    assert storage.read("a", 90, 50) == bytes(range(90, 100))
    assert storage.open("a").read() == bytes(range(100))
    assert storage.meter["read_bytes"] == 115
    with raises("storage.missing", "b", kind=MissingFileError):
        storage.read("b", 0, 1)


SCHEMES = ["http", "s3", "gs"]


FAULTS = [(scheme, fault) for scheme in ("http", "s3") for fault in ("503", "429", "cut", "short")]


@pytest.mark.parametrize(("scheme", "fault"), [*FAULTS, ("gs", "short")])
def test_a_fault_that_passes_is_retried_and_counted(web, shards, scheme, fault):
    storage = web.storage(scheme)
    web.faults = [fault, fault]
    assert storage.read("000000.tar", 0, 600) == (shards / "000000.tar").read_bytes()[:600]
    assert web.asked() == 3
    assert storage.meter == Counter(requests=3, read_bytes=600, used_bytes=600, retries=2)


def test_an_image_that_was_changed_on_its_way_is_read_a_second_time(web, shards):
    reader = ImageSet(web.url, load_index(web.url))
    expected = ImageSet(shards, load_index(shards)).data(4)
    web.faults = ["flip"]
    assert reader.data(4) == expected
    assert reader.storage.meter["retries"] == 1
    web.faults = ["flip", "flip"]
    with pytest.raises(DamagedImageError, match="crc_mismatch"):
        reader.data(4)
    assert not web.faults


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_fault_that_stays_is_an_error_that_says_where_and_how_often(web, scheme):
    storage = web.storage(scheme)
    web.faults = ["503"] * 9
    where = rf"{web.base(scheme)}/000000\.tar"
    last = r"[\s\S]*(503|Service Unavailable)"
    with pytest.raises(
        UnreachableError, match=f"{where}: .* 5 attempts failed, the last with: {last}"
    ):
        storage.read("000000.tar", 0, 600)
    assert len(web.requests) == 5


# boto takes long to load
@pytest.mark.parametrize(("scheme", "seconds"), [("http", 0.3), ("gs", 0.3), ("s3", 1)])
def test_a_server_that_stalls_is_given_up_after_the_time_out(
    web, shards, scheme, seconds, monkeypatch
):
    monkeypatch.setattr(remotes, "ATTEMPTS", 2)
    monkeypatch.setattr(remotes, "TIMEOUT_SECONDS", seconds)
    storage = web.storage(scheme)
    web.faults = ["stall", "stall"]
    silence = rf"(no answer within {seconds} s|Read timeout)"
    with pytest.raises(UnreachableError, match=f"2 attempts failed, the last with: {silence}"):
        storage.read("000000.tar", 0, 600)
    web.faults = ["stall"]
    monkeypatch.setattr(remotes, "TIMEOUT_SECONDS", max(seconds, 1))
    assert (
        web.storage(scheme).read("000000.tar", 0, 600) == (shards / "000000.tar").read_bytes()[:600]
    )


@pytest.mark.parametrize("fault", ["endless", "chunked", "packed"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_answer_without_end_is_an_error_after_the_bytes_asked_for(web, scheme, fault):
    storage = web.storage(scheme)
    storage.read("000000.tar", 0, 600)  # has loaded what it needs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    web.requests.clear()
    web.faults = [fault] * 9
    with raises("storage.bad_answer", "000000.tar"):
        storage.read("000000.tar", 0, 600)
    assert web.asked() == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_redirect_to_another_host_is_followed_only_where_it_is_allowed(
    web, shards, scheme, monkeypatch
):
    with web_server(shards) as inner:
        storage = web.storage(scheme)
        for header in ("", "URI "):
            web.faults = [header + inner.url]
            with raises("storage.bad_redirect", "http://127.0.0.1", "DISTAP_REDIRECTS"):
                storage.read("000000.tar", 0, 600)
            assert not inner.requests
        web.faults = ["file://"]
        with raises("storage.bad_redirect"):
            storage.read("000000.tar", 0, 600)
        monkeypatch.setenv("DISTAP_REDIRECTS", "store.example.org,127.0.0.1")
        web.faults = [inner.url]
        assert (
            Storage(storage.base).read("000000.tar", 0, 600)
            == (shards / "000000.tar").read_bytes()[:600]
        )


def test_a_redirect_within_the_host_is_followed(web, shards):
    web.faults = [web.url]
    assert Storage(web.url).read("000000.tar", 0, 600) == (shards / "000000.tar").read_bytes()[:600]


def test_a_server_that_is_not_there_is_named():
    storage = Storage("http://127.0.0.1:9")
    with raises("storage.unreachable", "http://127.0.0.1:9/a.tar", "5", kind=UnreachableError):
        storage.size("a.tar")


@pytest.mark.parametrize("status", ["403", "401", "410"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_another_attempt_would_not_mend_is_tried_once(web, scheme, status):
    web.faults = [status] * 3
    with raises("storage.refused", "000000.tar"):
        web.storage(scheme).read("000000.tar", 0, 600)
    assert len(web.requests) == 1


def test_a_missing_file_is_told_from_other_errors(web):
    with raises("storage.missing", web.url, kind=MissingFileError):
        Storage(web.url).size("none.tar")
    with raises("storage.missing", web.url, kind=MissingFileError):
        Storage(web.url).read("none.tar", 0, 1)


def test_a_server_that_ignores_ranges_is_found_out_by_the_first_image(web):
    reader = ImageSet(web.url, load_index(web.url))
    web.ranges = False
    with pytest.raises(DistapError, match=r"ignores Range.*nginx"):
        reader.data(4)


def test_a_pipe_in_place_of_an_index_is_refused_at_once(shards):
    (shards / "index.npz").unlink()
    os.mkfifo(shards / "index.npz")
    with raises("storage.not_a_file", "index.npz"):
        load_index(shards)


def test_an_image_behind_a_name_with_odd_signs_is_found_and_a_large_file_is_not_read_whole(
    tmp_path, monkeypatch
):
    (tmp_path / "a b%20c+é.tar").write_bytes(b"data")
    with web_server(tmp_path) as server:
        assert Storage(server.url).read("a b%20c+é.tar", 0, 4) == b"data"
        monkeypatch.setattr(files, "LARGEST_WHOLE", 3)
        with raises("storage.too_large", "3"):
            Storage(server.url).read_whole("a b%20c+é.tar")


def test_credentials_that_are_missing_are_an_error_at_once(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with raises("storage.refused", "s3://shards/a.tar"):
        Storage("s3://shards").size("a.tar")


def test_an_object_store_is_read_listed_and_written(s3, shards, monkeypatch):
    storage = Storage(upload(shards, "stored"))
    whole = (shards / "000000.tar").read_bytes()
    assert storage.size("000000.tar") == len(whole)
    assert storage.read("000000.tar", 700, 1000) == whole[700:1700]
    assert storage.read("000000.tar", len(whole) - 5, 5) == whole[-5:]
    assert storage.names("*.tar") == ["000000.tar", "000001.tar", "000002.tar"]
    storage.write("note", b"text")
    assert storage.open("note").read() == b"text"
    with raises("storage.missing", "s3://shards/stored/none", kind=MissingFileError):
        storage.read("none", 0, 1)
    with pytest.raises(MissingFileError):
        Storage("s3://nowhere").size("a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with raises("storage.unreachable", "s3://shards/note", "5", kind=UnreachableError):
        Storage("s3://shards").write("note", b"")


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, scheme, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    for names in [name for name in fsspec.registry if name == scheme]:
        monkeypatch.delitem(_registry, names)
    with raises("package.missing", scheme, extra):
        Storage(f"{scheme}://bucket").size("a")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["http", "s3"])
def test_reading_over_a_network_is_reading_from_disk(kind, workers, shards, web, s3):
    source = web.url if kind == "http" else upload(shards, "same")
    expected = ImageSet(shards, load_index(shards))
    reader = ImageSet(source, load_index(source))
    assert reader.index.fingerprint == expected.index.fingerprint
    own_row = indexed_images(shards, 9)
    images = indexed_images(source, 9, workers=workers)
    # of this process, whose counts a fork begins with
    images.read_from.storage.meter["read_bytes"] = 7
    web.requests.clear()
    shares = [own_row.shares(range(1)), images.shares(range(1))]
    here, on_disk = map(next, shares)
    assert np.array_equal(here.images(slice(0, 9)), on_disk.images(slice(0, 9)))
    assert here.samples.tolist() == on_disk.samples.tolist()
    size = sum(int(expected.index.size[sample]) for sample in range(9))
    # Neighbours share a request, with the bytes between them.
    requests = on_disk.traffic["requests"]
    assert 3 <= requests < 9
    assert on_disk.traffic["used_bytes"] == size < on_disk.traffic["read_bytes"] < 3 * size
    assert len(web.requests) == (requests if kind == "http" else 0)


def test_an_index_behind_http_is_made_on_disk_by_the_same_pattern(web, shards):
    index, _ = index_shards(f"{shards}/{{000000..000002}}.tar")
    assert load_index(f"{web.url}/{{000000..000002}}.tar").fingerprint == index.fingerprint
    with raises("data.read_only"):
        index_shards(f"{web.url}/{{000000..000002}}.tar")


def test_an_index_is_made_over_s3_beside_the_shards(s3, shards):
    expected = load_index(shards).fingerprint
    (shards / "index.npz").unlink()
    url = upload(shards, "unindexed")
    with raises("data.missing_index", "index.npz", "s3://shards/unindexed"):
        load_index(url)
    for source in (url, f"{url}/*.tar", f"{url}/{{000000..000002}}.tar"):
        index, _ = index_shards(source)
        assert load_index(source).fingerprint == index.fingerprint == expected


def test_google_storage_is_read_listed_and_written(shards):
    with gcs_server():
        storage = Storage("gs://shards/train")
        for path in shards.iterdir():
            storage.write(path.name, path.read_bytes())
        assert storage.names("*.tar") == ["000000.tar", "000001.tar", "000002.tar"]
        expected = ImageSet(shards, load_index(shards))
        reader = ImageSet("gs://shards/train", load_index("gs://shards/train"))
        assert [reader.data(sample) for sample in range(9)] == [
            expected.data(sample) for sample in range(9)
        ]
        with raises("storage.missing", "gs://shards/train/none", kind=MissingFileError):
            storage.read("none", 0, 1)
