import re
from collections import Counter

import numpy as np
import pytest
import torch
from extractions import describe_files, describer, encoded, extract, network, one_by_one
from PIL import Image
from ranks import on_ranks

from benchmarks.photos import pack, photo
from distap.data.images.damage import DamagedImageError
from distap.data.loading.reader import ImageSet, open_images
from distap.data.sizing import Sizing
from distap.errors import DistapError
from distap.evaluation.extraction import extracted_folder, extracting
from distap.evaluation.extraction.extracting import (
    BrokenOffError,
    Describing,
    Extraction,
    extract_descriptors,
)
from distap.evaluation.extraction.image_describer import ImageDescriber, describer_like
from distap.retrieval.descriptor_files import read_descriptors
from distap.world import World


@pytest.fixture
def described(monkeypatch) -> Counter:
    """How often each image of a folder has been read in this process since."""
    counts: Counter = Counter()
    encoded = ImageSet.encoded

    def counted(reader, sample, *file):
        counts[reader.where(sample)] += 1
        return encoded(reader, sample, *file)

    monkeypatch.setattr(ImageSet, "encoded", counted)
    return counts


@pytest.fixture
def batches(monkeypatch) -> list:
    """The shapes of all batches that were described since."""
    shapes = []
    call = ImageDescriber.__call__

    def noted(maker, pixels):
        shapes.append(pixels.shape)
        return call(maker, pixels)

    monkeypatch.setattr(ImageDescriber, "__call__", noted)
    return shapes


def in_process(maker, images, world=World(), boxes=None):  # noqa: B008 - it is frozen
    return Extraction(Describing(maker, world, workers=0), images, boxes or {})


@pytest.mark.parametrize("sizing", ["crop 32", "side 36", "original"])
def test_a_folder_is_described_as_its_images_one_by_one_and_says_how(tmp_path, photos, sizing):
    maker = describer(sizing, scales=(1.0, 0.7071), batch_pixels=5 * 40 * 40, first=7)
    extract(photos, tmp_path / "out", maker=maker)
    descriptors = read_descriptors(tmp_path / "out")
    assert descriptors.keys.tolist() == open_images(photos).keys.tolist() and len(descriptors) == 31
    assert set(descriptors.classes.tolist()) == {""}
    assert descriptors.described_by == maker.described_by and descriptors.data == str(photos)
    again = describer_like(descriptors.described_by, network())
    assert again.described_by == descriptors.described_by and not again.network.network.training
    np.testing.assert_allclose(
        descriptors.descriptors, one_by_one(again, photos, descriptors.keys), atol=1e-6
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "about.json",
        "checksums.npy",
        "classes.npy",
        "descriptors.npy",
        "extraction.json",
        "keys.npy",
    ]


def test_batches_of_whole_images_are_large_though_shapes_are_mixed_and_give_the_same_bits(
    tmp_path, photos, batches
):
    maker = describer("original", batch_pixels=10 * 40 * 40)
    for name in ("a", "b"):
        extract(photos, tmp_path / name, maker=maker)
    # 40 x 32 and 32 x 40 ten times each and one more turned by EXIF, 40 x 40 and 48 x 33 five
    # times; twice.
    assert len(batches) == 2 * 4
    first, second = (read_descriptors(tmp_path / name).descriptors for name in ("a", "b"))
    assert np.array_equal(first, second)
    samples, in_memory, _ = extract_descriptors(in_process(maker, open_images(photos)))
    assert np.array_equal(in_memory, first)
    assert samples.tolist() == list(range(31))


def test_a_shard_s_image_that_exif_turns_is_described_as_it_is_seen(tmp_path, photos, batches):
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "turned.jpg").write_bytes((photos / "turned.jpg").read_bytes())
    (tmp_path / "images" / "a" / "upright.png").write_bytes((photos / "0" / "00.png").read_bytes())
    pack(tmp_path / "images", tmp_path / "shards")
    maker = describer("original")
    extract(tmp_path / "shards", tmp_path / "out", maker=maker)
    descriptors = read_descriptors(tmp_path / "out")
    assert len(batches) == 2 and descriptors.classes.tolist() == ["a", "a"]
    expected = one_by_one(maker, photos, ["turned.jpg", "0/00.png"])
    np.testing.assert_allclose(descriptors.descriptors, expected, atol=1e-6)


def test_boxes_are_cut_out_first(photos):
    maker = describer("original")
    images = open_images(photos)
    boxes = {images.keys.tolist().index("0/00.png"): (4, 4, 30, 28), 17: (0, 0, 20, 20)}
    _, extracted, _ = extract_descriptors(in_process(maker, images, boxes=boxes))
    _, plain, _ = extract_descriptors(in_process(maker, images))
    for row, key in enumerate(images.keys.tolist()):
        if row not in boxes:
            np.testing.assert_allclose(extracted[row], plain[row], atol=1e-6)
            continue
        cut = encoded(Image.open(photos / key).crop(boxes[row]))
        np.testing.assert_allclose(extracted[row], describe_files(maker, [cut])[0], atol=1e-6)


