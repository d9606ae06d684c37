"""Trainings whose checkpoints are in an object store, on hosts that share nothing else."""

import os
import signal

import pytest
import torch
import yaml
from launching import Program, output_of
from raising import raises
from servers import s3_files, s3_server, web_server
from small_trainings import losses, parameters, recipe, train

from distap.apps.export.exporting import export_to_folder
from distap.checkpoint.finding import opened_checkpoint
from distap.checkpoint.lease import TAKE_OVER
from distap.data.shards.indexing import index_shards
from distap.errors import FINISHED, RESTART
from distap.evaluation.saved import saved_steps
from distap.telemetry.endpoint import Endpoint
from distap.telemetry.metrics import ENDINGS
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.build import trained_network
from distap.training.prepared import prepare
from distap.world import World

STEPS = {"steps": 4, "checkpoint__every": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, training_shards):
    """A run that keeps its checkpoints on disk and is not interrupted."""
    run = tmp_path_factory.mktemp("undisturbed")
    train(World(), run, training_shards, **STEPS, **evaluated(training_shards))
    return run


def evaluated(shards):
    return {"data__validation": str(shards[1]), "evaluation": {"every": 2}}


def stopped_in(trainer, number):
    """The exit status of a training that is asked to stop in a step."""
    step = trainer.step

    def stop(share, learning_rate):
        if share.step == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(share, learning_rate)

    trainer.step = stop
    return trainer.train()


def ending_of(trainer):
    """What the metrics say of the end of a training, for alerts."""
    value = trainer.report.endpoint.registry.get_sample_value
    return [reason for reason in ENDINGS if value("distap_ended", {"reason": reason})]


def test_a_run_that_was_stopped_goes_on_elsewhere_bit_for_bit(
    tmp_path, training_shards, undisturbed, s3
):
    url = "s3://shards/stopped"
    changes = {**STEPS, "checkpoint__store": url, **evaluated(training_shards)}
    first = tmp_path / "first" / "run"
    second = tmp_path / "second" / "run"
    trainer = Trainer(prepare(recipe(first, training_shards, **changes), World()), World())
    assert stopped_in(trainer, 1) == RESTART
    assert ending_of(trainer) == ["stopped"]
    trainer = Trainer(prepare(recipe(second, training_shards, **changes), World()), World())
    assert trainer.train() == FINISHED
    assert ending_of(trainer) == ["done"]
    assert losses(second) == losses(undisturbed)
    assert saved_steps(second) == saved_steps(undisturbed)
    assert [entry["step"] for entry in read_run_log(second) if "validation" in entry] == [0, 2, 4]
    for run in (first, second):
        assert list((run / "checkpoints").iterdir()) == []
    # What a run in a store is taken for elsewhere: its newest and its best network.
    _, network = trained_network(url, World())
    saved = parameters(undisturbed)
    assert all(
        torch.equal(value, saved[f"network.{name}"]) for name, value in network.state_dict().items()
    )
    assert (
        export_to_folder(url, tmp_path / "exported", ["safetensors"])[0].dimensions
        == network.dimensions
    )
    with opened_checkpoint(url, best=True) as best:
        assert best.manifest.score == next(iter(best.state()["figures"].values()))["mAP"]
    with raises("checkpoint.none", "s3://shards/nothing"):
        trained_network("s3://shards/nothing", World())


def test_a_store_belongs_to_one_run(tmp_path, training_shards, monkeypatch):
    def train_as(name, steps):
        store = f"file://{tmp_path}/store"
        train(World(), tmp_path / name, training_shards, steps=steps, checkpoint__store=store)

    monkeypatch.delenv("USER", raising=False)
    train_as("ann", 1)
    before = (tmp_path / "store/recipe.yaml").read_bytes()
    with raises("run.other_run", tmp_path / "ann", tmp_path / "bob", "--take-over"):
        train_as("bob", 2)
    assert (tmp_path / "store/recipe.yaml").read_bytes() == before
    monkeypatch.setenv(TAKE_OVER, "1")
    train_as("bob", 2)
    monkeypatch.delenv(TAKE_OVER)
    train_as("elsewhere/bob", 3)
    assert len(losses(tmp_path / "elsewhere/bob")) == 3
    monkeypatch.setenv("USER", "bob")  # it was nobody's that is known
    train_as("bob", 4)
    monkeypatch.setenv("USER", "carl")
    for steps in (4, 5):  # also where nothing is left to do
        with raises("run.other_run", "of bob", "of carl", "--take-over"):
            train_as("carl/bob", steps)
    monkeypatch.delenv("USER")
    train_as("bob", 5)


