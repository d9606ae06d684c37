"""`distap.train`: a training with a network, a loss and data sets in Python in place of names."""

import importlib
import signal
import sys
import warnings

import pytest
import torch
import yaml
from images import write_images
from raising import raises
from ranks import on_ranks
from small_trainings import losses, parameters
from torch import nn
from torchvision.datasets import ImageFolder

import distap
from distap.data.sizing import Sizing
from distap.errors import RESTART
from distap.ranking.losses.smooth import SmoothAP
from distap.telemetry.runlog import read_run_log

PARTS = "train", "validation"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for seed, split in enumerate(PARTS):
        write_images(
            folder / split, {f"{split}-{number}": 3 + number % 4 for number in range(12)}, 40, seed
        )
    return folder


def recipe(run, **changes):
    return {
        "run": str(run),
        "steps": 4,
        "data": {"image_size": 32, "workers": 1},
        "sampling": {"name": "random", "batch_size": 25},
        "model": {"backbone": "test_resnet", "weights": "random"},
        "replay": {"size": 4},
        "schedule": "constant",
        "optimizer": {"learning_rate": 1e-3},
        **changes,
    }


class Own(nn.Module):
    """With BatchNorm and dropout, and a `view` that takes one layout only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 15 * 15, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, pixels):
        features = torch.relu(self.norm(self.convolution(pixels)))
        return self.head(self.dropout(features.view(len(features), -1)))


class ApartLoss:
    """A function of (descriptors, labels); asks the process to stop when it is called for the
    `stops`-th time.
    """

    def __init__(self, stops=None) -> None:
        self.calls = 0
        self.stops = stops

    def __call__(self, descriptors, labels):
        self.calls += 1
        if self.calls == self.stops:
            signal.raise_signal(signal.SIGTERM)
        same = labels[:, None] == labels
        return torch.where(same, 1, -1).to(descriptors).mul(1 - descriptors @ descriptors.T).mean()


def trained_by_names(_, run, folders):
    data = {split: f"imagefolder:{folders / split}" for split in PARTS}
    distap.train(
        recipe(run),
        {"loss": {"name": "smooth_ap", "tau": 0.1}, "data": data, "evaluation.every": 2},
    )


def trained_by_objects(_, run, folders):
    data = {split: ImageFolder(folders / split) for split in PARTS}
    assert (
        distap.train(recipe(run), {"evaluation.every": 2}, loss=SmoothAP(tau=0.1), data=data) == run
    )


def figures(run):
    return [line["validation"] for line in read_run_log(run) if "validation" in line]


def test_a_gallery_may_be_an_object_too(tmp_path, folders):
    gallery = write_images(
        tmp_path / "gallery", {f"validation-{number}": 2 for number in range(12)}, 40, seed=7
    )
    places = {"train": folders / "train", "validation": folders / "validation", "gallery": gallery}
    for name, kind in (("named", "imagefolder:{}".format), ("given", ImageFolder)):
        data = {split: kind(folder) for split, folder in places.items()}
        distap.train(recipe(tmp_path / name, steps=1), data=data)
    assert figures(tmp_path / "given") == figures(tmp_path / "named")
    assert 0 < figures(tmp_path / "given")[0]["mAP"] < 1
    assert distap.load(tmp_path / "given").dimensions > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_objects_train_as_their_names_do(tmp_path, folders, ranks):
    named = tmp_path / "named"
    inputs = tmp_path / "given"
    for run, train in ((named, trained_by_names), (inputs, trained_by_objects)):
        train(None, run, folders) if ranks == 1 else on_ranks(
            ranks, train, run, folders, joins=False
        )
    assert losses(inputs) == losses(named) and len(losses(named)) == 4
    assert figures(inputs) == figures(named) and len(figures(named)) == 3
    ours = parameters(inputs)
    theirs = parameters(named)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )
    record = yaml.safe_load((inputs / "recipe.yaml").read_text())
    assert record["loss"]["name"] == "smooth_ap" and record["loss"]["tau"] == 0.1
    assert record["data"]["train"] == "given:torchvision.datasets.folder:ImageFolder"
    assert distap.load(inputs, device="cpu").dimensions == 96


def test_a_stopped_training_goes_on_as_if_undisturbed_and_its_network_can_be_loaded(
    tmp_path, folders
):
    data = ImageFolder(folders / "train")
    handlers = [signal.getsignal(number) for number in (2, 15)]
    settings = {"model": {"batchnorm": "frozen"}, "steps": 6}
    undisturbed = tmp_path / "undisturbed"
    run = tmp_path / "run"
    distap.train(recipe(undisturbed), settings, network=Own(), loss=ApartLoss(), data=data)
    with pytest.raises(SystemExit) as stopped:
        distap.train(recipe(run), settings, network=Own(), loss=ApartLoss(stops=2), data=data)
    assert stopped.value.code == RESTART and len(losses(run)) < 6
    assert [signal.getsignal(number) for number in (2, 15)] == handlers
    network = Own()
    distap.train(recipe(run), settings, network=network, loss=ApartLoss(), data=data)
    assert losses(run) == losses(undisturbed)
    record = yaml.safe_load((run / "recipe.yaml").read_text())
    place = Own.__module__
    assert record["model"]["backbone"] == {"name": "given", "of": f"{place}:Own"}
    assert record["loss"] == {"name": "given", "of": f"{place}:ApartLoss"}

    loaded = distap.load(run, network=Own(), device="cpu")
    paths = sorted((folders / "validation").glob("*/0.png"))
    pixels = torch.stack([loaded.transform(path) for path in paths])
    with torch.no_grad():
        expected = nn.functional.normalize(network.eval()(pixels / 255))
    assert torch.allclose(loaded.describe(paths), expected, atol=1e-6)
    loaded.save_pretrained(tmp_path / "saved")
    again = distap.load(tmp_path / "saved", network=Own(), device="cpu")
    assert torch.equal(again.describe(paths), loaded.describe(paths))
    for source in (run, tmp_path / "saved"):
        with raises("network.missing", "Own", "distap.load"):
            distap.load(source)
    with raises("weights.other_tensors"):
        distap.load(run, network=nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)))


def test_a_loaded_network_can_be_trained_on_and_those_of_timm_get_their_pixels(tmp_path, folders):
    data = ImageFolder(folders / "train")
    first = distap.train(recipe(tmp_path / "first"), {"steps": 1}, data=data)
    before = parameters(first)
    loaded = distap.load(first, device="cpu")
    again = distap.train(recipe(tmp_path / "again"), {"steps": 1}, network=loaded, data=data)
    after = parameters(again)
    assert before.keys() == after.keys() and not all(
        torch.equal(before[name], after[name]) for name in before
    )
    backbone = loaded.describer.retrieval_network.backbone
    backbone.pretrained_cfg = {"mean": (0.5, 0.25, 0.75), "std": (0.1, 0.2, 0.3)}
    pooled = nn.Sequential(backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    pooled.pretrained_cfg = backbone.pretrained_cfg
    distap.train(recipe(tmp_path / "pooled"), {"steps": 1}, network=pooled, data=data)
    image = next((folders / "train").glob("*/*.png"))
    described = distap.load(tmp_path / "pooled", network=pooled, device="cpu")
    pixels = Sizing("crop", 32)(described_file(image))[None] / 255
    mean, std = (
        torch.tensor(pooled.pretrained_cfg[name]).view(1, 3, 1, 1) for name in ("mean", "std")
    )
    with torch.no_grad():
        expected = nn.functional.normalize(pooled.eval()((pixels - mean) / std))
    assert torch.allclose(described.describe([image]), expected, atol=1e-5)


def described_file(path):
    from distap.data.images.decoding import EncodedImage

    return EncodedImage(path.read_bytes())


class Tied(nn.Module):
    """Two layers that share a weight, and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3 * 32 * 32, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.third.weight = self.second.weight
        self.register_buffer("shift", torch.full((1,), 0.5).expand(16))

    def forward(self, pixels):
        hidden = torch.relu(self.first(pixels.flatten(1)))
        return self.third(torch.relu(self.second(hidden))) + self.shift


