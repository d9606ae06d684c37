import os
import re
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from images import write_images
from PIL import Image
from raising import raises
from ranks import on_ranks
from small_trainings import DESCENT, are_same, losses, parameters, recipe, train
from stores import SHARD, found_checkpoint, list_checkpoints

from benchmarks.photos import pack
from distap.data.shards.index import load_index
from distap.errors import FINISHED, RESTART, DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.evaluation.saved import folder_of_step, read_evaluation, saved_steps
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.build import trained_network
from distap.training.prepared import prepare
from distap.world import World


def train_on_ranks(world, run, shards, changes):
    train(world, run, shards, **changes)


@pytest.mark.slow
def test_the_loss_curve_does_not_depend_on_the_number_of_ranks(tmp_path, training_shards):
    curves = []
    for ranks in (1, 2, 3):
        run = tmp_path / str(ranks)
        changes = {
            "data__workers": int(ranks == 2),
            "optimizer": DESCENT,
            "steps": 5,
            "data__image_sizes": {0: 24, 0.5: 32},
        }
        on_ranks(ranks, train_on_ranks, run, training_shards, changes)
        curves.append(losses(run))
    assert len(curves[0]) == 5
    assert curves[1] == pytest.approx(curves[0], abs=2e-5)
    assert curves[2] == pytest.approx(curves[0], abs=2e-5)
    assert curves[0][-1] < curves[0][0]


WITH_MEMORY = {
    "loss": {"sup_ap": 0.5, "calibration": {"weight": 0.5, "weights": "class"}},
    "memory": {"size": 60, "after": 2},
    "data__image_sizes": {0: 16, 0.8: 32},
    "steps": 5,
    "checkpoint": {"every": 4},
}


def test_a_memory_is_restored_with_the_checkpoint(tmp_path, training_shards):
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    without = tmp_path / "without"
    train(World(), whole, training_shards, **WITH_MEMORY)
    checkpoint = Path("checkpoints") / "step-00000004"
    assert 25 < len(found_checkpoint(whole / checkpoint).tensors("memory.")["memory.labels"]) <= 50
    shutil.copytree(whole / checkpoint, resumed / checkpoint)
    train(World(), resumed, training_shards, **WITH_MEMORY)
    assert losses(resumed) == losses(whole)[4:]
    assert are_same(whole, resumed)
    train(World(), without, training_shards, **WITH_MEMORY | {"memory": {"size": 0}})
    assert losses(without)[:3] == losses(whole)[:3]
    assert losses(without)[3] != losses(whole)[3]


def test_a_finished_run_is_not_trained_again(tmp_path, training_shards):
    train(World(), tmp_path, training_shards, steps=2)
    before = (tmp_path / "metrics.jsonl").read_text()
    train(World(), tmp_path, training_shards, steps=2)
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"seed": 1}, "run.other_recipe", ["0", "1"]),
        (
            {"model__projection": 16, "seed": 1},
            "run.other_recipe",
            ["0", "model.projection", "16"],
        ),
        (
            {"sampling": {"name": "p_by_k", "classes": 5, "images": 5}},
            "run.other_recipe",
            ["sampling.name", "sampling.batch_size", "25"],
        ),
    ],
)
def test_a_run_does_not_go_on_as_another_training(tmp_path, training_shards, changes, code, names):
    train(World(), tmp_path, training_shards, steps=1)
    with raises(code, *names):
        train(World(), tmp_path, training_shards, **{"steps": 2, **changes})
    with raises("run.other_recipe", "data.train"):
        train(World(), tmp_path, training_shards[::-1], steps=2)


def test_a_damaged_checkpoint_is_passed_over_until_training_writes_its_step_again(
    tmp_path, training_shards, caplog
):
    train(World(), tmp_path, training_shards, steps=4, checkpoint__every=2)
    whole = parameters(tmp_path)
    state = tmp_path / "checkpoints" / "step-00000004" / SHARD.format(1)
    state.write_bytes(state.read_bytes()[:-1])
    caplog.clear()
    train(World(), tmp_path, training_shards, steps=4, checkpoint__every=2)
    assert (
        f"step-00000004: damaged checkpoint: {state.name} is not the file that was written"
        in caplog.text
    )
    assert f"going on from {tmp_path / 'checkpoints' / 'step-00000002'}" in caplog.text
    assert all(torch.equal(whole[name], again) for name, again in parameters(tmp_path).items())
    kept_names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert kept_names == ["step-00000002", "step-00000004.1"]


