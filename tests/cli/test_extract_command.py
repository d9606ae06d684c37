import os
import signal
from pathlib import Path

import numpy as np
import pytest
from commands import distap
from launching import Program, started
from postprocessing_reference import unit, whitened_reference
from small_trainings import recipe

from distap.errors import RESTART
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.whitening import learned_whitening, save_whitening
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World


@pytest.fixture(scope="module")
def run(tmp_path_factory, training_shards) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    Trainer(
        prepare(
            recipe(folder, training_shards, steps=1, sampling={"name": "random", "batch_size": 8}),
            World(),
        ),
        World(),
    ).train()
    return folder


def test_the_command_describes_a_folder_and_says_what_it_wrote(
    tmp_path, monkeypatch, capsys, run, photos
):
    out = tmp_path / "out"
    options = "--checkpoint", run
    keys = "evaluation.sizing=side 40", "evaluation.scales=[1,0.5]", "data.workers=0"
    assert distap(monkeypatch, "extract", *options, photos, out, *keys) == 0
    printed = "".join(capsys.readouterr())
    assert "31 descriptors of 96 dimensions" in printed
    assert f"describing {photos} 31/31  done in" in printed
    descriptors = read_descriptors(out)
    assert descriptors.described_by.sizing == "side 40" and descriptors.described_by.scales == (
        1.0,
        0.5,
    )
    whitening = learned_whitening(descriptors, dimensions=4)
    save_whitening(tmp_path / "whitening", whitening)
    assert (
        distap(
            monkeypatch,
            "extract",
            *options,
            "--whitening",
            tmp_path / "whitening",
            photos,
            tmp_path / "whitened",
            *keys,
        )
        == 0
    )
    expected = whitened_reference(whitening, descriptors.descriptors)
    np.testing.assert_allclose(
        read_descriptors(tmp_path / "whitened").descriptors, expected, atol=0.02
    )
    assert (
        distap(
            monkeypatch,
            "extract",
            *options,
            photos,
            tmp_path / "cut",
            *keys,
            "evaluation.dimensions=24",
        )
        == 0
    )
    expected = unit(descriptors.descriptors[:, :24].astype(np.float32))
    np.testing.assert_allclose(read_descriptors(tmp_path / "cut").descriptors, expected, atol=0.002)
    assert descriptors.described_by.antialias
    for name, change in (
        ("rough", "evaluation.antialias=false"),
        ("narrow", "evaluation.precision=bf16"),
    ):
        assert distap(monkeypatch, "extract", *options, photos, tmp_path / name, *keys, change) == 0
        assert not np.array_equal(
            read_descriptors(tmp_path / name).descriptors, descriptors.descriptors
        )
    assert not read_descriptors(tmp_path / "rough").described_by.antialias
    assert '"precision": "bf16"' in (tmp_path / "narrow/about.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["{photos}", "{tmp}/out", "evaluation.scales=[1,x]"],
            "evaluation.scales.1: 'x': must be a number",
        ),
        (["--whitening", "{tmp}/none", "{photos}", "{tmp}/out"], "none"),
        (
            ["{photos}", "{tmp}/out", "evaluation.dimensions=97"],
            "evaluation.dimensions: 97, but descriptors have 96",
        ),
        (["{tmp}/nothing", "{tmp}/out"], "no such data set"),
        (["{photos}", "{photos}"], "holds something"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    tmp_path, monkeypatch, capsys, run, photos, arguments, message
):
    arguments = [argument.format(tmp=tmp_path, photos=photos) for argument in arguments]
    assert distap(monkeypatch, "extract", "--checkpoint", run, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_ranks_that_are_asked_to_stop_leave_whole_parts_to_go_on_from(
    tmp_path, monkeypatch, run, photos, capsys
):
    out = tmp_path / "out"
    images = tmp_path / "images"
    images.mkdir()
    for number in range(100):
        for path in photos.rglob("*.png"):
            (images / f"{number}-{path.name}").write_bytes(path.read_bytes())
    options = ["--checkpoint", str(run), str(images), str(out)]
    options += ["evaluation.sizing=original", "data.workers=1"]
    with started(
        Program(("-m", "distap.cli", "extract", "--ranks", "2", *options)), tmp_path
    ) as job:
        job.wait_until(lambda: len(list((out / "parts").glob("*.npz"))) >= 4)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.status() == RESTART, job.said
        assert "the same command continues" in job.said
        job.wait_until_none_is_left()
    assert not (out / "about.json").exists()
    chunks = {path.name for path in (out / "parts").iterdir()}
    assert all(name.endswith(".npz") and name[0] != "." for name in chunks)
    assert distap(monkeypatch, "extract", *options) == 0
    assert f"{len(chunks) * 128} of 3000 images are described already" in capsys.readouterr().err
    assert len(read_descriptors(out)) == 3000 and not (out / "parts").exists()
