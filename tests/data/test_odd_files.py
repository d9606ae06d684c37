"""A drawer of odd files: the fate of each is known, and told."""

import os
import re
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from commands import distap
from images import indexed_images
from PIL import Image
from raising import raises

from benchmarks.photos import pack, photo
from distap.data.images.formats import FORMAT_BY_SUFFIX, missing_reader
from distap.data.loading.reader import open_images
from distap.data.shards.image_files import list_images
from distap.data.shards.index import load_index
from distap.errors import DistapError

PACKED = "packed"
NOBODY = 65_534


def save(path: Path, seed: int, file_format: str | None = None, **options) -> None:
    photo(60, 40, seed=seed).save(path, file_format, **options)


def header_of(width: int, height: int) -> bytes:
    """A PNG that says that it is so large."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IEND", b""))
    whole = ((len(data), tag + data) for tag, data in chunks)
    fields = (
        struct.pack(">I", size) + data + struct.pack(">I", zlib.crc32(data)) for size, data in whole
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(fields)


@pytest.fixture
def drawer(tmp_path):
    """The folder, and by the path of each file in it either PACKED or the beginning of the reason
    against it.
    """
    folder = tmp_path / "drawer"
    cat = folder / "cat"
    for name in ("cat/.cache", "dog", "ghost", "empty"):
        (folder / name).mkdir(parents=True)
    fates: dict[str, str] = {}

    def put(name: str, fate: str, data: bytes | None = None) -> Path:
        fates[name] = fate
        if data is not None:
            (folder / name).write_bytes(data)
        return folder / name

    save(put("cat/кот 0.jpg", PACKED), 0)
    save(put("cat/SHOUT.JPEG", PACKED), 1, "JPEG")
    photo(60, 40, seed=2).convert("CMYK").save(put("cat/cmyk.jpg", PACKED))
    Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60)).save(
        put("cat/sixteen bits.png", PACKED)
    )
    save(put("cat/moving.gif", PACKED), 3, save_all=True, append_images=[photo(60, 40, seed=4)])
    photo(60, 40, seed=5).quantize(8).save(put("cat/palette.png", PACKED), transparency=3)
    exif = Image.Exif()
    exif[0x0112] = 6
    save(put("cat/turned.jpg", PACKED), 6, exif=exif)
    Image.new("RGB", (1, 1), "red").save(put("cat/one pixel.png", PACKED))
    save(put("cat/without extension", PACKED), 7, "JPEG")
    save(put("cat/of 2020.01.02", PACKED), 8, "WEBP")
    save(put("cat/narrow\u202fspace.png", PACKED), 9)
    save(put("cat/line\nbreak.png", PACKED), 10)
    save(put(os.fsdecode(b"cat/latin-\xe9.png"), PACKED), 11)
    save(put("cat/wrongly named.jpg", PACKED), 12, "PNG")
    newer = {"jp2": "JPEG2000", "avif": "AVIF", "heic": "HEIF"}
    for number, (suffix, name) in enumerate(newer.items()):
        missing = missing_reader(FORMAT_BY_SUFFIX[f".{suffix}"])
        if missing:
            put(f"cat/new.{suffix}", f".{suffix}, no reader: {missing}", b"any")
        else:
            save(put(f"cat/new.{suffix}", PACKED), 13 + number, name)

    whole = (cat / "SHOUT.JPEG").read_bytes()
    put("cat/cut.jpg", "truncated", whole[: len(whole) // 2])
    put("cat/nothing in it.png", "empty files", b"")
    put("cat/text.png", "decode_error", b"no image")
    put("cat/huge.png", "too_large", header_of(50_000, 50_000))
    put("cat/README", "without an extension, and by their content no images", b"read me")
    put("cat/notes.txt", ".txt, no format", b"notes")
    put("cat/film.MP4", ".mp4, no format", b"\0\0\0\x18ftypmp42")
    put("cat/Thumbs.db", ".db, no format", b"")
    put("cat/.DS_Store", "hidden files", b"")
    put("cat/.cache/small.jpg", "hidden files", whole)
    put("cat/._SHOUT.JPEG", "._ files of macOS", b"\0\5\x16\7")
    put("cat/gone.jpg", "links to nothing").symlink_to(folder / "nowhere.jpg")
    put("cat/itself.jpg", "links to nothing").symlink_to(cat / "itself.jpg")
    put("cat/above", "links to a folder that is listed already").symlink_to(folder)
    os.mkfifo(put("cat/pipe.jpg", "no regular files"))
    put("dog/the same.jpg", PACKED, (cat / "кот 0.jpg").read_bytes())
    put("dog/again.jpg", PACKED, (cat / "cmyk.jpg").read_bytes())
    save(put("dog/other.bmp", PACKED), 20)
    put("ghost/damaged.png", "decode_error", b"no image")
    put("loose.jpg", "loose images", whole)
    put("list.csv", ".csv, no format", b"")
    return folder, fates


def files_below(folder: Path) -> set[str]:
    """Every file, and every link, by its path within the folder."""
    results = set()
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        results |= {str(Path(parent, name).relative_to(folder)) for name in (*names, *links)}
    return results


def escaped(name: str) -> str:
    return name.replace("\n", "\\n").replace("\udce9", "\\udce9")


def test_each_file_of_the_drawer_is_packed_or_told(drawer, tmp_path):
    folder, fates = drawer
    index, left_out = pack(folder, tmp_path / "shards")
    message = {str(Path(name).relative_to(folder)): reason for name, reason in left_out}
    assert message.pop("empty") == "class folders without an image"
    assert len(left_out) == len(message) + 1
    wrong = {
        name: reason
        for name, reason in message.items()
        if not reason.startswith(fates.get(name, "-"))
    }
    assert not wrong
    assert set(index.path.tolist()) == {
        escaped(name) for name, fate in fates.items() if fate == PACKED
    }
    assert len(index) + len(message) == len(fates)
    assert files_below(folder) == set(fates)
    assert index.class_name.tolist() == ["cat", "dog"]


def test_every_reason_is_printed_with_a_number_and_an_example(
    drawer, tmp_path, monkeypatch, capsys
):
    folder, fates = drawer
    output = tmp_path / "shards"
    table = tmp_path / "left out.csv"
    monkeypatch.setenv("COLUMNS", "400")
    assert distap(monkeypatch, "data", "pack", folder, output, "--left-out", table) == 0
    printed = "".join(capsys.readouterr())
    message = re.findall(r"left out: ([\d,]+) (.+) \((.+)\)$", printed, re.MULTILINE)
    # The count of files that are packed or told is that of all files; an empty class is told as
    # well.
    packed = int(re.search(r"([\d,]+) images of 2 classes", printed)[1])
    assert packed + sum(int(count) for count, *_ in message) == len(fates) + 1
    for reason in {fate for fate in fates.values() if fate != PACKED}:
        assert any(item.startswith(reason) for _, item, _ in message), reason
    assert "no image is left of 1 classes: ghost" in printed
    alike = re.search(
        r"2 images are in two classes, by size and CRC-32, such as cat/(.+) and dog/(.+)", printed
    )
    assert alike.groups() in (("кот 0.jpg", "the same.jpg"), ("cmyk.jpg", "again.jpg"))
    assert len(table.read_text().splitlines()) == 1 + sum(int(count) for count, *_ in message)


def test_a_folder_that_is_not_packed_tells_what_it_leaves_out(drawer, monkeypatch, capsys, caplog):
    folder, fates = drawer
    all_names = set(map(escaped, files_below(folder)))
    for index in (load_index(f"imagefolder:{folder}"), open_images(folder).index):
        named = {name for name, _ in index.left_out} - {"empty"}
        assert named | set(index.path.tolist()) == all_names
        assert len(named) + len(index) == len(fates)
    indexed_images(f"imagefolder:{folder}")
    assert "left out: 2 hidden files" in caplog.text
    monkeypatch.setenv("COLUMNS", "400")
    distap(monkeypatch, "data", "check", f"imagefolder:{folder}")
    assert "left out: 2 hidden files" in capsys.readouterr().err


def test_a_name_cannot_command_the_terminal_that_shows_it(tmp_path, monkeypatch, capsys):
    name = "\x1b]0;mine\x07\x1b[2J"
    (tmp_path / "images" / "class").mkdir(parents=True)
    save(tmp_path / "images" / "class" / f"{name}.png", 0, "PNG")
    save(tmp_path / "images" / "class" / "sound.png", 1, "PNG")
    assert distap(monkeypatch, "data", "pack", tmp_path / "images", tmp_path / "shards") == 0
    for shard in (tmp_path / "shards").glob("*.tar"):
        shard.write_bytes(shard.read_bytes().replace(b"IDAT", b"IDAX"))
    assert distap(monkeypatch, "data", "check", tmp_path / "shards") == 1
    distap(monkeypatch, "data", "stats", tmp_path / "shards")
    output = "".join(capsys.readouterr())
    assert r"\x1b]0;mine\x07\x1b[2J" in output and "\x1b" not in output and "\x07" not in output


def test_a_folder_that_cannot_be_read_is_told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("open")
    save(folder / "x.png", 0)
    (folder / "locked").mkdir(mode=0o000)
    (folder / "listed").mkdir()
    for name in ("a", "b.png"):
        save(folder / "listed" / name, 1, "PNG")
    (folder / "listed").chmod(0o444)
    for parent in (folder, *folder.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(NOBODY)
        actual = dict(open_images(folder).index.left_out)
        with pytest.raises(
            DistapError, match=r"locked: [\s\S]* 1 folders that cannot be read: Permission denied"
        ):
            list_images(folder / "locked")
    finally:
        os.seteuid(user)
    assert actual == {
        "locked": "folders that cannot be read: Permission denied",
        "listed/a": "files that cannot be read: Permission denied",
        "listed/b.png": "files that cannot be read: Permission denied",
    }


@pytest.fixture
def nested(tmp_path):
    folder = tmp_path / "nested"
    for number, name in enumerate(("train/cat", "train/dog", "animals/cat")):
        (folder / name).mkdir(parents=True)
        save(folder / name / "0.png", number)
    return folder


@pytest.mark.parametrize(
    ("way", "classes"),
    [
        ("top", ["animals", "train", "train"]),
        ("merge", ["cat", "cat", "dog"]),
        ("path", ["animals/cat", "train/cat", "train/dog"]),
    ],
)
def test_the_option_decides_on_folders_in_folders(nested, way, classes):
    assert [image.class_name for image in list_images(nested, way).images] == classes


def test_folders_in_folders_are_refused_without_the_option(nested):
    with raises("data.nested_folders", "animals/cat/0.png", "--nested"):
        list_images(nested)
    with raises("data.ambiguous_folders", "animals/cat", "train/cat", "--nested"):
        list_images(nested, "leaf")
    (nested / "animals" / "cat").rename(nested / "animals" / "cow")
    assert [image.class_name for image in list_images(nested, "leaf").images] == [
        "cow",
        "cat",
        "dog",
    ]


def test_a_split_has_other_classes_on_each_side(tmp_path, monkeypatch, capsys):
    for name in range(5):
        (tmp_path / "images" / f"class {name}").mkdir(parents=True)
        save(tmp_path / "images" / f"class {name}" / "0.png", name)
    assert (
        distap(monkeypatch, "data", "pack", tmp_path / "images", "--split", 0.4, tmp_path / "a")
        == 0
    )
    sides = [
        load_index(tmp_path / "a" / side).class_name.tolist() for side in ("train", "validation")
    ]
    assert [len(side) for side in sides] == [3, 2]
    assert sorted(sides[0] + sides[1]) == [f"class {name}" for name in range(5)]
    assert sides[1] == load_index(f"imagefolder:{tmp_path}/images[:0.4]").class_name.tolist()
    assert (
        distap(monkeypatch, "data", "pack", tmp_path / "images", tmp_path / "d", "--split", 0.01)
        == 2
    )
    assert "leaves one side without any" in capsys.readouterr().err
