"""What a step does on a GPU, on a device that keeps a GPU's rules: `helpers/twin_device.py` says
which.
"""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from batches import TensorBatch, small_images, small_network
from ranks import on_ranks
from steps import learning, step_with
from twin_device import twin_device, values, watching

from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.micro_batches import MicroBatchSizes
from distap.stopwatch import Stopwatch
from distap.world import World

IMAGES = 200
OF_STAGE = {"synchronize in Stopwatch._now"}  # at the begin and the end of a stage


def trained(device, keep=0):
    """The outcome of a step, the parameters after it, and the waits of each stage."""
    world = World(device=device)
    waits = defaultdict(set)
    network = small_network().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    learner = learning(network, optimizer, world)
    sizes = MicroBatchSizes(8, keep)
    step = step_with(
        learner, QuantizedAP(), world, 0, sizes, probed=True, stopwatch=Stopwatch(device)
    )
    with watching() as moved:
        for stage in ("describe", "_run_passes"):
            watched(step.stages, stage, moved, waits[stage])
        batch = TensorBatch(*small_images(IMAGES), world, 1)
        if device.type != "cpu":
            batch.pixels = batch.pixels.pin_memory()
        result = step(batch, learning_rate=1.0)
        # a tensor of the device means nothing to the process that asks
        result = replace(result, per_query=values(result.per_query))
    return result, [values(engine).detach() for engine in network.parameters()], dict(waits)


def watched(step, name, moved, waits):
    stage = getattr(step, name)

    def watch(*arguments):
        moved.clear()
        result = stage(*arguments)
        waits.update(moved)
        return result

    setattr(step, name, watch)


def trained_on_both(_, keep):
    """The same step on the CPU and on the device."""
    with twin_device() as device:  # first, since autograd looks for devices once
        on_device = trained(device, keep)
    return trained(torch.device("cpu"), keep), on_device


@pytest.mark.parametrize("keep", [0, 3])
def test_a_step_on_a_device_has_the_same_bits_and_waits_for_nothing(keep):
    [(on_cpu, on_device)] = on_ranks(1, trained_on_both, keep)
    result, parameters, waits = on_device
    assert result.loss == on_cpu[0].loss and result.gradient_norm == pytest.approx(
        on_cpu[0].gradient_norm
    )
    assert result.replay_drift == 0 and (result.replayed, result.kept) == (
        on_cpu[0].replayed,
        on_cpu[0].kept,
    )
    assert torch.equal(result.per_query, on_cpu[0].per_query)
    for actual, expected in zip(parameters, on_cpu[1], strict=True):
        assert torch.equal(actual, expected)
    assert waits["describe"] <= OF_STAGE
    assert waits["_run_passes"] == set()