def test_an_evaluation_that_a_request_to_stop_came_before_is_made_up_for(tmp_path, training_shards):
    evaluation = {"every": 2, "at_start": False}
    settings = {"steps": 2, "data__validation": str(training_shards[1]), "evaluation": evaluation}
    trainer = Trainer(prepare(recipe(tmp_path, training_shards, **settings), World()), World())
    step = trainer.step

    def stop_in_the_last(share, learning_rate):
        if share.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(share, learning_rate)

    trainer.step = stop_in_the_last
    assert trainer.train() == RESTART
    assert not any("validation" in entry for entry in read_run_log(tmp_path))
    assert (
        Trainer(prepare(recipe(tmp_path, training_shards, **settings), World()), World()).train()
        == FINISHED
    )
    evaluated = [entry["step"] for entry in read_run_log(tmp_path) if "validation" in entry]
    assert evaluated == [2]
    Trainer(prepare(recipe(tmp_path, training_shards, **settings), World()), World()).train()
    assert [entry["step"] for entry in read_run_log(tmp_path) if "validation" in entry] == evaluated
    assert found_checkpoint(tmp_path, best=True).step == 2


@pytest.mark.parametrize(("steps", "checkpoints"), [(2, ["step-00000002"]), (0, [])])
def test_a_request_in_an_evaluation_breaks_it_off(
    tmp_path, training_shards, monkeypatch, caplog, steps, checkpoints
):
    evaluation = {"every": 2, "at_start": steps == 0}
    settings = {"steps": 4, "data__validation": str(training_shards[1]), "evaluation": evaluation}
    describe = ImageDescriber.__call__
    described = []

    def asked_at_the_first_batch(describer, pixels):
        described.append(len(pixels))
        if len(described) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while "stopping after this step" not in caplog.text:
                threading.Event().wait(0.01)
        return describe(describer, pixels)

    with monkeypatch.context() as patch:
        patch.setattr(ImageDescriber, "__call__", asked_at_the_first_batch)
        assert (
            Trainer(
                prepare(recipe(tmp_path, training_shards, **settings), World()), World()
            ).train()
            == RESTART
        )
    assert len(described) == 1
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == checkpoints
    assert (
        Trainer(prepare(recipe(tmp_path, training_shards, **settings), World()), World()).train()
        == FINISHED
    )
    evaluated = [entry["step"] for entry in read_run_log(tmp_path) if "validation" in entry]
    assert evaluated == sorted({0 if steps == 0 else 2, 2, 4})


def test_the_best_checkpoint_stays_and_is_found(tmp_path, training_shards):
    generator = np.random.default_rng(0)
    for number in range(24):  # with nothing in common, so that the figure goes up and down
        path = tmp_path / "noise" / f"noise-{number % 6}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    pack(tmp_path / "noise", tmp_path / "hard")
    train(
        World(),
        tmp_path,
        training_shards,
        steps=6,
        data__validation=str(tmp_path / "hard"),
        evaluation={"every": 1, "at_start": False},
        checkpoint={"every": 5, "keep": 1},
    )
    scores = {
        entry["step"]: entry["validation"]["mAP"]
        for entry in read_run_log(tmp_path)
        if "validation" in entry
    }
    best = max(scores, key=lambda step: (scores[step], -step))
    kept_names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert kept_names == sorted({f"step-{best:08d}", "step-00000006"})
    assert found_checkpoint(tmp_path, best=True).manifest.score == scores[best]
    _, network = trained_network(tmp_path, World(), best=True)
    assert isinstance(network.state_dict()["pooling.power"], torch.Tensor)
    # The numbers went up and down between the first, the best and the last.
    assert saved_steps(tmp_path) == sorted({1, best, 6})


def test_a_training_says_what_it_is_about_to_do(tmp_path, training_shards, caplog):
    caplog.set_level("INFO")
    trainer = Trainer(
        prepare(
            recipe(tmp_path, training_shards, steps=2, data__validation=str(training_shards[1])),
            World(),
        ),
        World(),
    )
    trainer.train()
    images = len(trainer.images.index)
    classes = len(trainer.images.index.class_name)
    for line in (
        f"data        {training_shards[0]}: {images:,} images of {classes} classes",
        f"evaluation  {training_shards[1]}, before the first step and after the last",
        "device      cpu",
        "engine      ddp",
        f"batch       25 images by random; an epoch is {images / 25:.3g} steps",
        f"run         {tmp_path}, from the start",
    ):
        assert line in caplog.text


