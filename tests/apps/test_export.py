import io
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from commands import distap
from extractions import describe_files
from networks import random_network
from PIL import Image
from raising import raises
from small_trainings import train
from stores import found_checkpoint
from torch import nn

from distap.apps.export import exporting
from distap.apps.export.card import model_card
from distap.apps.export.exporting import (
    cases_of,
    difference,
    export_to_folder,
    exportable,
    onnx_describer,
    program_of,
    save_onnx,
    save_program,
)
from distap.config.reading import recorded_recipe
from distap.data.sizing import Sizing
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.evaluation.saved import folder_of_step, read_evaluation
from distap.model.multiscale import MultiScaleNetwork
from distap.model.pooling import NamedPooling
from distap.retrieval.descriptor_files import DescriptorSet
from distap.retrieval.whitening import learned_whitening, load_whitening, save_whitening
from distap.training.build import trained_network
from distap.world import World

ALL = ("pt2", "onnx", "safetensors")
SIZE = 48


def network(backbone="resnet10t", projection=16, seed=0):
    return random_network(backbone, projection, seed).eval()


def whitening_tensors(dimensions=16):
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(dimensions, generator=generator), torch.randn(
        8, dimensions, generator=generator
    )


def images(count, height=SIZE, width=SIZE, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, training_shards):
    """A trained network with whitening, exported in all formats."""
    folder = tmp_path_factory.mktemp("export")
    run = folder / "run"
    train(
        World(),
        run,
        training_shards,
        steps=2,
        data__validation=str(training_shards[1]),
        evaluation={"every": 2, "at_start": False},
        model__projection=16,
        loss={"sup_ap": 0.5, "calibration": 0.5},
    )
    training, inner = trained_network(run, World())
    describer = ImageDescriber(inner, Sizing("crop", SIZE))
    with describer.evaluating():
        described = describer(images(60)).numpy()
    names = np.array([str(number) for number in range(60)])
    whitening = learned_whitening(
        DescriptorSet(described, names, names, describer.described_by, "noise"), dimensions=8
    )
    save_whitening(folder / "whitening.safetensors", whitening)
    output = folder / "output"
    export_to_folder(
        run,
        output,
        ALL,
        folder / "whitening.safetensors",
        overrides=[f"evaluation.sizing=crop {SIZE}"],
    )
    return SimpleNamespace(
        run=run,
        output=output,
        recipe=training,
        network=inner,
        whitening=folder / "whitening.safetensors",
        describer=ImageDescriber(inner, Sizing("crop", SIZE), whitening=whitening),
    )


def described(exported, pixels):
    with exported.describer.evaluating():
        return exported.describer(pixels)


def by_onnx(path, pixels):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: pixels.numpy()})[0])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_both_programs_describe_as_the_checkpoint_does(exported, count):
    pixels = images(count, seed=count)
    expected = described(exported, pixels)
    program = torch.export.load(exported.output / "model.pt2").module()
    for actual in (program(pixels), by_onnx(exported.output / "model.onnx", pixels)):
        assert actual.dtype == torch.float32 and actual.shape == (count, 8)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(actual.norm(dim=1), torch.ones(count))


def test_every_program_says_what_made_it(exported):
    expected = json.loads(json.dumps(exported.describer.described_by.__dict__))
    extra = {"distap": ""}
    torch.export.load(exported.output / "model.pt2", extra_files=extra)
    properties = {
        item.key: item.value for item in onnx.load(exported.output / "model.onnx").metadata_props
    }
    for text in (extra["distap"], properties["distap"]):
        assert json.loads(text)["described_by"] == expected


