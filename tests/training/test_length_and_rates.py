"""The length of a training in epochs, its learning rates, and the average of its parameters, over
whole runs.
"""

import shutil
from types import SimpleNamespace

import pytest
import torch
from raising import raises
from ranks import on_ranks
from small_trainings import losses, recipe, train
from stores import found_checkpoint, list_checkpoints

import distap as library
from benchmarks.plan.planning import planned_steps
from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.build import trained_network
from distap.training.prepared import prepare
from distap.training.run_state import score_of
from distap.training.schedule import Length, RateSchedule
from distap.world import World

# 54 images in batches of 25: an epoch is 2.16 steps, and three of them are 6.48.
EPOCHS = {"steps": None, "epochs": 3, "schedule": {"name": "cosine", "unit": "epochs", "warmup": 1}}
RATES = {
    "name": "adamw",
    "learning_rate": 1e-2,
    "layer_decay": 0.7,
    "head_only": 1.5,  # epochs: the backbone moves from the fifth step on
    "backbone": {"factor": 0.5, "weight_decay": 0.1},
}
AVERAGED = {"ema": 0.8, "evaluation": {"every": 1, "unit": "epochs"}}
MODEL = {
    "backbone": "test_vit",
    "weights": "random",
    "projection": 8,
    "arguments": {"drop_path_rate": 0.1},
}
EVERYTHING = EPOCHS | AVERAGED | {"optimizer": RATES, "model": MODEL, "data__image_size": 48}


def tensors(run, step=None):
    return found_checkpoint(
        run if step is None else run / "checkpoints" / f"step-{step:08d}"
    ).tensors()


def test_a_training_in_epochs_has_the_schedule_and_the_evaluations_of_its_steps(
    tmp_path, training_shards, caplog
):
    caplog.set_level("INFO")
    sets = {
        "data__validation": str(training_shards[1]),
        "checkpoint": {"every": 2, "unit": "epochs"},
    }
    settings = (
        EPOCHS
        | {"evaluation": {"every": 1, "unit": "epochs"}, "optimizer": {"learning_rate": 0.1}}
        | sets
    )
    read = recipe(tmp_path / "run", training_shards, **settings)
    trainer = Trainer(prepare(read, World()), World())
    trainer.train()
    assert "an epoch is 2.16 steps, the training 2.78 epochs or 6 steps" in caplog.text
    assert "and every 1 epochs" in caplog.text
    log = read_run_log(tmp_path / "run")
    in_steps = RateSchedule("cosine", warmup=2.16)
    rates = [entry["learning_rate"] for entry in log if "loss" in entry]
    assert rates == pytest.approx([0.1 * in_steps.factor(step, 6) for step in range(6)])
    assert [entry["step"] for entry in log if "validation" in entry] == [0, 3, 5, 6]
    assert [path.name[-1] for path in list_checkpoints(tmp_path / "run" / "checkpoints")][-2:] == [
        "5",
        "6",
    ]
    train(
        World(),
        tmp_path / "steps",
        training_shards,
        steps=6,
        schedule={"name": "cosine", "warmup": 2.16},
        optimizer={"learning_rate": 0.1},
    )
    assert losses(tmp_path / "steps") == pytest.approx(losses(tmp_path / "run"), abs=1e-5)


def test_epochs_and_steps_are_either_or_and_need_a_count_of_images(tmp_path, training_shards):
    with pytest.raises(DistapError, match="set either steps or epochs; neither is set"):
        recipe(tmp_path, training_shards, steps=None)
    with raises("recipe.value", "10", "2.5"):
        recipe(tmp_path, training_shards, epochs=2.5)
    with raises("recipe.value", "epochs"):
        recipe(tmp_path, training_shards, steps=None, epochs=float("inf"))
    read = recipe(tmp_path, training_shards, **EPOCHS)
    for images, batch, steps in ((54, 25, 6), (54, 54, 3), (54, 500, 1), (1_000_003, 100, 30_000)):
        assert Length(read, range(images), batch).steps == steps
    with raises("data.no_epochs"):
        Length(read, None, 25)
    assert planned_steps(read, 10) == 16
    with pytest.raises(DistapError, match="epochs: the images cannot be counted, so set steps=N: "):
        planned_steps(recipe(tmp_path, (tmp_path / "nothing",), **EPOCHS), 10)


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ((), (None, 3)),
        (["steps=5"], (5, None)),
        ([{"steps": 5}], (5, None)),
        (["steps=null"], (None, 3)),
        (["epochs=0.5"], (None, 0.5)),
        (["steps=null", "epochs=2"], (None, 2)),
    ],
)
def test_an_override_of_steps_or_epochs_replaces_the_other(
    tmp_path, training_shards, overrides, length
):
    settings = recipe(tmp_path, training_shards, **EPOCHS).model_dump(mode="json")
    read = load_recipe(settings, overrides)
    assert (read.steps, read.epochs) == length
    with raises("recipe.value", "5", "2"):
        load_recipe(settings, ["steps=5", "epochs=2"])


