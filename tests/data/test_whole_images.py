import numpy as np
import pytest
import torch
from extractions import encoded
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from raising import raises
from torchvision.transforms import v2

from benchmarks.photos import pack, photo
from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.images.whole_images import batches_of_one_shape, sized_chunks
from distap.data.loading.reader import open_images
from distap.data.shards.indexing import index_shards
from distap.data.sizing import Sizing

ORIENTATION = 0x0112
PHOTO = photo(120, 80, seed=0)


def pixels(image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def turned(image, orientation) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(image, "JPEG", quality=95, exif=exif)


@pytest.mark.parametrize(
    "text", ["crop 224", "side 1024", "original", "resize 256 crop 224", "resize 256x300 crop 224"]
)
def test_a_sizing_is_written_and_read_as_text(text):
    assert str(Sizing.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *["", "crop", "side", "crop 0", "side -3", "original 3", "crop ²", "stretch 3", "crop a"],
        *[
            "resize 256",
            "resize 256 side 224",
            "resize 223 crop 224",
            "resize 0 crop 0",
            "resize 9 original",
        ],
        *["resize 256x223 crop 224", "resize 9x crop 9", "resize 9x9x9 crop 9"],
    ],
)
def test_a_sizing_that_is_none_is_refused(text):
    with raises("image.unknown_sizing"):
        Sizing.parse(text)


@pytest.mark.parametrize(
    ("resize", "crop"), [("64", 56), ("48", 48), ("100", 33), ("200", 199), ("64x48", 40)]
)
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_resized_crop_is_torchvisions_bit_for_bit(resize, crop, orientation):
    image = EncodedImage(turned(photo(320, 222, seed=1), orientation))
    theirs = v2.Compose([v2.Resize([*map(int, resize.split("x"))]), v2.CenterCrop(crop)])
    sizing = Sizing.parse(f"resize {resize} crop {crop}")
    assert torch.equal(sizing(image), theirs(pixels(image.whole())))
    of_pil = pixels(theirs(image.whole())).int()  # PIL resizes in another precision
    assert (sizing(image).int() - of_pil).abs().max() <= 1
    assert torch.equal(
        sizing(image, (20, 10, 170, 210)), theirs(pixels(image.whole().crop((20, 10, 170, 210))))
    )


def test_an_image_too_narrow_to_be_resized_is_damaged():
    with pytest.raises(
        DamagedImageError, match="too_large: too narrow for `resize 256 crop 224`: 9000 x 2 pixels"
    ):
        Sizing.parse("resize 256 crop 224")(EncodedImage(encoded(Image.new("RGB", (9000, 2)))))


@pytest.mark.parametrize(
    ("side", "shape"), [(60, (40, 60)), (119, (79, 119)), (120, (80, 120)), (500, (80, 120))]
)
def test_the_longer_side_is_scaled_down_and_never_up(side, shape):
    sizing = Sizing("side", side)
    assert sizing.shape(120, 80) == shape
    assert sizing(EncodedImage(encoded(PHOTO))).shape == (3, *shape)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("sizing", ["original", "side 61", "crop 41"])
def test_an_image_that_exif_turns_is_sized_as_it_is_seen(orientation, sizing):
    seen = EncodedImage(turned(PHOTO, orientation))
    plain = EncodedImage(encoded(seen.whole()))
    sizing = Sizing.parse(sizing)
    actual = sizing(seen)
    expected = sizing(plain)
    assert actual.shape == expected.shape == (3, *sizing.shape(*seen.size))
    assert (actual.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("sizing", ["original", "side 31", "crop 31"])
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_a_box_counts_as_if_it_were_the_image(sizing, form):
    sizing = Sizing.parse(sizing)
    image = EncodedImage(encoded(PHOTO, form))
    actual = sizing(image, (10, 4, 70, 64))
    assert torch.equal(actual, sizing(EncodedImage(encoded(image.whole().crop((10, 4, 70, 64))))))


def test_a_box_is_cut_to_the_image_and_one_beside_it_is_refused():
    image = EncodedImage(encoded(PHOTO))
    assert torch.equal(Sizing("original")(image, (100, -5, 999, 10)), pixels(PHOTO)[:, :10, 100:])
    with pytest.raises(DamagedImageError, match="nothing of its 120 x 80 pixels is in the box"):
        Sizing("original")(image, (120, 0, 130, 10))


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=40),
    most=st.integers(1, 60),
)
def test_every_image_is_in_one_batch_of_its_shape_within_the_limit(shapes, most):
    images = [(n, torch.full((3, *shape), n, dtype=torch.uint8)) for n, shape in enumerate(shapes)]
    batches = list(batches_of_one_shape(images, most))
    assert sorted(n for numbers, _ in batches for n in numbers) == list(range(len(shapes)))
    for numbers, batch in batches:
        assert all(
            torch.equal(image, images[n][1]) for n, image in zip(numbers, batch, strict=True)
        )
        assert len(numbers) == 1 or batch[:, 0].numel() <= most


