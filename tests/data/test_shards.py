import io
import tarfile

import numpy as np
import pytest
import webdataset
from PIL import Image

from distap.data.shards.index import load_index
from distap.data.shards.indexing import index_shards
from distap.errors import DistapError


def png(colour=(200, 10, 10)):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_shards_that_webdataset_writes_are_indexed(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(3):
            writer.write({"__key__": f"sub/{number}", "png": png(), "cls": 5 * number, "json": {"more": 1}})
    index, skipped = index_shards(tmp_path)
    assert index.key.tolist() == ["sub/0", "sub/1", "sub/2"]
    assert index.class_name.tolist() == ["0", "5", "10"]
    assert index.label.tolist() == [0, 1, 2]
    assert not skipped


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", png()), ("a.cls", b"cat")], "label 'cat' of key 'a' is no integer"),
        ([("a.png", png())], "key 'a' has no .cls member"),
        ([("a.cls", b"1")], "key 'a' needs one image member"),
        ([("a.png", png()), ("a.jpg", png()), ("a.cls", b"1")], "key 'a' needs one image member"),
        ([("a.png", png()), ("b.png", png()), ("a.cls", b"1"), ("b.cls", b"1")], "key 'a' has no .cls"),
        (
            [("a.png", png()), ("a.cls", b"1"), ("b.png", png()), ("b.cls", b"1"), ("a.json", b"{}")],
            "key 'a' do not stand together",
        ),
        ([("a.png", png()), ("a.png", png()), ("a.cls", b"1")], "two members .png"),
    ],
)
def test_an_incomplete_sample_is_refused_by_shard_and_key(tmp_path, members, message):
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(DistapError, match=rf"x\.tar: .*{message}"):
        index_shards(tmp_path)


def test_every_flipped_bit_in_a_header_is_refused(shards):
    shard = shards / "000000.tar"
    whole = bytearray(shard.read_bytes())
    with tarfile.open(shard) as tar:
        headers = [member.offset for member in tar]
    generator = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(whole)
        byte = int(generator.choice(headers)) + int(generator.integers(512))
        damaged[byte] ^= 1 << int(generator.integers(8))
        shard.write_bytes(damaged)
        with pytest.raises(DistapError, match=r"000000\.tar"):
            index_shards(shards)


@pytest.mark.parametrize("cut", [512, 1024, 1536, 5120, 10240, 10241, 12000])
def test_a_tar_that_was_cut_short_is_refused(shards, cut):
    shard = shards / "000000.tar"
    whole = shard.read_bytes()
    end = len(whole.rstrip(b"\0"))
    shard.write_bytes(whole[: max(end - end % 512 + 512 - cut, 512)])
    with pytest.raises(DistapError, match=r"000000\.tar: "):
        index_shards(shards)


def test_data_behind_the_end_of_a_tar_is_refused(shards):
    shard = shards / "000000.tar"
    shard.write_bytes(shard.read_bytes() + b"x" * 512)
    with pytest.raises(DistapError, match="no proper end"):
        index_shards(shards)


def test_a_missing_or_changed_shard_is_found_when_the_index_is_loaded(shards):
    shard = shards / "000001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-512])
    with pytest.raises(DistapError, match=r"000001\.tar: .* when it was indexed"):
        load_index(shards)
    shard.unlink()
    with pytest.raises(DistapError, match=r"000001\.tar: the shard is missing"):
        load_index(shards)


def test_a_missing_or_damaged_index_is_named(tmp_path, shards):
    with pytest.raises(DistapError, match="nowhere: no such data set"):
        load_index(tmp_path / "nowhere")
    path = shards / "index.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DistapError, match=r"index\.npz: not a readable index"):
        load_index(shards)
    path.unlink()
    with pytest.raises(DistapError, match=r"no index\.npz in it"):
        load_index(shards)


def test_a_folder_that_cannot_be_looked_at_is_no_traceback():
    with pytest.raises(DistapError, match="a: cannot be looked at: File name too long"):
        load_index(300 * "a")