def resumed(world, folder, shards, changes):
    """Train whole, and again from the whole run's checkpoints after some of the steps."""
    changes = {**changes, "data__validation": str(shards[1]), "checkpoint": {"every": 1, "keep": 9}}
    train(world, folder / "whole", shards, **changes)
    for step in (2, 5):  # the backbone is held, and it moves
        name = f"checkpoints/step-{step:08d}"
        if world.rank == 0:
            shutil.copytree(folder / "whole" / name, folder / f"from-{step}" / name)
        world.barrier()
        train(world, folder / f"from-{step}", shards, **changes)


@pytest.mark.parametrize(("ranks", "engine"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_a_run_with_everything_goes_on_bit_for_bit(tmp_path, training_shards, ranks, engine):
    changes = EVERYTHING | {"engine": engine}
    if ranks == 1:
        resumed(World(), tmp_path, training_shards, changes)
    else:
        on_ranks(ranks, resumed, tmp_path, training_shards, changes)
    expected = tensors(tmp_path / "whole")
    assert any(name.startswith("ema.") for name in expected)
    for step in (2, 5):
        actual = tensors(tmp_path / f"from-{step}")
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
        assert losses(tmp_path / f"from-{step}") == losses(tmp_path / "whole")[step:]


def test_while_the_head_warms_up_the_backbone_and_its_moments_stay_as_they_are(
    tmp_path, training_shards
):
    changes = EVERYTHING | {"checkpoint": {"every": 1, "keep": 9}, "evaluation": {}}
    train(World(), tmp_path, training_shards, **changes)
    first, held, moves = (tensors(tmp_path, step) for step in (1, 4, 5))
    for name in held:
        is_of_backbone = name.startswith("network.backbone.")
        if name.startswith("network.") and torch.equal(held[name], first[name]) != is_of_backbone:
            pytest.fail(f"{name} {'moves' if is_of_backbone else 'stays'}")
    of_backbone = [name for name in moves if name.startswith("optimizer.state.backbone.")]
    assert of_backbone and not set(of_backbone) & held.keys()
    assert all(float(moves[name]) == 1 for name in of_backbone if name.endswith(".step"))
    assert any(
        not torch.equal(moves[name], held[name])
        for name in held
        if name.startswith("network.backbone.")
    )


def test_the_average_is_evaluated_judged_saved_and_read(tmp_path, training_shards):
    changes = {
        "steps": 4,
        "data__validation": str(training_shards[1]),
        "ema": 0.5,
        "evaluation__every": 1,
    }
    # high, so that the average is far from the parameters
    rate = {"name": "sgd", "learning_rate": 3.0}
    train(
        World(),
        tmp_path,
        training_shards,
        **changes,
        optimizer=rate,
        checkpoint={"every": 1, "keep": 9},
    )
    average = {
        key.removeprefix("ema."): t
        for key, t in tensors(tmp_path).items()
        if key.startswith("ema.")
    }
    first, *later = (tensors(tmp_path, step) for step in (1, 2, 3, 4))
    for name in average:
        mean = first[f"ema.{name}"]
        for step in later:
            mean = 0.5 * mean + 0.5 * step[f"network.{name}"]
        torch.testing.assert_close(average[name], mean)
    assert not all(torch.equal(average[name], later[-1][f"network.{name}"]) for name in average)
    loaded = library.load(tmp_path, device="cpu").describer.retrieval_network.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in average.items())
    scores = {
        e["step"]: e["validation"]["mAP"] for e in read_run_log(tmp_path) if "validation" in e
    }
    for step, score in list(scores.items())[1:]:
        path = tmp_path / "checkpoints" / f"step-{step:08d}"
        _, network = trained_network(path, World())
        again = Trainer(
            prepare(recipe(tmp_path / f"at-{step}", training_shards, **changes), World()), World()
        )
        again.network.load_state_dict(network.state_dict())
        again.learner.keep_average(0.5)
        figures = again.evaluate(SimpleNamespace(requested=False))
        assert score_of(figures, again.recipe) == score
    best = found_checkpoint(tmp_path, best=True)
    assert best.manifest.score == max(scores[step] for step in (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"ema": 1}, "recipe.value", ["ema", "1"]),
        (
            {"ema": 0.9, "engine": {"name": "deepspeed", "stage": 3}},
            "recipe.value",
            ["ema"],
        ),
        (
            {"optimizer__head_only": 3, "engine": "deepspeed"},
            "recipe.value",
            ["deepspeed"],
        ),
        ({"optimizer__layer_decay": 0}, "recipe.value", ["optimizer.layer_decay", "0"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(tmp_path, training_shards, changes, code, names):
    with raises(code, *names):
        recipe(tmp_path, training_shards, **changes)


def test_a_network_of_a_backbone_alone_has_no_head_to_warm_up(tmp_path, training_shards):
    with raises("network.nothing_to_train", "head_only"):
        Trainer(
            prepare(
                recipe(tmp_path, training_shards, optimizer__head_only=1, model__pooling="mean"),
                World(),
            ),
            World(),
        )
