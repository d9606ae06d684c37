"""What is tried with every engine on two ranks, and the same by plain autograd in one process."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from batches import TensorBatch, small_images
from steps import step_with
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize
from torch.profiler import ProfilerActivity, profile

from distap.randomness import seed_for
from distap.ranking.losses.smooth import SmoothAP
from distap.ranking.rank import rank
from distap.registry import REGISTRY
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.step import DROPOUT
from distap.training.engines import DDPSettings, DeepSpeedSettings, FSDPSettings
from distap.training.optimizer import TimmOptimizer

# shares of 7 and 6 images, so 4 and 3 micro-batches, the last of one image
RANKS = 2
IMAGES = 13
SIZE = 2
STEPS = 2
ENGINES = {
    "ddp": DDPSettings(),
    "fsdp": FSDPSettings(),
    "fsdp blocks": FSDPSettings(unit="blocks"),
    "fsdp pass": FSDPSettings(reshard="pass"),
    "fsdp hosts": FSDPSettings(unit="blocks", within="host"),
    "fsdp hosts pass": FSDPSettings(reshard="pass", within="host"),
    "zero 1": DeepSpeedSettings(stage=1),
    "zero 2": DeepSpeedSettings(stage=2),
    "zero 3": DeepSpeedSettings(stage=3),
}
# which cannot give a backward pass up
NEVER_BEGIN_AGAIN = [name for name in ENGINES if name == "zero 3" or name.startswith("fsdp")]
ADAM = TimmOptimizer("adam")
PLAIN = TimmOptimizer("momentum", momentum=0.0)
DECAY = 0.7  # of the average of the parameters
# Steps of training: the engine, and how many micro-batches of a rank keep their graph.
TRAININGS = {name: (name, 0) for name in ENGINES} | {
    "ddp, two graphs kept": ("ddp", 2),
    "fsdp, one graph kept": ("fsdp", 1),
    "fsdp, all graphs kept": ("fsdp", 4),
    "fsdp blocks, two graphs kept": ("fsdp blocks", 2),
    "zero 2, two graphs kept": ("zero 2", 2),
}
OPTIMIZERS = {name: list(REGISTRY["optimizer"]) for name in ("ddp", "fsdp")} | {
    "zero 2": [name for name in REGISTRY["optimizer"] if name not in ("lamb", "lars", "adafactor")]
}


class FailsOnce(torch.autograd.Function):
    """Raises in the backward pass, once for each failure that the network still has to make."""

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
    """Channels-last, a frozen stem, a power without dimensions, 7 channels that divide by no number
    of ranks.
    """

    failures = 0

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3, stride=2).requires_grad_(False)
        self.blocks = nn.Sequential(*(Block(7, dropout) for _ in range(3)))
        self.power = nn.Parameter(torch.tensor(3.0))
        self.head = nn.Linear(7, 5)

    def train(self, mode=True):
        super().train(mode)
        for block in self.blocks:
            block.norm.eval()
        return self

    def forward(self, images):
        features = self.stem(images.contiguous(memory_format=torch.channels_last))
        features = FailsOnce.apply(self.blocks(features), self)
        pooled = features.clamp(min=1e-3).pow(self.power).mean((2, 3)).pow(1 / self.power)
        return normalize(self.head(pooled))


def is_exact(name):
    """DeepSpeed keeps float32 copies of the parameters; the other engines are tried in float64."""
    return not name.startswith("zero")


def network_and_groups(exact, dropout=0.0):
    torch.manual_seed(0)
    network = BlockNetwork(dropout).to(torch.float64 if exact else torch.float32)
    network.train().to(memory_format=torch.channels_last)

    def groups():
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        return [{"params": trained[::2], "factor": 0.5}, {"params": trained[1::2]}]

    return network, groups


def engine_of(world, name, optimizer=ADAM, dropout=0.0, clip_norm=None, precision=""):
    network, groups = network_and_groups(is_exact(name) and not precision, dropout)
    return ENGINES[name].build(
        network, lambda: optimizer.build(groups()), world, clip_norm, precision or "float32"
    )


def images_for(engine):
    images, labels = small_images(IMAGES)
    return images.to(next(engine.network.parameters()).dtype), labels


def whole(engine):
    """The tensors of an engine's state, put together."""
    state = engine.state_dict()
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu().clone()
        for name, t in state.items()
    }


def parameters_of(engine):
    return {name: tensor for name, tensor in whole(engine).items() if name.startswith("network.")}


