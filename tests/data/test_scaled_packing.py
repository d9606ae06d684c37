"""`distap data pack --side`: images are scaled down as they are packed."""

import io
import json

import numpy as np
import pytest
from commands import distap
from PIL import Image, ImageChops, ImageCms
from raising import raises

from benchmarks.photos import jpeg, pack, photo
from distap.data.images.decoding import ORIENTATION, EncodedImage
from distap.data.loading.checking import check
from distap.data.loading.reader import ImageSet
from distap.data.shards.image_files import ImageFile
from distap.data.shards.index import Scaling, load_index, parse_index
from distap.data.shards.index_rules import COLUMNS
from distap.data.shards.indexing import index_shards
from distap.storage.columns import columns_file, read_columns

PHOTO = photo(300, 200, seed=0)
CODING = 4  # levels by which JPEG changes the pixels of the photograph; another pixel's are 10 off
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.fixture
def run(monkeypatch):
    """`distap data`: its exit status."""
    return lambda *arguments: distap(monkeypatch, "data", *arguments)


@pytest.fixture
def folder(tmp_path):
    """Two photographs of 300 x 200, one of 200 x 300, and one of 120 x 90 pixels."""
    for name, size in {
        "a/0": (300, 200),
        "a/1": (300, 200),
        "b/0": (200, 300),
        "b/1": (120, 90),
    }.items():
        path = tmp_path / "images" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(photo(*size, seed=len(name)), 95))
    return tmp_path / "images"


def packed_image(tmp_path, data, suffix=".jpg", box=None, scaling=(100, 95)):
    """The bytes of an image after packing."""
    path = tmp_path / f"image{suffix}"
    path.write_bytes(data)
    pack([ImageFile(path, "a", box=box)], tmp_path / "out", scaling=Scaling(*scaling))
    return ImageSet(tmp_path / "out", load_index(tmp_path / "out")).data(0)


