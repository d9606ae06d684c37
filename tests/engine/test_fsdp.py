"""FSDP2 on two ranks: exact, with as few messages as there can be, and whatever happens on one rank alone."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from batches import TensorBatch, small_images
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

from distap.engine.fsdp import FSDPEngine, FSDPSettings, blocks
from distap.engine.precision import Precision
from distap.randomness import seed_for
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.rank import rank
from distap.stages.micro_batches import MicroBatchSizes
from distap.step import DROPOUT, ThreeStageStep
from distap.world import World

IMAGES = 13  # 7 and 6 on two ranks, so that the last micro-batch of one has a single image
CLIP_NORM = 1e-2
BINS = 100
WAYS = {
    "at once": FSDPSettings(),
    "by blocks": FSDPSettings(units="blocks"),
    "freed each time": FSDPSettings(reshard=True),
}
CASES = {  # how the parameters travel, images in a micro-batch, micro-batches that keep their graph
    "at once": ("at once", 2, 0),
    "at once, some graphs kept": ("at once", 2, 1),
    "at once, all graphs kept": ("at once", 2, 4),
    "by blocks": ("by blocks", 2, 0),
    "by blocks, some graphs kept": ("by blocks", 2, 2),
    "freed each time, one rank pads": ("freed each time", 2, 0),
}


class Block(nn.Module):
    """Convolution, frozen BatchNorm, dropout, and a way round them."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features):
        return features + self.dropout(torch.relu(self.norm(self.convolution(features))))


class BlockNetwork(nn.Module):
    """Channels-last, as the real one, with a pooling whose power has no dimension; 7 channels divide by no rank."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3, stride=2)
        self.blocks = nn.Sequential(*(Block(7, dropout) for _ in range(3)))
        self.power = nn.Parameter(torch.tensor(3.0))
        self.head = nn.Linear(7, 5)
        self.unused = nn.Linear(3, 2)

    def train(self, mode=True):
        super().train(mode)
        for block in self.blocks:
            block.norm.eval()
        return self

    def forward(self, images):
        features = self.blocks(self.stem(images.contiguous(memory_format=torch.channels_last)))
        pooled = features.clamp(min=1e-3).pow(self.power).mean((2, 3)).pow(1 / self.power)
        return normalize(self.head(pooled))


def network_with(dropout=0.0, frozen=()):
    torch.manual_seed(0)
    network = BlockNetwork(dropout).double().train().to(memory_format=torch.channels_last)
    for name in frozen:
        network.get_submodule(name).requires_grad_(False)
    return network


def engine_of(world, network, settings=None, **options):
    return FSDPEngine(network, lambda: torch.optim.SGD(network.parameters(), lr=0.0), world, settings, **options)


def whole(engine):
    """The network's tensors, put together."""
    tensors = {name: t for name, t in engine.state_dict().items() if name.startswith("network.")}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()}


def full_batch(ranks, size, dropout=0.0, frozen=()):
    """What one process makes of all images in one graph, each micro-batch of `ranks` with its own dropout."""
    network = network_with(dropout, frozen)
    images, labels = small_images(IMAGES)
    slots, parts = [], []
    for first_rank in range(ranks):
        mine = torch.arange(first_rank, IMAGES, ranks)
        for rows in mine.split(size):
            torch.manual_seed(seed_for(DROPOUT, 0, 0, int(rows[0])))
            parts.append(network(images[rows]))
            slots += rows.tolist()
    descriptors = torch.cat(parts)[torch.tensor(slots).argsort()]
    ranking = rank(descriptors.detach(), labels, QuantizedAP(bins=BINS))
    descriptors.backward(ranking.gradient)
    norm = float(nn.utils.clip_grad_norm_(network.parameters(), CLIP_NORM))
    torch.optim.SGD(network.parameters(), lr=1.0).step()
    return {f"network.{name}": tensor.detach() for name, tensor in network.state_dict().items()}, norm


def one_step(world, settings, size, keep=0, dropout=0.0, frozen=()):
    """The greatest difference to what one process leads to, relative to the step, and that of the norms."""
    engine = engine_of(world, network_with(dropout, frozen), settings, clip_norm=CLIP_NORM)
    # What came before is of no account, such as an evaluation in which ranks describe by themselves.
    with engine.describing(), torch.inference_mode():
        for _ in range(world.rank + 1):
            engine.describe(small_images(2)[0])
    step = ThreeStageStep(engine, QuantizedAP(bins=BINS), world, 0, MicroBatchSizes(size, keep=keep))
    result = step(TensorBatch(*small_images(IMAGES), world), learning_rate=1.0)
    expected, norm = full_batch(world.size, size, dropout, frozen)
    found = whole(engine)
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).abs().max()) for n in found) / CLIP_NORM, result.gradient_norm / norm


def messages(world, settings, micro_batches):
    """Collectives of one step with so many micro-batches, and the reductions that the engine counts."""
    engine = engine_of(world, network_with(), settings)
    images = small_images(2)[0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with engine.describing():
            for _ in range(micro_batches):
                engine.describe(images)
        for number in range(micro_batches):
            with engine.accumulating(is_last=number == micro_batches - 1):
                descriptors = engine.forward(images)
                engine.backward(descriptors, torch.ones_like(descriptors).cumsum(1))
    names = Counter(event.name for event in profiler.events() if event.name.startswith("c10d::"))
    gathers, reductions = (sum(n for name, n in names.items() if part in name) for part in ("allgather", "scatter"))
    return gathers, reductions, engine.reductions, sum(names.values())


class _RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, network):
        ctx.network = network
        return tensor.clone()

    @staticmethod
    def backward(ctx, *gradients):
        if ctx.network.failures:
            ctx.network.failures -= 1
            raise torch.OutOfMemoryError("in the middle of a backward pass")
        return gradients[0], None


