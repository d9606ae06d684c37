"""The examples of docs/ and the Python of README and guides, run as they are printed."""

import os
import re
import shutil
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
import timm
import torch
from batches import TensorBatch
from images import write_images
from launching import Launch, Program, output_of, started
from nbclient import NotebookClient
from ranks import skip_if_fast
from small_trainings import losses, recipe
from steps import learning, step_with

from distap import MicroBatchSizes
from distap.data.images.augmentation import seeded
from distap.data.images.decoding import EncodedImage, image_file
from distap.ranking.losses.quantized import QuantizedAP
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for split, seed in (("train", 1), ("test", 2)):
        write_images(folder / split, {f"{split}-{number}": 6 for number in range(12)}, 48, seed)
    return folder


@pytest.fixture
def run(tmp_path):
    """Standard output of a program, which has to succeed."""

    def output(*arguments):
        path = os.pathsep.join([str(ROOT), str(EXAMPLES)])
        return output_of(Program(tuple(map(str, arguments)), tmp_path), tmp_path, PYTHONPATH=path)

    return output


@pytest.fixture
def on_two_ranks(tmp_path):
    """What two ranks say of a program that has to succeed, in the environment of torchrun."""

    def said(name, *arguments):
        program = Launch(
            "--standalone --nproc-per-node=2", name, " ".join(map(str, arguments)), EXAMPLES
        )
        with started(program, tmp_path) as job:
            assert job.status() == 0, job.said
            return job.said

    return said


@pytest.mark.slow
def test_the_plain_loop_goes_from_folders_to_figures(run, photos):
    written = (EXAMPLES / "plain.py").read_text()
    shorter = written
    for setting, smaller in (("batch = 128", "batch = 48"), ("steps = 15", "steps = 2")):
        assert setting in written
        shorter = shorter.replace(setting, smaller)
    assert "'mAP': '" in run("-c", shorter, photos / "train", photos / "test")


@pytest.mark.slow
def test_the_loop_of_ddp_trains_on_two_ranks(on_two_ranks, photos):
    assert "epoch 2: loss 0." in on_two_ranks("ddp", photos / "train")


@pytest.mark.slow
def test_the_loop_of_a_sharded_tower_trains_and_saves_on_two_ranks(on_two_ranks, photos, tmp_path):
    printed = on_two_ranks("sharded", photos / "train", tmp_path / "saved")
    assert re.search(r"epoch 2: loss \d+\.", printed)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2


@pytest.mark.parametrize("name", ["own_loss", "metric_learning", "distillation", "pairs"])
def test_an_example_of_a_loss_prints_it(run, name):
    assert re.fullmatch(r"loss \d\.\d{4}\n", run(EXAMPLES / f"{name}.py"))


@pytest.mark.slow
def test_loops_of_lightning_and_accelerate_have_the_losses_of_our_own_step(on_two_ranks):
    torch.manual_seed(0)
    labels = torch.arange(320) // 4
    images = torch.randn(80, 3, 32, 32)[labels] + torch.randn(320, 3, 32, 32)
    network = timm.create_model("test_resnet", num_classes=0).train()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    network.register_forward_hook(
        lambda network, images, descriptors: torch.nn.functional.normalize(descriptors)
    )
    learner = learning(
        network, torch.optim.SGD(network.parameters(), lr=3.0, momentum=0.9), World()
    )
    step = step_with(learner, QuantizedAP(), World(), 0, MicroBatchSizes(8))
    expected = []
    for number in range(5):
        rows = slice(64 * number, 64 * number + 64)
        expected.append(step(TensorBatch(images[rows], labels[rows], World(), number), 3.0).loss)
    assert max(expected) - min(expected) > 1e-3
    for name in ("accelerate_loop", "lightning_loop"):
        printed = re.findall(r"step \d: loss (\S+)", on_two_ranks(name))
        assert [float(loss) for loss in printed] == pytest.approx(expected, abs=1e-5)


