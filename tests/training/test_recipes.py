"""Each recipe of a paper from its name alone: one of each loss trains, evaluates and resumes; the
others are built.
"""

import math
import os
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from commands import distap
from dataset_trees import TREES
from images import write_images
from ranks import on_ranks

from benchmarks.photos import pack
from distap.config.reading import RECIPES, load_recipe
from distap.data.converters.dataset import convert
from distap.registry import by_path
from distap.retrieval.figures import LABELLED_FIGURES
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

# made small, the same as for ViT-B/32
LARGER = sorted(path.stem for path in RECIPES.glob("*-vit-b16.yaml"))
MIXED = sorted(path.stem for path in RECIPES.glob("simix-*.yaml"))
# the others differ from those without SiMix in the same way
TRAINED_MIXED = ("simix-cub", "simix-cub-vit-b32")
NAMES = sorted(
    path.stem
    for path in RECIPES.glob("*.yaml")
    if path.stem in TRAINED_MIXED or path.stem not in ("emoji", *LARGER, *MIXED)
)
# One of each loss, and one that reads descriptors; others of the same loss differ by data, network
# and rates.
TRAINED = (
    "dinov2-own",
    "dinov3-7b-own",
    "gldv2",
    "gldv2-sfm-120k",
    "guie-64",
    "happier-sop",
    "ilias-linear",
    "landmarks-clean",
    "megaloc",
    "phone-query-own",
    "recall-sop",
    "roadmap-sop",
    "simix-cub",
    "smooth-ap-sop",
    "suprank-h-gldv2",
    "uned-64",
)
STEPS = 3
UNED = ("uned-64", "uned-512")
TOWERS = ("dinov3-7b-own", "pe-core-g-own")
CLASSES_OF_A_MIXTURE = {"gldv2-sfm-120k": 4, "megaloc": 12}  # of which each set has two or more
# Sets without a converter have the shards of others here.
PACKED = ("gsv-cities", "megascenes", "msls", "scannet", "sf-xl", "webface42m")
FIGURES = {
    "roxford5k": "Hard mAP/trapezoids",
    "rparis6k": "Hard mAP/trapezoids",
    "medium": "R@1",
    "phone": "new-to-old mAP",
    "upgrade": "new-to-old mAP",
    "large": "R@1",
}


def made_small(name: str) -> list[str]:
    """Changes that leave the recipe's loss, sampling, optimiser, schedule, augmentation and
    protocol as they are.
    """
    settings = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    sampling = settings["sampling"]
    model = settings["model"]
    evaluation = settings["evaluation"]
    is_transformer = model["pooling"] in ("cls", "cls_mean")
    changes = [
        "precision=float32",
        "data.image_size=32",
        "data.workers=0",
        "replay.size=1",
        "checkpoint.every=1",
    ]
    changes += [
        "model.weights=random",
        f"model.backbone={'test_vit' if is_transformer else 'test_resnet'}",
    ]
    if "batch_size" in sampling:
        # Three of UnED's domains have two images.
        changes.append(f"sampling.batch_size={2 if name in UNED else 4}")
    else:
        classes = CLASSES_OF_A_MIXTURE.get(name, 2)
        changes += [f"sampling.classes={classes}", "sampling.images=2"]
    if name in TOWERS:
        # Gathers of bfloat16 go with bfloat16 alone.
        changes += ["engine={name: fsdp, unit: blocks}", "evaluation.precision=float32"]
    if "whitening" in model:
        changes.append("model.projection=2")  # fewer than there are images to whiten
    if "rows" in settings["data"] and "projection" in model:
        changes.append("model.projection=96")  # as the small backbone describes without it
    if "every" in evaluation:
        changes.append("evaluation.every=1")
    if "resize" in evaluation.get("sizing", ""):
        changes += [
            f"evaluation.sizing=resize {'36x36' if 'x' in evaluation['sizing'] else 36} crop 32"
        ]
    if name == "megaloc":
        changes += ["data.augmentation.steps=[{Resize: [32, 32]}, {RandAugment: {num_ops: 3}}]"]
    if name in UNED:
        changes += [
            "data.augmentation.steps=[{Resize: [36, 36]}, RandomCrop, RandomHorizontalFlip]"
        ]
    if name in ("gldv2", "smooth-ap-vggface2-arcface", "arcface-webface42m"):
        changes += ["data.augmentation.steps=[{Resize: [32, 32]}, RandomHorizontalFlip]"]
    if name.endswith("-own"):
        changes += ["data.augmentation.steps=[{Resize: [32, 32]}, {RandAugment: {num_ops: 3}}]"]
        changes += ["data.train=data/cub/train", "data.validation=data/cub/test"]
        changes += [
            f"evaluation.also.{name}.data=data/cub/test" for name in evaluation.get("also", {})
        ]
    return changes


