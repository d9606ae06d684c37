"""Training in float16 with a loss scale, next to torch's own GradScaler and to float64."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from batches import TensorBatch
from networks import noise, random_network
from raising import raises
from small_trainings import are_same, losses, recipe, train
from steps import learning, step_with
from stores import found_checkpoint
from torch import nn

from distap.errors import FINISHED, DistapError
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.rank import rank
from distap.stages.micro_batches import MicroBatchSizes
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training import loss_scale
from distap.training.loss_scale import FIRST_SCALE, LEAST_SCALE, ScaledLearner
from distap.training.prepared import prepare
from distap.world import World

IMAGES = 24
LABELS = torch.arange(IMAGES) // 4
RATE = 1e-2
LARGE_SCALE = 2.0**30  # at which the gradients here overflow
HALVED = "the loss scale is"


def descent(network):
    return torch.optim.SGD(network.parameters(), lr=RATE)


def gradient_of(network):
    return torch.cat([parameter.grad.double().flatten() for parameter in network.parameters()])


def moved_in(precision, network, size=5, keep=0):
    """How one step of plain descent moved each parameter, and the step's result."""
    network = copy.deepcopy(network)
    before = [parameter.detach().double().clone() for parameter in network.parameters()]
    learner = learning(network, descent(network), World(), precision=precision)
    sizes = MicroBatchSizes(size, keep=keep)
    step = step_with(learner, QuantizedAP(), World(), 0, sizes, max_drift=0.1)
    while True:
        result = step(TensorBatch(noise(IMAGES), LABELS, World()), 1.0)
        if result.skipped != "overflow":
            break
    after = [parameter.detach().double() for parameter in network.parameters()]
    moved = [(old - new).flatten() for old, new in zip(before, after, strict=True)]
    return torch.cat(moved), result


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("backbone", ["resnet10t", "test_vit"])
def test_a_step_is_that_of_float64_but_for_the_rounding_of_float16(backbone, keep):
    size = 64 if backbone == "test_vit" else None
    network = random_network(backbone, projection=8, image_size=size).train()
    exact, _ = moved_in("float32", network.double())
    away = {}
    for precision in ("fp16", "bf16"):
        moved, result = moved_in(precision, network.float(), keep=keep)
        assert result.skipped is None and result.replay_drift < 0.05
        away[precision] = float((moved - exact).norm() / exact.norm())
    # float16 has three bits more
    assert away["fp16"] < min(away["bf16"] / 2, 0.1)


@pytest.mark.parametrize(("scale", "is_lost"), [(1.0, True), (FIRST_SCALE, False)])
def test_a_gradient_below_float16_is_kept_by_the_scale(scale, is_lost):
    network = random_network(projection=8).train()
    learner = learning(network, descent(network), World(), precision="fp16")
    learner.loss_scale = scale
    exact = copy.deepcopy(network).double()
    descriptors = learner.replica.forward(noise(4))
    tiny = 1e-9 * torch.ones_like(descriptors).cumsum(1)
    learner.replica.backward(descriptors, tiny * scale, is_last=True)
    exact(noise(4)).backward(tiny.double())
    # The head computes in float32; the backbone below it does not.
    actual = gradient_of(network.backbone) / scale
    expected = gradient_of(exact.backbone)
    assert bool(actual.any()) != is_lost
    if not is_lost:
        assert (actual - expected).norm() < 0.1 * expected.norm()
        whole = float(gradient_of(exact).norm())
        assert learner.update(RATE) == pytest.approx(whole, rel=0.02)


