"""What only a GPU can show; test_on_a_device.py and test_nccl_rules.py show what can be seen
without one.

One card is enough. Nothing here or elsewhere has ever run on two: NCCL between cards, FSDP2 and
sharded ranking over NCCL. The tests of fp16, of compiled blocks and of the device's memory were
written without a card, and have not run yet.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from batches import TensorBatch
from definitions import OF_SETS
from networks import noise, random_network
from problems import problem
from servers import free_ports
from steps import learning, step_with
from teachers import extra_of
from torch.nn.functional import normalize

from distap.evaluation.given_descriptors import evaluate
from distap.ranking.gather import gather
from distap.ranking.loss import Budget
from distap.ranking.losses.building import build_loss
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.rank import rank_descriptors
from distap.registry import REGISTRY
from distap.stages.blocks import compile_blocks
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.sizes import free_memory
from distap.stopwatch import Stopwatch
from distap.telemetry.metrics import device_memory
from distap.world import World, joined_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
IMAGES = 40
LOSSES = {
    **{name: name for name in sorted(REGISTRY["loss"]) if name != "sum"},
    "matryoshka": {"name": "matryoshka", "dimensions": [2, 5], "inner": "ap_q"},
    # Many virtual images come before a positive: the gradient of recall@k, its usual inner loss, is
    # but rounding.
    "simix": {"name": "simix", "inner": "smooth_ap"},
    "within": {"within": {"inner": {"ap_q": 1, "arc_face": 0.1}}},
    "by_set": {"by_set": {"even": "smooth_ap", "odd": "arc_face"}},
}


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    """Convolutions of float32 take TF32 by default, whose gradient is about 1% off."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def stepped(network, device, precision="float32", sizes=None, network_of=lambda network: network):
    """The result of a step, the way that it moved the parameters, float64, and its stopwatch."""
    world, network = World(device=device), network_of(copy.deepcopy(network)).to(device)
    before = [parameter.detach().cpu().double().clone() for parameter in network.parameters()]
    optimizer = torch.optim.SGD(network.parameters(), lr=1000.0)
    learner = learning(network, optimizer, world, precision=precision)
    step = step_with(
        learner,
        QuantizedAP(),
        world,
        0,
        sizes or MicroBatchSizes(8),
        max_drift=math.inf,
        stopwatch=Stopwatch(device),
    )
    batch = TensorBatch(noise(IMAGES), torch.arange(IMAGES) // 4, world, 1)
    batch.pixels = batch.pixels.pin_memory() if device.type == "cuda" else batch.pixels
    result = step(batch, 1000.0)
    while result.skipped == "overflow":  # until the loss scale of float16 fits
        result = step(batch, 1000.0)
    after = [parameter.detach().cpu().double().clone() for parameter in network.parameters()]
    moved = torch.cat([(new - old).flatten() for old, new in zip(before, after, strict=True)])
    return result, moved, step


def distance(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-3), ("bf16", 0.3), ("fp16", 0.1)])
def test_a_step_is_exact_and_its_stages_are_timed(precision, near):
    network = random_network().train()
    _, expected, _ = stepped(network.double(), torch.device("cpu"))
    result, actual, step = stepped(network.float(), DEVICE, precision)
    assert result.skipped is None and result.replay_drift < 0.05
    assert distance(actual, expected) < near
    seconds = step.stages.stopwatch.seconds
    assert 0 < seconds["network"] < seconds["describe"] + seconds["replay"]


def test_the_memory_of_the_device_is_that_of_its_tensors():
    before = device_memory(DEVICE)["device_memory"]["allocated"]
    tensor = torch.empty(2**24, dtype=torch.uint8, device=DEVICE)
    memory = device_memory(DEVICE)["device_memory"]
    assert memory["allocated"] - before == tensor.nbytes
    assert memory["allocated"] <= memory["peak"] and memory["allocated"] <= memory["reserved"]