def test_the_code_on_the_card_describes_a_photo_as_distap_does(exported, monkeypatch):
    card = (exported.output / "README.md").read_text()
    generator = np.random.default_rng(0)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    photo = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3  # stored upside down
    picture = coarse.resize((91, 63))
    picture.putalpha(picture.convert("L"))  # what is transparent is white
    picture.save(photo, "PNG", exif=exif)
    (exported.run / "photo.jpg").write_bytes(photo.getvalue())
    monkeypatch.chdir(exported.run)
    for name in ("model.pt2", "model.onnx", "model.safetensors", "config.json"):
        (exported.run / name).symlink_to(exported.output / name)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(code, names)
    expected = describe_files(exported.describer, [photo.getvalue()])
    torch.testing.assert_close(names["descriptors"], expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(names["descriptors_by_onnx"], expected, atol=1e-5)
    assert names["features"].shape == (1, 96)


def test_the_card_tells_what_the_run_knows(exported, training_shards):
    card = (exported.output / "README.md").read_text()
    evaluation = read_evaluation(folder_of_step(exported.run, 2))
    fields = yaml.safe_load(card.split("---\n")[1])
    (result,) = fields["model-index"][0]["results"]
    assert result["dataset"]["name"] == str(training_shards[1])
    actual = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert actual == pytest.approx(evaluation.figures, abs=1e-6)
    assert fields["license"] == "unknown" and "base_model" not in fields
    (written,) = re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)
    assert yaml.safe_load(written) == yaml.safe_load((exported.run / "recipe.yaml").read_text())
    for text in (
        "0.5 sup_ap + 0.5 calibration",
        f"| mAP | {100 * evaluation.figures['mAP']:.2f} |",
        f"| data set | `{training_shards[0]}` |",
        "| began with | random weights |",
        exported.describer.described_by.network,
        load_whitening(exported.whitening).fingerprint,
        "learned from `noise`",
        "whose figures are not known",
        "That of these weights is not known here",
    ):
        assert text in card, text


def test_a_card_names_the_weights_that_training_began_with(exported):
    checkpoint = found_checkpoint(exported.run)
    state = checkpoint.state()
    state["recipe"]["model"] |= {"backbone": "resnet50.a1_in1k", "weights": {"name": "timm"}}
    recipe = recorded_recipe(state["recipe"], "test")
    card = model_card(state, checkpoint.manifest, recipe, exported.describer, {}, ())
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "timm/resnet50.a1_in1k"
    assert "timm's `timm/resnet50.a1_in1k`, which timm says to be under apache-2.0" in card


def test_a_card_passes_on_no_key_to_a_storage(exported):
    checkpoint = found_checkpoint(exported.run)
    state = checkpoint.state()
    state["recipe"]["data"]["train"] = "https://user:word@a.example/shards/train?signature=abc"
    card = model_card(state, checkpoint.manifest, exported.recipe, exported.describer, {}, ())
    assert "https://a.example/shards/train" in card and "word" not in card and "abc" not in card


def test_what_is_not_known_is_not_told(tmp_path, training_shards):
    run = tmp_path / "run"
    output = tmp_path / "output"
    shards = shutil.copytree(training_shards[0], tmp_path / "shards")
    train(World(), run, [shards], steps=1)
    for name in ("recipe.yaml", "metrics.jsonl"):
        (run / name).unlink()
    shutil.rmtree(shards)
    export_to_folder(run, output, ("safetensors",))
    card = (output / "README.md").read_text()
    assert "was not evaluated while it was trained" in card and "model-index" not in card
    assert (
        "`distap.load` reads this folder" in card
        and "torch.export" not in card
        and "onnx" not in card
    )


def test_a_folder_with_something_else_in_it_is_left_alone(exported, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "thesis.tex").write_text("chapter 1")
    with raises("storage.folder_taken"):
        export_to_folder(exported.run, output, ("safetensors",))
    assert (output / "thesis.tex").read_text() == "chapter 1"


def test_an_export_appears_whole_or_not_at_all(exported, tmp_path, monkeypatch, capfd):
    command = ("export", exported.run, tmp_path / "output", "--best")
    assert distap(monkeypatch, *command, "evaluation.scales=two") == 2
    assert distap(monkeypatch, *command, "--format", "tflite") == 2
    assert list(tmp_path.iterdir()) == []
    assert (
        distap(monkeypatch, *command, "--format", "safetensors", "evaluation.sizing=crop 40") == 0
    )
    assert "images as `crop 40`" in capfd.readouterr().out
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "output").iterdir()}
    assert files == dict.fromkeys(
        ("README.md", "config.json", "head.safetensors", "model.safetensors"), 0o644
    )


