"""`data.decode: gpu`; torchvision's decoder runs on the CPU here, and on a GPU in tests/test_gpu.py."""

import pytest
import torch
from images import indexed_images, write_images
from PIL import Image
from small_trainings import recipe

from benchmarks.photos import jpeg, photo
from distap.data.images.augmentation import CropFlipColour
from distap.data.images.decoding import DamagedImageError, EncodedImage
from distap.data.images.gpu_decoding import GPUDecoder, StoredJPEG
from distap.data.loading.share import NO_SAMPLE
from distap.data.shards.packing import pack
from distap.errors import DistapError
from distap.stopwatch import Stopwatch
from distap.training.build import images_of
from distap.world import World

CPU = torch.device("cpu")
TRANSFORM = CropFlipColour(colour=0.4).transform(32, scaled_decoding=False)
TABLES, COMMENT = b"\xff\xdb", b"\xff\xfe"  # without its tables, no JPEG can be decoded


def augment(image, step, slot):
    torch.manual_seed(100 * step + slot)
    return TRANSFORM(image)


def stored(data, step=0, slot=0):
    image = EncodedImage(data)
    assert image.plain_jpeg == data
    return StoredJPEG(data, image.turns, step, slot)


def photos(folder, count=12):
    """PNG images, and photographs as JPEG, packed."""
    write_images(folder / "images", {"a": 3, "b": 3}, 40)
    for number in range(count):
        path = folder / "images" / f"photos-{number // 4}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg(photo(60, 50, number), 90))
    pack(folder / "images", folder / "shards", images_per_shard=5)
    return folder / "shards"


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_pixels_are_those_of_pillow_but_for_rounding_whatever_the_orientation(tmp_path, orientation):
    exif, path = Image.Exif(), tmp_path / "photo.jpg"
    exif[0x0112] = orientation
    photo(120, 90, 0).save(path, quality=95, exif=exif)
    data = path.read_bytes()
    files = [stored(data, step, slot) for step in range(2) for slot in range(20)]
    for file, found in zip(files, GPUDecoder(augment, CPU)(files), strict=True):
        difference = (found.int() - augment(EncodedImage(data), file.step, file.slot).int()).abs().float()
        assert difference.mean() < 1


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_as_those_that_workers_decode(tmp_path, workers):
    shards = photos(tmp_path)
    found = indexed_images(shards, batch_size=16, chunk=5, workers=workers, decode="gpu").shares(range(2))
    for share, expected in zip(found, indexed_images(shards, batch_size=16).shares(range(2)), strict=True):
        pixels, wanted = share.images(slice(0, 16)), expected.images(slice(0, 16))
        assert torch.equal(share.samples, expected.samples) and torch.equal(share.labels, expected.labels)
        assert (pixels.int() - wanted.int()).abs().float().mean(dim=(1, 2, 3)).max() < 6
        assert torch.equal(pixels[share.labels < 2], wanted[share.labels < 2])  # PNG, which the workers decode


def test_a_file_that_cannot_be_decoded_leaves_its_slot_empty_and_the_others_as_they_are(tmp_path):
    good = jpeg(photo(60, 50, 0), 90)
    broken = good.replace(TABLES, COMMENT)
    results = GPUDecoder(augment, CPU)([stored(good), stored(broken), stored(good)])
    assert torch.equal(results[0], results[2]) and isinstance(results[1], DamagedImageError)

    shards = photos(tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EncodedImage, "plain_jpeg", broken)
        shares = indexed_images(shards, batch_size=18, decode="gpu").shares(range(1))
        share = next(shares)
        pixels = share.images(slice(0, 18))
    is_lost = ~share.present
    assert is_lost.sum() == 18 and set(share.samples.tolist()) == {NO_SAMPLE} and not pixels.any()
    assert {failure.reason for failure in share.failures} == {"decode_error"}


def test_what_other_decoders_do_not_know_stays_with_pillow(tmp_path):
    photo(60, 50, 0).convert("CMYK").save(tmp_path / "cmyk.jpg")
    for data in ((tmp_path / "cmyk.jpg").read_bytes(), jpeg(photo(60, 50, 0), 90)[:-40]):
        assert EncodedImage(data).plain_jpeg is None


def test_a_rank_without_a_gpu_refuses_to_decode_on_one(tmp_path, training_shards):
    settings = recipe(tmp_path, training_shards, data__decode="gpu")
    with pytest.raises(DistapError, match=r"data\.decode: gpu, but this rank trains on its CPU"):
        images_of(settings, World(), Stopwatch())
