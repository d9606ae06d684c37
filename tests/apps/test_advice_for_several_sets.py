"""`distap init A B`: one recipe for several data sets, which trains and evaluates as it is."""

import pytest
from commands import distap
from images import write_images

from distap.config.reading import load_recipe
from distap.telemetry.runlog import read_run_log

QUICK = (
    "model.weights=random",
    "model.backbone=test_resnet",
    "data.workers=0",
)


def classes(count, images):
    return {f"{number}": images for number in range(count)}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "recipe.yaml"


def evaluated(run):
    return [entry for entry in read_run_log(run) if "validation" in entry]


def test_the_recipe_of_two_folders_trains_on_both_and_evaluates_each_and_all(
    tmp_path, recipe, monkeypatch
):
    """Classes of both have the same names, and are held out apart."""
    write_images(tmp_path / "cars/train", classes(12, 4))
    write_images(tmp_path / "cars/test", {"old": 4, "new": 4})
    write_images(tmp_path / "birds", classes(24, 4))
    assert distap(monkeypatch, "init", "cars", "birds", "--output", recipe) == 0
    loaded = load_recipe(recipe)
    train = {name: (settings.data, settings.weight) for name, settings in loaded.data.train.items()}
    assert train == {
        "cars": ("imagefolder:cars/train", 1),
        "birds": ("imagefolder:birds[0:0.75]", 1),
    }
    assert loaded.data.validation == {
        "cars": "imagefolder:cars/test",
        "birds": "imagefolder:birds[0.75:1]",
    }
    assert (loaded.sampling.mix, loaded.evaluation.merged) == ("all", True)
    assert loaded.data.unseen_classes
    assert "A quarter of the classes of birds is held out" in recipe.read_text()
    assert distap(monkeypatch, "train", recipe, "--dry-run", *QUICK) == 0
    assert distap(monkeypatch, "train", recipe, "steps=2", *QUICK) == 0
    entries = evaluated(tmp_path / "runs/recipe")
    assert [entry["step"] for entry in entries] == [0, 2]
    assert entries[-1]["also"].keys() == {"cars", "birds", "merged", "mean"}
    steps = [entry["sets"] for entry in read_run_log(tmp_path / "runs/recipe") if "sets" in entry]
    assert [set(step) for step in steps] == [{"cars", "birds"}] * 2


def test_sets_of_very_unlike_sizes_weigh_by_the_root_and_a_batch_fits_the_smallest(
    tmp_path, recipe, monkeypatch
):
    write_images(tmp_path / "few", {"cat": 5, "dog": 6})
    write_images(tmp_path / "many", classes(150, 3))
    assert distap(monkeypatch, "init", "few", "many", "--output", recipe) == 0
    loaded = load_recipe(recipe)
    assert [settings.weight for settings in loaded.data.train.values()] == [
        "sqrt",
        "sqrt",
    ]
    assert (loaded.data.validation.keys(), loaded.evaluation.merged) == (
        {"many"},
        False,
    )
    assert "No classes of few are held out" in recipe.read_text()
    # 11 and 336 images: the smaller share, 0.153, of a batch is two classes at most
    assert loaded.sampling.classes == 13
    assert distap(monkeypatch, "train", recipe, "--dry-run", *QUICK) == 0


def test_sets_with_galleries_are_evaluated_with_them(tmp_path, recipe, monkeypatch):
    for name in ("people", "cars"):
        for split, count in (("train", 8), ("query", 1), ("gallery", 2)):
            kind = "seen" if split == "train" else "new"
            folder = tmp_path / name / split
            drawn = {f"{kind}-{number}": count + 1 for number in range(3)}
            write_images(folder, drawn, seed=10 * count + len(name))
    write_images(tmp_path / "birds", classes(24, 3))
    assert distap(monkeypatch, "init", "people", "birds", "--output", recipe) == 0
    loaded = load_recipe(recipe)
    assert loaded.data.validation.keys() == {"birds"}
    assert loaded.evaluation.also["people"].gallery == "imagefolder:people/gallery"
    assert distap(monkeypatch, "train", recipe, "--dry-run", *QUICK) == 0

    recipe.unlink()
    assert distap(monkeypatch, "init", "people", "cars", "--output", recipe) == 0
    loaded = load_recipe(recipe)
    assert loaded.data.gallery == "imagefolder:people/gallery"
    assert loaded.evaluation.also["cars"].gallery == "imagefolder:cars/gallery"
    assert distap(monkeypatch, "train", recipe, "steps=1", *QUICK) == 0
    assert {"cars", "mean", "merged"} <= evaluated(tmp_path / "runs/recipe")[-1]["also"].keys()


def test_folders_of_one_name_get_names_of_their_own(tmp_path, recipe, monkeypatch):
    for name in ("a b/train", "c/train", "c/mean"):
        write_images(tmp_path / name, {"cat": 4, "dog": 4})
    assert (
        distap(
            monkeypatch,
            "init",
            "a b/train",
            "c/train",
            "c/mean",
            "--output",
            recipe,
        )
        == 0
    )
    assert load_recipe(recipe).data.train.keys() == {
        "a-b-train",
        "c-train",
        "c-mean",
    }


def test_a_folder_that_does_not_fit_is_named(tmp_path, recipe, monkeypatch, capfd):
    write_images(tmp_path / "good", {"cat": 4, "dog": 4})
    write_images(tmp_path / "alone", classes(3, 1))
    for place, message in (
        ("nothing", "nothing: no such data set"),
        ("alone", "alone: 3 classes, of which 0 have two images or more"),
        ("./good", "good: named twice"),
    ):
        assert distap(monkeypatch, "init", "good", place, "--output", recipe) == 2
        assert message in capfd.readouterr().err
        assert not recipe.exists()
