import io
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import started
from PIL import Image
from ranks import on_ranks
from test_cli import distap
from test_trainer import recipe
from torch.nn.functional import normalize

from distap.bench.photos import photo
from distap.data.decoding import DamagedImageError
from distap.data.folders import ImageFolder
from distap.data.image_sets import open_images
from distap.data.packing import pack
from distap.data.whole_images import Sizing
from distap.distributed import World
from distap.errors import DistapError
from distap.exits import RESTART
from distap.extraction import describer_from, describer_of, extract_descriptors, extract_to_folder
from distap.extraction.part_files import PartFiles
from distap.model import build_network
from distap.retrieval.descriptor_files import DescriptorSet, read_descriptors
from distap.retrieval.whitening import learn_pca, save_whitening
from distap.trainer import Trainer

SHAPES = [(40, 32), (32, 40), (40, 40), (40, 32), (48, 33), (32, 40)]  # width and height
ORIENTATION = 0x0112


def network(seed=0, backbone="resnet10t", projection=16):
    torch.manual_seed(seed)
    return build_network(backbone, {"name": "random"}, {"name": "gem"}, projection)


def describer(sizing="crop 32", seed=0, **settings):
    return describer_of(network(seed), Sizing.parse(sizing), **settings)


def encoded(image, form="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """30 photos of five shapes in two folders, one of them turned by EXIF; not to be written to."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(30):
        path = folder / f"{number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(photo(*SHAPES[number % len(SHAPES)], seed=number)))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    (folder / "turned.jpg").write_bytes(encoded(photo(40, 32, seed=99), "JPEG", quality=95, exif=exif))
    return folder


@pytest.fixture
def described(monkeypatch) -> Counter:
    """How often each image of a folder has been read in this process since."""
    counts: Counter = Counter()
    encoded = ImageFolder.encoded

    def counted(folder, sample):
        counts[folder.names[sample]] += 1
        return encoded(folder, sample)

    monkeypatch.setattr(ImageFolder, "encoded", counted)
    return counts


def extract(source, output, world=World(), maker=None, workers=0, **settings):  # noqa: B008 - it is frozen
    return extract_to_folder(
        maker or describer("original"), open_images(source), world, output, workers=workers, **settings
    )


def one_by_one(maker, source: Path, keys) -> np.ndarray:
    return torch.cat([maker.describe([(source / key).read_bytes()]) for key in keys]).numpy()


# What is described


@pytest.mark.parametrize("sizing", ["crop 32", "side 36", "original"])
def test_a_folder_is_described_as_its_images_one_by_one(tmp_path, photos, sizing):
    maker = describer(sizing, scales=(1.0, 0.7071), batch_pixels=5 * 40 * 40)
    written = extract(photos, tmp_path / "out", maker=maker)
    found = read_descriptors(tmp_path / "out")
    images = open_images(photos)
    assert found.keys.tolist() == images.keys.tolist() and len(found) == 31
    assert set(found.classes.tolist()) == {""}
    assert found.described_by == maker.described_by and found.data == str(photos)
    np.testing.assert_allclose(found.descriptors, one_by_one(maker, photos, found.keys), atol=1e-6)
    assert written.images == written.described_now == 31
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("about.json", "classes.npy", "descriptors.npy", "extraction.json", "keys.npy")
    ]


def test_batches_of_whole_images_are_large_though_shapes_are_mixed(tmp_path, photos):
    maker = describer("original", batch_pixels=10 * 40 * 40)
    written = extract(photos, tmp_path / "out", maker=maker)
    # 40 x 32 and 32 x 40 ten times each and one more turned by EXIF, 40 x 40 and 48 x 33 five times.
    assert written.batches == 4


def test_batches_of_the_same_images_give_the_same_bits(tmp_path, photos):
    maker = describer("original", batch_pixels=4 * 40 * 40)
    for name in ("a", "b"):
        extract(photos, tmp_path / name, maker=maker)
    first, second = (read_descriptors(tmp_path / name).descriptors for name in ("a", "b"))
    assert np.array_equal(first, second)
    in_memory = extract_descriptors(maker, open_images(photos), World(), workers=0)
    assert np.array_equal(in_memory.descriptors, first)
    assert in_memory.as_set(maker).keys.tolist() == in_memory.images.keys.tolist()