def test_scale_and_parameters_are_those_of_torchs_scaler(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    network = random_network("test_vit", projection=8, image_size=64).train()
    reference = copy.deepcopy(network)
    optimizer = descent(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=LARGE_SCALE, growth_interval=3)
    learner = learning(network, descent(network), World(), clip_norm=0.5, precision="fp16")
    learner.loss_scale = LARGE_SCALE
    # One micro-batch, so that the same numbers are added in the same order.
    sizes = MicroBatchSizes(IMAGES)
    step = step_with(learner, QuantizedAP(), World(), 0, sizes, max_drift=0.1)

    scales, theirs, skipped = [], [], []
    for number in range(14):
        result = step(TensorBatch(noise(IMAGES), LABELS, World(), number), RATE)
        scales.append(result.loss_scale)
        skipped.append(result.skipped)

        with torch.autocast("cpu", torch.float16):
            descriptors = reference(noise(IMAGES))
        gradient = rank(descriptors.detach(), LABELS, "ap_q").gradient
        optimizer.zero_grad()
        scaler.scale((descriptors * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        theirs.append(scaler.get_scale())

    assert scales == theirs
    assert skipped[0] == "overflow" and None in skipped
    assert any(later > earlier for earlier, later in pairwise(scales))
    for parameter, other in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)


def test_overflows_at_a_large_scale_do_not_end_a_training(
    tmp_path, training_shards, monkeypatch, caplog
):
    large = LARGE_SCALE / 2**10
    monkeypatch.setattr(ScaledLearner, "loss_scale", large)
    with caplog.at_level("INFO"):
        train(
            World(),
            tmp_path,
            training_shards,
            precision="fp16",
            step__max_not_finite=1,
            optimizer__learning_rate=1e-4,
        )
    scales = [entry["loss_scale"] for entry in read_run_log(tmp_path) if "loss" in entry]
    assert len(scales) == 10 and scales[0] == large / 2
    assert scales[-1] == scales[-2]  # steps that moved
    halvings = int(math.log2(large / scales[-1]))
    assert caplog.text.count(HALVED) == halvings >= 1


def test_a_gradient_that_stays_not_a_number_ends_the_training_from_the_least_scale_on(
    tmp_path, training_shards, monkeypatch
):
    monkeypatch.setattr(ScaledLearner, "loss_scale", 4 * LEAST_SCALE)
    of_float16 = recipe(tmp_path, training_shards, precision="fp16", step__max_not_finite=3)
    trainer = Trainer(prepare(of_float16, World()), World())
    *_, last = trainer.network.parameters()
    last.register_hook(lambda gradient: gradient * math.nan)
    with raises("run.not_finite", "step 5", "gradient", "3"):
        trainer.train()
    assert trainer.learner.loss_scale == LEAST_SCALE


def test_a_restart_goes_on_bit_for_bit_with_the_same_scale(tmp_path, training_shards, monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 4)
    changes = {"precision": "fp16", "checkpoint": {"every": 2}}
    train(World(), tmp_path / "whole", training_shards, **changes)

    trainer = Trainer(
        prepare(recipe(tmp_path / "begun", training_shards, **changes), World()), World()
    )
    step = trainer.step

    def failing(share, rate):
        if share.step == 7:
            raise DistapError("run.failed", "the machine is gone")
        return step(share, rate)

    trainer.step = failing
    with raises("run.failed"):
        trainer.train()
    train(World(), tmp_path / "begun", training_shards, **changes)

    assert are_same(tmp_path / "whole", tmp_path / "begun")
    states = [found_checkpoint(tmp_path / run).tensors("scale.") for run in ("whole", "begun")]
    scales = [entry["loss_scale"] for entry in read_run_log(tmp_path / "whole") if "loss" in entry]
    assert len(set(scales)) > 1 and states[0]["scale.value"] == scales[-1]
    assert states[0].keys() == {"scale.value", "scale.good_steps"}
    assert states[0] == states[1]


def test_a_run_changes_between_float32_and_float16(tmp_path, training_shards):
    for steps, precision in enumerate(("float32", "fp16", "float32"), 1):
        recipe_now = recipe(
            tmp_path, training_shards, precision=precision, steps=2 * steps, schedule="constant"
        )
        assert Trainer(prepare(recipe_now, World()), World()).train() == FINISHED
    assert len(losses(tmp_path)) == 6


def test_recipes_of_deepspeed_and_of_gathers_in_bfloat16_refuse_float16(tmp_path, training_shards):
    for engine, names in (
        ("deepspeed", ["precision", "fp16", "ddp", "fsdp"]),
        ({"name": "fsdp", "gather": "bf16"}, ["engine.gather", "precision"]),
    ):
        with raises("recipe.value", *names):
            recipe(tmp_path, training_shards, precision="fp16", engine=engine)
