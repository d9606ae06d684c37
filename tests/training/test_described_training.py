"""A head trained on extracted descriptors, in place of images, and joined with the backbone that
described them.
"""

import numpy as np
import pytest
import torch
import yaml
from commands import distap
from ranks import on_ranks
from small_trainings import losses, parameters, recipe, train
from torch import nn
from torch.nn.functional import normalize

import distap as library
from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.evaluation.describing import describing_of
from distap.evaluation.sets import open_set
from distap.ranking.losses.building import build_loss
from distap.retrieval.descriptor_files import read_descriptors
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.build import trained_network
from distap.training.prepared import prepare
from distap.world import World

STEPS = 6
RATE = 0.01
MODEL = {"backbone": "test_vit", "weights": "random"}


def head(folder, described, shards, **changes):
    """A head of eight dimensions, trained on all descriptors at once."""
    rows = len(read_descriptors(described / "train"))
    settings = {
        "steps": STEPS,
        "data": {
            "train": f"described:{described}/train",
            "validation": f"described:{described}/test",
        },
        "data__image_size": 32,
        "model": MODEL
        | {"weights": {"name": "run", "path": str(described / "run")}, "projection": 8},
        "model__unit_length": True,
        "sampling": {"name": "random", "batch_size": rows},
        "loss": {"name": "smooth_ap", "tau": 0.1},
        "optimizer": {"name": "adam", "learning_rate": RATE},
        "schedule": "constant",
        "replay": {"size": 10, "keep": 2},
    }
    return recipe(folder, shards, **{**settings, **changes})


@pytest.fixture(scope="module")
def described(tmp_path_factory, training_shards):
    """A run of one step, and what its network makes of the images to train and to evaluate on."""
    folder = tmp_path_factory.mktemp("described")
    train(World(), folder / "run", training_shards, steps=1, model=MODEL)
    with pytest.MonkeyPatch.context() as patch:
        for name, shards in zip(("train", "test"), training_shards, strict=True):
            assert (
                distap(patch, "extract", shards, folder / name, "--checkpoint", folder / "run") == 0
            )
    return folder


@pytest.fixture(scope="module")
def trained(described, tmp_path_factory, training_shards):
    run = tmp_path_factory.mktemp("head") / "run"
    Trainer(prepare(head(run, described, training_shards), World()), World()).train()
    return run


def of_head(run):
    return {
        name.partition("head.")[2]: parameter
        for name, parameter in parameters(run).items()
        if "head." in name
    }


def test_the_head_learns_as_in_a_plain_loop_over_the_descriptors(described, trained, tmp_path):
    known_labels = read_descriptors(described / "train")
    rows = torch.tensor(known_labels.descriptors)
    labels = torch.tensor(np.unique(known_labels.classes, return_inverse=True)[1])
    start = load_recipe(
        trained / "recipe.yaml",
        [f"run={tmp_path}/start", "steps=1", "optimizer.learning_rate=1e-30"],
    )
    Trainer(prepare(start, World()), World()).train()
    layer = nn.Linear(rows.shape[1], 8)
    layer.load_state_dict(of_head(start.run))
    optimizer = torch.optim.Adam(layer.parameters(), RATE)
    loss = build_loss("smooth_ap", tau=0.1)
    for _ in range(STEPS):
        value = library.ListwiseLoss(loss)(normalize(layer(rows)), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    for name, tensor in of_head(trained).items():
        torch.testing.assert_close(tensor, layer.state_dict()[name], rtol=1e-3, atol=1e-4)
    assert losses(trained)[-1] < losses(trained)[0] - 0.01


def test_ranks_train_the_same_head(described, trained, training_shards, tmp_path):
    on_ranks(2, train_on_a_rank, tmp_path / "run", described, training_shards)
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), abs=1e-5)


def train_on_a_rank(world, run, described, shards):
    Trainer(prepare(head(run, described, shards, replay={"keep": "auto"}), world), world).train()


def test_the_head_joins_its_backbone_wherever_the_run_is_read(
    described, trained, training_shards, tmp_path
):
    reference = read_descriptors(described / "test")
    layer = of_head(trained)
    joined = parameters(trained)
    assert all(
        torch.equal(parameter, joined[name])
        for name, parameter in parameters(described / "run").items()
    )
    expected = normalize(torch.tensor(reference.descriptors) @ layer["weight"].T + layer["bias"])
    with pytest.MonkeyPatch.context() as patch:
        assert (
            distap(patch, "extract", training_shards[1], tmp_path / "out", "--checkpoint", trained)
            == 0
        )
        assert distap(patch, "export", trained, tmp_path / "export", "--format", "adapter") == 0
    assert torch.allclose(
        torch.tensor(read_descriptors(tmp_path / "out").descriptors), expected, atol=1e-5
    )
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    of_run, of_export = (
        library.load(item, device="cpu")(images) for item in (trained, tmp_path / "export")
    )
    assert of_run.shape == (2, 8) and torch.equal(of_run, of_export)
    recipe, network = trained_network(trained, World())
    (shown,) = [
        parameter["validation"]
        for parameter in read_run_log(trained)
        if "validation" in parameter and parameter["step"] == STEPS
    ]
    figures = (
        open_set(str(training_shards[1]))
        .describe(describing_of(recipe, network, World()))
        .evaluate()
        .figures
    )
    assert figures == pytest.approx({name: shown[name] for name in figures}, abs=1e-6)