def test_a_trainer_of_transformers_saves_the_memory_and_goes_on_as_if_it_had_not_stopped(
    run, tmp_path
):
    pytest.importorskip("transformers")
    losses = [
        re.findall(r"'loss': '?([\d.]+)", run(EXAMPLES / "transformers_loop.py", tmp_path / "out"))
    ]
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    losses.append(
        re.findall(r"'loss': '?([\d.]+)", run(EXAMPLES / "transformers_loop.py", tmp_path / "out"))
    )
    assert len(losses[0]) == 6 and losses[1] == losses[0][3:]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_notebook_finds_more_after_training(tmp_path):
    skip_if_fast("a kernel")
    stored = nbformat.read(EXAMPLES / "search_your_images.ipynb", as_version=4)
    shorter = deepcopy(stored)
    (training,) = (cell for cell in shorter.cells if "epochs = 120, 10" in cell.source)
    training.source = training.source.replace("epochs = 120, 10", "epochs = 120, 4")
    done = NotebookClient(
        shorter, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    for notebook in (stored, done):  # what a reader sees, and what it prints now
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert sum("image/jpeg" in output.get("data", {}) for output in outputs) == 4
        figures = re.findall(
            r"^(\S+): (\S+) -> (\S+)$", "".join(output.get("text", "") for output in outputs), re.M
        )
        assert [name for name, *_ in figures] == ["mAP", "mAP@R", "R@1", "R@5"]
        assert all(float(after) > 1.2 * float(before) for _, before, after in figures)
    assert (EXAMPLES / "search_your_images.ipynb").stat().st_size < 300_000
    warnings = [
        element
        for cell in stored.cells
        for element in cell.get("outputs", [])
        if element.get("name") == "stderr"
    ]
    assert warnings == []  # they would name paths of the machine that ran it


def test_an_own_sampling_chooses_batches_of_a_loop_and_of_a_recipe(
    tmp_path, run, photos, training_shards, monkeypatch
):
    assert re.fullmatch(r"loss \d\.\d{4}\n", run(EXAMPLES / "own_sampler.py", photos / "train"))
    monkeypatch.syspath_prepend(EXAMPLES)
    sampling = {"name": "own_sampler:LongTail", "classes": 5, "images": 3}
    Trainer(
        prepare(recipe(tmp_path, training_shards, steps=2, sampling=sampling), World()), World()
    ).train()
    assert len(losses(tmp_path)) == 2


def test_an_own_augmentation_turns_images_by_the_seed(tmp_path, training_shards, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    augmentation = {"name": "own_augmentation:QuarterTurns", "crop": 1, "flip": 0}
    chosen = recipe(tmp_path, training_shards, steps=1, data__augmentation=augmentation)
    assert chosen.data.augmentation.crop == 1
    Trainer(prepare(chosen, World()), World()).train()
    assert len(losses(tmp_path)) == 1

    gradient = torch.arange(3 * 32 * 32, dtype=torch.uint8).reshape(3, 32, 32)
    image = EncodedImage(image_file(gradient))
    transform = chosen.data.augmentation.transform(32)
    turned = [seeded(transform, image, seed) for seed in range(16)]
    turns = [
        torch.rot90(image.crop((0, 0, 32, 32), (32, 32)), quarters, (1, 2)) for quarters in range(4)
    ]
    quarters = [[torch.equal(pixels, turn) for turn in turns].index(True) for pixels in turned]
    assert set(quarters) == {0, 1, 2, 3}
    assert all(
        torch.equal(pixels, seeded(transform, image, seed)) for seed, pixels in enumerate(turned)
    )


def test_an_own_loss_is_named_in_a_recipe(tmp_path, training_shards, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    chosen = recipe(
        tmp_path, training_shards, steps=1, loss={"name": "own_loss:hinge", "margin": 0.2}
    )
    assert chosen.loss.margin == 0.2
    Trainer(prepare(chosen, World()), World()).train()


def test_each_block_of_python_in_readme_and_guides_runs_by_itself(
    tmp_path, run, photos, training_shards
):
    blocks = []
    for document, count in (
        ("README.md", 1),
        ("docs/guides/own-loop.md", 5),
        ("docs/guides/losses.md", 3),
        ("docs/guides/own-loss.md", 2),
    ):
        matches = re.findall(
            r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE
        )
        assert len(matches) == count, document
        blocks += matches
    Trainer(
        prepare(recipe(tmp_path / "runs/demo/train", training_shards, steps=1), World()), World()
    ).train()
    (tmp_path / "photos").symlink_to(photos)
    (own_loss,) = (number for number, block in enumerate(blocks) if "class Mine" in block)
    blocks[own_loss] += (
        "assert distap.rank([[1.0, 0.0]] * 4, [0, 0, 1, 1], loss=Mine(margin=0.2)).loss > 0\n"
    )
    run("-c", "\n".join(f"exec({block!r}, {{'__name__': '__main__'}})" for block in blocks))