def test_damaged_images_are_left_out_and_named(tmp_path, photos):
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "c.png"):
        (images / name).write_bytes((photos / "0" / "00.png").read_bytes())
    (images / "b.png").write_bytes((photos / "0" / "00.png").read_bytes()[:200])
    (images / "d.jpg").write_bytes(b"none")
    (images / "e.png").symlink_to(photos / "0" / "00.png")
    assert len(extract(images, tmp_path / "out")) == 3
    descriptors = read_descriptors(tmp_path / "out")
    assert descriptors.keys.tolist() == ["a.png", "c.png", "e.png"]  # links are followed
    assert list(descriptors.left_out) == ["b.png", "d.jpg"]
    message = "\n".join(descriptors.left_out.values())
    assert re.fullmatch(r".*truncated.*\n.*not an image.*", message)


def test_a_descriptor_that_is_not_finite_is_left_out(tmp_path, photos):
    maker = describer("crop 32")
    with torch.no_grad():
        maker.network.network.head.weight.fill_(float("inf"))
    with pytest.raises(DistapError, match=r"none of its 31 images can be described.*not finite"):
        extract(photos, tmp_path / "out", maker=maker)


def test_images_too_small_for_the_network_are_left_out(tmp_path):
    maker = ImageDescriber(network(backbone="convnext_atto"), Sizing("original"))
    for name, size in (("a", (40, 32)), ("b", (3, 40)), ("c", (40, 32))):
        (tmp_path / f"{name}.png").write_bytes(encoded(photo(*size, seed=1)))
    extract(tmp_path, tmp_path / "out", maker=maker)
    descriptors = read_descriptors(tmp_path / "out")
    assert descriptors.keys.tolist() == ["a.png", "c.png"]
    assert descriptors.left_out == {
        "b.png": "decode_error: 3 x 40 pixels are too few for the network"
    }
    with pytest.raises(DamagedImageError, match="3 x 40 pixels are too few"):
        describe_files(maker, [(tmp_path / "b.png").read_bytes()])


class StoppedError(Exception):
    pass


def stopped_after(monkeypatch, count: int) -> None:
    """The next extraction ends as if it were killed when it has written so many parts."""
    file_of = extracted_folder.part_file
    left = iter(range(count))

    def file_or_stop(*arguments):
        if next(left, None) is None:
            raise StoppedError
        return file_of(*arguments)

    monkeypatch.setattr(extracted_folder, "part_file", file_or_stop)


def test_an_extraction_that_was_stopped_describes_what_is_missing_and_names_what_is_damaged(
    tmp_path, photos, monkeypatch, described
):
    with monkeypatch.context() as patch:
        stopped_after(patch, 3)
        with pytest.raises(StoppedError):
            extract(photos, tmp_path / "out", part_images=4)
    with pytest.raises(
        DistapError, match="out: its extraction has not ended; the command that began it continues"
    ):
        read_descriptors(tmp_path / "out")
    file = tmp_path / "out" / "parts" / "000001.npz"
    data = bytearray(file.read_bytes())
    data[400] ^= 1
    file.write_bytes(data)
    described.clear()
    with pytest.raises(DistapError, match=r"000001.npz: not readable as .*CRC.*; remove it"):
        extract(photos, tmp_path / "out", part_images=4)
    assert described.total() == 31 - 12
    described.clear()
    file.unlink()
    extract(photos, tmp_path / "out", part_images=4)
    assert described.total() == 4
    extract(photos, tmp_path / "whole", part_images=4)
    descriptors, whole = (read_descriptors(tmp_path / name) for name in ("out", "whole"))
    assert (
        np.array_equal(descriptors.descriptors, whole.descriptors)
        and descriptors.keys.tolist() == whole.keys.tolist()
    )


def test_one_that_is_finished_is_not_done_again(tmp_path, photos, described):
    first = extract(photos, tmp_path / "out")
    described.clear()
    again = extract(photos, tmp_path / "out")
    assert described.total() == 0
    assert np.array_equal(again.descriptors, first.descriptors)
    (tmp_path / "out" / "descriptors.npy").write_bytes(b"")
    extract(photos, tmp_path / "out")
    assert described.total() == 31


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"maker": {"seed": 1}}, "network was '.*' and is '"),
        ({"maker": {"scales": (1.0, 0.5)}}, r"scales was \[1.0\] and is \[1.0, 0.5\]"),
        ({"source": "0"}, "fingerprint was"),
    ],
)
def test_parts_of_something_else_are_refused(tmp_path, photos, settings, message):
    extract(photos, tmp_path / "out", maker=describer())
    other = dict(settings)
    source = photos / other.pop("source", "")
    maker = describer(**{"sizing": "crop 32", **other.pop("maker", {})})
    with pytest.raises(
        DistapError, match=f"an extraction of something else was begun there: .*{message}"
    ):
        extract(source, tmp_path / "out", maker=maker, **other)


