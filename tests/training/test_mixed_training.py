"""Trainings on several data sets: the same on any ranks, resumed at any step, told by set."""

import json
import math
import shutil

import numpy as np
import pytest
from commands import distap
from images import pack_sets, write_images
from raising import raises
from ranks import on_ranks
from servers import web_server
from small_trainings import DESCENT, are_same, losses, recipe, train

from distap.checkpoint.checkpoints import CHECKPOINTS_FOLDER
from distap.config.reading import load_recipe
from distap.data.shards.index import load_index
from distap.pages.report import report
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.by_set import SetFigures
from distap.training.prepared import prepare
from distap.world import World

STEPS = 6
SAMPLING = {"name": "p_by_k", "classes": 6, "images": 2}
SETTINGS = {
    "steps": STEPS,
    "sampling": SAMPLING,
    "loss": {"name": "smooth_ap", "tau": 0.1},
    "optimizer": DESCENT,
    "checkpoint": {"every": 1, "keep": 9},
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Shards of three data sets, whose classes have the same names."""
    folder = tmp_path_factory.mktemp("sets")
    pack_sets(folder, "shards/{}".format, {"a": (10, 3), "b": (8, 4), "c": (12, 3)}, size=40)
    return folder / "shards"


def mapping(sets, **changed):
    return {name: {"data": str(sets / name), **changed.get(name, {})} for name in "abc"}


def train_mixed(world, run, sets, **changes):
    settings = SETTINGS | {"data__train": mapping(sets, c={"weight": 2})} | changes
    train(world, run, (None, None), **settings)


def by_set(run):
    return [entry["sets"] for entry in read_run_log(run) if "sets" in entry]


@pytest.mark.parametrize("mix", ["all", "one"])
def test_weights_follow_the_losses_on_any_ranks_and_resumed_at_any_step(tmp_path, sets, mix):
    sampling = SAMPLING | {"mix": mix, "follow_loss": 2}
    for ranks in (1, 2, 3):
        run = tmp_path / str(ranks)
        on_ranks(ranks, train_mixed_with, run, sets, sampling)
    whole = tmp_path / "1"
    assert len(losses(whole)) == STEPS
    if mix == "all":
        images = [tuple(each["images"] for each in step.values()) for step in by_set(whole)]
        assert {sum(step) for step in images} == {12} and len(set(images)) > 1
    for other in ("2", "3"):
        assert losses(tmp_path / other) == pytest.approx(losses(whole), abs=1e-5)
        for ours, theirs in zip(by_set(whole), by_set(tmp_path / other), strict=True):
            assert {name: f["images"] for name, f in ours.items()} == {
                name: f["images"] for name, f in theirs.items()
            }
    for done in range(1, STEPS):
        resumed = tmp_path / f"resumed-{done}"
        checkpoint = f"{CHECKPOINTS_FOLDER}/step-{done:08}"
        shutil.copytree(whole / checkpoint, resumed / checkpoint)
        on_ranks(1, train_mixed_with, resumed, sets, sampling)
        assert losses(resumed) == losses(whole)[done:] and are_same(whole, resumed)


def train_mixed_with(world, run, sets, sampling):
    train_mixed(world, run, sets, sampling=sampling)


def test_the_figures_of_the_sets_are_those_of_the_batch(tmp_path, sets):
    train_mixed(World(), tmp_path / "run", sets)
    entries = [entry for entry in read_run_log(tmp_path / "run") if "sets" in entry]
    for entry in entries:
        figures = entry["sets"].values()
        queries = [each["queries"] for each in figures]
        means = [each["loss"] for each in figures]
        assert np.average(means, weights=queries) == pytest.approx(entry["loss"], abs=1e-9)
        assert sum(each["images"] for each in figures) == entry["images"]
    page, _ = report(tmp_path / "run", tmp_path)
    assert "Loss of b" in page.read_text()


def test_a_set_that_was_added_or_weighed_anew_is_refused_by_name(tmp_path, sets):
    run = tmp_path / "run"
    train_mixed(World(), run, sets, steps=2)
    with raises("run.other_recipe", "data.train.b.weight", "3.0"):
        train_mixed(
            World(),
            run,
            sets,
            data__train=mapping(sets, b={"weight": 3}, c={"weight": 2}),
        )
    fewer = mapping(sets, c={"weight": 2})
    del fewer["a"]
    with raises("run.other_recipe", "data.train.a.data", "unset"):
        train_mixed(World(), run, sets, data__train=fewer)
    other = mapping(sets, c={"weight": 2}) | {"a": {"data": str(sets / "b")}}
    with raises("run.other_recipe", "data.train.a.data"):
        train_mixed(World(), run, sets, data__train=other)
    # the same sets, from another place and in another order
    shutil.copytree(sets, tmp_path / "copy")
    moved = dict(reversed(mapping(tmp_path / "copy", c={"weight": 2}).items()))
    train_mixed(World(), run, sets, data__train=moved, steps=3)
    assert len(losses(run)) == 3


LOSSES_BY_SET = {
    "within": {"within": {"inner": {"name": "arc_face", "scale": 16.0}}},
    "by_set": {
        "by_set": {
            "a": "smooth_ap",
            "b": "arc_face",
            "c": {"name": "ap_q", "bins": 10},
        }
    },
}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", LOSSES_BY_SET)
def test_losses_of_each_set_train_alike_on_any_ranks_and_engine(tmp_path, sets, loss, engine):
    changes = {"loss": LOSSES_BY_SET[loss]}
    train_mixed(World(), tmp_path / "1", sets, **changes)
    on_ranks(2, train_with, tmp_path / "2", sets, changes | {"engine": engine})
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), abs=1e-5)
    resumed = tmp_path / "resumed"
    checkpoint = f"{CHECKPOINTS_FOLDER}/step-00000003"
    shutil.copytree(tmp_path / "1" / checkpoint, resumed / checkpoint)
    train_mixed(World(), resumed, sets, **changes)
    assert are_same(tmp_path / "1", resumed)


def train_with(world, run, sets, changes):
    train_mixed(world, run, sets, **changes)


def test_weights_are_renewed_once_and_kept_where_no_step_had_a_loss(tmp_path, sets):
    sampling = SAMPLING | {"follow_loss": 3}
    changes = SETTINGS | {
        "sampling": sampling,
        "data__train": mapping(sets),
    }
    trainer = Trainer(prepare(recipe(tmp_path, (None, None), **changes), World()), World())
    weights = trainer.state.weights
    weights.renew(3)
    assert trainer.images.plan.sampling.shares.first == 0
    figures = {name: SetFigures(4, 0, 4, loss) for name, loss in zip("abc", (1, 2, 3), strict=True)}
    weights.observe(figures, 2.0)
    weights.renew(3)
    shares = trainer.images.plan.sampling.shares
    assert [float(weight) for weight in shares.weights] == [
        0.167,
        0.333,
        0.5,
    ]
    # a process that was stopped before step 3 goes on from here
    state = weights.state_dict()
    weights.load_state_dict(state)
    weights.renew(3)
    assert trainer.images.plan.sampling.shares.weights == shares.weights
    without = {name: each._replace(loss=math.nan) for name, each in figures.items()}
    weights.observe(without, math.nan)  # of a step that was skipped
    with raises("sampling.no_losses", "sampling.follow_loss"):
        weights.observe(without, 2.0)


def test_losses_of_other_sets_than_those_of_the_data_are_refused(tmp_path, sets):
    of_two = {"by_set": {"a": "smooth_ap", "b": "smooth_ap"}}
    with raises("loss.other_sets", "a, b", "a, b, c"):
        train_mixed(World(), tmp_path / "run", sets, loss=of_two)
    with raises("loss.other_sets", "a, b"):
        train_mixed(
            World(),
            tmp_path / "run",
            sets,
            loss={**of_two, "calibration": 0.5},
        )
    with raises("loss.no_sets", "data.train"):
        train_mixed(
            World(),
            tmp_path / "run",
            sets,
            data__train=str(sets / "a"),
            loss=LOSSES_BY_SET["within"],
        )


def test_one_named_set_trains_bit_for_bit_as_a_set_without_a_name(tmp_path, sets):
    train_mixed(
        World(),
        tmp_path / "named",
        sets,
        data__train={"a": str(sets / "a")},
    )
    train_mixed(World(), tmp_path / "plain", sets, data__train=str(sets / "a"))
    assert are_same(tmp_path / "named", tmp_path / "plain")
    assert losses(tmp_path / "named") == losses(tmp_path / "plain")


@pytest.mark.parametrize("window", [None, 2])
def test_a_mixture_from_a_web_server_with_a_cache_trains_as_from_the_disk(tmp_path, sets, window):
    sampling = SAMPLING | {"window": window}
    train_mixed(World(), tmp_path / "disk", sets, sampling=sampling)
    with web_server(sets) as server:
        urls = {
            name: {
                "data": f"{server.url}/{name}",
                "weight": 1 + (name == "c"),
            }
            for name in "abc"
        }
        cache = {"folder": str(tmp_path / "cache"), "bytes": 10**8}
        on_ranks(
            2,
            train_from_server,
            tmp_path / "server",
            sets,
            urls,
            cache,
            sampling,
        )
    assert losses(tmp_path / "server") == pytest.approx(losses(tmp_path / "disk"), abs=1e-5)
    reading = [
        entry["reading"] for entry in read_run_log(tmp_path / "server") if "reading" in entry
    ]
    assert sum(step.get("cache_hits", 0) for step in reading) > 0


def train_from_server(world, run, sets, urls, cache, sampling):
    train_mixed(
        world,
        run,
        sets,
        data__train=urls,
        data__cache=cache,
        data__workers=1,
        sampling=sampling,
    )


def test_the_set_is_the_coarsest_level_of_graded_losses(tmp_path, sets):
    train_mixed(World(), tmp_path / "run", sets, loss="h_ap", steps=2)
    graded = losses(tmp_path / "run")
    train_mixed(World(), tmp_path / "flat", sets, loss="smooth_ap", steps=2)
    assert len(graded) == 2 and graded != losses(tmp_path / "flat")


def test_each_set_is_mined_by_itself(tmp_path, sets):
    sampling = SAMPLING | {"name": "mined", "near": 2, "every": 2}
    changes = SETTINGS | {
        "sampling": sampling,
        "data__train": mapping(sets),
    }
    settings = recipe(tmp_path / "run", (None, None), **changes)
    trainer = Trainer(prepare(settings, World()), World())
    trainer.train()
    for classes in trainer.images.plan.classes.sets:
        assert classes.nearest.shape == (classes.count, 2)
    resumed = tmp_path / "resumed"
    checkpoint = f"{CHECKPOINTS_FOLDER}/step-00000003"
    shutil.copytree(tmp_path / "run" / checkpoint, resumed / checkpoint)
    train(World(), resumed, (None, None), **changes)
    assert are_same(tmp_path / "run", resumed)


def test_descriptors_of_several_sets_train_a_head(tmp_path, sets, monkeypatch):
    run = tmp_path / "run"
    train_mixed(
        World(),
        run,
        sets,
        data__train=str(sets / "a"),
        model__backbone="test_vit",
    )
    described = {}
    for name in "ab":
        described[name] = f"described:{tmp_path / name}"
        output = tmp_path / name
        assert (
            distap(
                monkeypatch,
                "extract",
                sets / name,
                output,
                "--checkpoint",
                run,
            )
            == 0
        )
    train_mixed(
        World(),
        tmp_path / "head",
        sets,
        data__train=described,
        model={
            "backbone": "test_vit",
            "weights": {"name": "run", "path": str(tmp_path / "run")},
            "projection": 8,
            "unit_length": True,
        },
    )
    assert [set(step) for step in by_set(tmp_path / "head")] == [{"a", "b"}] * STEPS


def test_damage_is_told_by_set(tmp_path, sets):
    copy = tmp_path / "shards"
    shutil.copytree(sets, copy)
    index = load_index(copy / "b")
    for sample in range(3):
        shard = copy / "b" / str(index.shard_name[index.shard[sample]])
        data = bytearray(shard.read_bytes())
        data[index.offset[sample] + 40] ^= 255
        shard.write_bytes(bytes(data))
    train_mixed(World(), tmp_path / "run", copy, steps=8)
    damaged = {
        name: sum(step[name]["damaged"] for step in by_set(tmp_path / "run") if name in step)
        for name in "abc"
    }
    assert damaged["b"] > 0 and damaged["a"] == damaged["c"] == 0


def test_sets_that_do_not_fit_are_refused_or_told(tmp_path, sets, caplog):
    empty = tmp_path / "empty"
    empty.mkdir()
    with raises("data.empty", empty):
        train_mixed(
            World(),
            tmp_path / "run",
            sets,
            data__train={"a": str(sets / "a"), "e": f"imagefolder:{empty}"},
        )
    with raises("data.repeated_set", "data.train.b"):
        train_mixed(
            World(),
            tmp_path / "run",
            sets,
            steps=30,
            data__train=mapping(sets, b={"repeat": False}),
        )
    lone = write_images(tmp_path / "lone", {"only": 8}, 40)
    lonely = {
        "a": str(sets / "a"),
        "lone": {"data": f"imagefolder:{lone}", "weight": 0.2},
    }
    with raises("sampling.set_too_small", "data.train.lone"):
        train_mixed(
            World(),
            tmp_path / "run",
            sets,
            data__train=lonely | {"a": {"data": str(sets / "a"), "weight": 0.1}},
        )
    train_mixed(World(), tmp_path / "told", sets, steps=1, data__train=lonely)
    assert "data.train.lone: 1 of its classes" in caplog.text
    twice = {"a": str(sets / "a"), "again": f"{sets / 'a'}[:0.5]"}
    train_mixed(World(), tmp_path / "twice", sets, steps=1, data__train=twice)
    assert "a and again share 15 images" in caplog.text


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("data.train={a: x, b: {data: y, weight: size}}", ["data", "size"]),
        ("data.train={a: 'described:x', b: y}", ["described:"]),
        ("data.train={a: {weight: 2}}", ["data.train.a.data"]),
        ("data.train={a b: x}", ["data.train", "a b"]),
        ("data.train={a: {data: x, weight: 0}}", ["data.train.a.weight"]),
        (
            "data.train={a: {data: x, wieght: 1}}",
            ["data.train.a.wieght", "weight"],
        ),
        (
            "evaluation.also={a: {dta: x}}",
            ["evaluation.also.a.dta", "data"],
        ),
        ("data.train={}", ["data.train"]),
        (
            "sampling={name: p_by_k, mix: one}",
            ["sampling.mix", "data.train"],
        ),
        (
            "sampling={name: random, follow_loss: 3}",
            ["sampling.follow_loss", "data.train"],
        ),
        (
            "sampling={name: random, follow_loss: 3}; data.train={a: x}",
            ["sampling.follow_loss"],
        ),
        ("data.train=[a, b]", ["data.train"]),
    ],
)
def test_a_wrong_mapping_is_an_error_of_its_key(tmp_path, change, names):
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"run": str(tmp_path), "steps": 1, "data": {"train": "x"}}))
    with raises("recipe.value", *names):
        load_recipe(file, change.split("; "))
