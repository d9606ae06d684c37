"""`distap tune`: trials on held-out classes; it goes on after a kill, and says what is wrong with a
space.
"""

import os
import sqlite3
from contextlib import closing, contextmanager
from unittest.mock import patch

import pytest
import yaml
from commands import distap
from images import write_images
from launching import started

from distap.apps.tune import Tuning
from distap.config.reading import load_recipe
from distap.telemetry.runlog import read_run_log

RECIPE = """
run: runs/photos
steps: 40
data: {train: "imagefolder:photos", image_size: 32, workers: 0}
sampling: {name: p_by_k, classes: 4, images: 2}
model: {backbone: test_resnet, weights: random}
loss: smooth_ap
optimizer: {learning_rate: 0.001}
schedule: {name: linear, warmup: 4}
"""
pytestmark = pytest.mark.slow
SPACE = """
loss: [multi_similarity]
sampling: [{name: p_by_k, classes: 8, images: 2}]
optimizer.learning_rate: {low: 1e-4, high: 0.01, log: true}  # the first is text in YAML
data.image_sizes: [{}, {0: 16, 0.5: 32}]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_images(tmp_path / "photos", {f"{number}": 6 for number in range(24)}, size=32)
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.replace("imagefolder:photos", f"imagefolder:{tmp_path}/photos")
    )
    (tmp_path / "space.yaml").write_text(SPACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_a_search_writes_a_recipe_and_a_page_and_goes_on_after_a_kill(folder, monkeypatch, capfd):
    search = ["tune", f"{folder}/recipe.yaml", "--space", f"{folder}/space.yaml", "--share", "0.5"]
    search += ["--output", f"{folder}/tuned"]
    trials = folder / "tuned/trials"
    with started(["distap", *search], folder) as job:  # which kills it at the end
        job.wait_until(lambda: [*trials.glob("*/*/checkpoints/*/manifest.json")])
        assert distap(monkeypatch, *search) == 2
        assert (
            "--output: " in (message := capfd.readouterr().err)
            and "another search runs here" in message
        )
    (first,) = trials.glob("*/*")
    trial = load_recipe(first / "trial.yaml")
    assert (trial.steps, trial.sampling.size, trial.schedule.warmup, trial.evaluation.every) == (
        20,
        8,
        2,
        5,
    )
    assert (str(trial.data.train), str(trial.data.validation)) == (
        f"imagefolder:{folder}/photos[0:0.75]",
        f"imagefolder:{folder}/photos[0.75:1]",
    )
    # The killed trial was that of the recipe as it is; it goes on from its checkpoint.
    assert distap(monkeypatch, *search, "--minutes", "0.1") == 0
    assert [entry["step"] for entry in read_run_log(first) if "loss" in entry] == [*range(1, 21)]
    output = capfd.readouterr()
    assert (
        "trial 1, as it was, " in output.err
        and "minutes left" in output.err
        and "Next: distap train " in output.out
    )
    # each as many pixels
    for of_trial in (load_recipe(file) for file in trials.glob("*/*/trial.yaml")):
        if of_trial.sampling.size == 16 and not of_trial.data.image_sizes:
            assert (of_trial.schedule.warmup, of_trial.steps) == (0.8, 8)
    text = (folder / "tuned/recipe.yaml").read_text()
    assert (
        "mAP of held-out classes in " in text
        and "of them whole: the best reached " in text
        and "# loss, " in text
    )
    tuned = load_recipe(folder / "tuned/recipe.yaml")
    assert tuned.data.validation is None and str(tuned.run) == "runs/photos-tuned"
    assert tuned.data.image_sizes or tuned.steps * tuned.sampling.size == 320
    page = (folder / "tuned/tuning.html").read_text()
    assert "distap: tuning of " in page and page.count("<tr>") > 1


@contextmanager
def trials_worth(value):
    """Give each trial a value by its parameters, in place of training it."""
    with patch.object(Tuning, "train", autospec=True) as train:
        train.side_effect = lambda search, trial, _: search.study.tell(trial, value(trial.params))
        yield train


def test_each_trial_changes_one_value_of_the_best_until_all_were_tried(folder, monkeypatch):
    search = [
        "tune",
        "recipe.yaml",
        "--space",
        "space.yaml",
        "--output",
        "tuned",
        "--share",
        "0.1",
        "--minutes",
        "9",
    ]
    (folder / "space.yaml").write_text("loss: [smooth_ap, multi_similarity]")
    with trials_worth(lambda values: 1 - len(values)) as train:
        assert distap(monkeypatch, *search) == 0
    tried = [call.args[1].params.get("loss") for call in train.call_args_list]
    assert tried[0] is None  # as it was, and each value
    assert sorted(tried[1:]) == ["multi_similarity", "smooth_ap"]
    (folder / "space.yaml").write_text(
        "{loss: [smooth_ap, multi_similarity], model.pooling: [gem, mean]}"
    )
    with trials_worth(len) as train:
        assert distap(monkeypatch, *search) == 0
    base, first, best, *remaining = (call.args[1].params for call in train.call_args_list)
    assert (base, len(first), len(best), len(remaining)) == (
        {},
        1,
        2,
        2,
    ) and first.items() < best.items()
    assert all(len(best.items() & other.items()) == 1 for other in remaining)


def test_what_no_trial_could_do_is_refused_before_any(folder, monkeypatch, capfd):
    assert (
        distap(monkeypatch, "tune", "recipe.yaml", "data.reading=streamed", "sampling=random") == 2
    )
    assert "recipe.yaml, in a trial: data.reading is streamed" in capfd.readouterr().err


def test_few_classes_are_refused(folder, monkeypatch, capfd):
    write_images(folder / "few", {"cat": 4, "dog": 4}, size=32)
    assert distap(monkeypatch, "tune", "recipe.yaml", f"data.train=imagefolder:{folder}/few") == 2
    assert "2 classes, of which none can be held out" in capfd.readouterr().err


def test_without_a_space_it_searches_what_its_own_file_says(folder, monkeypatch):
    search = ["tune", "recipe.yaml", "--share", "0.1", "--minutes", "0.01", "--output", "tuned"]
    with trials_worth(lambda values: 1 - len(values)):
        assert distap(monkeypatch, *search) == 0
    space = yaml.safe_load((folder / "tuned/space.yaml").read_text())
    assert space["optimizer.learning_rate"] == {"low": 1e-4, "high": 1e-2, "log": True}
    assert {"name": "p_by_k", "classes": 16, "images": 2} in space[
        "sampling"
    ] and "model.freeze" not in space
    assert (
        load_recipe(folder / "tuned/recipe.yaml").loss == load_recipe(folder / "recipe.yaml").loss
    )


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (
            "optimizer.learning_rate: {low: 0.1, high: 0.01}",
            "space.yaml: optimizer.learning_rate: ",
        ),
        ("optimizer.learning_rate: {low: 0.1, hihg: 1}", "space.yaml: optimizer.learning_rate: "),
        (
            "optimizer.learning_rate: {low: 1e-5, high: text}",
            "space.yaml: optimizer.learning_rate: ",
        ),
        ("optimizer.learning_rate: [0.1, -1.0]", "space.yaml: optimizer.learning_rate: -1"),
        ("los: [smooth_ap]", "space.yaml: los: unknown key; did you mean loss?"),
        ("loss: []", "space.yaml: loss: "),
        ("loss", "space.yaml: expected recipe keys"),
    ],
)
def test_a_wrong_space_is_told_before_any_trial(folder, monkeypatch, capfd, space, said):
    (folder / "space.yaml").write_text(space)
    assert (
        distap(monkeypatch, "tune", "recipe.yaml", "--space", "space.yaml", "--output", "tuned")
        == 2
    )
    assert said in capfd.readouterr().err
    assert not (folder / "tuned/trials").exists()


def text(path):
    path.write_text("not a database")


def foreign(path):
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table studies (x int)")
        database.commit()


@pytest.mark.parametrize("make", [text, foreign, os.mkfifo, os.mkdir])
def test_a_database_that_holds_no_trials_is_named_in_one_line(make, folder, monkeypatch, capfd):
    (folder / "tuned").mkdir()
    make(folder / "tuned/trials.db")
    assert (
        distap(monkeypatch, "tune", "recipe.yaml", "--space", "space.yaml", "--output", "tuned")
        == 2
    )
    message = capfd.readouterr().err
    assert "error: tuned/trials.db: the trials cannot be kept there: " in message
    assert "Traceback" not in message


def test_a_database_that_another_process_holds_is_named_in_one_line(folder, monkeypatch, capfd):
    (folder / "tuned").mkdir()
    with closing(sqlite3.connect(folder / "tuned/trials.db")) as database:
        database.execute("begin exclusive")
        assert (
            distap(monkeypatch, "tune", "recipe.yaml", "--space", "space.yaml", "--output", "tuned")
            == 2
        )
    assert (
        "error: tuned/trials.db: the trials cannot be kept there: database is locked"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("name", ["a?x=1", "a#b", "a%41", "a b"])
def test_trials_stay_in_a_folder_of_any_name(name, folder):
    Tuning(folder / "recipe.yaml", [], folder / name, folder / "space.yaml", 0.5, 1)
    assert [path.name for path in (folder / name).iterdir()] == ["trials.db"]
    assert not {path.name for path in folder.iterdir()} - {
        name,
        "photos",
        "recipe.yaml",
        "space.yaml",
    }
