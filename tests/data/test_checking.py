import io
import shutil
import tarfile
from collections import Counter

import numpy as np
from images import write_images
from PIL import Image
from servers import web_server

from benchmarks.photos import pack
from distap.data.loading.reader import ImageSet, check
from distap.data.shards.index import load_index


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