# Folders


@pytest.fixture
def folder(tmp_path):
    """Two photos below each other, and much that is none."""
    images = tmp_path / "photos"
    (images / "deep" / "er").mkdir(parents=True)
    PHOTO.save(images / "b.png")
    PHOTO.save(images / "deep" / "er" / "a.JPG", "JPEG")
    (images / "notes.txt").write_text("none")
    (images / ".hidden.png").write_bytes(b"none")
    (images / "._b.png").write_bytes(b"none")
    return images


def test_the_images_of_a_folder_are_named_by_their_paths(folder):
    images = open_images(folder)
    assert images.keys.tolist() == ["b.png", "deep/er/a.JPG"]
    assert images.classes.tolist() == ["", ""]
    assert images.encoded(1).size == (120, 80)


def test_a_folder_that_changes_has_another_fingerprint(folder):
    before = open_images(folder).index.fingerprint
    assert open_images(folder).index.fingerprint == before
    (folder / "b.png").write_bytes((folder / "b.png").read_bytes() + b"more")
    after = open_images(folder).index.fingerprint
    (folder / "b.png").rename(folder / "c.png")
    assert len({before, after, open_images(folder).index.fingerprint}) == 3


def test_an_image_that_has_gone_or_cannot_be_read_is_damaged(folder):
    images = open_images(folder)
    (folder / "b.png").unlink()
    with pytest.raises(DamagedImageError, match=r"b\.png: there is no such file"):
        images.encoded(0)
    (folder / "b.png").mkdir()
    with pytest.raises(DamagedImageError, match=r"b\.png: cannot be read: .*Is a directory"):
        images.encoded(0)


def test_a_folder_without_images_is_refused(tmp_path):
    with raises("data.empty", "JPEG"):
        open_images(tmp_path)


# Sets of images


def test_a_folder_with_shards_but_no_index_is_not_taken_for_images(shards):
    (shards / "index.npz").unlink()
    with raises("data.missing_index"):
        open_images(shards)


def test_keys_that_two_shards_share_are_told_apart(tmp_path, image_folder):
    for name in ("a", "b"):
        pack(image_folder, tmp_path / name)
        (tmp_path / "both").mkdir(exist_ok=True)
        (tmp_path / name / "000000.tar").rename(tmp_path / "both" / f"{name}.tar")
    index_shards(tmp_path / "both")
    keys = open_images(tmp_path / "both").keys.tolist()
    assert len(set(keys)) == len(keys) == 18
    assert keys[0].startswith("a.tar:") and keys[-1].startswith("b.tar:")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_leaves_the_others_of_its_chunk(folder, workers):
    (folder / "a.png").write_bytes(b"damage")
    images = open_images(folder), Sizing("original"), {}
    (chunk,) = sized_chunks(*images, [[0, 1, 2]], workers, 3)
    assert chunk.samples == [1, 2] and [image.shape for image in chunk.pixels] == [(3, 80, 120)] * 2
    assert chunk.damaged[0].startswith("decode_error")
    assert torch.equal(torch.from_numpy(chunk.pixels[0]), pixels(PHOTO))
    (chunk,) = sized_chunks(*images, [[0]], workers, 3)
    assert chunk.samples == [] and chunk.pixels == []
