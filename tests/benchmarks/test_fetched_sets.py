"""Sets that are drawn from packages of npm: glyphs and emoji."""

import io
import json
import tarfile

import pytest
from PIL import Image, ImageFont

from benchmarks.fetch import emoji, glyphs, small_sets
from benchmarks.fetch.glyphs import Font
from distap.data.shards.image_files import list_images
from distap.errors import DistapError

AILERON = ImageFont.load_default(10).path.getvalue()  # a TrueType font of Latin that Pillow holds
# with a mark and an ideograph that are not to be drawn
RANGES = "U+30-39,U+41-5A,U+61-7a,U+2c,U+4e00"


def write_tar(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_jsons(path, files):
    write_tar(
        path, {f"{name}.json": json.dumps(content).encode() for name, content in files.items()}
    )


def write_font(folder, name, units=1000, data=AILERON):
    """A package as Fontsource's; the more units an em has, the smaller the font draws."""
    tables = data.index(b"head")
    head = int.from_bytes(data[tables + 8 : tables + 12])
    font = data[: head + 18] + units.to_bytes(2) + data[head + 20 :]
    files = {
        "package.json": json.dumps({"license": "OFL-1.1"}).encode(),
        "unicode.json": json.dumps({"latin": RANGES, "[3]": "U+41-5A,U+416"}).encode(),
        **{f"files/{name}-{subset}-400-normal.woff2": font for subset in ("latin", "3")},
    }
    return Font(f"@fontsource/{name}", "1.0.0", 400), write_tar(folder / f"{name}.tgz", files)


def write_properties(path):
    """Scripts and blocks as the package of Unicode's properties has them."""
    members = {
        "Script/Latin": r"[A-Za-z\xC4]",
        "Script/Common": "[0-9]",
        "Script/Han": r"[\u4E00]|\uD840[\uDC00-\uDC02]",
    }
    members |= {"Block/Basic_Latin": r"[\0-\x7F]", "Block/Latin_1_Supplement": r"[\x80-\xFF]"}
    members["Block/CJK"] = r"[\u4E00-\u9FFF]|[\uD840-\uD868][\uDC00-\uDFFF]"
    return write_tar(
        path,
        {f"{name}/regex.mjs": f"export default /{members[name]}/;\n".encode() for name in members},
    )


def test_characters_have_their_blocks_and_scripts(tmp_path):
    actual = glyphs.read_levels(write_properties(tmp_path / "unicode.tgz"), "a7Ä\U00020001")
    assert actual["U+0061"] == ("Latin/Basic_Latin", "Latin") and actual["U+0037"] == (
        "Common/Basic_Latin",
        "Common",
    )
    assert actual["U+00C4"] == ("Latin/Latin_1_Supplement", "Latin") and actual["U+20001"] == (
        "Han/CJK",
        "Han",
    )


def test_no_two_images_are_equal_and_classes_are_split(tmp_path):
    sizes = (1000, 1100, 1200, 1200, 1300, 900, 800)  # two of these fonts draw alike
    packages = [write_font(tmp_path, f"font-{number}", units) for number, units in enumerate(sizes)]
    record = glyphs.draw_set(
        tmp_path / "set", 32, packages, write_properties(tmp_path / "unicode.tgz")
    )
    images = sorted((tmp_path / "set").rglob("*.png"))
    pixels = {Image.open(path).tobytes() for path in images}
    assert len(pixels) == len(images) == record["images"] > 150
    assert record["fonts"]["font-2"]["licence"] == "OFL-1.1"
    assert record["fonts"]["font-3"]["images"] == 0
    train, test = (
        {path.name for path in (tmp_path / "set" / split).iterdir()} for split in ("train", "test")
    )
    drawn = {
        f"U+{code:04X}"
        for code in (*range(0x30, 0x3A), *range(0x41, 0x5B), *range(0x61, 0x7B), 0xC4)
    }
    assert not train & test and train | test <= drawn
    assert abs(len(train) - len(test)) <= 1
    listed = [
        item
        for split in ("train", "test")
        for item in list_images(tmp_path / "set" / f"{split}.csv").images
    ]
    assert {item.path: item.levels[1] in ("Latin", "Common") for item in listed} == dict.fromkeys(
        images, True
    )


def test_an_icon_of_a_package_is_drawn_whole_on_white(tmp_path):
    icons = {
        "dot": {"body": '<circle cx="5" cy="5" r="5"/>'},
        "wide": {"body": "<g/>", "width": 20, "left": 3},
    }
    files = {
        "package": {"version": "1.0.0"},
        "info": {"license": {"spdx": "MIT"}},
        "icons": {"width": 10, "height": 10, "icons": icons},
    }
    write_jsons(tmp_path / "x.tgz", files)
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


def test_products_are_drawn_alike_from_their_seed_and_digits_are_those_of_scikit_learn(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("benchmarks.fetch.small_sets.PRODUCTS", 4)
    monkeypatch.setattr("benchmarks.fetch.small_sets.VIEWS", 2)
    actual = [small_sets.fetch_small_set("products", tmp_path / name, 32) for name in "ab"]
    assert actual[0] == actual[1] == {"size": 32, "classes": {"train": 2, "test": 2}, "images": 8}
    paths = sorted((tmp_path / "a").rglob("*.png"))
    assert [path.relative_to(tmp_path / "a").as_posix()[:9] for path in paths[::2]] == [
        *("test/002/", "test/003/"),
        *("train/000", "train/001"),
    ]
    pixels = [
        [Image.open(path).tobytes() for path in sorted((tmp_path / name).rglob("*.png"))]
        for name in "ab"
    ]
    assert pixels[0] == pixels[1] and len(set(pixels[0])) == 8
    record = small_sets.fetch_small_set("digits", tmp_path / "digits", 16)
    assert record["images"] == 1_797 and record["classes"] == {"train": 5, "test": 5}
