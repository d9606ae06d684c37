import json
import re

import pytest
from commands import distap
from images import write_images

from distap.data.shards.image_files import ImageFile
from distap.data.shards.packing import pack


@pytest.fixture
def odd_names(tmp_path):
    """Classes whose names are markup for a page or a terminal."""
    folder = write_images(tmp_path / "images", {"a": 3, "b": 2, "c": 1})
    names = {"a": "<script>alert(1)</script>", "b": "[red]b[/nothing]", "c": "c"}
    images = [
        ImageFile(path, names[path.parent.name], f"<i>{path.parent.name}") for path in sorted(folder.rglob("*.png"))
    ]
    pack(images, tmp_path / "shards")
    return tmp_path / "shards"


@pytest.fixture
def damaged(odd_names):
    """The same with one image damaged."""
    shard = odd_names / "000000.tar"
    data = bytearray(shard.read_bytes())
    data[data.index(b"IDAT") + 20] ^= 1
    shard.write_bytes(data)
    return odd_names


def test_the_page_shows_figures_and_images_and_runs_no_script(tmp_path, monkeypatch, capsys, odd_names):
    assert distap(monkeypatch, "data", "stats", odd_names, "--output", tmp_path / "stats.html") == 0
    page = (tmp_path / "stats.html").read_text()
    assert "<script" not in page and "<i>a" not in page
    assert "&lt;script&gt;alert(1)" in page and "&lt;i&gt;a" in page
    assert page.count("data:image/webp;base64,") == 6
    assert page.count('<table class="histogram">') == 5
    printed = capsys.readouterr().out
    assert re.search("Classes by images a class\n +1  █{40}  1 \n +2  █{40}  1 ", printed)
    assert "1 classes have one image" in printed


def test_the_figures_are_written_as_json(tmp_path, monkeypatch, odd_names):
    assert distap(monkeypatch, "data", "stats", odd_names, "--output", tmp_path / "new" / "stats.json") == 0
    figures = json.loads((tmp_path / "new" / "stats.json").read_text())
    assert (figures["images"], figures["classes"], figures["groups"], figures["singletons"]) == (6, 3, 3, 1)
    assert figures["images_a_class_histogram"] == [["1", 1], ["2", 1], ["3", 1]]


def test_a_damaged_image_is_a_gap_in_the_page_and_a_warning(tmp_path, monkeypatch, damaged, caplog):
    assert distap(monkeypatch, "data", "stats", damaged, "--output", tmp_path / "stats.html") == 0
    page = (tmp_path / "stats.html").read_text()
    assert page.count("data:image/webp;base64,") == 5
    assert page.count(">not readable<") == 1
    assert "crc_mismatch" in caplog.text


def test_another_kind_of_file_is_refused(tmp_path, monkeypatch, capsys, odd_names):
    assert distap(monkeypatch, "data", "stats", odd_names, "--output", tmp_path / "stats.xlsx") == 2
    assert "stats.xlsx: statistics are written as .json or .html" in capsys.readouterr().err


def test_a_check_says_by_its_status_whether_all_is_sound(tmp_path, monkeypatch, capsys, request, odd_names):
    assert distap(monkeypatch, "data", "check", odd_names, "--workers", 1) == 0
    assert "6 images in 1 shards, all sound" in capsys.readouterr().out
    listing = tmp_path / "damaged.csv"
    damaged = request.getfixturevalue("damaged")
    assert distap(monkeypatch, "data", "check", damaged, "--workers", 1, "--output", listing) == 1
    printed = capsys.readouterr().out
    assert "000000.tar:a/0.png: crc_mismatch" in printed
    assert "2 things damaged: shard_sha256 1, crc_mismatch 1" in printed
    assert len(listing.read_text().splitlines()) == 3
