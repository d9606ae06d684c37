import io
import math
import shutil
import tarfile
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from images import write_images
from PIL import Image
from servers import web_server

from benchmarks.photos import pack
from distap.data.loading.checking import check
from distap.data.loading.reader import ImageSet
from distap.data.shards.index import load_index
from distap.storage import files
from distap.storage.locations import parse_source


def listed(checked):
    return [(damage.name, damage.reason.partition(":")[0]) for damage in checked[1]]


def reasons(checked):
    return Counter(reason for _, reason in listed(checked))


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def jpeg(size=(64, 48)):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def test_every_flipped_bit_anywhere_is_found(shards):
    generator = np.random.default_rng(0)
    shard = shards / "000002.tar"
    whole = shard.read_bytes()
    for place in generator.integers(0, len(whole), 40).tolist():
        flip(shard, place)
        assert reasons(check(shards))["shard_sha256"] == 1
        shard.write_bytes(whole)


def test_a_changed_label_is_told_from_a_changed_image(tmp_path):
    pack(write_images(tmp_path / "images", {"a": 2, "b": 2}), tmp_path / "out")
    shard = tmp_path / "out" / "000000.tar"
    with tarfile.open(shard) as tar:
        label = next(member.offset_data for member in tar if member.name.endswith(".cls"))
    flip(shard, label)
    (damage,) = check(tmp_path / "out")[1]
    assert damage.reason.startswith("shard_sha256: ")
    assert "no image, but the data around them, such as labels" in damage.reason


def test_the_check_goes_on_after_missing_and_cut_shards(shards):
    index = load_index(shards)
    (shards / "000000.tar").unlink()
    cut = int(index.offset[6])
    shard = shards / "000001.tar"
    shard.write_bytes(shard.read_bytes()[: cut + 10])
    flip(shards / "000002.tar", int(index.offset[8]) + 30)
    where = ImageSet(shards, index).where
    assert listed(check(shards, workers=2)) == [
        ("000000.tar", "shard_missing"),
        ("000001.tar", "shard_size"),
        (where(6), "truncated"),
        (where(7), "truncated"),
        ("000002.tar", "shard_sha256"),
        (where(8), "crc_mismatch"),
    ]
    (shards / "000002.tar").unlink()
    (shards / "000002.tar").mkdir()
    assert listed(check(shards))[-1] == ("000002.tar", "shard_unreadable")


def test_shards_that_the_index_does_not_have_are_named(shards):
    shutil.copy(shards / "000000.tar", shards / "new.tar")
    assert listed(check(shards)) == [("new.tar", "shard_not_indexed")]
    for shard in shards.glob("*.tar"):
        shard.unlink()
    assert reasons(check(shards)) == {"shard_missing": 3}


def test_images_that_were_packed_damaged_are_listed_by_reason(tmp_path, image_folder):
    whole = (image_folder / "car" / "0.png").read_bytes()
    for name, data in {
        "cut.png": whole[: len(whole) // 2] + whole[-12:],  # with its end mark
        "noise.png": whole[:60] + bytes(400) + whole[-12:],
        "sound.jpg": jpeg(),
    }.items():
        (image_folder / "car" / name).write_bytes(data)
    pack(image_folder, tmp_path / "out")
    assert listed(check(tmp_path / "out")) == [
        ("000000.tar:car/cut.png", "truncated"),
        ("000000.tar:car/noise.png", "decode_error"),
    ]


def test_a_data_set_behind_a_url_is_checked_as_one_on_disk(shards):
    index = load_index(shards)
    flip(shards / "000002.tar", int(index.offset[8]) + 30)
    (shards / "000000.tar").unlink()
    with web_server(shards) as server:
        checked = check(server.url, workers=2)
        assert listed(checked) == listed(check(shards))
        assert reasons(checked) == {"shard_missing": 1, "shard_sha256": 1, "crc_mismatch": 1}
        server.faults = ["", *["503"] * 5]
        assert "shard_unreadable" in reasons(check(server.url))


def test_a_shard_behind_a_url_is_read_once(shards):
    with web_server(shards) as server:
        assert listed(check(server.url)) == []
        assert server.asked() == 1 + 2 * 3  # the index, a byte of each shard, and each shard


def test_a_server_that_cannot_send_a_part_of_a_shard_is_no_sound_one(shards):
    with web_server(shards) as server:
        server.ranges = False
        checked = check(server.url)
        assert reasons(checked) == {"shard_unreadable": 3}
        assert "ignores Range" in checked[1][0].reason


@pytest.mark.parametrize("place", [-1, 20])
def test_bytes_that_change_on_their_way_once_are_no_damage(shards, monkeypatch, place):
    index = load_index(shards)
    # The last byte of a request is changed: of an image, or of what is around them.
    block = int(index.offset[0]) + place
    monkeypatch.setattr(files, "REQUEST_BYTES", block)
    with web_server(shards) as server:
        index_blocks = math.ceil((shards / "index.npz").stat().st_size / block)
        server.faults = [""] * index_blocks + ["", "flip"]
        assert listed(check(server.url)) == []
        assert not server.faults


@pytest.mark.parametrize("is_remote", [False, True])
def test_images_that_share_bytes_are_checked(shards, is_remote):
    index = load_index(shards)
    offset = index.offset.copy()
    size = index.size.copy()
    crc32 = index.crc32.copy()
    shard = (shards / "000000.tar").read_bytes()
    offset[1] = offset[0]  # the same file
    size[1] = size[0]
    size[0] = offset[2] + size[2] - offset[0]  # to the end of another
    offset[3] = offset[2] + 1  # begins within one, and is no image
    size[3] = size[2] - 1
    for sample in range(4):
        crc32[sample] = zlib.crc32(shard[offset[sample] :][: size[sample]])
    crc32[2] ^= 1
    replace(index, offset=offset, size=size, crc32=crc32).save(parse_source(str(shards)))
    where = ImageSet(shards, index).where
    with web_server(shards) as server:
        checked = check(server.url if is_remote else shards)
    assert listed(checked) == [(where(2), "crc_mismatch"), (where(3), "decode_error")]