def mistaken(world, run, shards):
    with pytest.raises(DistapError, match=r"^rank 0: sampling\.classes is 900, but only") as raised:
        Trainer(
            prepare(recipe(run, shards, sampling={"name": "p_by_k", "classes": 900}), world), world
        )
    return raised.value.is_on_all_ranks


def test_a_mistake_is_found_by_rank_0_and_raised_on_all(tmp_path, training_shards):
    assert on_ranks(2, mistaken, tmp_path, training_shards) == [True, True]


def test_an_error_of_the_device_is_not_told_as_one_of_the_size(tmp_path, training_shards):
    model = {"backbone": {"name": "plug_ins:LostDevice"}}
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access"):
        Trainer(prepare(recipe(tmp_path, training_shards, model=model), World()), World())


def test_an_evaluation_before_the_first_step_changes_no_step_of_the_training(
    tmp_path, training_shards
):
    settings = {"steps": 2, "data__validation": str(training_shards[1])}
    train(World(), tmp_path / "with", training_shards, **settings)
    train(World(), tmp_path / "without", training_shards, **settings, evaluation={"every": 0})
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    lines = [entry for entry in read_run_log(tmp_path / "with") if "validation" in entry]
    assert [line["step"] for line in lines] == [0, 2] == saved_steps(tmp_path / "with")
    assert read_evaluation(folder_of_step(tmp_path / "with", 2)).figures == lines[1]["validation"]
    assert saved_steps(tmp_path / "without") == []


def test_a_full_disk_costs_the_kept_evaluation_and_not_the_training(
    tmp_path, training_shards, caplog
):
    (tmp_path / "evaluations").write_text("a file where the folder should be")
    train(
        World(),
        tmp_path,
        training_shards,
        steps=1,
        data__validation=str(training_shards[1]),
        evaluation={"every": 1},
    )
    assert "the evaluation is not kept for the report" in caplog.text
    assert len([entry for entry in read_run_log(tmp_path) if "validation" in entry]) == 2


def test_a_class_of_the_validation_set_is_never_trained_on(tmp_path, training_shards):
    shared = write_images(tmp_path / "images", {"test-3": 3, "train-5": 3})
    pack(shared, tmp_path / "shared")
    with raises("data.seen_classes", "1", "5"):
        train(World(), tmp_path / "run", training_shards, data__validation=str(tmp_path / "shared"))
    names = [set(load_index(folder).class_name.tolist()) for folder in training_shards]
    assert not names[0] & names[1]


def spoil(folder: Path, samples: list[int]) -> None:
    """Overwrite some images within their shards."""
    index = load_index(folder)
    for sample in samples:
        with (folder / str(index.shard_name[index.shard[sample]])).open("r+b") as file:
            file.seek(int(index.offset[sample]))
            file.write(b"damage")


def test_damaged_images_are_skipped_counted_and_named(tmp_path, training_shards, caplog):
    shutil.copytree(training_shards[0], tmp_path / "spoilt")
    spoil(tmp_path / "spoilt", [0, 9])
    sampling = {"name": "random", "batch_size": len(load_index(tmp_path / "spoilt"))}
    on_ranks(
        2,
        train_on_ranks,
        tmp_path / "run",
        [tmp_path / "spoilt"],
        {"steps": 2, "sampling": sampling},
    )
    train(World(), tmp_path / "alone", [tmp_path / "spoilt"], steps=1, sampling=sampling)
    assert len(re.findall(r"step 1: left out: \S+\.tar:\S+: crc_mismatch", caplog.text)) == 2
    entries = [entry for entry in read_run_log(tmp_path / "run") if "loss" in entry]
    assert [entry["skipped_images"] for entry in entries] == [2, 4]
    assert all(entry["loss"] > 0 for entry in entries)


def test_too_much_damage_stops_the_training_and_names_it(tmp_path, training_shards):
    shutil.copytree(training_shards[0], tmp_path / "spoilt")
    spoil(tmp_path / "spoilt", list(range(40)))
    with raises("data.too_many_damaged", "25", "data.max_damaged", "0.2", "tar", "crc_mismatch"):
        train(World(), tmp_path / "run", [tmp_path / "spoilt"], data__max_damaged=0.2)


