"""Shards on the Hugging Face Hub, by its real file system and a server that answers as it does."""

import os
import subprocess
import sys

import fsspec.config
import pytest
from hubs import HubServer
from raising import raises
from servers import web_server

from distap.data.loading.checking import check
from distap.data.loading.reader import ImageSet
from distap.data.shards.index import load_index
from distap.data.shards.indexing import index_shards
from distap.errors import DistapError
from distap.storage import remotes
from distap.storage.files import Storage
from distap.storage.locations import from_folder, parse_source
from distap.storage.ranges import Range
from distap.storage.remotes import MissingFileError, UnreachableError

PLACE = "hf://datasets/user/photos"


@pytest.fixture
def hub(shards, monkeypatch):
    """A hub whose data set has the shards in its folder `train`."""
    (shards.parent / "repository").mkdir()
    shards.rename(shards.parent / "repository" / "train")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with web_server(shards.parent / "repository", HubServer) as server:
        fsspec.config.conf["hf"] = {"endpoint": server.url}
        yield server


@pytest.mark.parametrize("revision", ["", "@main", "@v1"])
@pytest.mark.parametrize("pattern", ["", "/*.tar", "/{000000..000002}.tar"])
def test_shards_on_the_hub_are_those_on_disk(hub, revision, pattern):
    expected = load_index(hub.folder / "train")
    if pattern:
        index_shards(f"{hub.folder}/train{pattern}")
    source = f"{PLACE}{revision}/train{pattern}"
    index = load_index(source)
    assert index.fingerprint == expected.fingerprint
    images = ImageSet(source, index)
    on_disk = ImageSet(hub.folder / "train", expected)
    assert [images.data(n) for n in range(9)] == [on_disk.data(n) for n in range(9)]
    assert check(source)[1] == []


def test_only_the_bytes_asked_for_are_read(hub):
    storage = Storage(f"{PLACE}/train")
    whole = (hub.folder / "train/000000.tar").read_bytes()
    ranges = [Range("000000.tar", 10, 20), Range("000000.tar", 5, 7), Range("000000.tar", 900, 1)]
    assert storage.read_many(ranges) == [whole[10:30], whole[5:12], whole[900:901]]
    assert storage.size("000000.tar") == len(whole)
    (request,) = [request for request in hub.requests if "bytes=" in request]
    assert request.endswith("bytes=5-900")


def test_the_hub_is_told_from_a_data_set_of_its_library():
    assert parse_source(f"{PLACE}@v1/train[:0.5]").kind == "shards"
    assert parse_source(f"{PLACE}/train/{{000..009}}.tar").base == f"{PLACE}/train"
    assert parse_source("hf:photos").kind == "hf"
    assert parse_source("hf:user/name#train").kind == "hf"
    assert from_folder(f"{PLACE}/train", "/data") == f"{PLACE}/train"
    for place in ("hf://", "hf://user/photos", "hf://datasets/user", "hf://datasets/*/a"):
        with raises("data.bad_source", "hf://datasets/USER/NAME"):
            parse_source(place)


def test_the_token_of_the_environment_is_sent_to_the_hub_alone(hub, monkeypatch, tmp_path):
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("DISTAP_REDIRECTS", "127.0.0.1")
    with web_server(hub.folder / "train", HubServer) as other:
        hub.faults = [f"{other.url}/elsewhere"]
        with raises("storage.missing", "000000.tar"):
            Storage(f"{PLACE}/train").read("000000.tar", 0, 600)
        assert set(hub.tokens) == {"Bearer secret"}
        assert other.tokens == [""]


def test_what_is_configured_for_web_servers_is_not_sent_to_the_hub(hub, monkeypatch):
    secret = {"Authorization": "Basic c2VjcmV0"}
    options = {"client_kwargs": {"headers": secret}, "headers": secret}
    monkeypatch.setitem(fsspec.config.conf, "https", options)
    assert len(Storage(f"{PLACE}/train").read("000000.tar", 0, 600)) == 600
    assert set(hub.tokens) == {""}


def test_a_redirect_elsewhere_is_refused(hub):
    with web_server(hub.folder) as other:
        hub.faults = [other.url]
        with raises("storage.bad_redirect", "DISTAP_REDIRECTS"):
            Storage(f"{PLACE}/train").read("000000.tar", 0, 600)
        assert not other.requests


def test_a_data_set_that_needs_a_token_is_refused_at_once(hub, monkeypatch):
    monkeypatch.setattr(remotes, "ATTEMPTS", 3)
    hub.token = "secret"
    for storage in (Storage(f"{PLACE}/train"), Storage(f"{PLACE}@v1/train")):
        hub.tokens.clear()
        with raises("storage.refused", f"{storage.base}/000000.tar", "401"):
            storage.read("000000.tar", 0, 1)
        assert len(hub.tokens) == 1
        with raises("storage.refused", "401"):
            storage.names("*.tar")


def test_a_gated_data_set_is_refused_at_once(hub):
    hub.is_gated = True
    with raises("storage.refused", "000000.tar", "403"):
        Storage(f"{PLACE}/train").size("000000.tar")


@pytest.mark.parametrize(
    "place", [f"{PLACE}/train/none", f"{PLACE}/none", f"{PLACE}@v2/train", f"{PLACE}-2/train"]
)
def test_what_is_not_there_is_missing(hub, place):
    storage = Storage(place)
    with raises("storage.missing", f"{place}/a.tar", kind=MissingFileError):
        storage.size("a.tar")
    with raises("storage.missing", f"{place}/a.tar", kind=MissingFileError):
        storage.read("a.tar", 0, 9)
    with raises("storage.missing", f"{place}/a.tar", kind=MissingFileError):
        storage.read_many([Range("a.tar", 0, 9)])


def test_a_hub_that_is_not_there_is_unreachable(monkeypatch):
    monkeypatch.setattr(remotes, "ATTEMPTS", 2)
    fsspec.config.conf["hf"] = {"endpoint": "http://127.0.0.1:9"}
    with raises("storage.unreachable", f"{PLACE}/a.tar", "2", kind=UnreachableError):
        Storage(PLACE).size("a.tar")


def test_an_index_is_written_to_the_hub_by_those_who_may(hub, monkeypatch):
    (hub.folder / "train/index.npz").unlink()
    with pytest.raises(DistapError, match="403"):
        index_shards(f"{PLACE}/train")
    assert not (hub.folder / "train/index.npz").exists()
    monkeypatch.setenv("HF_TOKEN", hub.writer)
    index, _ = index_shards(f"{PLACE}/train")
    assert load_index(f"{PLACE}/train").fingerprint == index.fingerprint


def test_a_command_finds_the_hub_by_the_environment(hub):
    command = [sys.executable, "-m", "distap.cli", "data", "check", f"{PLACE}/train"]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "secret"}
    hub.token = "secret"
    checked = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "9 images in 3 shards, all sound" in checked.stdout
