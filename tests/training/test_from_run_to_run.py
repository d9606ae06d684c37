"""Begin from another run, use one that another version of distap recorded, and share no run
folder."""

import json
import os
import re
import shutil
import subprocess
import time

import pytest
import torch
from commands import distap
from raising import raises
from ranks import on_ranks
from small_trainings import are_same, losses, parameters, recipe, train
from stores import checkpoints_of, list_checkpoints, rewrite_manifest

import distap as library
from distap.apps.export.exporting import export_to_folder
from distap.checkpoint import lease as leases
from distap.checkpoint.manifest import STATE_FILE
from distap.errors import DistapError
from distap.trainer import Trainer
from distap.training.build import network_of, trained_network
from distap.training.prepared import prepare
from distap.world import World

MODEL = {"backbone": "test_resnet", "weights": {"name": "random"}, "projection": 16}


@pytest.fixture(scope="module")
def first(tmp_path_factory, training_shards):
    """A run of two steps, and its network as `export` and `save_pretrained` write it."""
    folder = tmp_path_factory.mktemp("first")
    train(
        World(),
        folder / "run",
        training_shards,
        steps=2,
        model=MODEL,
        data__validation=str(training_shards[1]),
    )
    export_to_folder(folder / "run", folder / "export", ("safetensors",))
    library.load(folder / "run", device="cpu").save_pretrained(folder / "saved")
    return folder


def from_run(path, **changes):
    return {**MODEL, "weights": {"name": "run", "path": str(path)}, **changes}


def is_network_of(run, state):
    return all(
        torch.equal(tensor, state[name.removeprefix("network.")])
        for name, tensor in parameters(run).items()
    )


def network_on_a_rank(world, run, shards, model):
    return network_of(recipe(run, shards, model=model), world).state_dict()


@pytest.mark.parametrize("path", ["run", "run/checkpoints/step-00000002", "export", "saved"])
def test_a_training_begins_from_all_of_another_network(first, tmp_path, training_shards, path):
    weights = {"name": "run", "path": f"{first}/{path}"}
    network = network_of(
        recipe(tmp_path, training_shards, model={**MODEL, "weights": weights}), World()
    )
    assert is_network_of(first / "run", network.state_dict())


def test_every_rank_begins_from_what_rank_0_reads(first, tmp_path, training_shards):
    model = from_run(tmp_path / "link")
    (tmp_path / "link").symlink_to(first / "run")
    for state in on_ranks(2, network_on_a_rank, tmp_path / "run", training_shards, model):
        assert is_network_of(first / "run", state)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"projection": None}, ["model.projection: 16"]),
        (
            {"projection": 8, "pooling": "mean"},
            ['model.pooling: {"name": "auto"}', "model.projection: 16"],
        ),
        ({"backbone": "resnet10t"}, ['model.backbone: "test_resnet"']),
    ],
)
def test_a_recipe_of_another_network_is_told_what_it_needs(
    first, tmp_path, training_shards, changes, lines
):
    with raises("weights.other_recipe", "model.weights") as error:
        network_of(
            recipe(tmp_path, training_shards, model=from_run(first / "run", **changes)), World()
        )
    assert [line.strip() for line in str(error.value).splitlines()[1:-1]] == lines


def test_weights_that_are_nowhere_are_named_with_their_key(tmp_path, training_shards):
    for weights, message in (
        (
            {"name": "run", "path": str(tmp_path / "none")},
            r"^model\.weights: .*/none: no checkpoint there",
        ),
        (
            {"name": "run", "path": f"hf-hub:{tmp_path}/none"},
            r"^model\.weights: hf-hub:.*: not a network that",
        ),
        (
            {"name": "run", "path": "runs/a", "bset": True},
            r"model\.weights\.bset: unknown key; did you mean best",
        ),
    ):
        with pytest.raises(DistapError, match=message):
            network_of(
                recipe(tmp_path, training_shards, model={**MODEL, "weights": weights}), World()
            )


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit"])
def test_a_second_stage_at_a_larger_size_goes_on_without_the_first(
    tmp_path, training_shards, backbone
):
    item = tmp_path / "one"
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    train(World(), item, training_shards, steps=1, model={**MODEL, "backbone": backbone})
    second = {
        "steps": 4,
        "checkpoint": {"every": 2},
        "model": from_run(item, backbone=backbone),
        "data__image_size": 48,
        "loss": "smooth_ap",
    }
    train(World(), whole, training_shards, **second)
    shutil.rmtree(item)
    newest = list_checkpoints(whole / "checkpoints")[0]
    shutil.copytree(newest, resumed / "checkpoints" / newest.name)
    train(World(), resumed, training_shards, **second)
    assert losses(resumed) == losses(whole)[2:]
    assert are_same(whole, resumed)
    with raises("checkpoint.none", "model.weights"):
        train(World(), tmp_path / "anew", training_shards, **second)