def test_a_disk_without_room_is_told_and_the_parts_are_kept(tmp_path, photos, small_disk):
    disk = small_disk("16k")
    with pytest.raises(DistapError):
        extract(photos, disk / "out", part_images=4)
    assert list((disk / "out" / "parts").glob("*.npz"))
    assert not (disk / "out" / "about.json").exists()


def extract_on_a_rank(world, source, single, folder):
    """From the start, from what was stopped before, a set of one image, and in memory."""
    maker = describer("original", batch_pixels=4 * 40 * 40)
    read = []
    seen = []
    encoded = ImageSet.encoded
    ImageSet.encoded = lambda images, sample, *file: (
        seen.append(sample) or encoded(images, sample, *file)
    )
    for images, name in [(source, "whole"), (source, "stopped"), (single, "of-one")]:
        extract(images, folder / name, world, maker, part_images=4)
        read.append(len(seen))
        seen.clear()
    _, descriptors, left_out = extract_descriptors(in_process(maker, open_images(source), world))
    return read, descriptors, left_out


@pytest.mark.slow
def test_two_ranks_describe_what_one_does_and_go_on_for_it(tmp_path, photos, monkeypatch):
    source = tmp_path / "photos"
    single = tmp_path / "single"
    for path in photos.rglob("*.*"):
        folder = single if path.name == "00.png" else source
        folder.mkdir(exist_ok=True)
        (folder / path.name).write_bytes(path.read_bytes())
    (source / "damaged.png").write_bytes(b"none")
    maker = describer("original", batch_pixels=4 * 40 * 40)
    extract(source, tmp_path / "alone", maker=maker, part_images=4)
    with monkeypatch.context() as patch:
        stopped_after(patch, 3)
        with pytest.raises(StoppedError):
            extract(source, tmp_path / "stopped", maker=maker, part_images=4)
    _, alone, alone_left_out = extract_descriptors(in_process(maker, open_images(source)))
    first, second = on_ranks(2, extract_on_a_rank, source, single, tmp_path)
    assert [sum(ranks) for ranks in zip(first[0], second[0], strict=True)] == [31, 31 - 3 * 4, 1]
    expected = read_descriptors(tmp_path / "alone")
    for name in ("whole", "stopped"):
        stored = read_descriptors(tmp_path / name)
        assert np.array_equal(stored.descriptors, expected.descriptors)
        assert stored.keys.tolist() == expected.keys.tolist()
    assert read_descriptors(tmp_path / "of-one").keys.tolist() == ["00.png"]
    (damaged,) = alone_left_out
    for _, descriptors, left_out in (first, second):
        assert np.array_equal(descriptors, alone)
        assert list(left_out) == [damaged] and "not an image" in left_out[damaged]


def break_off_on_a_rank(world, source, waiting):
    """Rank 1 is asked to stop; the rank `waiting` meets the other at its end only. Both can go on
    together.
    """
    extracting.PROGRESS_SECONDS = 600 if world.rank == waiting else 0
    maker = describer("original", batch_pixels=4 * 40 * 40)
    describing = Describing(maker, world, workers=0, is_asked_to_stop=lambda: world.rank == 1)
    extraction = Extraction(describing, open_images(source))
    with pytest.raises(BrokenOffError):
        extract_descriptors(extraction)
    return world.gather_values(7)


@pytest.mark.parametrize("waiting", [0, 1])
def test_ranks_break_off_together(photos, waiting):
    assert on_ranks(2, break_off_on_a_rank, photos, waiting) == [[7, 7]] * 2


def extract_into_a_folder_of_its_own(world, photos, folder):
    """As on hosts that share no file system; another run left the same plan on rank 1's."""
    if world.rank == 1:
        extract(photos, folder / "1", maker=describer())
    with pytest.raises(
        DistapError, match=r"rank 1 does not see rank 0's folder; name one that all hosts share"
    ):
        extract(photos, folder / str(world.rank), world, describer())


@pytest.mark.slow
def test_ranks_that_do_not_see_one_folder_are_told(tmp_path, photos):
    on_ranks(2, extract_into_a_folder_of_its_own, photos, tmp_path)
    assert not (tmp_path / "0" / "parts").exists()