def test_a_recipe_describes_images_with_the_network_that_it_begins_with(
    described, tmp_path, monkeypatch, capsys
):
    settings = {
        "run": "run",
        "steps": 1,
        "data": {"train": f"described:{tmp_path}/rows", "image_size": 32},
    }
    settings |= {
        "model": MODEL | {"projection": 8, "unit_length": True},
        "sampling": {"batch_size": 8},
    }
    (tmp_path / "head.yaml").write_text(yaml.safe_dump(settings))
    images = next(path for path in described.parent.rglob("train-images"))
    assert (
        distap(
            monkeypatch,
            "extract",
            f"imagefolder:{images}",
            tmp_path / "rows",
            "--checkpoint",
            tmp_path / "head.yaml",
        )
        == 0
        and read_descriptors(tmp_path / "rows").descriptors.shape[1] == 64
    )
    monkeypatch.chdir(tmp_path)
    assert distap(monkeypatch, "train", tmp_path / "head.yaml", "--dry-run") == 0
    capsys.readouterr()
    assert distap(monkeypatch, "train", tmp_path / "head.yaml", "--dry-run", "seed=1") == 2
    assert "has described it, but without a projection" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__unit_length": False},
            "its descriptors have length 1: set model.unit_length: true",
        ),
        ({"model__weights": "random"}, "has described it, but without a projection this one is"),
        ({"model__projection": None}, "train model.projection alone: set it"),
        ({"model__adapter": "lora"}, "leave model.adapter out"),
        ({"engine": "fsdp"}, "set engine to ddp"),
        (
            {"data__augmentation": {"crop": 0.2}},
            "descriptors have no pixels: leave data.augmentation",
        ),
        ({"data__image_sizes": {0: 16, 0.5: 32}}, "leave data.augmentation and image_sizes out"),
        ({"evaluation": {"scales": [1, 0.7]}}, r"set evaluation.scales to \[1\]"),
        ({"data__train": "described:nowhere"}, "nowhere/about.json: no such file"),
    ],
)
def test_what_cannot_be_trained_on_descriptors_is_refused(
    described, training_shards, tmp_path, changes, message
):
    with pytest.raises(DistapError, match=message):
        Trainer(
            prepare(head(tmp_path / "run", described, training_shards, **changes), World()), World()
        ).train()


@pytest.mark.parametrize("change", ["evaluation.scales=[1,0.7]", "classes"])
def test_a_folder_that_no_head_can_stand_on_is_named(
    described, training_shards, tmp_path, monkeypatch, change
):
    images = (
        training_shards[0]
        if "=" in change
        else next(path for path in described.parent.rglob("train-images"))
    )
    assert (
        distap(
            monkeypatch,
            "extract",
            images,
            tmp_path / "train",
            "--checkpoint",
            described / "run",
            *([change] if "=" in change else []),
        )
        == 0
    )
    message = (
        "at the scales" if "=" in change else r"described:\S+: 54 of its 54 images have no class"
    )
    with pytest.raises(DistapError, match=message):
        Trainer(
            prepare(
                head(
                    tmp_path / "run",
                    described,
                    training_shards,
                    data__train=f"described:{tmp_path}/train",
                    data__validation=None,
                ),
                World(),
            ),
            World(),
        )


FROZEN = MODEL | {"freeze": "backbone", "unit_length": True, "projection": 8, "pooling": "mean"}
STILL = {
    "model": FROZEN,
    "schedule": "constant",
    "data__image_size": 32,
    "optimizer": {"name": "adam", "learning_rate": RATE},
}


def test_a_frozen_backbone_describes_images_that_no_step_varies_once(training_shards, tmp_path):
    once = tmp_path / "once"
    again = tmp_path / "again"
    for steps in (2, 4):  # the second training goes on from the first
        train(
            World(),
            once,
            training_shards,
            steps=steps,
            data__augmentation={"crop": 1, "flip": 0},
            **STILL,
        )
    described = read_descriptors(once / "described")
    assert len(described) == len(open_set(str(training_shards[0])).images.sets[0])
    # The same pixels, but for all that the trainer knows each step may flip them.
    train(
        World(),
        again,
        training_shards,
        steps=4,
        data__augmentation={"crop": 1, "flip": 1e-12},
        **STILL,
    )
    assert not (again / "described").exists()
    expected = of_head(again)
    for name, actual in of_head(once).items():
        torch.testing.assert_close(actual, expected[name], rtol=1e-4, atol=1e-5)
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    torch.testing.assert_close(
        library.load(once, device="cpu")(images), library.load(again, device="cpu")(images)
    )