def replay(world, replica, micro_batches=3, infinite=False, fails=False, scale=1.0):
    """Give `backward` gradients that differ by rank and micro-batch; a rank that `fails` at first
    starts again.
    """
    own_rows = images_for(replica)[0][world.rank :: world.size]
    with replica.replaying():
        if fails:
            replica.network.failures = 1
            descriptors = replica.forward(own_rows[:2])
            with pytest.raises(torch.OutOfMemoryError):
                replica.backward(descriptors, torch.ones_like(descriptors), is_last=False)
            replica.discard()
        for number in range(micro_batches):
            descriptors = replica.forward(own_rows[number : number + 2])
            gradient = (1 + world.rank + number) * 1e-3 * torch.ones_like(descriptors).cumsum(1)
            gradient *= scale
            if infinite and world.rank == 1 and number == 0:
                gradient[0, 0] = torch.inf
            replica.backward(descriptors, gradient, number == micro_batches - 1)
        replica.reduce()


def three_stages(world, engine, steps=1, keep=0, first=0):
    """Norms of some steps of training; the network has the same descriptors in describe and in
    replay.
    """
    step = step_with(engine, SmoothAP(tau=0.1), world, 0, MicroBatchSizes(SIZE, keep=keep))
    results = [
        step(TensorBatch(*images_for(engine), world, number), learning_rate=0.02)
        for number in range(first, first + steps)
    ]
    is_double = images_for(engine)[0].dtype == torch.float64
    assert max(result.replay_drift for result in results) < (1e-12 if is_double else 1e-6)
    return [result.gradient_norm for result in results]


def full_batch(exact, clip_norm, dropout=0.2):
    """The same steps by autograd over the whole batch, with dropout drawn as the ranks draw it."""
    network, groups = network_and_groups(exact, dropout)
    optimizer = ADAM.build(groups())
    images, labels = small_images(IMAGES)
    norms = []
    average = {
        f"ema.{name}": p.detach().clone()
        for name, p in network.named_parameters()
        if p.requires_grad
    }
    for number in range(STEPS):
        descriptors = [None] * IMAGES
        for first in range(RANKS):
            for slots in torch.arange(first, IMAGES, RANKS).split(SIZE):
                torch.manual_seed(seed_for(DROPOUT, 0, number, int(slots[0])))
                for slot, row in zip(
                    slots.tolist(), network(images[slots].to(network.power.dtype)), strict=True
                ):
                    descriptors[slot] = row
        batch = torch.stack(descriptors)
        optimizer.zero_grad()
        batch.backward(rank(batch.detach(), labels, "smooth_ap", tau=0.1).gradient)
        norms.append(float(nn.utils.clip_grad_norm_(network.parameters(), clip_norm)))
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * group.get("factor", 1.0)
        optimizer.step()
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                average[f"ema.{name}"].mul_(DECAY).add_((1 - DECAY) * parameter.detach())
    return (
        {f"network.{name}": tensor.detach() for name, tensor in network.state_dict().items()},
        norms,
        average,
    )


# What runs on the ranks


def moved(world, name, clip_norm):
    """How far one step of plain gradient descent moves each parameter, and the norm that the engine
    reports.
    """
    engine = engine_of(world, name, PLAIN, clip_norm=clip_norm)
    before = parameters_of(engine)
    replay(world, engine.replica)
    norm = engine.update(1.0)
    after = parameters_of(engine)
    return {key: before[key] - after[key] for key in before}, norm


def trained(world, name, keep):
    engine = engine_of(world, name, dropout=0.2, clip_norm=0.05)
    if name != "zero 3":
        engine.keep_average(DECAY)
    norms = three_stages(world, engine, STEPS, keep)
    return parameters_of(engine), norms, averaged(world, name, engine)


def averaged(world, name, engine):
    """An engine's average, how far its descriptors are from those of a network with it, and what it
    leaves behind.
    """
    state = whole(engine)
    average = {key: tensor for key, tensor in state.items() if key.startswith("ema.")}
    network, _ = network_and_groups(is_exact(name))
    means = {key.removeprefix("ema."): tensor for key, tensor in average.items()}
    network.eval().load_state_dict(network.state_dict() | means)
    engine.network.eval()
    with engine.averaged(), engine.replica.whole(), torch.no_grad():
        apart = (
            (engine.replica.forward(images_for(engine)[0]) - network(images_for(engine)[0]))
            .abs()
            .max()
        )
    engine.network.train()
    other = engine_of(world, name, dropout=0.2)
    if average:
        other.keep_average(DECAY)
    other.load_state_dict({key: tensor.clone() for key, tensor in state.items()})
    states = [whole(engine), whole(other)]
    return (
        average,
        float(apart),
        all(torch.equal(restored[key], state[key]) for restored in states for key in state),
    )


