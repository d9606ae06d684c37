"""`distap data stats` and `distap data check`."""

import json
import re

import pytest
from commands import distap
from images import damage, write_images

from benchmarks.photos import pack
from distap.data.shards.image_files import ImageFile
from distap.data.shards.index import load_index


@pytest.fixture
def odd_names(tmp_path):
    """Classes whose names are markup for a page or a terminal."""
    folder = write_images(tmp_path / "images", {"a": 3, "b": 2, "c": 1})
    names = {"a": "<script>alert(1)</script>", "b": "[red]b[/nothing]", "c": "c"}
    images = [
        ImageFile(path, names[path.parent.name], (f"<i>{path.parent.name}",))
        for path in sorted(folder.rglob("*.png"))
    ]
    pack(images, tmp_path / "shards")
    return tmp_path / "shards"


def test_figures_are_a_table_and_json(monkeypatch, capsys, odd_names):
    assert distap(monkeypatch, "data", "stats", odd_names) == 0
    printed = capsys.readouterr().out
    assert re.search(r"images a class median +2.0\b", printed) and re.search(
        r"classes of one image +1\b", printed
    )
    assert distap(monkeypatch, "data", "stats", odd_names, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == {
        **{
            "images": 6,
            "classes": 3,
            "classes_of_one_image": 1,
            "images_a_class_min": 1,
            "images_a_class_max": 3,
        },
        **{
            "images_a_class_median": 2,
            "bytes": int(load_index(odd_names).size.sum()),
            "left_out": 0,
        },
    }


def test_a_check_says_by_its_status_whether_all_is_sound(monkeypatch, capsys, odd_names):
    assert distap(monkeypatch, "data", "check", odd_names, "--workers", 1) == 0
    assert "6 images in 1 shard, all sound" in capsys.readouterr().out
    damage(odd_names, [0])
    assert distap(monkeypatch, "data", "check", odd_names, "--workers", 1) == 1
    printed = capsys.readouterr().out
    assert "000000.tar:a/0.png: crc_mismatch" in printed
    assert "2 things damaged: shard_sha256 1, crc_mismatch 1" in printed