def trained(world, folder: Path, name: str) -> None:
    """Two steps, and a third after resuming."""
    os.chdir(folder)
    length = "epochs" if load_recipe(Path(name)).steps is None else "steps"
    if name in UNED:
        length = "epochs=null steps"
    for until in (2, STEPS):  # an epoch of four images is one step
        changes = [*made_small(name), *f"{length}={until}".split()]
        Trainer(prepare(load_recipe(Path(name), changes), world), world).train()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with small copies of the data sets in data/, as `distap data convert` writes
    them."""
    folder = tmp_path_factory.mktemp("recipes")
    places = {
        str(source).split("/")[1]
        for name in NAMES
        for source in load_recipe(Path(name)).data.train_sources.values()
    }
    for name in (*places & TREES.keys(), "roxford5k", "rparis6k"):
        TREES[name](folder / "source" / name)
        convert(name, folder / "source" / name, folder / "data" / name)
    for seed, name in enumerate(PACKED):
        photos = {f"place-{number}": 3 for number in range(5)}
        pack(write_images(folder / name, photos, seed=seed), folder / "shards" / name)
    return folder


def extract(monkeypatch, images: str, rows: str, name: str) -> None:
    changes = made_small(name)
    assert distap(monkeypatch, "extract", images, rows, "--checkpoint", name, *changes) == 0


def extract_rows(monkeypatch, name: str) -> None:
    """Describe the images of the sets as the recipe's teacher does, with its dimensions."""
    recipe = load_recipe(Path(name))
    for rows in recipe.data.rows.values():
        extract(monkeypatch, "data/cub/train", str(rows), name)
    for of_set in recipe.evaluation.also.values():
        if of_set.gallery_rows is not None:
            extract(monkeypatch, "data/cub/test", str(of_set.gallery_rows), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_trains_evaluates_and_goes_on(folder, name, monkeypatch):
    kind, _, rows = load_recipe(Path(name)).data.train_name.rpartition(":")
    monkeypatch.chdir(folder)
    if kind == "described":
        extract(monkeypatch, f"data/{rows.partition('/')[2]}", rows, name)
    extract_rows(monkeypatch, name)
    on_ranks(2, trained, folder, name)
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    entries = read_run_log(folder / recipe.run)
    losses = {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
    assert [entry["step"] for entry in entries if "loss" in entry] == [*range(1, STEPS + 1)]
    assert all(map(math.isfinite, losses.values()))
    evaluated = [entry for entry in entries if "validation" in entry]
    if recipe.data.validation is not None:
        assert [entry["step"] for entry in evaluated] == [*range(STEPS + 1)]
    for entry in evaluated:
        asked = recipe.evaluation.figures or LABELLED_FIGURES
        assert {"mAP", *asked} <= entry["validation"].keys()
        also = {name: figures for name, figures in entry.get("also", {}).items() if name in FIGURES}
        assert also.keys() == recipe.evaluation.also.keys()
        assert all(FIGURES[other] in figures for other, figures in also.items())


@pytest.mark.parametrize("name", sorted({*NAMES} - {*TRAINED}))
def test_a_recipe_of_a_loss_that_another_one_trains_is_built(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    extract_rows(monkeypatch, name)
    recipe = load_recipe(Path(name), made_small(name))
    with closing(prepare(recipe, World()).images.shares(range(1))) as shares:
        images = next(shares).images(slice(0, recipe.sampling.size))
    assert images.shape == (recipe.sampling.size, 3, 32, 32)


@pytest.mark.parametrize("name", ["gldv2-sfm-120k", "megaloc", "uned-64"])
def test_a_recipe_of_several_sets_is_tried_without_training(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    assert distap(monkeypatch, "train", name, "--dry-run", *made_small(name)) == 0


def keys_that_differ(*names):
    ours, other = (dict(by_path(load_recipe(Path(name)).model_dump(), ".")) for name in names)
    return {key for key in ours.keys() | other.keys() if ours.get(key) != other.get(key)}


def test_uned_of_512_dimensions_differs_by_its_projection_alone():
    assert keys_that_differ("uned-512", "uned-64") == {"run", "model.projection"}


@pytest.mark.parametrize("name", LARGER)
def test_a_recipe_of_a_larger_transformer_has_its_own_network_rate_and_micro_batch(name):
    expected = {"run", "model.backbone", "optimizer.learning_rate", "replay.size"}
    assert keys_that_differ(name, name.replace("b16", "b32")) <= expected


@pytest.mark.parametrize("name", MIXED)
def test_a_recipe_with_simix_differs_by_its_loss_alone(name):
    other = name.replace("simix-", "recall-")
    assert {key.partition(".")[0] for key in keys_that_differ(name, other)} == {"run", "loss"}
    assert load_recipe(Path(name)).loss.inner == load_recipe(Path(other)).loss
