import bz2
import gzip
import io
import itertools
import json
import lzma
import mmap
import shutil
import tarfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
import webdataset
from PIL import Image
from raising import raises

from benchmarks.photos import pack
from distap.data.shards.image_files import ImageFile
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import load_index
from distap.data.shards.index_rules import COLUMNS
from distap.data.shards.indexing import index_shards
from distap.data.shards.tar import TAR_BLOCK, read_samples
from distap.errors import DistapError
from distap.storage import files

FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT, "ustar": tarfile.USTAR_FORMAT}
LONG = "a-folder-with-a-name-of-some-length/" * 3


def png(shade=0):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), (shade, 10, 10)).save(buffer, "PNG")
    return buffer.getvalue()


def member(name, data=b"", **fields):
    """A header with contents, as tarfile writes them."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def archive(members, kind="ustar", end=True):
    buffer = io.BytesIO()
    for info, data in members:
        buffer.write(info.tobuf(FORMATS[kind], "utf-8", "surrogateescape"))
        buffer.write(data + bytes(-len(data) % TAR_BLOCK))
    return buffer.getvalue() + (bytes(2 * TAR_BLOCK) if end else b"")


def sample_members(name, label=1, shade=0):
    return [member(f"{name}.cls", str(label).encode()), member(f"{name}.png", png(shade))]


def samples(data):
    """What the strict pass finds: key, label and CRC-32 of each sample."""
    samples_read = read_samples(io.BytesIO(data), len(data), "x.tar")
    return [s if isinstance(s, Skipped) else (s.key, s.label, s.crc32) for s in samples_read]


def refusal(data):
    with raises("data.damaged_shard", "x.tar") as error:
        samples(data)
    return str(error.value)


def sound_archives(tmp_path):
    """Tars of eight samples by everything that writes shards, with short and long names."""
    written = {}
    images = []
    for number in range(8):
        path = tmp_path / "images" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(30 * number))
        images.append(ImageFile(path, f"class {number % 3}"))
    pack(images, tmp_path / "packed")
    written["ours"] = (tmp_path / "packed" / "000000.tar").read_bytes()
    for name, prefix in (("webdataset", ""), ("webdataset, long names", LONG + "é")):
        path = tmp_path / "webdataset.tar"
        with webdataset.TarWriter(str(path)) as writer:
            for number in range(8):
                writer.write(
                    {"__key__": f"{prefix}{number}", "png": png(30 * number), "cls": number}
                )
        written[name] = path.read_bytes()
    for kind, prefix in itertools.product(FORMATS, ("", LONG)):
        members = [member for n in range(8) for member in sample_members(f"{prefix}{n}", n, 30 * n)]
        written[f"{kind}, {len(prefix)}"] = archive(members, kind)
    return written


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return sound_archives(tmp_path_factory.mktemp("sound"))


def headers(data):
    """Offsets of all bytes that are no file's contents: headers, and the blocks that carry long
    names.
    """
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        contents = np.zeros(len(data), dtype=bool)
        last = 0
        for info in tar:
            contents[info.offset_data : info.offset_data + info.size + -info.size % TAR_BLOCK] = (
                True
            )
            last = info.offset_data + info.size + -info.size % TAR_BLOCK
    return np.flatnonzero(~contents[:last])


def test_every_writer_s_shards_are_read_whole(sound):
    for name, data in sound.items():
        read = samples(data)
        assert [label for _, label, _ in read] == (
            [n % 3 for n in range(8)] if name == "ours" else list(range(8))
        ), name
        assert [crc for _, _, crc in read] == [zlib.crc32(png(30 * n)) for n in range(8)], name


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_to_a_shard_is_an_error_that_names_it_or_loses_nothing(sound, damage):
    generator = np.random.default_rng(0)
    refused = 0
    tried = 0
    for data in sound.values():
        expected = samples(data)
        places = headers(data)
        for _ in range(2000 // len(sound) if damage == "flip" else 500 // len(sound)):
            damaged = bytearray(data)
            if damage == "flip":
                damaged[int(generator.choice(places))] ^= 1 << int(generator.integers(8))
            else:  # half of the cuts are between two blocks
                del damaged[
                    int(generator.integers(len(data) // TAR_BLOCK)) * TAR_BLOCK
                    + generator.choice([0, 200]) :
                ]
            tried += 1
            try:
                assert samples(bytes(damaged)) == expected
            except DistapError as error:
                assert str(error).startswith("x.tar: ")
                refused += 1
    # What is left are cuts in the zeros at the end, and bits that no reader needs, as in times that
    # PAX headers add.
    assert refused > (0.8 if damage == "flip" else 0.6) * tried
    assert tried > (1900 if damage == "flip" else 450)


def with_checksum(block):
    """A header whose plain checksum is right."""
    block = bytearray(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def test_what_tarfile_takes_for_the_end_is_refused():
    whole = archive([*sample_members("a"), *sample_members("b")])
    third = 2 * (TAR_BLOCK + TAR_BLOCK)  # where b begins
    for junk in (
        b"x" * TAR_BLOCK,
        bytes(TAR_BLOCK),
        whole[third : third + 100] + bytes(TAR_BLOCK - 100),
    ):
        damaged = whole[:third] + junk + whole[third + TAR_BLOCK :]
        assert "damaged tar: after 'a.png', byte" in refusal(damaged)
    with tarfile.open(
        fileobj=io.BytesIO(whole[:third] + bytes(TAR_BLOCK) + whole[third + TAR_BLOCK :])
    ) as tar:
        assert len(tar.getmembers()) == 2  # without a word


@pytest.mark.parametrize(
    "kind", ["LNKTYPE", "SYMTYPE", "CHRTYPE", "BLKTYPE", "FIFOTYPE", "CONTTYPE", "GNUTYPE_SPARSE"]
)
def test_links_devices_and_files_with_holes_are_refused(kind):
    evil = member("a.png", type=getattr(tarfile, kind), linkname="/etc/passwd")
    assert "after 'a.png', byte 512: no plain file" in refusal(
        archive([evil, *sample_members("b")])
    )


@pytest.mark.parametrize(
    "size", [b"\x80" + (2**40).to_bytes(11, "big"), b"\xff" * 11 + b"\x00", b"77777777777\0"]
)
def test_a_size_that_cannot_be_is_refused(size):
    info, _ = member("a.png", b"x")
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = size
    refusal(with_checksum(block) + bytes(3 * TAR_BLOCK))


def pax(*records):
    """The contents of a PAX header for the next member."""
    lines = b""
    for key, value in records:
        body = b" " + key + b"=" + value + b"\n"
        length = next(n for n in range(len(body), len(body) + 5) if len(str(n)) + len(body) == n)
        lines += str(length).encode() + body
    return lines


@pytest.mark.parametrize(
    "members",
    [
        [member("x", pax((b"size", b"0")), type=tarfile.XHDTYPE), *sample_members("a")],
        [member("x", pax((b"size", b"0")), type=tarfile.XGLTYPE), *sample_members("a")],
        [member("x", pax((b"GNU.sparse.map", b"0,1")), type=tarfile.XHDTYPE), *sample_members("a")],
        [member("x", pax((b"path", b"\xff.png")), type=tarfile.XHDTYPE), *sample_members("a")],
        [member("L", b"b.png\0", type=tarfile.GNUTYPE_LONGNAME)],
        [member("L", b"\xff.png\0", type=tarfile.GNUTYPE_LONGNAME), *sample_members("a")],
        [member("folder", b"contents", type=tarfile.DIRTYPE), *sample_members("a")],
        [member("x", pax((b"comment", b"a")), type=tarfile.XHDTYPE)] * 2000,
    ],
)
def test_a_header_that_changes_more_than_a_name_or_lacks_its_file_is_refused(members):
    assert "damaged tar: after " in refusal(archive(members))


def test_folders_and_harmless_pax_headers_are_passed_over():
    whole = archive(
        [
            member("x", pax((b"comment", b"made by git")), type=tarfile.XGLTYPE),
            member("folder", type=tarfile.DIRTYPE),
            member("x", pax((b"mtime", b"1.5"), (b"path", b"folder/a.cls")), type=tarfile.XHDTYPE),
            member("short", b"3"),
            member("folder/a.png", png()),
        ]
    )
    assert samples(whole) == [("folder/a", 3, zlib.crc32(png()))]


def test_data_behind_the_end_is_refused():
    assert "neither a file nor the end" in refusal(archive(sample_members("a")) + b"x" * TAR_BLOCK)


@pytest.mark.parametrize(("packed", "remedy"), [(gzip, "gunzip"), (lzma, "unxz"), (bz2, "bunzip2")])
def test_a_compressed_shard_is_told_from_a_damaged_one(packed, remedy, tmp_path):
    data = packed.compress(archive(sample_members("a")))
    assert (
        f"compressed; images are found by their offset, so unpack it to a plain .tar by {remedy}"
        in refusal(data)
    )
    (tmp_path / "0.tar.gz").write_bytes(data)
    with raises("data.empty", "0.tar.gz"):
        index_shards(tmp_path)


def test_what_macos_and_other_systems_add_to_a_tar_is_passed_over():
    mac = [member(f"./._a.{field}", b"\0\5\x16\7 attributes") for field in ("cls", "png")]
    members = [member("./a.CLS", b"3"), member("./a.PNG", png())]
    mixed = [entry for pair in zip(mac, members, strict=True) for entry in pair]
    assert samples(archive(mixed)) == [("./a", 3, zlib.crc32(png()))]
    assert "key './' needs one image member; it has ._a.png" in refusal(
        archive([member("./._a.png", png())])
    )


@pytest.mark.parametrize("word", ["-1", "nan", "None", ""])
def test_an_image_without_a_class_is_left_out(word):
    read = samples(archive([*sample_members("a", word), *sample_members("b")]))
    assert [item[0] for item in read] == ["a", "b"]
    assert read[0] == Skipped("a", f"images without a class: its .cls is {word!r}")


@pytest.mark.parametrize("key", ["a\n2026-11-25 ERROR forged", "a\x1b[2J", "a" * 5000, "é" * 2049])
def test_a_key_that_is_no_line_of_text_is_refused_by_its_beginning(key):
    members = [(f"{key}.png", png()), (f"{key}.cls", b"1")]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            tar.addfile(member(name, data)[0], io.BytesIO(data))
    message = refusal(buffer.getvalue())
    assert (
        f"key {key[:60]!r} of {len(key):,} letters is not one line of text of at most 4,096 bytes"
        in message
    )
    assert len(message) < 400 and "\n" not in message


def test_a_header_of_endless_length_is_refused_before_it_is_read():
    info = tarfile.TarInfo("x")
    info.size = 2**29
    info.type = tarfile.XHDTYPE
    assert "a member or header of 536,870,912 bytes" in refusal(info.tobuf() + bytes(2**20))


def test_all_damaged_shards_are_listed(shards):
    shutil.copy(shards / "000000.tar", shards / "000003.tar")
    for name in ("000000.tar", "000002.tar"):
        (shards / name).write_bytes((shards / name).read_bytes()[:-2000])
    with raises("data.damaged_shard", "2", "4") as error:
        index_shards(shards)
    lines = str(error.value).splitlines()[1:]
    assert [
        line.startswith(str(shards / name))
        for line, name in zip(lines, ("000000.tar", "000002.tar"), strict=True)
    ]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [member("a.png", png()), member("a.cls", b"cat")],
            "label 'cat' of key 'a' is no integer of 0 or more",
        ),
        ([member("a.png", png()), member("a.cls", b"9" * 5000)], "is no integer of 0 or more"),
        ([member("a.png", png())], "key 'a' has no .cls member"),
        ([member("a.cls", b"1")], "key 'a' needs one image member"),
        (sample_members("22.05.s0"), "rename files that have others"),
        ([member("a.jpg", png()), *sample_members("a")], "key 'a' needs one image member"),
        (
            [member("a.png", png()), *sample_members("b"), member("a.cls", b"1")],
            "key 'a' has no .cls",
        ),
        (
            [*sample_members("a"), *sample_members("b"), member("a.json", b"{}")],
            "key 'a' are not adjacent",
        ),
        ([member("a.png", png()), *sample_members("a")], "two members .png"),
    ],
)
def test_an_incomplete_sample_is_refused_by_shard_and_key(members, message):
    assert message in refusal(archive(members))


def test_samples_without_a_readable_image_are_left_out_and_listed(tmp_path):
    members = [
        *sample_members("a"),
        member("b.cls", b"1"),
        member("b.png", b"no image"),
        *sample_members("c"),
    ]
    (tmp_path / "x.tar").write_bytes(archive(members))
    for _ in range(2):
        index, skipped = index_shards(tmp_path)
        assert index.key.tolist() == ["a", "c"]
        assert [(image.name, image.reason.partition(":")[0]) for image in skipped] == [
            ("x.tar:b", "decode_error")
        ]
        assert isinstance(skipped[0], Skipped)


def test_coarser_classes_are_read_from_the_names_of_classes(shards):
    plain = load_index(shards)
    assert plain.class_levels.shape == (3, 0)
    (shards / "classes.txt").write_text("apple\tfruit\nbear\ncar\tthing\n")
    index, _ = index_shards(shards)
    assert index.class_name.tolist() == ["apple", "bear", "car"]
    assert load_index(shards).class_levels.tolist() == [["fruit"], [""], ["thing"]]
    assert index.fingerprint != plain.fingerprint


def with_levels(key, label, **levels):
    return [*sample_members(key, label=label), member(f"{key}.json", json.dumps(levels).encode())]


def test_coarser_classes_are_read_from_json_members(tmp_path):
    first = [
        *with_levels("a", 7, genus="Pica", family="Corvidae"),
        *with_levels("b", 2, genus="Parus", family=None),
    ]
    (tmp_path / "0.tar").write_bytes(archive(first))
    (tmp_path / "1.tar").write_bytes(archive(with_levels("c", 7, genus="Pica", family="Corvidae")))
    index, _ = index_shards(tmp_path, levels=["genus", "family"])
    assert index.class_levels.tolist() == [["Parus", ""], ["Pica", "Corvidae"]]
    (tmp_path / "1.tar").write_bytes(
        archive(with_levels("c", 7, genus="Corvus", family="Corvidae"))
    )
    with raises("data.crossing_levels", "1.tar", "c", "7", "0", "Corvus", "Pica"):
        index_shards(tmp_path, levels=["genus", "family"])
    with raises("data.damaged_shard", "a", "json", "KeyError"):
        index_shards(tmp_path, levels=["order"])


@pytest.mark.parametrize("name", ["apple", ""])
def test_a_class_name_that_an_evaluation_could_not_tell_apart_is_refused_with_its_line(
    shards, name
):
    (shards / "classes.txt").write_text(f"apple\tfruit\n{name}\tcompany\ncar\tthing\n")
    with raises("data.wrong_class_name", "classes.txt", "2"):
        index_shards(shards)


def test_patterns_in_one_folder_have_an_index_each(shards):
    first, _ = index_shards(f"{shards}/00000[01].tar")
    second, _ = index_shards(f"{shards}/{{000002..000002}}.tar")
    assert len(load_index(shards)) == 9
    assert len(load_index(f"{shards}/00000[01].tar")) == len(first) == 8
    assert len(load_index(f"{shards}/{{000002..000002}}.tar")) == len(second) == 1


def test_shards_in_folders_below_are_named_by_their_path(tmp_path, shards):
    for letter in "ab":
        (tmp_path / "parts" / letter).mkdir(parents=True)
    shutil.copy(shards / "000000.tar", tmp_path / "parts" / "a" / "0.tar")
    shutil.copy(shards / "000002.tar", tmp_path / "parts" / "b" / "0.tar")
    source = f"{tmp_path}/parts/{{a,b}}/*.tar"
    index, _ = index_shards(source)
    assert (
        load_index(source).shard_name.tolist()
        == index.shard_name.tolist()
        == ["a/0.tar", "b/0.tar"]
    )
    # of which a knows nothing: both have a class 0
    names = tmp_path / "parts" / "b" / "classes.txt"
    names.write_text("cat\ndog\nhen\n")
    with raises("data.several_numberings", "b/classes.txt"):
        index_shards(source)
    shutil.copy(names, tmp_path / "parts")
    assert "cat" in index_shards(source)[0].class_name


def test_a_missing_or_changed_shard_is_found_when_the_index_is_loaded(shards):
    shard = shards / "000001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-512])
    with raises("data.changed_shard", "000001.tar"):
        load_index(shards)
    shard.unlink()
    with raises("storage.missing", "000001.tar"):
        load_index(shards)


def test_a_missing_or_damaged_index_is_named(tmp_path, shards):
    with raises("data.missing", "nowhere"):
        load_index(tmp_path / "nowhere")
    (tmp_path / "list.csv").write_text("path,label")
    with raises("data.no_shards", "list.csv"):
        load_index(tmp_path / "list.csv")
    path = shards / "index.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with raises("data.damaged_index", "index.npz"):
        load_index(shards)
    path.unlink()
    with raises("data.missing_index", "index.npz"):
        load_index(shards)


def mapped_by(column):
    """What holds the memory of a column."""
    while isinstance(column, np.ndarray):
        column = column.base
    return column.obj


def test_the_columns_of_a_large_index_are_views_of_its_mapped_file(shards, monkeypatch):
    monkeypatch.setattr(files, "LARGE_FILE", 0)
    index = load_index(shards)
    written = index_shards(shards)[0]
    for name in COLUMNS:
        assert isinstance(mapped_by(getattr(index, name)), mmap.mmap), name
        assert np.array_equal(getattr(index, name), getattr(written, name)), name
    assert index.fingerprint == written.fingerprint
    labels = index.label.tolist()
    replace(written, label=written.label[::-1]).save(shards)
    assert load_index(shards).label.tolist() == labels[::-1]
    assert index.label.tolist() == labels  # of whoever has it open