def test_a_network_with_tied_weights_and_an_expanded_buffer_goes_on_and_can_be_saved(
    tmp_path, folders
):
    data = {"train": ImageFolder(folders / "train")}
    for steps in (2, 4):  # the second call goes on from the checkpoint of the first
        distap.train(recipe(tmp_path / "run", steps=steps), network=Tied(), data=data)
    distap.train(recipe(tmp_path / "whole"), network=Tied(), data=data)
    ours = parameters(tmp_path / "run")
    theirs = parameters(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    network = distap.load(tmp_path / "run", network=Tied())
    network.save_pretrained(tmp_path / "saved")
    again = distap.load(tmp_path / "saved", network=Tied())
    paths = sorted(folders.rglob("*.png"))[:3]
    assert torch.equal(again.describe(paths), network.describe(paths))


@pytest.mark.parametrize(
    "setting",
    [torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)],
    ids=["no_grad", "inference_mode", "set_grad_enabled"],
)
def test_gradients_that_the_caller_has_turned_off_are_on_while_it_trains(
    tmp_path, folders, setting
):
    data = {"train": ImageFolder(folders / "train")}
    distap.train(recipe(tmp_path / "plain", steps=2), network=Own(), data=data)
    network = Own()
    with setting():
        distap.train(recipe(tmp_path / "run", steps=2), network=network, data=data)
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    torch.set_grad_enabled(True)


