"""The examples of docs/ and the README's Python, run as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from images import write_images
from ranks import skip_if_fast
from small_trainings import recipe

from distap.trainer import Trainer
from distap.world import World

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for part, seed in (("train", 1), ("test", 2)):
        write_images(folder / part, {f"{part}-{number}": 6 for number in range(12)}, 48, seed)
    return folder


def run(*command, folder=None):
    """Standard output of a command, which has to succeed."""
    skip_if_fast("a program")
    path = os.pathsep.join([str(ROOT), str(EXAMPLES)])
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_loop_goes_from_folders_to_figures(photos):
    assert "'mAP': '" in run(sys.executable, EXAMPLES / "plain.py", photos / "train", photos / "test")


def test_the_loop_of_ddp_trains_on_two_ranks(photos):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert "epoch 2: loss 0." in run(*torchrun, EXAMPLES / "ddp.py", photos / "train")


@pytest.mark.parametrize("name", ["own_loss", "metric_learning"])
def test_an_example_of_a_loss_prints_it(name):
    assert re.fullmatch(r"loss \d\.\d{4}\n", run(sys.executable, EXAMPLES / f"{name}.py"))


def test_an_own_loss_is_named_in_a_recipe(tmp_path, training_shards, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    chosen = recipe(tmp_path, training_shards, steps=1, loss={"name": "own_loss:hinge", "margin": 0.2})
    assert chosen.loss.margin == 0.2
    Trainer(chosen, World()).train()


def test_the_python_of_the_readme_runs_as_it_is_printed(tmp_path, photos, training_shards):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    Trainer(recipe(tmp_path / "runs/demo/train", training_shards, steps=1), World()).train()
    (tmp_path / "photos").symlink_to(photos)
    run(sys.executable, "-c", "\n".join(blocks), folder=tmp_path)