def test_too_much_damage_in_one_step_stops_the_training(tmp_path, training_shards):
    shutil.copytree(training_shards[0], tmp_path / "spoilt")
    spoil(tmp_path / "spoilt", list(range(24)))
    with raises("data.too_many_damaged", "0.25"):
        train(World(), tmp_path / "run", [tmp_path / "spoilt"], data__max_damaged=1.0)


def start_apart(world, run, shards):
    """Rank 1 sees another data set, has another recipe, or only workers of its own."""
    world = World(world.rank, world.size, watchdog=world.watchdog, hosts=("a", "b"))
    apart = (
        (shards[world.rank :], {}),
        (shards, {"steps": 2 + world.rank}),
        (shards, {"data__workers": world.rank}),
    )
    output = []
    for folder, changes in apart:
        try:
            output.append(Trainer(prepare(recipe(run, folder, **changes), world), world).train())
        except DistapError as error:
            output.append(str(error))
    return output


def test_ranks_that_do_not_train_the_same_are_refused_on_every_rank(tmp_path, training_shards):
    for data, settings, of_hosts in on_ranks(2, start_apart, tmp_path, training_shards):
        assert "the ranks see different data" in data
        assert (
            settings
            == "rank 1 (b): not what rank 0 trains: steps: 2 on rank 0, 3 here; start all hosts"
            " alike"
        )
        assert of_hosts == FINISHED


def test_the_log_tells_where_the_seconds_of_a_step_went(tmp_path, training_shards):
    train(World(), tmp_path, training_shards, steps=2)
    for entry in read_run_log(tmp_path):
        if "loss" in entry:
            seconds = entry["seconds"]
            stages = sum(
                value for name, value in seconds.items() if name not in ("step", "network")
            )
            assert stages == pytest.approx(seconds["step"], abs=1e-4)
            assert 0 < seconds["network"] < seconds["step"]


def spoilt_on_one_rank(world, run, shards, changes):
    """Train; after the third step a parameter of the last rank is NaN, as an update may leave
    it."""
    trainer = Trainer(prepare(recipe(run, shards, **changes), world), world)
    step = trainer.step

    def spoiling(share, rate):
        result = step(share, rate)
        if share.step == 2 and world.rank == world.size - 1:
            next(trainer.network.parameters()).data[0] = torch.nan
        return result

    trainer.step = spoiling
    with pytest.raises(DistapError) as error:
        trainer.train()
    return str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_checkpoint_is_written_from_parameters_that_are_not_finite(
    tmp_path, training_shards, ranks
):
    changes = {"steps": 4, "checkpoint": {"every": 2}, "optimizer": DESCENT}
    *remaining, last = on_ranks(ranks, spoilt_on_one_rank, tmp_path, training_shards, changes)
    assert "step 4: network." in last and "is not finite, so no checkpoint is written" in last
    assert all("the state of another rank is not finite" in other for other in remaining)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]
    train(World(), tmp_path, training_shards, **changes)  # goes on from there
    assert len(losses(tmp_path)) == 4


def test_descriptors_that_are_not_finite_stop_a_training_with_the_advice_that_helps(
    tmp_path, training_shards
):
    trainer = Trainer(
        prepare(recipe(tmp_path, training_shards, step__max_not_finite=3), World()), World()
    )
    for parameter in trainer.network.parameters():
        parameter.data.fill_(torch.nan)
    with raises("run.not_finite", "3"):
        trainer.train()
    assert [entry["loss"] for entry in read_run_log(tmp_path)] == [None] * 3


def test_a_network_that_tells_no_images_apart_is_told_of_once(tmp_path, training_shards, caplog):
    trainer = Trainer(prepare(recipe(tmp_path, training_shards), World()), World())
    first, *_ = (
        module for module in trainer.network.modules() if isinstance(module, torch.nn.Conv2d)
    )
    first.weight.data.zero_()
    with caplog.at_level("WARNING"):
        assert trainer.train() == FINISHED
    assert (
        caplog.text.count("has given all images the same descriptor") == 1
        and "step 5: the network" in caplog.text
    )
    assert max(entry["spread"] for entry in read_run_log(tmp_path) if "loss" in entry) < 1e-5