def test_shards_are_described_with_their_classes(tmp_path, training_shards):
    source = training_shards[1]
    extract(source, tmp_path / "out", maker=describer(), workers=1)
    found, images = read_descriptors(tmp_path / "out"), open_images(source)
    assert found.keys.tolist() == images.keys.tolist()
    assert found.classes.tolist() == images.classes.tolist()
    expected = describer().describe([images.reader.data(n) for n in range(len(images))]).numpy()
    np.testing.assert_allclose(found.descriptors, expected, atol=1e-6)


def test_a_shard_s_image_that_exif_turns_is_described_as_it_is_seen(tmp_path, photos):
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "turned.jpg").write_bytes((photos / "turned.jpg").read_bytes())
    (tmp_path / "images" / "a" / "upright.png").write_bytes((photos / "0" / "00.png").read_bytes())
    pack(tmp_path / "images", tmp_path / "shards")
    maker = describer("original")
    written = extract(tmp_path / "shards", tmp_path / "out", maker=maker)
    expected = one_by_one(maker, photos, ["turned.jpg", "0/00.png"])
    np.testing.assert_allclose(read_descriptors(tmp_path / "out").descriptors, expected, atol=1e-6)
    assert written.batches == 2


def test_boxes_are_cut_out_first(photos):
    maker, images = describer("original"), open_images(photos)
    boxes = {"0/00.png": (3.6, 4.4, 30.0, 28.0), "1/03.png": (0, 0, 20, 20)}
    found = extract_descriptors(maker, images, World(), boxes, workers=0)
    plain = extract_descriptors(maker, images, World(), workers=0)
    for row, key in enumerate(images.keys.tolist()):
        if key not in boxes:
            np.testing.assert_allclose(found.descriptors[row], plain.descriptors[row], atol=1e-6)
            continue
        box = [round(edge) for edge in boxes[key]]
        cut = encoded(Image.open(photos / key).crop(box))
        np.testing.assert_allclose(found.descriptors[row], maker.describe([cut])[0], atol=1e-6)
        np.testing.assert_allclose(maker.describe([(photos / key).read_bytes()], [box])[0], maker.describe([cut])[0])


@pytest.mark.parametrize(
    ("boxes", "message"),
    [({"nobody": (0, 0, 1, 1)}, "no image is called so"), ({"0/00.png": (5, 0, 5, 1)}, "expected left, top")],
)
def test_a_box_of_no_image_or_without_content_is_refused(photos, boxes, message):
    with pytest.raises(DistapError, match=message):
        extract_descriptors(describer(), open_images(photos), World(), boxes, workers=0)