def recorded_anew(run, change):
    """Change the recipe that a run's checkpoint has recorded, as another version of distap would
    have written it.
    """
    (folder,) = list_checkpoints(run / "checkpoints")
    state = json.loads((folder / STATE_FILE).read_text())
    change(state["recipe"])
    (folder / STATE_FILE).write_text(json.dumps(state))
    rewrite_manifest(folder)


def of_a_later_version(settings):
    settings |= {"loss": {"name": "later_ap"}, "sampling": {"name": "later"}, "later": {"key": 1}}
    settings["engine"] = {"name": "later:Engine"}
    settings["data"] |= {"train": "later:photos", "reading": {"name": "later"}, "key_of_data": 2}
    settings["model"] |= {"weights": {"name": "later"}}
    settings["evaluation"] |= {"also": {"later": 4}}


def test_a_network_is_read_whatever_its_recipe_says_of_training(
    first, tmp_path, training_shards, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(first / "run", run)
    recorded_anew(run, of_a_later_version)
    assert distap(monkeypatch, "eval", "--checkpoint", run) == 0
    export_to_folder(run, tmp_path / "export", ("safetensors",))
    assert "Loss: later_ap." in (tmp_path / "export" / "README.md").read_text()
    assert is_network_of(
        run, library.load(tmp_path / "export", device="cpu").network.network.state_dict()
    )
    assert (
        distap(monkeypatch, "extract", training_shards[1], tmp_path / "out", "--checkpoint", run)
        == 0
    )
    recorded_anew(run, lambda settings: settings["data"].update(image_size="later"))
    with raises("recipe.value", "00000002", "data.image_size", "later"):
        trained_network(run, World())


def test_a_change_that_makes_figures_differ_is_told_where_a_run_goes_on(
    tmp_path, training_shards, caplog
):
    train(World(), tmp_path, training_shards, steps=1)
    train(
        World(),
        tmp_path,
        training_shards,
        steps=2,
        memory={"size": 30},
        optimizer={"clip_norm": 1.0},
        data__validation=str(training_shards[1]),
    )
    for line in (
        "memory.size: was 0, is 30",
        "optimizer.clip_norm: was null, is 1.0",
        "data.validation: was null, is /",
    ):
        assert f"the recipe has changed since: {line}" in caplog.text


def test_a_run_that_drew_its_batches_in_another_way_does_not_go_on(tmp_path, training_shards):
    train(World(), tmp_path / "run", training_shards, steps=1)
    (folder,) = list_checkpoints(tmp_path / "run/checkpoints")
    record = checkpoints_of(tmp_path / "run").manifest(folder.name).about
    rewrite_manifest(folder, about=record | {"order": 1})
    with raises("run.other_plan", "1", "5"):
        train(World(), tmp_path / "run", training_shards, steps=2)
    begun = {"name": "run", "path": str(tmp_path / "run")}
    train(World(), tmp_path / "new", training_shards, steps=1, model__weights=begun)


def test_a_run_is_evaluated_from_another_folder_and_with_other_settings(
    tmp_path, training_shards, monkeypatch
):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    shutil.copytree(training_shards[1], tmp_path / "there" / "photos")
    monkeypatch.chdir(tmp_path / "there")
    train(
        World(),
        "run",
        training_shards,
        steps=1,
        data__validation="photos",
        evaluation__figures=["mAP"],
    )
    monkeypatch.chdir(tmp_path / "here")
    run = ("eval", "--checkpoint", "../there/run")
    assert distap(monkeypatch, *run, "--output", "32") == 0
    assert (
        distap(monkeypatch, *run, "data.image_size=40", "evaluation.batch_size=8", "--output", "40")
        == 0
    )
    at_32, at_40 = (
        json.loads((tmp_path / "here" / size / "result.json").read_text()) for size in ("32", "40")
    )
    assert at_32["fingerprint"] == at_40["fingerprint"] and at_32["figures"] != at_40["figures"]
    assert list(at_32["figures"]) == ["mAP"]
    assert distap(monkeypatch, *run, "data.imagesize=40") == 2


def lease(run):
    return json.loads((run / "lease.json").read_text())


def write_lease(run, **changes):
    """Write a lease as a training on another host, or with `changes` another one, would have left
    it.
    """
    now = time.time()
    left = {
        "host": "a",
        "pid": 7,
        "process": "a table 1",
        "training": "another",
        "started": now - 60,
    }
    run.mkdir(parents=True, exist_ok=True)
    (run / "lease.json").write_text(json.dumps(left | {"renewed": now} | changes))


@pytest.mark.parametrize("key", ["run", "checkpoint.store"])
def test_a_second_training_is_refused_and_the_first_one_goes_on_undisturbed(
    tmp_path, training_shards, key
):
    alone = tmp_path / "alone"
    shared = tmp_path / "shared"
    stored = (
        {"checkpoint": {"every": 1, "store": f"file://{tmp_path}/store"}}
        if key == "checkpoint.store"
        else {}
    )
    other = tmp_path / "other" if stored else shared
    trainer = Trainer(prepare(recipe(shared, training_shards, steps=3, **stored), World()), World())
    message = []
    second = recipe(other, training_shards, steps=9, **stored)
    step = trainer.step
    as_late = Trainer(prepare(second, World()), World())

    def disturbed(share, learning_rate):
        with pytest.raises(DistapError) as error:
            as_late.train()
        message.append(str(error.value))
        return step(share, learning_rate)

    trainer.step = disturbed
    trainer.train()
    for text in message:
        assert (
            text.startswith(f"{key}: ")
            and f"pid {os.getpid()}, started 0:00:" in text
            and "or choose another" in text
        )
        assert "start this one with --take-over" in text
    assert len(message) == 3
    train(World(), alone, training_shards, steps=3)
    assert losses(shared) == losses(alone)
    assert not [*tmp_path.glob("*/lease.json")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"process": "own", "pid": 2**22 + 1}, "its process has ended"),
        ({"process": "own", "pid": 1}, "its process has ended"),  # another one has its id now
    ],
)
def test_the_lease_of_a_training_that_is_gone_is_taken_over(
    tmp_path, training_shards, monkeypatch, caplog, changes, reason
):
    trainer = Trainer(prepare(recipe(tmp_path, training_shards, steps=1), World()), World())
    with trainer.state.leased():
        our_lease = lease(tmp_path)
    write_lease(
        tmp_path, **changes | ({"process": our_lease["process"]} if "process" in changes else {})
    )
    train(World(), tmp_path, training_shards, steps=1)
    assert f"taking over the lease of host a, pid {changes.get('pid', 7)}, " in caplog.text
    assert f": {reason}" in caplog.text
    assert not (tmp_path / "lease.json").exists()


