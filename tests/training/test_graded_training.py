"""Trainings by labels of several levels, from a list of images to the loss."""

import pytest
import torch
from images import write_images
from raising import raises
from ranks import on_ranks
from small_trainings import DESCENT, losses, recipe, train

import distap
from benchmarks.photos import pack
from distap.data.loading.reader import ImageSet
from distap.data.shards.image_files import list_images
from distap.data.shards.index import load_index
from distap.stopwatch import Stopwatch
from distap.telemetry.runlog import read_run_log
from distap.training.build import images_of, network_of
from distap.world import World

GRADED = {
    "loss": {"name": "h_ap", "preset": "released"},
    "sampling": {"name": "p_by_k", "classes": 6, "images": 4, "balance": 1},
    "optimizer": DESCENT,
    "steps": 3,
}


def levels_of(species: int) -> tuple[int, int, int]:
    return species, species // 2, species // 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Twelve species of six genera of two families, packed from a CSV."""
    folder = tmp_path_factory.mktemp("levels")
    files = write_images(
        folder / "images", {str(species): 4 + species % 2 for species in range(12)}, 40
    ).glob("*/*")
    rows = [(file.relative_to(folder), *levels_of(int(file.parent.name))) for file in sorted(files)]
    text = "".join(
        f"{path},species {species},genus {genus},family {family}\n"
        for path, species, genus, family in rows
    )
    (folder / "list.csv").write_text("path,label,level1,level2\n" + text)
    pack(list_images(folder / "list.csv"), folder / "shards", images_per_shard=20)
    return folder / "shards", None


def train_on_ranks(world, run, shards, changes):
    train(world, run, shards, **changes)


def test_the_loss_of_a_graded_training_is_that_of_rank_on_any_number_of_ranks(tmp_path, shards):
    settings = recipe(tmp_path, shards, **GRADED)
    index = load_index(shards[0])
    assert index.class_levels[index.class_name == "species 7"].tolist() == [["genus 3", "family 1"]]
    shares = images_of(settings, World(), Stopwatch()).shares(range(1))
    share = next(shares)
    pixels = share.images(slice(0, 24))
    levels = torch.tensor(
        [levels_of(int(index.path[sample].split("/")[1])) for sample in share.samples.tolist()]
    )
    # balanced over genera
    assert [len(set(levels[:, level].tolist())) for level in range(3)] == [6, 6, 2]
    network = network_of(settings, World()).eval()
    with torch.no_grad():
        expected = distap.rank(network(pixels), levels, GRADED["loss"])
        alone = distap.rank(network(pixels), levels[:, 0], GRADED["loss"])
    assert abs(float(expected.loss - alone.loss)) > 1e-3
    for ranks in (1, 2):
        on_ranks(ranks, train_on_ranks, tmp_path / str(ranks), shards, GRADED)
    first = losses(tmp_path / "1")
    second = losses(tmp_path / "2")
    assert first[0] == pytest.approx(float(expected.loss), abs=1e-5)
    assert second == pytest.approx(first, abs=1e-5) and len(second) == 3


# The last one takes a family for a data set.
@pytest.mark.parametrize(
    "loss",
    [
        {"h_ap": 0.9, "normalized_softmax": 0.1},
        {"h_ap": 0.9, "csl": 0.1},  # which takes the tree of classes from the index
        {"within": {"inner": {"h_ap": 0.9, "csl": 0.1}}},
    ],
    ids=str,
)
def test_graded_and_other_losses_train_with_a_memory_of_levels(tmp_path, shards, loss):
    train(World(), tmp_path, shards, **GRADED | {"loss": loss, "memory": {"size": 40}})
    assert len(losses(tmp_path)) == 3


def test_graded_figures_of_a_training_are_those_of_its_descriptors(tmp_path, shards):
    names = ["H-AP", "NDCG"]
    evaluation = {
        "at_start": False,
        "figures": names,
        "also": {"again": {"data": str(shards[0]), "figures": ["R@1"]}},
    }
    train(
        World(),
        tmp_path,
        shards,
        **GRADED,
        data__validation=str(shards[0]),
        data__unseen_classes=False,
        evaluation=evaluation,
    )
    (actual,) = (entry for entry in read_run_log(tmp_path) if "validation" in entry)
    network = distap.load(tmp_path)
    index = load_index(shards[0])
    reader = ImageSet(shards[0], index)
    with torch.no_grad():
        descriptors = network.describe([reader.data(sample) for sample in range(len(index))])
    levels = [levels_of(int(path.split("/")[1])) for path in index.path.tolist()]
    expected = distap.evaluate(descriptors, levels, figures=["mAP", *names])
    assert actual["validation"] == pytest.approx(
        {key: expected[key] for key in actual["validation"]}, abs=1e-6
    )
    assert {"mAP", "level 1 mAP", "level 2 mAP", "H-AP", "NDCG"} <= actual["validation"].keys()
    assert list(actual["also"]["again"]) == ["mAP", "R@1"]


def test_a_level_that_the_index_lacks_is_refused(tmp_path, shards):
    sampling = GRADED["sampling"] | {"balance": 3}
    with raises("sampling.unknown_level", "3", "2"):
        train(World(), tmp_path, shards, **GRADED | {"sampling": sampling})