def test_warnings_may_be_errors(tmp_path, folders):
    data = {"train": ImageFolder(folders / "train")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distap.train(recipe(tmp_path / "run", steps=1), network=Own(), data=data)
        distap.train(recipe(tmp_path / "run", steps=2), network=Own(), data=data)
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused_by_name(tmp_path, folders, register):
    network = Own()
    getattr(network.head.weight, register)(lambda gradient: None)
    with raises("network.hooked_parameter", "head.weight"):
        distap.train(recipe(tmp_path / "run"), network=network, data=ImageFolder(folders / "train"))


def test_overrides_are_nested_or_dotted_and_a_name_chooses_anew(tmp_path, folders):
    settings = recipe(tmp_path / "run", schedule={"name": "multistep", "milestones": [2]})
    changes = {
        "steps": 1,
        "data": {"workers": 0},
        "optimizer.clip_norm": 1.0,
        "schedule": {"name": "cosine"},
    }
    run = distap.train(settings, changes, data=ImageFolder(folders / "train"))
    record = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (record["steps"], record["data"]["workers"], record["data"]["image_size"]) == (1, 0, 32)
    assert record["optimizer"]["clip_norm"] == 1 and record["optimizer"]["learning_rate"] == 1e-3
    assert record["schedule"]["name"] == "cosine" and settings["schedule"] == {
        "name": "multistep",
        "milestones": [2],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(record))
    assert (
        distap.train(path, {"run": tmp_path / "again"}, data=ImageFolder(folders / "train")).name
        == "again"
    )
    with raises("data.object_missing", "given:torchvision"):
        distap.train(path, {"run": tmp_path / "third"})


@pytest.mark.parametrize(
    ("changes", "objects", "code", "names"),
    [
        (
            {},
            {"network": nn.Conv2d(3, 4, 3)},
            "network.no_descriptors",
            ["2", "4", "30"],
        ),
        ({}, {"network": nn.Linear(3, 4)}, "network.fails", ["2", "3", "32"]),
        ({}, {"network": nn.Flatten()}, "network.nothing_to_train", []),
        (
            {},
            {"network": nn.BatchNorm2d(3, track_running_stats=False)},
            "network.mixes_images",
            [],
        ),
        ({}, {"loss": "smooth"}, "recipe.name", ["smooth_ap"]),
        (
            {},
            {"data": {"test": "shards"}},
            "data.unknown_set",
            ["data"],
        ),
        ({"steps": 0}, {}, "recipe.value", ["recipe", "0"]),
        ({"steps.x": 0}, {}, "recipe.override", []),
        ({"loss": {"name": "given", "of": "m:L"}}, {}, "recipe.value", ["loss", "m:L"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    tmp_path, folders, changes, objects, code, names
):
    objects = {"data": ImageFolder(folders / "train"), **objects}
    with raises(code, *names):
        distap.train(recipe(tmp_path / "run"), changes, **objects)


def test_the_module_behind_torchrun_can_be_called_as_the_function(tmp_path):
    module = importlib.import_module("distap.train")
    try:
        assert distap.train is module
        with raises("recipe.not_found", "none.yaml"):
            distap.train(tmp_path / "none.yaml")
    finally:
        del sys.modules["distap.train"], distap.train
