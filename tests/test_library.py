"""`distap.load` and `distap.evaluate`, and wrong arguments of any public function."""

import json
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import timm
import torch
from extractions import extract
from PIL import Image
from raising import raises
from small_trainings import recipe
from torchvision.transforms.v2 import functional as F

import distap
from distap.errors import DistapError
from distap.retrieval.descriptor_files import read_descriptors
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

IMAGES = 24


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of JPEG and PNG files of several sizes, some turned by EXIF."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        exif = Image.Exif()
        exif[0x0112] = 6 if number % 4 > 1 else 1
        pixels = generator.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((120 + number % 3, 90), Image.Resampling.BICUBIC)
        image.save(folder / f"{number:03}.{'jpg' if number % 2 else 'png'}", exif=exif)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, training_shards):
    folder = tmp_path_factory.mktemp("library") / "run"
    Trainer(
        prepare(
            recipe(folder, training_shards, steps=2, model=MODEL, evaluation__dimensions=16),
            World(),
        ),
        World(),
    ).train()
    return folder


MODEL = {"backbone": "test_resnet", "weights": "random", "projection": 20}


def test_pil_images_get_the_descriptors_that_extraction_writes(photos, run, tmp_path):
    network = distap.load(run, device="cpu")
    assert not network.training and network.dimensions == 16
    extract(photos, tmp_path / "out", maker=network.describer)
    written = read_descriptors(tmp_path / "out")
    paths = [photos / key for key in written.keys]
    assert len(paths) == IMAGES
    expected = torch.from_numpy(np.array(written.descriptors))
    with ExitStack() as opened:
        images = [opened.enter_context(Image.open(path)) for path in paths]
        assert torch.equal(network.describe(images), expected)
    assert torch.equal(network.describe(paths), expected)
    assert torch.equal(network.describe(path.read_bytes() for path in paths), expected)


def test_decoded_images_arrays_and_tensors_are_described_alike(photos, run):
    network = distap.load(run, device="cpu")
    png = sorted(photos.glob("*.png"))[:10:2]  # those that EXIF does not turn
    expected = network.describe(png)
    images = []
    for path in png:
        with Image.open(path) as image:
            images.append(image.convert("RGB"))
    assert torch.equal(network.describe(images), expected)
    assert torch.equal(network.describe(map(np.asarray, images)), expected)
    assert torch.equal(network.describe(map(F.pil_to_tensor, images)), expected)
    pixels = torch.stack([network.transform(image) for image in images])
    assert pixels.dtype == torch.uint8 and pixels.shape == (5, 3, 32, 32)
    with torch.inference_mode():
        assert torch.allclose(network(pixels), expected, atol=1e-6)
    for wrong in ("missing.png", 3, np.zeros((4, 4)), torch.zeros(3, 4, 4)):
        with pytest.raises(
            DistapError, match=r"missing.png: cannot|is no image|expected three colours"
        ):
            network.describe([wrong])


def test_describing_under_another_default_device_is_refused(photos, run):
    network = distap.load(run, device="cpu")
    with (
        torch.device("meta"),
        raises("ranks.default_device"),
    ):
        network.describe(sorted(photos.iterdir())[:2])


def test_a_saved_network_describes_the_same_and_timm_reads_its_backbone(photos, run, tmp_path):
    network = distap.load(run, scales=(1, 0.7), sizing="side 64", device="cpu")
    network.save_pretrained(tmp_path / "saved")
    again = distap.load(tmp_path / "saved", device="cpu")
    paths = sorted(photos.iterdir())[:6]
    assert torch.equal(again.describe(paths), network.describe(paths))
    assert again.describer.described_by == network.describer.described_by
    of_timm = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    state = network.describer.retrieval_network.backbone.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in of_timm.state_dict().items())
    assert (tmp_path / "saved" / "README.md").read_text().startswith("---")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["distap"]["format"] += 1
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    with raises("weights.other_version", tmp_path / "saved", config["distap"]["format"]):
        distap.load(tmp_path / "saved")
    del config["distap"]["format"]  # as the first ones were
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    assert torch.equal(
        distap.load(tmp_path / "saved", device="cpu").describe(paths), network.describe(paths)
    )
    (tmp_path / "saved" / "head.safetensors").write_bytes(b"")
    with raises("weights.not_a_network"):
        distap.load(tmp_path / "saved")


@pytest.fixture
def described():
    generator = torch.Generator().manual_seed(0)
    return torch.nn.functional.normalize(torch.randn(60, 8, generator=generator))