def saved(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def difference(data, reference):
    """The mean difference of an image's pixels from those of a reference, in levels."""
    pixels = np.asarray(EncodedImage(data).whole(), np.float64)
    expected = np.asarray(reference.convert("RGB"), np.float64)
    assert pixels.shape == expected.shape
    return np.abs(pixels - expected).mean()


def test_the_shorter_side_of_larger_images_becomes_the_side_and_others_keep_their_bytes(
    tmp_path, folder, run
):
    assert run("pack", folder, tmp_path / "out", "--side", 100) == 0
    index = load_index(tmp_path / "out")
    images = ImageSet(tmp_path / "out", index)
    sizes = {
        path: (width, height)
        for path, width, height in zip(index.path.tolist(), index.width, index.height, strict=True)
    }
    assert sizes == {
        "a/0.jpg": (150, 100),
        "a/1.jpg": (150, 100),
        "b/0.jpg": (100, 150),
        "b/1.jpg": (120, 90),
    }
    small = index.path.tolist().index("b/1.jpg")
    assert images.data(small) == (folder / "b" / "1.jpg").read_bytes()
    assert check(tmp_path / "out")[1] == []


@pytest.mark.parametrize("side", [100, 90, 51, 25])
def test_scaled_pixels_are_near_those_of_pillow(tmp_path, side):
    # 51 and 25 are decoded at reduced scale.
    data = packed_image(tmp_path, jpeg(PHOTO, 95), scaling=(side, 95))
    with Image.open(io.BytesIO(jpeg(PHOTO, 95))) as whole:
        expected = whole.resize((round(side * 1.5), side), Image.Resampling.BILINEAR)
    assert difference(data, expected) < CODING
    assert difference(data, ImageChops.offset(expected, 1, 0)) > 8


def test_the_quality_is_that_of_the_option(tmp_path, folder, run):
    tables = []
    for options, quality in (((), 90), (("--quality", 40), 40)):
        output = tmp_path / f"out{quality}"
        assert run("pack", folder, output, "--side", 100, *options) == 0
        images = ImageSet(output, load_index(output))
        with Image.open(io.BytesIO(images.data(0))) as image:
            tables.append(image.quantization)
        with Image.open(io.BytesIO(saved(PHOTO, "JPEG", quality=quality))) as expected:
            assert tables[-1] == expected.quantization
    assert tables[0] != tables[1]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_scaled_images_are_upright_and_say_so(tmp_path, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = saved(PHOTO, "JPEG", quality=95, exif=exif)
    upright = EncodedImage(file)
    data = packed_image(tmp_path, file)
    assert Image.open(io.BytesIO(data)).getexif().get(ORIENTATION, 1) == 1
    shape = (100, 150) if upright.size == (300, 200) else (150, 100)
    assert difference(data, upright.scaled(shape)) < CODING


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_transparency_is_shown_on_white(tmp_path, form):
    transparent = Image.new("RGBA", (300, 200), (255, 0, 0, 0))
    data = packed_image(tmp_path, saved(transparent, form, lossless=True), f".{form.lower()}")
    assert difference(data, Image.new("RGB", (150, 100), "white")) < CODING


def test_sixteen_bits_and_ink_become_the_colours_that_training_sees(tmp_path):
    values = np.linspace(0, 65535, 300 * 200).reshape(200, 300).astype(np.uint16)
    grey = saved(Image.fromarray(values), "PNG")
    ink = saved(PHOTO.convert("CMYK"), "JPEG", quality=95)
    for number, file in enumerate((grey, ink)):
        (tmp_path / str(number)).mkdir()
        data = packed_image(tmp_path / str(number), file, ".jpg" if number else ".png")
        assert difference(data, EncodedImage(file).scaled((100, 150))) < CODING


def test_a_colour_profile_stays_if_it_fits_the_pixels(tmp_path):
    cases = {
        "RGB": (PHOTO, SRGB, SRGB),
        "CMYK": (PHOTO.convert("CMYK"), b"\0" * 16 + b"CMYK", None),
    }
    cases["RGB without"] = (PHOTO, None, None)
    for name, (image, profile, expected) in cases.items():
        (tmp_path / name).mkdir()
        file = saved(image, "JPEG", quality=95, icc_profile=profile)
        with Image.open(io.BytesIO(packed_image(tmp_path / name, file))) as scaled:
            assert scaled.info.get("icc_profile") == expected


def test_a_box_is_cut_out_and_then_scaled(tmp_path):
    for name, box, size in (
        ("large", (20, 10, 280, 190), (144, 100)),
        ("small", (20, 10, 100, 90), (80, 80)),
    ):
        (tmp_path / name).mkdir()
        data = packed_image(tmp_path / name, saved(PHOTO, "PNG"), ".png", box)
        expected = PHOTO.crop(box).resize(size, Image.Resampling.BILINEAR)
        assert difference(data, expected) < CODING


def test_a_cut_file_is_left_out_when_it_is_scaled(tmp_path, folder):
    whole = (folder / "a" / "0.jpg").read_bytes()
    (folder / "a" / "0.jpg").write_bytes(whole[: len(whole) // 2])
    index, skipped = pack(folder, tmp_path / "out", scaling=Scaling(20, 90))
    assert [(file.name[-7:], file.reason.partition(":")[0]) for file in skipped] == [
        ("a/0.jpg", "truncated")
    ]
    assert len(index) == 3


def test_the_number_of_workers_changes_no_byte_of_scaled_images(tmp_path, folder):
    for workers in (1, 2):
        layout = {"images_per_shard": 2, "scaling": Scaling(50, 90), "workers": workers}
        pack(folder, tmp_path / str(workers), **layout)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()


def test_side_and_quality_are_told_wherever_the_images_are_counted(tmp_path, folder, run, capsys):
    output = tmp_path / "out"
    assert run("pack", folder, output, "--side", 100, "--quality", 80) == 0
    assert run("check", output) == 0
    assert capsys.readouterr().out.count("shorter side of 100 pixels at most, JPEG quality 80") == 2
    assert run("stats", output) == 0
    printed = capsys.readouterr().out
    assert "shorter side" in printed and "jpeg quality" in printed
    assert run("stats", output, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["shorter_side"], figures["jpeg_quality"]) == (100, 80)


def test_side_and_quality_stay_with_a_part_and_a_new_index_of_the_images(tmp_path, folder):
    output = tmp_path / "out"
    pack(folder, output, scaling=Scaling(100, 80))
    index = load_index(output)
    assert index.scaling == Scaling(100, 80)
    assert load_index(f"{output}[:0.5]").scaling == index.scaling
    assert index_shards(output)[0].scaling == index.scaling
    (output / "index.npz").unlink()
    assert index_shards(output)[0].scaling is None


def test_an_index_without_the_column_is_read_and_one_with_it_has_all_columns_of_before(
    tmp_path, folder
):
    pack(folder, tmp_path / "scaled", scaling=Scaling(100, 80))
    pack(folder, tmp_path / "plain")
    plain = (tmp_path / "plain" / "index.npz").read_bytes()
    assert parse_index(plain, "index").scaling is None
    with pytest.raises(ValueError, match="column scaling"):
        read_columns(plain, {"scaling": "int64"})
    scaled = (tmp_path / "scaled" / "index.npz").read_bytes()
    assert read_columns(scaled, {"version": "scalar", **COLUMNS}).keys() == {"version", *COLUMNS}


def test_a_damaged_record_of_the_scaling_is_refused(tmp_path, folder):
    index, _ = pack(folder, tmp_path / "out")
    columns = {name: getattr(index, name) for name in COLUMNS}
    for wrong in (np.array([1]), np.array([1, 2, 3]), np.array(["1", "2"])):
        data = columns_file(version=np.array(5), scaling=wrong, **columns)
        with raises("data.damaged_index", "index"):
            parse_index(data, "index")


def test_a_quality_without_a_side_is_refused(tmp_path, folder, run, capfd):
    assert run("pack", folder, tmp_path / "out", "--quality", 80) == 2
    assert "--side" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