def test_damaged_images_are_left_out_and_named(tmp_path, photos):
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "c.png"):
        (images / name).write_bytes((photos / "0" / "00.png").read_bytes())
    (images / "b.png").write_bytes((photos / "0" / "00.png").read_bytes()[:200])
    (images / "d.jpg").write_bytes(b"none")
    (images / "e.png").symlink_to(photos / "0" / "00.png")
    written = extract(images, tmp_path / "out")
    assert (written.images, written.left_out) == (2, 3)
    found = read_descriptors(tmp_path / "out")
    assert found.keys.tolist() == ["a.png", "c.png"]
    lines = (tmp_path / "out" / "left_out.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["b.png", "d.jpg", "e.png"]
    assert "truncated" in lines[0] and "not an image" in lines[1] and "out of the folder" in lines[2]


def test_a_descriptor_that_is_not_finite_is_left_out(tmp_path, photos):
    maker = describer("crop 32")
    with torch.no_grad():
        maker.network.network.head.weight.fill_(float("inf"))
    with pytest.raises(DistapError, match=r"none of its 31 images can be described.*not finite"):
        extract(photos, tmp_path / "out", maker=maker)


def test_images_too_small_for_the_network_are_left_out(tmp_path):
    maker = describer_of(network(backbone="convnext_atto"), Sizing("original"))
    for name, size in (("a", (40, 32)), ("b", (3, 40)), ("c", (40, 32))):
        (tmp_path / f"{name}.png").write_bytes(encoded(photo(*size, seed=1)))
    extract(tmp_path, tmp_path / "out", maker=maker)
    assert read_descriptors(tmp_path / "out").keys.tolist() == ["a.png", "c.png"]
    (left_out,) = (tmp_path / "out" / "left_out.txt").read_text().splitlines()
    assert left_out == "b.png\tdecode_error: 3 x 40 pixels are too few for the network"
    with pytest.raises(DamagedImageError, match="3 x 40 pixels are too few"):
        maker.describe([(tmp_path / "b.png").read_bytes()])


def test_float16_is_the_rounded_float32(tmp_path, photos):
    for dtype in ("float32", "float16"):
        extract(photos, tmp_path / dtype, dtype=dtype)
    single, half = (read_descriptors(tmp_path / dtype).descriptors for dtype in ("float32", "float16"))
    assert half.dtype == np.float16
    assert np.array_equal(single.astype(np.float16), half)


def test_bf16_is_near_to_float32(photos):
    single, half = (
        extract_descriptors(describer(precision=precision), open_images(photos), World(), workers=0).descriptors
        for precision in ("float32", "bf16")
    )
    assert half.dtype == np.float32
    assert 0.99 < (single * half).sum(axis=1).min() < 1


def test_parquet_holds_the_same(tmp_path, photos):
    extract(photos, tmp_path / "npy")
    extract(photos, tmp_path / "parquet", form="parquet")
    arrays, table = (read_descriptors(tmp_path / form) for form in ("npy", "parquet"))
    assert np.array_equal(arrays.descriptors, table.descriptors)
    assert arrays.keys.tolist() == table.keys.tolist()
    assert sorted(path.name for path in (tmp_path / "parquet").iterdir()) == [
        *("about.json", "descriptors.parquet", "extraction.json")
    ]


# Going on


class StoppedError(Exception):
    pass


def stopped_after(monkeypatch, parts: int) -> None:
    """The next extraction ends as if it were killed when it has written so many parts."""
    write = PartFiles.write
    left = iter(range(parts))

    def write_or_stop(*arguments):
        if next(left, None) is None:
            raise StoppedError
        write(*arguments)

    monkeypatch.setattr(PartFiles, "write", write_or_stop)


def test_an_extraction_that_was_stopped_describes_what_is_missing(tmp_path, photos, monkeypatch, described):
    with monkeypatch.context() as patch:
        stopped_after(patch, 3)
        with pytest.raises(StoppedError):
            extract(photos, tmp_path / "out", part_images=4)
    with pytest.raises(DistapError, match="writes it when all are described"):
        read_descriptors(tmp_path / "out")
    described.clear()
    written = extract(photos, tmp_path / "out")  # the size of parts is that of the beginning
    assert written.described_now == described.total() == 31 - 12
    extract(photos, tmp_path / "whole", part_images=4)
    found, whole = (read_descriptors(tmp_path / name) for name in ("out", "whole"))
    assert np.array_equal(found.descriptors, whole.descriptors) and found.keys.tolist() == whole.keys.tolist()


def test_one_that_is_finished_is_not_done_again(tmp_path, photos, described):
    first = extract(photos, tmp_path / "out")
    described.clear()
    again = extract(photos, tmp_path / "out")
    assert described.total() == again.described_now == 0
    assert (again.images, again.batches) == (first.images, first.batches)
    (tmp_path / "out" / "descriptors.npy").write_bytes(b"")
    assert extract(photos, tmp_path / "out").described_now == 31


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"maker": {"seed": 1}}, "network was '.*' and is '"),
        ({"maker": {"sizing": "crop 40"}}, "sizing was 'crop 32' and is 'crop 40'"),
        ({"maker": {"scales": (1.0, 0.5)}}, r"scales was \[1.0\] and is \[1.0, 0.5\]"),
        ({"maker": {"precision": "bf16"}}, "precision was 'float32' and is 'bf16'"),
        ({"dtype": "float16"}, "dtype was 'float32' and is 'float16'"),
        ({"boxes": {"0/00.png": (0, 0, 9, 9)}}, "boxes was None and is"),
        ({"source": "0"}, "fingerprint was"),
    ],
)
def test_parts_of_something_else_are_refused(tmp_path, photos, settings, message):
    extract(photos, tmp_path / "out", maker=describer())
    other = dict(settings)
    source, maker = photos / other.pop("source", ""), describer(**{"sizing": "crop 32", **other.pop("maker", {})})
    with pytest.raises(DistapError, match=f"an extraction of something else was begun there: .*{message}"):
        extract(source, tmp_path / "out", maker=maker, **other)


def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path, photos):
    with pytest.raises(DistapError, match="something already that is no extraction"):
        extract(photos, photos)
    (tmp_path / "file").write_text("")
    with pytest.raises(DistapError, match="something already"):
        extract(photos, tmp_path / "file")