def test_a_whitening_of_another_network_is_refused_and_nothing_is_left(exported, tmp_path):
    whitening = load_whitening(exported.whitening)
    foreign = replace(whitening, described_by=replace(whitening.described_by, network="0" * 64))
    save_whitening(tmp_path / "whitening.safetensors", foreign)
    with pytest.raises(DistapError, match="learn it anew"):
        export_to_folder(
            exported.run, tmp_path / "output", ("pt2",), tmp_path / "whitening.safetensors"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["whitening.safetensors"]


def test_onnx_that_is_not_installed_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "ONNX_MODULES", ("onnx", "no_such_package"))
    with raises("package.missing", "no_such_package", "distap[onnx]"):
        export_to_folder("no run", tmp_path, ("onnx",))


# What is held to the network


def test_another_network_is_not_taken_for_the_one_that_was_exported():
    cases = cases_of(MultiScaleNetwork(network()), SIZE)
    with raises("export.inexact", "model.pt2", "0.0001"):
        difference("model.pt2", MultiScaleNetwork(network(seed=1)), cases)
    with raises("export.other_output", "torch.float32", "1", "8", "16"):
        difference("model.pt2", MultiScaleNetwork(network(), whitening=whitening_tensors()), cases)


# What cannot be exported


class Choosing(nn.Module):
    """Which way it goes depends on the pixels."""

    def forward(self, features):
        return features.mean(dim=(2, 3)) if features.sum() > 0 else features.amax(dim=(2, 3))


class Solving(nn.Module):
    """What ONNX has no operator for."""

    def forward(self, features):
        local = features.flatten(2)
        return torch.linalg.eigvalsh(local @ local.mT)


def test_a_network_that_cannot_be_traced_is_refused_with_the_reason():
    inner = network(projection=None)
    inner.pooling = Choosing()
    with raises("export.failed", "48"):
        program_of(exportable(MultiScaleNetwork(inner)), SIZE)


def test_an_operator_that_onnx_lacks_is_named(tmp_path):
    inner = network(projection=None)
    inner.pooling = Solving()
    program = program_of(exportable(MultiScaleNetwork(inner)), SIZE)
    with raises("export.failed", "ONNX", "20", "_linalg_eigh"):
        save_onnx(program, tmp_path / "model.onnx", {})


# Other networks, other ways


def held_to_the_network(folder, several, image_size):
    program = program_of(exportable(several), image_size)
    cases = cases_of(several, image_size)
    save_program(program, folder / "model.pt2", {})
    save_onnx(program, folder / "model.onnx", {})
    actual = [
        difference("model.pt2", torch.export.load(folder / "model.pt2").module(), cases),
        difference("model.onnx", onnx_describer(folder / "model.onnx"), cases),
    ]
    assert all(element < 1e-5 for element in actual)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "pooling", "options"),
    [("test_vit", "cls_mean", {"layer_norm": True, "projection": 16}), ("resnet10t", "max", {})],
)
def test_every_pooling_and_head_is_exported(tmp_path, backbone, pooling, options):
    inner = random_network(backbone, pooling=NamedPooling(pooling), **options).eval()
    held_to_the_network(tmp_path, MultiScaleNetwork(inner), 64)


@pytest.mark.slow
def test_images_are_described_at_several_scales(tmp_path):
    several = MultiScaleNetwork(
        network(), (1.0, 0.7071), whitening=whitening_tensors(), dimensions=3
    )
    held_to_the_network(tmp_path, several, 64)


@pytest.mark.parametrize("format", ["pt2", "safetensors"])
def test_an_export_to_a_full_disk_says_so_and_leaves_nothing(format, exported, small_disk):
    disk = small_disk("600k")
    with raises("storage.cannot_write"):
        export_to_folder(exported.run, disk / "exported", [format])
    assert not [*disk.iterdir()]
