"""What every engine is held to."""

import copy
import gc
import weakref

import pytest
import torch
from batches import TensorBatch, small_images, small_network
from ranks import on_ranks

from distap.engine import ENGINES
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.micro_batches import MicroBatchSizes
from distap.step import ThreeStageStep
from distap.world import World

IMAGES = 13
CLIP_NORMS = [None, 1e-3]
# DeepSpeed keeps float32 copies of the parameters, so it has tests of its own, of less exactness.
EXACT = [name for name in ENGINES if name != "deepspeed"]


def moved(world, name, clip_norm):
    """How far one step of SGD at rate 1 moves each parameter, and the norm that the engine reports."""
    network = small_network()
    before = [p.detach().clone() for p in network.parameters()]
    engine = ENGINES[name](network, lambda: torch.optim.SGD(network.parameters(), lr=0.0), world, clip_norm=clip_norm)
    # A larger loss, so that the clipping bites.
    step = ThreeStageStep(engine, QuantizedAP(bins=100), world, 0, MicroBatchSizes(2))
    result = step(TensorBatch(*small_images(IMAGES), world), learning_rate=1.0)
    with engine.describing():  # where parameters are whole
        steps = [b - p.detach() for b, p in zip(before, network.parameters(), strict=True)]
    return steps, result.gradient_norm


def all_moved(world):
    return {(name, clip_norm): moved(world, name, clip_norm) for name in EXACT for clip_norm in CLIP_NORMS}


@pytest.fixture(scope="module")
def three_ranks():
    return on_ranks(3, all_moved)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("clip_norm", CLIP_NORMS)
def test_parameters_move_along_the_sum_over_ranks(three_ranks, name, clip_norm):
    alone, norm = moved(World(), name, clip_norm)
    assert norm > 1e-2
    length = torch.cat([m.flatten() for m in alone]).norm().item()
    assert length == pytest.approx(clip_norm or norm, rel=1e-3)
    for together, same_norm in (found[name, clip_norm] for found in three_ranks):
        assert same_norm == pytest.approx(norm, rel=1e-9)
        for one, other in zip(alone, together, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_state_is_given_back():
    network = small_network()
    engine = ENGINES["ddp"](network, lambda: torch.optim.Adam(network.parameters()), World())
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.update(0.1)
    state = copy.deepcopy(engine.state_dict())
    other = small_network(dropout=0.1)
    restored = ENGINES["ddp"](other, lambda: torch.optim.Adam(other.parameters()), World())
    restored.load_state_dict(state)
    for one, again in ((network, engine), (other, restored)):
        for parameter in one.parameters():
            parameter.grad = torch.ones_like(parameter)
        again.update(0.1)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))


def leave_nothing_behind(world):
    """Whether the network is gone once the engine is, after a step."""
    network = small_network()
    engine = ENGINES["ddp"](network, lambda: torch.optim.SGD(network.parameters(), lr=0.0), world)
    ThreeStageStep(engine, QuantizedAP(), world, 0, MicroBatchSizes(4))(
        TensorBatch(*small_images(IMAGES), world), 1.0
    )
    reference = weakref.ref(network)
    del network, engine
    gc.collect()
    return reference() is None


def test_an_engine_can_be_collected_before_the_process_group_goes():
    assert on_ranks(2, leave_nothing_behind) == [True, True]