def test_a_part_that_is_damaged_is_described_again(tmp_path, photos, monkeypatch):
    with monkeypatch.context() as patch:
        stopped_after(patch, 3)
        with pytest.raises(StoppedError):
            extract(photos, tmp_path / "out", part_images=4)
    part = tmp_path / "out" / "parts" / "000001.npz"
    data = bytearray(part.read_bytes())
    data[400] ^= 1
    part.write_bytes(data)
    with pytest.raises(DistapError, match=r"000001.npz: damaged .* describes this part again"):
        extract(photos, tmp_path / "out")
    assert extract(photos, tmp_path / "out").described_now == 4


def test_a_disk_without_room_is_told_and_the_parts_are_kept(tmp_path, photos, small_disk):
    disk = small_disk("16k")
    with pytest.raises(DistapError):
        extract(photos, disk / "out", part_images=4)
    assert list((disk / "out" / "parts").glob("*.npz"))
    assert not (disk / "out" / "about.json").exists()


# Ranks


def extract_on_a_rank(world, source, single, folder):
    """From the start, from what was stopped before, a set of one image, and in memory."""
    maker = describer("original", batch_pixels=4 * 40 * 40)
    written = [
        extract(source, folder / "whole", world, maker, part_images=4),
        extract(source, folder / "stopped", world, maker),
        extract(single, folder / "of-one", world, maker),
    ]
    in_memory = extract_descriptors(maker, open_images(source), world, workers=0)
    return [one and one.described_now for one in written], in_memory.descriptors, in_memory.left_out


@pytest.mark.slow
def test_two_ranks_describe_what_one_does_and_go_on_for_it(tmp_path, photos, monkeypatch):
    source, single = tmp_path / "photos", tmp_path / "single"
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
    alone = extract_descriptors(maker, open_images(source), World(), workers=0)
    first, second = on_ranks(2, extract_on_a_rank, source, single, tmp_path)
    assert first[0] == [31, 31 - 3 * 4, 1] and second[0] == [None] * 3
    expected = read_descriptors(tmp_path / "alone")
    for name in ("whole", "stopped"):
        found = read_descriptors(tmp_path / name)
        assert np.array_equal(found.descriptors, expected.descriptors)
        assert found.keys.tolist() == expected.keys.tolist()
    assert read_descriptors(tmp_path / "of-one").keys.tolist() == ["00.png"]
    (damaged,) = alone.left_out
    for _, descriptors, left_out in (first, second):
        assert np.array_equal(descriptors, alone.descriptors)
        assert list(left_out) == [damaged] and "not an image" in left_out[damaged]


# Single images


def test_a_stored_set_says_how_a_single_image_is_described(tmp_path, photos):
    maker = describer("side 36", scales=(1.0, 0.5))
    extract(photos, tmp_path / "out", maker=maker)
    stored = read_descriptors(tmp_path / "out")
    again = describer_from(network(), stored.described_by)
    assert again.described_by == stored.described_by and not again.network.network.training
    np.testing.assert_allclose(stored.descriptors, one_by_one(again, photos, stored.keys), atol=1e-6)


def test_another_network_or_whitening_is_refused(photos):
    maker = describer("crop 32")
    generator = np.random.default_rng(0)
    values = normalize(torch.from_numpy(generator.normal(size=(40, 16)))).numpy()
    texts = np.array([str(row) for row in range(40)])
    whitening = learn_pca(DescriptorSet(values, texts, texts, maker.described_by, "here"), dimensions=8)
    with pytest.raises(DistapError, match="name the checkpoint that they were extracted with"):
        describer_from(network(seed=1), maker.described_by)
    with pytest.raises(DistapError, match="learn it anew"):
        describer_of(network(seed=1), maker.sizing, whitening=whitening)
    whitened = describer_of(network(), maker.sizing, whitening=whitening)
    assert whitened.dimensions == 8
    image = [(photos / "0" / "00.png").read_bytes()]
    expected = whitening.apply(maker.describe(image))
    torch.testing.assert_close(whitened.describe(image), expected, atol=1e-6, rtol=0)
    assert describer_from(network(), whitened.described_by, whitening).described_by == whitened.described_by
    with pytest.raises(DistapError, match=r"made with the whitening .* but no whitening is given"):
        describer_from(network(), whitened.described_by)


def test_a_network_in_training_is_described_as_in_evaluation_and_goes_on_training(photos):
    inner = network().train()
    inner.backbone.bn1.train()
    image = [(photos / "0" / "00.png").read_bytes()]
    found = describer_of(inner, Sizing("crop", 32)).describe(image)
    assert inner.training and inner.backbone.training
    assert torch.equal(found, describer("crop 32").describe(image))


