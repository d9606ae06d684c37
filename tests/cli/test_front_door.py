"""What every command has in common: where results go, how loud it is, and the recipe in full."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import distap

from distap import __version__
from distap.config.reading import RECIPES, load_recipe
from distap.telemetry import terminal
from docs.recipe_keys import recipe_keys


@pytest.fixture
def recipe(tmp_path, training_shards) -> Path:
    settings = {
        **{
            "run": str(tmp_path / "run"),
            "steps": 2,
            "sampling": {"name": "random", "batch_size": 8},
        },
        "data": {
            "train": str(training_shards[0]),
            "validation": str(training_shards[1]),
            "image_size": 32,
        },
        "model": {"backbone": "resnet10t", "weights": "random"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_in_full_is_the_same_recipe(monkeypatch, capfd, path):
    assert distap(monkeypatch, "config", path.stem) == 0
    printed = capfd.readouterr().out
    assert load_recipe(yaml.safe_load(printed), where="printed") == load_recipe(path)


def test_every_key_has_a_meaning_and_takes_no_name_of_a_class():
    keys = list(recipe_keys())
    assert [key.path for key in keys if not key.meaning] == []
    assert [key.path for key in keys if "Source" in key.values] == []


def test_the_version_is_told_without_the_command_on_the_path():
    message = subprocess.run(
        [sys.executable, "-m", "distap.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert message.stdout == f"distap {__version__}\n" and not message.stderr


def test_figures_go_to_a_file_and_progress_does_not(tmp_path, monkeypatch, capfd, recipe):
    command = "eval", "--checkpoint", recipe, "--output", tmp_path / "out"
    assert distap(monkeypatch, *command) == 0
    printed = capfd.readouterr().out
    assert "mAP@R" in printed and "\x1b" not in printed and "describing" not in printed
    assert distap(monkeypatch, *command, "--json") == 0
    (figures,) = json.loads(capfd.readouterr().out)["sets"].values()
    assert figures["plain"] == json.loads((tmp_path / "out/result.json").read_text())["figures"]
    assert 0 < figures["plain"]["mAP"] <= 1


def test_other_results_are_json_too(tmp_path, monkeypatch, capfd, recipe, training_shards):
    assert distap(monkeypatch, "train", recipe) == 0
    capfd.readouterr()
    assert distap(monkeypatch, "report", tmp_path / "run", "--json") == 0
    assert json.loads(capfd.readouterr().out)["summary"]["after"]["mAP"] > 0
    described = tmp_path / "found"
    assert (
        distap(
            monkeypatch, "extract", training_shards[0], described, "--checkpoint", tmp_path / "run"
        )
        == 0
    )
    capfd.readouterr()
    assert distap(monkeypatch, "index", described, tmp_path / "index", "--json") == 0
    indexed = json.loads(capfd.readouterr().out)
    assert indexed["images"] == 54 and indexed["recall"] == 1


@pytest.mark.parametrize("ranks", ["0", "many", "-1"])
def test_an_impossible_number_of_ranks_is_refused(monkeypatch, capfd, recipe, ranks):
    assert distap(monkeypatch, "train", recipe, f"--ranks={ranks}") == 2
    assert "or auto" in capfd.readouterr().err


@pytest.mark.parametrize(
    "command",
    [("data", "pack", "images", "s3://bucket/x"), ("report", "runs/x", "--output=s3://b/x")],
)
def test_a_url_in_place_of_a_folder_is_refused(tmp_path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    assert distap(monkeypatch, *command) == 2
    assert "not a URL" in " ".join(capfd.readouterr().err.split()) and not list(tmp_path.iterdir())


def test_help_breaks_lines_only_at_the_width_of_the_terminal(monkeypatch, capfd):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    assert distap(monkeypatch, "search", "--help") == 0
    assert "among its own hits. Files that cannot be used are named" in capfd.readouterr().out


def test_long_work_tells_its_rate_and_the_time_left_now_and_then(capfd):
    with terminal.progress("packing", 3, seconds=-1) as show:
        show(1)
        show(2)
        show(3)
    assert list(terminal.track("abc", "reading", 3)) == ["a", "b", "c"]
    first, second, _, packed, read = capfd.readouterr().err.splitlines()
    assert first == "packing 1/3  "
    assert re.fullmatch(r"packing 2/3  \S+ a second, \S+ left", second)
    assert packed.startswith("packing 3/3  done in ") and read.startswith("reading 3/3  done in ")