def messages(world, name, micro_batches):
    """Large messages of a step with so many micro-batches: gathers of parameters, reductions of
    gradients.
    """
    engine = engine_of(world, name)
    replay(world, engine.replica, 1)  # the first step sets things up
    engine.update(0.0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        with engine.replica.describing(), torch.no_grad():
            engine.replica.forward(images_for(engine)[0][:2])
        replay(world, engine.replica, micro_batches)
    events = [
        event
        for event in recorded.events()
        if any(size and size[0] > 30 for size in event.input_shapes)
    ]
    names = [event.name for event in events]
    reducing = sum(name in ("gloo:all_reduce", "gloo:reduce_scatter") for name in names)
    return names.count("gloo:all_gather"), reducing


def without_damage(world, name):
    """Norms of the same step: alone, after one given up in the middle or at its end, and after a
    pass that failed.
    """
    engine = engine_of(world, name)
    norms = []
    for given_up in ((), (False,), (False, True)):
        with engine.replica.replaying() if given_up else nullcontext():
            for is_last in given_up:
                descriptors = engine.replica.forward(images_for(engine)[0])
                engine.replica.backward(
                    descriptors, torch.ones_like(descriptors).cumsum(1), is_last
                )
            if given_up == (False,):
                engine.replica.discard()
            elif given_up:
                engine.replica.reduce()
        if given_up == (False, True):
            engine.replica.discard()
        replay(world, engine.replica)
        norms.append(engine.update(0.0))
    if name not in NEVER_BEGIN_AGAIN:
        replay(world, engine.replica, fails=world.rank == 0)
        norms.append(engine.update(0.0))
    return norms


def half_precision(world, name, precision):
    """Norms of three steps, whether each moved a parameter, and the loss scale after each; in the
    second, one rank has an infinite gradient.
    """
    engine = engine_of(world, name, clip_norm=1e-3, precision=precision)
    norms = []
    has_moved = []
    scales = []
    for number in range(3):
        before = parameters_of(engine)
        replay(world, engine.replica, infinite=number == 1, scale=engine.loss_scale)
        norms.append(engine.update(0.01))
        after = whole(engine)
        has_moved.append(any(not torch.equal(before[key], after[key]) for key in before))
        scales.append(engine.loss_scale)
    return norms, has_moved, scales


def there_and_back(world, name, state):
    """The state after one more step from a given one, and whether a second engine goes on from
    there exactly.
    """
    engine = engine_of(world, name)
    other = engine_of(world, name)
    engine.load_state_dict({key: tensor.clone() for key, tensor in state.items()})
    three_stages(world, engine, first=1)
    after = whole(engine)
    other.load_state_dict({key: tensor.clone() for key, tensor in after.items()})
    for network in (engine, other):
        three_stages(world, network, first=2)
    again = parameters_of(engine)
    same = parameters_of(other)
    return after, all(torch.equal(again[key], same[key]) for key in again)


def optimized(world, name, optimizer):
    """The state after three steps, and the same with a restart before the third."""
    engine = engine_of(world, name, TimmOptimizer(optimizer))
    restarted = engine_of(world, name, TimmOptimizer(optimizer))
    for number in range(3):
        if number == 2:
            restarted.load_state_dict(whole(engine))
        for network in (engine, restarted)[: 1 + number // 2]:
            replay(world, network.replica)
            network.update(1e-2)
    return whole(engine), whole(restarted)


def described_apart(world, name):
    """How far descriptors of the engine and of its network are apart; ranks describe different
    numbers of images.

    Returns the norm of the next step as well, and whether the network stays behind once the engine
    is gone.
    """
    engine = engine_of(world, name)
    images = images_for(engine)[0]
    with engine.replica.whole(), torch.no_grad():
        chunks = [engine.replica.forward(images[i : i + 1]) for i in range(1 + 5 * world.rank)]
        together = engine.network(images[: len(chunks)])
    norm = three_stages(world, engine)[0]
    network = weakref.ref(engine.network)
    del engine
    gc.collect()
    return (torch.cat(chunks) - together).abs().max().item(), norm, network() is not None


def everything(world, names, folder, state):
    """All of the above by check and engine."""
    results = {}
    for name in names:
        results["moved", name] = {
            clip_norm: moved(world, name, clip_norm) for clip_norm in (None, 1e-3)
        }
        results["messages", name] = messages(world, name, micro_batches=5)
        results["without damage", name] = without_damage(world, name)
        results["state", name] = there_and_back(world, name, state[is_exact(name)])
        results["apart", name] = described_apart(world, name)
        results["bf16", name] = half_precision(world, name, "bf16")
        if is_exact(name):
            results["fp16", name] = half_precision(world, name, "fp16")
        for optimizer in OPTIMIZERS.get(name, ()):
            results[optimizer, name] = optimized(world, name, optimizer)
    for case, (name, keep) in TRAININGS.items():
        if name in names:
            results["trained", case] = trained(world, name, keep)
    results["threads"] = [
        item.name for item in threading.enumerate() if not item.name.startswith("distap")
    ]
    return results