def test_a_damaged_upload_says_why(photos):
    with pytest.raises(DamagedImageError, match="too_large"):
        describer(max_pixels=100).describe([(photos / "0" / "00.png").read_bytes()])


def test_no_image_gives_no_descriptor():
    assert describer().describe([]).shape == (0, 16)


def test_a_backbone_of_one_size_takes_crops_of_it_alone():
    inner = network(backbone="vit_tiny_patch16_224")
    for sizing, scales in [("original", (1.0,)), ("side 224", (1.0,)), ("crop 224", (1.0, 0.5)), ("crop 96", (1.0,))]:
        with pytest.raises(DistapError, match=r"224 x 224 pixels only.*use `crop 224`"):
            describer_of(inner, Sizing.parse(sizing), scales)
    assert describer_of(inner, Sizing("crop", 224)).dimensions == 16


# The command


@pytest.fixture(scope="module")
def run(tmp_path_factory, training_shards) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    Trainer(recipe(folder, training_shards, steps=1, sampling={"name": "random", "batch_size": 8}), World()).train()
    return folder


def test_the_command_describes_a_folder_and_says_what_it_wrote(tmp_path, monkeypatch, capsys, run, photos):
    out = tmp_path / "out"
    options = ("--checkpoint", run, "--max-side", 40, "--scales", "1,0.5", "--dtype", "float16", "--workers", 0)
    assert distap(monkeypatch, "extract", *options, "--part-images", 8, photos, out) == 0
    printed = capsys.readouterr().err
    assert "31 descriptors of 512 dimensions, float16" in printed and "images a batch" in printed
    assert f"describing {photos}: 31 of 31 done" in printed and "images/s" in printed
    found = read_descriptors(out)
    assert found.described_by.sizing == "side 40" and found.described_by.scales == (1.0, 0.5)
    assert found.described_by.scale_power == pytest.approx(3.0, abs=0.1)
    whitening = learn_pca(found, dimensions=4)
    save_whitening(tmp_path / "whitening", whitening)
    whitened = ("--whitening", tmp_path / "whitening", "--form", "parquet", photos, tmp_path / "whitened")
    assert distap(monkeypatch, "extract", *options, *whitened) == 0
    expected = whitening.apply(np.asarray(found.descriptors, dtype=np.float32))
    np.testing.assert_allclose(read_descriptors(tmp_path / "whitened").descriptors, expected, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--original", "--max-side", "9", "{photos}", "{tmp}/out"], "give one of --image-size"),
        (["--scales", "1,x", "{photos}", "{tmp}/out"], "expected numbers with commas"),
        (["--whitening", "{tmp}/none", "{photos}", "{tmp}/out"], "none"),
        (["{tmp}/nothing", "{tmp}/out"], "no such data set"),
        (["{photos}", "{photos}"], "something already"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(tmp_path, monkeypatch, capsys, run, photos, arguments, message):
    arguments = [argument.format(tmp=tmp_path, photos=photos) for argument in arguments]
    assert distap(monkeypatch, "extract", "--checkpoint", run, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_ranks_that_are_asked_to_stop_leave_whole_parts_to_go_on_from(tmp_path, monkeypatch, run, photos, capsys):
    out, images = tmp_path / "out", tmp_path / "images"
    images.mkdir()
    for number in range(20):
        for path in photos.rglob("*.png"):
            (images / f"{number}-{path.name}").write_bytes(path.read_bytes())
    options = ["--checkpoint", str(run), "--original", "--workers", "1", "--part-images", "8", str(images), str(out)]
    command = [sys.executable, "-m", "distap.cli", "extract", "--ranks", "2", *options]
    with started(command, tmp_path) as job:
        job.wait_until(lambda: len(list((out / "parts").glob("*.npz"))) >= 4, seconds=120)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.status() == RESTART, job.said
        assert "the same command goes on" in job.said
        job.wait_until_none_is_left()
    assert not (out / "about.json").exists()
    parts = {path.name for path in (out / "parts").iterdir()}
    assert all(name.endswith(".npz") and name[0] != "." for name in parts)
    assert distap(monkeypatch, "extract", *options) == 0
    assert f"{len(parts) * 8} of 600 images are described already" in capsys.readouterr().err
    assert json.loads((out / "extraction.json").read_text())["written"]["images"] == 600
    assert len(read_descriptors(out)) == 600 and not (out / "parts").exists()