class Greedy(BlockNetwork):
    """Memory does not suffice for one of its backward passes."""

    failures = 0

    def forward(self, images):
        features = self.stem(images.contiguous(memory_format=torch.channels_last))
        for number, block in enumerate(self.blocks):
            features = block(_RunsOut.apply(features, self) if number == 1 else features)
        pooled = features.clamp(min=1e-3).pow(self.power).mean((2, 3)).pow(1 / self.power)
        return normalize(self.head(pooled))


def out_of_memory(world, settings):
    """The same figures as of one_step, and the size that was found to fit each rank."""
    torch.manual_seed(0)
    network = Greedy().double().train()
    network.failures = world.rank  # on the second rank alone
    engine = engine_of(world, network, settings, clip_norm=CLIP_NORM)
    step = ThreeStageStep(engine, QuantizedAP(bins=BINS), world, 0, MicroBatchSizes(4))
    step(TensorBatch(*small_images(IMAGES), world), learning_rate=1.0)
    expected, _ = full_batch(world.size, 4)
    found = whole(engine)
    return max(float((found[n] - expected[n]).abs().max()) for n in found) / CLIP_NORM, step.sizes.replay


def overflow(world):
    """Whether parameters moved, the norm and the scale's factor, where a gradient is infinite in one rank's shard."""
    network = network_with().float()
    engine = engine_of(world, network, precision=Precision("fp16"))
    before, scale = whole(engine), engine.state_dict()["scaler.scale"]
    with engine.accumulating(is_last=True):
        descriptors = engine.forward(small_images(2)[0].float())
        engine.backward(descriptors, torch.ones_like(descriptors))
    if world.rank == 1:
        network.head.bias.grad.to_local().fill_(float("inf"))
    norm = engine.update(1.0)
    after = whole(engine)
    moved = any(not torch.equal(before[name], after[name]) for name in before)
    return moved, norm, float(engine.state_dict()["scaler.scale"] / scale)


def is_collected(world):
    network = network_with()
    engine = engine_of(world, network, FSDPSettings(units="blocks"))
    step = ThreeStageStep(engine, QuantizedAP(bins=BINS), world, 0, MicroBatchSizes(4))
    step(TensorBatch(*small_images(IMAGES), world), learning_rate=1.0)
    reference = weakref.ref(network)
    del network, engine, step
    gc.collect()
    return reference() is None


def everything(world):
    exact = {case: one_step(world, WAYS[way], size, keep, 0.2) for case, (way, size, keep) in CASES.items()}
    frozen = {
        way: one_step(world, settings, 2, frozen=("stem", "blocks.0", "head")) for way, settings in WAYS.items()
    }
    return {
        "exact": exact,
        "frozen": frozen,
        "messages": {way: [messages(world, settings, n) for n in (2, 6)] for way, settings in WAYS.items()},
        "out of memory": {way: out_of_memory(world, WAYS[way]) for way in ("at once", "by blocks")},
        "overflow": overflow(world),
        "collected": is_collected(world),
    }


@pytest.fixture(scope="module")
def two_ranks():
    """What happened on each of them."""
    return on_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_a_step_with_dropout_uneven_shares_and_clipping_is_that_of_the_full_batch(two_ranks, case):
    for found in two_ranks:
        difference, norms = found["exact"][case]
        assert difference < 1e-12
        assert norms == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters_stay_and_the_others_move_exactly(two_ranks, way):
    for found in two_ranks:
        difference, norms = found["frozen"][way]
        assert difference < 1e-12
        assert norms == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(("way", "units"), [("at once", 1), ("by blocks", 4)])
def test_parameters_are_gathered_and_gradients_reduced_once_a_step(two_ranks, way, units):
    for found in two_ranks:
        for of_step in found["messages"][way]:
            assert of_step == (units, units, units, 2 * units)


def test_parameters_that_are_freed_travel_with_every_micro_batch(two_ranks):
    for found in two_ranks:
        few, many = found["messages"]["freed each time"]
        assert (few[1], many[1]) == (2 * 4, 6 * 4)
        assert few[0] < many[0]


@pytest.mark.parametrize("way", ["at once", "by blocks"])
def test_memory_that_runs_out_in_a_backward_pass_of_one_rank_costs_no_exactness(two_ranks, way):
    (first, first_size), (second, second_size) = (found["out of memory"][way] for found in two_ranks)
    assert max(first, second) < 1e-12
    assert (first_size, second_size) == (4, 2)


def test_a_gradient_that_overflows_in_the_shard_of_one_rank_moves_nothing_on_any(two_ranks):
    assert [found["overflow"] for found in two_ranks] == [(False, float("inf"), 0.5)] * 2


def test_the_engine_can_be_collected_before_the_process_group_goes(two_ranks):
    assert all(found["collected"] for found in two_ranks)


def test_a_world_of_one_shares_nothing_out():
    difference, norms = one_step(World(), FSDPSettings(reshard=True), 4, dropout=0.2)
    assert difference < 1e-12
    assert norms == pytest.approx(1, rel=1e-12)
    assert not engine_of(World(), network_with(), FSDPSettings(reshard=True)).lockstep


def test_blocks_are_what_lists_of_modules_hold():
    found = blocks(network_with())
    assert [type(block) for block in found] == [Block] * 3
    nested = nn.Sequential(nn.Sequential(Block(7, 0.0), nn.ModuleList([Block(7, 0.0)])), nn.Linear(1, 1))
    assert [type(block) for block in blocks(nested)] == [Block] * 2


def test_freeing_the_whole_network_at_once_is_refused():
    with pytest.raises(ValueError, match="units: blocks"):
        FSDPSettings(reshard=True, units="network")