def test_a_training_on_another_host_is_watched_until_it_renews_its_lease_or_not(
    tmp_path, training_shards, monkeypatch, caplog
):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.1)
    write_lease(tmp_path)
    train(World(), tmp_path, training_shards, steps=1)
    assert "waiting to see whether host a, pid 7, " in caplog.text
    assert re.search(
        r"taking over the lease of host a, pid 7, started .* ago: not renewed for \d s", caplog.text
    )
    write_lease(tmp_path)
    trainer = Trainer(prepare(recipe(tmp_path, training_shards, steps=2), World()), World())
    monkeypatch.setattr(time, "sleep", lambda seconds: write_lease(tmp_path))
    with raises("run.in_use", "7"):
        trainer.train()
    assert lease(tmp_path)["training"] == "another"


def test_a_training_whose_lease_was_taken_over_stops(tmp_path, training_shards, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)
    trainer = Trainer(prepare(recipe(tmp_path, training_shards, steps=10_000), World()), World())
    step = trainer.step

    def taken_over(share, learning_rate):
        if share.step > 0:
            write_lease(tmp_path)
        return step(share, learning_rate)

    trainer.step = taken_over
    with raises("run.taken_over", "7"):
        trainer.train()
    assert lease(tmp_path)["training"] == "another"
    assert losses(tmp_path)


def test_a_person_can_take_over_the_lease_of_a_training_that_seems_to_run(
    tmp_path, training_shards, monkeypatch, caplog
):
    write_lease(tmp_path)
    monkeypatch.setenv(leases.TAKE_OVER, "1")
    train(World(), tmp_path, training_shards, steps=1)
    assert "taking over the lease of host a, pid 7, " in caplog.text
    assert "asked for by --take-over" in caplog.text


def test_a_run_on_a_read_only_disk_says_so(small_disk, training_shards):
    run = small_disk("16m") / "run"
    train(World(), run, training_shards, steps=1)
    subprocess.run(["mount", "-o", "remount,ro", str(run.parent)], check=True)
    with raises("storage.refused", "lease.json"):
        train(World(), run, training_shards, steps=2)


class Narrow(torch.nn.Module):
    """A network in Python, whose record in a run does not say how wide it is."""

    def __init__(self, width, extra=False):
        super().__init__()
        self.project = torch.nn.Linear(3, width)
        self.extra = torch.nn.Linear(width, width) if extra else torch.nn.Identity()

    def forward(self, images):
        return self.extra(self.project(images.mean((2, 3))))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Narrow(6), r".*size mismatch for \S*project\.bias"),
        (
            Narrow(4, extra=True),
            r'.*Missing key\(s\) in state_dict: "\S*extra\.weight", "\S*extra\.bias"',
        ),
    ],
)
def test_a_checkpoint_of_another_network_is_not_called_damaged(
    other, difference, tmp_path, training_shards
):
    settings = recipe(tmp_path / "run", training_shards, steps=1).model_dump(
        mode="json", exclude={"model"}
    )
    library.train(settings, network=Narrow(4))
    with pytest.raises(
        DistapError, match=f"it is of another network or loss: {difference}"
    ) as caught:
        library.train({**settings, "steps": 2}, network=other)
    assert "damaged" not in str(caught.value)