def test_what_the_store_cannot_take_is_counted_and_the_last_one_has_to_get_there(
    tmp_path, training_shards, caplog
):
    store = tmp_path / "store"
    run = tmp_path / "run"
    endpoint = Endpoint()
    trainer = Trainer(
        prepare(
            recipe(run, training_shards, **STEPS, checkpoint__store=f"file://{store}"),
            World(),
            endpoint,
        ),
        World(),
    )
    step = trainer.step

    def blocked_after_the_probe(share, learning_rate):
        if not store.is_file():
            store.rename(tmp_path / "away")
            store.write_text("a file where the folder was")
        return step(share, learning_rate)

    trainer.step = blocked_after_the_probe
    with raises("checkpoint.not_written", "00000004"):
        trainer.train()
    assert endpoint.registry.get_sample_value("distap_checkpoint_failures_total") == 2
    assert "the one before, if any, stays the newest" in caplog.text


def test_training_and_evaluating_over_s3_is_training_from_disk(tmp_path, training_shards):
    with s3_server():
        for split, folder in zip(("train", "test"), training_shards, strict=True):
            s3_files().put(f"{folder}/", f"s3://shards/{split}/", recursive=True)
        sets = {"train": "s3://shards/train/*.tar", "validation": "s3://shards/test"}
        index_shards(sets["train"])
        local = dict(zip(sets, map(str, training_shards), strict=True)) | {
            "image_size": 32,
            "workers": 0,
        }
        remote = local | sets | {"workers": 2}
        changes = {"steps": 2, "evaluation": {"every": 2}}
        train(World(), tmp_path / "local", training_shards, data=local, **changes)
        train(World(), tmp_path / "s3", training_shards, data=remote, **changes)
        assert losses(tmp_path / "s3") == losses(tmp_path / "local")


def test_windows_and_a_cache_of_a_web_server_change_no_loss(tmp_path, training_shards):
    sampling = {"name": "p_by_k", "classes": 4, "images": 3, "window": 2}
    changes = {"steps": 8, "sampling": sampling, "data__image_size": 32, "data__workers": 1}
    train(World(), tmp_path / "disk", training_shards, **changes)
    with web_server(training_shards[0]) as server:
        cache = {"folder": str(tmp_path / "cache"), "bytes": 10**7}
        changes["data__train"] = server.url
        train(World(), tmp_path / "http", training_shards, **changes)
        changes["data__cache"] = cache
        train(World(), tmp_path / "cached", training_shards, **changes)
        settings = recipe(tmp_path / "stopped", training_shards, **changes)
        assert stopped_in(Trainer(prepare(settings, World()), World()), 2) == RESTART
        train(World(), tmp_path / "stopped", training_shards, **changes)
    assert losses(tmp_path / "http") == losses(tmp_path / "disk")
    assert losses(tmp_path / "cached") == losses(tmp_path / "disk")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "disk")
    lines = [entry for entry in read_run_log(tmp_path / "cached") if "reading" in entry]
    assert sum(line["reading"].get("cache_hits", 0) for line in lines) == 8 * 12


def test_two_ranks_share_a_cache_from_the_command_line(tmp_path, training_shards):
    sampling = {"name": "p_by_k", "classes": 4, "images": 3, "window": 2}
    with web_server(training_shards[0]) as server:
        cached = {"folder": str(tmp_path / "cache"), "bytes": 10**7}
        disk = str(training_shards[0])
        for name, train_on, cache in (("disk", disk, None), ("cached", server.url, cached)):
            settings = recipe(
                tmp_path / name,
                [train_on],
                steps=4,
                sampling=sampling,
                data__cache=cache,
                data__workers=1,
                timeout_seconds=60.0,
            )
            file = tmp_path / f"{name}.yaml"
            file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
            output_of(Program(("-m", "distap.cli", "train", str(file), "--ranks", "2")), tmp_path)
    assert losses(tmp_path / "cached") == losses(tmp_path / "disk")
    lines = [entry for entry in read_run_log(tmp_path / "cached") if "reading" in entry]
    assert sum(line["reading"].get("cache_hits", 0) for line in lines) > 0


def test_a_wrong_source_is_named_by_its_key(tmp_path):
    with raises("recipe.value", "data.train"):
        recipe(tmp_path, [tmp_path], data__train="ftp://host/a")


def test_the_signature_of_an_address_is_not_repeated(tmp_path):
    with raises("recipe.secret", "data.train", "https://host/a.tar") as refused:
        recipe(tmp_path, [tmp_path], data__train="https://host/a.tar?X-Amz-Signature=ya29")
    assert "ya29" not in str(refused.value)