def test_compiled_blocks_have_the_gradient_of_eager_ones():
    network = random_network("test_vit", image_size=64).train()

    def compiled(network):
        compile_blocks(network, DEVICE)
        return network

    _, expected, _ = stepped(network, DEVICE)
    _, actual, _ = stepped(network, DEVICE, network_of=compiled)
    assert distance(actual, expected) < 1e-3


def test_dropout_is_the_same_in_describe_and_replay_and_leaves_the_random_state_alone():
    network = random_network(arguments={"drop_rate": 0.5, "drop_path_rate": 0.5}).train()
    state = torch.cuda.get_rng_state()
    (first, moved, _), (second, again, _) = (
        stepped(network, DEVICE, sizes=MicroBatchSizes(8)) for _ in range(2)
    )
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert first.replay_drift < 1e-4 and first.loss == pytest.approx(second.loss, rel=1e-5)
    assert distance(moved, again) < 1e-2


class Hungry(torch.nn.Module):
    """Runs out of the device's memory from so many images on."""

    def __init__(self, network, limit):
        super().__init__()
        self.network = network
        self.most = limit

    def forward(self, images):
        if len(images) > self.most:
            torch.empty(2**45, dtype=torch.uint8, device=images.device)
        return self.network(images)


def test_micro_batches_are_halved_until_they_fit():
    network = random_network().train()
    sizes = MicroBatchSizes(16)
    _, expected, _ = stepped(network, DEVICE)
    _, actual, step = stepped(
        network, DEVICE, sizes=sizes, network_of=lambda network: Hungry(network, 5)
    )
    assert step.stages.sizes.images == 4
    assert distance(actual, expected) < 1e-3


def gathered_on(device, dtype, classes):
    raw, labels = problem(4, 300, classes)
    raw, labels = normalize(raw).to(device, dtype), labels.unique(return_inverse=True)[1].to(device)
    return gather(
        raw, labels, torch.ones_like(labels, dtype=torch.bool), World(device=device), len(labels)
    )


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_near_to_float64_on_the_cpu(name):
    rankings = []
    for device, dtype in ((DEVICE, torch.float32), (torch.device("cpu"), torch.float64)):
        # Large classes take the interpolated sums; but simix makes a virtual image of each pair of
        # a class.
        gathered = gathered_on(device, dtype, 40 if name == "simix" else 7)
        classes = torch.arange(int(gathered.labels.max()) + 1)
        if name in OF_SETS:
            classes = torch.stack([classes, classes % 2], 1)
            gathered = replace(gathered, gallery_levels=classes.to(device)[gathered.labels])
        loss = build_loss(LOSSES[name]).sized(classes, gathered.descriptors.shape[1], 0)
        if loss.learned is not None:
            loss.learned.to(device)
        gathered = gathered.with_extra(extra_of(loss, gathered.descriptors.cpu()))
        rankings.append(rank_descriptors(loss, gathered, memory_bytes=2**18))
    on_gpu, expected = rankings
    assert float(on_gpu.loss) == pytest.approx(float(expected.loss), rel=1e-4)
    # its gradient is a difference of two rankings, of which near ties decide
    if name != "blackbox_ap":
        assert distance(on_gpu.gradient.double().cpu(), expected.gradient) < 1e-3


def test_ranking_takes_a_share_of_the_free_memory():
    free = free_memory(DEVICE)
    whole = torch.cuda.get_device_properties(DEVICE).total_memory
    assert (
        0 < Budget(torch.device("cuda", torch.cuda.current_device())).half <= whole // 8
        and 0 < free < whole
    )


def test_ddp_sums_its_bucket_over_nccl(monkeypatch):
    facts = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_ports(1),
    }
    for name, value in facts.items():
        monkeypatch.setenv(name, str(value))
    with joined_world() as world:
        assert dist.get_backend() == "nccl"
        assert float(world.sum(torch.tensor(2.0, device=world.device))) == 2


def test_evaluation_is_that_of_the_cpu():
    raw, labels = problem(5, 500, 16, dtype=torch.float32)
    actual = evaluate(normalize(raw).to(DEVICE), labels.to(DEVICE))
    assert actual == pytest.approx(evaluate(normalize(raw), labels), abs=1e-4)
