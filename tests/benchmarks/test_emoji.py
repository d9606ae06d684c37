import io
import json
import tarfile

import pytest
from PIL import Image

from benchmarks.fetch import emoji
from distap.errors import DistapError


def write_package(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info, data = tarfile.TarInfo(f"package/{name}.json"), json.dumps(content).encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_an_icon_of_a_package_is_drawn_whole_on_white(tmp_path):
    icons = {"dot": {"body": '<circle cx="5" cy="5" r="5"/>'}, "wide": {"body": "<g/>", "width": 20, "left": 3}}
    files = {
        "package": {"version": "1.0.0"},
        "info": {"license": {"spdx": "MIT"}},
        "icons": {"width": 10, "height": 10, "icons": icons},
    }
    write_package(tmp_path / "x.tgz", files)
    with pytest.raises(DistapError, match=r"x.tgz holds version 1\.0\.0 of x, expected 1\.0\.1"):
        emoji.read_vendor(tmp_path / "x.tgz", "x", "1.0.1")
    vendor = emoji.read_vendor(tmp_path / "x.tgz", "x", "1.0.0")
    assert 'viewBox="3 0 20 10"' in vendor.drawings["wide"]
    path = tmp_path / "class" / "x.png"
    emoji.draw((vendor.drawings["dot"], 32, path))
    image = Image.open(path).convert("RGB")
    assert image.size == (32, 32)
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert image.getpixel((16, 16)) == (0, 0, 0)


def test_icons_have_the_groups_and_subgroups_of_unicode(tmp_path):
    listed = [{"hexcode": "2764-FE0F", "subgroup": 7, "group": 0}, {"hexcode": "1F1E6", "order": 1}]
    files = {
        "tree": {"en/data": listed, "meta/groups": {"groups": {"0": "smileys"}, "subgroups": {"7": "heart"}}},
        "x": {"chars": {"2764": "red-heart", "1f1e6": "letter-a"}},
        "y": {"icons": {}},
        "z": {"chars": {"2764-fe0f": "heart"}},
    }
    for archive, contents in files.items():
        write_package(tmp_path / archive, contents)
    found = emoji.read_levels(tmp_path / "tree", [tmp_path / name for name in "xyz"])
    assert found == dict.fromkeys(("red-heart", "heart"), ("heart", "smileys"))