def test_descriptors_of_any_layout_are_taken(described):
    labels = [*range(20), *range(20), *[-1] * 10, *[float("nan")] * 10]
    figures = distap.evaluate(described, labels)
    assert (figures["queries"], figures["left_out"]) == (40, 20)
    nearest = [
        hit.row for hit in distap.search_index(described).search(described[7:8].numpy(), 5)[0]
    ]
    read_only = described.numpy().copy()
    read_only.flags.writeable = False
    reversed_rows = described.numpy()[::-1].copy()[::-1]
    graph = described.clone().requires_grad_()
    inputs = [
        list(described),
        described.tolist(),
        read_only,
        reversed_rows,
        described.numpy().astype(">f4"),
        graph,
    ]
    for values in inputs:
        assert distap.evaluate(values, labels) == figures
        # one vector
        assert [hit.row for hit in distap.search_index(values).search(values[7], 5)[0]] == nearest
    for values in (described.half(), described.numpy().astype(np.float16), described.bfloat16()):
        assert distap.evaluate(values, labels)["mAP"] == pytest.approx(figures["mAP"], rel=0.05)


def test_descriptors_that_cannot_be_ranked_are_named(described):
    long = described.clone()
    long[3] *= 2
    for values, message in (
        (long, "descriptor 3 has length 2, expected 1: normalise all"),
        (described[0], r"descriptors are \(8,\) of float32; expected \(N, C\)"),
        (described.int(), "of int32; expected"),
        ([[1, 2], [3]], "descriptors: a list of 2 list makes no tensor"),
    ):
        for call in (partial(distap.evaluate, labels=range(60)), distap.search_index):
            with pytest.raises(DistapError, match=message):
                call(values)
    labels = torch.arange(60) % 20
    assert distap.evaluate(long, labels, dot_product=True) != distap.evaluate(described, labels)
    assert distap.search_index(long, dot_product=True).search(long[3], 1)[0][
        0
    ].similarity == pytest.approx(4)
    with pytest.raises(DistapError, match="query 0 has length 2, expected 1"):
        distap.search_index(described).search(long[3], 1)
    with pytest.raises(DistapError, match="none of the 60 images has another of its class"):
        distap.evaluate(described, np.full(60, -1))


def test_labels_and_queries_that_do_not_fit_are_named(described):
    for labels, queries, message in (
        (torch.arange(60) * 1.5, None, r"labels: label 1\.5 is no class"),
        (range(59), None, "labels are"),
        (range(60), np.arange(60), "queries are"),
    ):
        with pytest.raises(DistapError, match=message):
            distap.evaluate(described, labels, queries)
    with pytest.raises(DistapError, match="not finite"):
        distap.evaluate(torch.full_like(described, torch.nan), range(60))


NETWORK = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 6))
BATCH = torch.rand(24, 3, 2, 2)
LABELS = torch.arange(24) // 4
step = distap.Multistage(NETWORK, micro_batch=5)


@pytest.mark.parametrize(
    ("call", "code", "names"),
    [
        (lambda: distap.Multistage(torch.flatten), "recipe.value", ["network"]),
        (
            lambda: distap.Multistage(NETWORK, max_drift="a", skip_below="b"),
            "recipe.value",
            ["max_drift", "a", "skip_below", "b"],
        ),
        (lambda: step([Image.new("RGB", (2, 2))] * 8, LABELS[:8]), "data.wrong_images", ["8"]),
        (
            lambda: step(BATCH, LABELS, samples=["a"] * 24),
            "data.not_numbers",
            ["samples", "24"],
        ),
        (
            lambda: distap.load("run", scales="1", sizing=224),
            "recipe.value",
            ["sizing", "224", "1"],
        ),
        (
            lambda: distap.load("run", device="gpu"),
            "ranks.no_device",
            ["device", "gpu"],
        ),
        (
            lambda: distap.load("hf-hub:a/b", best=True),
            "network.options_of_runs",
            ["hf-hub:a/b"],
        ),
        (
            lambda: distap.train("emoji", "steps=1"),
            "recipe.value",
            ["overrides", "steps=1"],
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_expected(call, code, names):
    with raises(code, *names):
        call()


def test_a_name_that_the_hub_cannot_have_is_refused_without_its_password():
    with raises("network.not_found") as caught:
        distap.load("hf-hub:https://user:PASSWORD@127.0.0.1:9/x")
    assert "PASSWORD" not in str(caught.value)
