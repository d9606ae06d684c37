"""Multistage holds its promise under every wrapper and in every use: the gradient is that of
autograd over the batch.

A table of wrappers and uses on two and three ranks; each cell compares the loss on all ranks, the
gradient of the network and that of the loss's own parameters with one pass of autograd over the
whole batches, in float64.
"""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist
from batches import small_images, small_network
from definitions import built, defined, levels_of
from raising import raises
from ranks import on_ranks
from reference import listwise_loss
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distap import Multistage
from distap.ranking.losses.building import build_loss

IMAGES = 36
FIRST = slice(0, 21)
SECOND = slice(21, 36)
PROXY_CLASSES = 5
DIMENSIONS = 5
NEAR = 1e-9

WRAPPERS = [
    "not wrapped",
    "summed here",
    "ddp inside",
    "ddp around",
    "fsdp2",
    "fsdp2 of blocks",
    "fsdp2 of blocks, freed by pass",
    "fsdp2 of blocks, copies on hosts, freed by pass",
]
USES = [
    "plain",
    "no_sync",
    "accumulation",
    "two losses, one backward",
    "a sum of losses",
    "memory",
    "proxies",
    "proxies of each rank",
    "lone rank",
]
CELLS = [
    (wrapper, use)
    for wrapper in WRAPPERS
    for use in USES
    if not ("hosts" in wrapper and use == "lone rank")
]


def batch_of(images):
    pixels, labels = small_images(IMAGES)
    return pixels[images], labels[images]


def loss_of(use):
    if use == "a sum of losses":
        return {"ap_q": 1.0, "sup_con": 0.5}
    if use == "proxies of each rank":  # which draws them once it knows its ranks
        return build_loss("proxy_nca").sized(PROXY_CLASSES, DIMENSIONS, 0)
    return built("proxy_nca", PROXY_CLASSES, DIMENSIONS) if use == "proxies" else "ap_q"


@cache
def expected(use):
    """Loss and gradients by one pass of autograd over each whole batch; the loss's own parameters
    come last.
    """
    network = small_network()
    first_images, first_labels = batch_of(FIRST)
    second_images, second_labels = batch_of(SECOND)
    first = network(first_images)
    second = network(second_images)
    learned = []

    if use in ("plain", "lone rank"):
        value = listwise_loss("ap_q", first, first_labels)
    elif use == "a sum of losses":
        contrastive = listwise_loss("sup_con", first, first_labels)
        value = listwise_loss("ap_q", first, first_labels) + 0.5 * contrastive
    elif use == "memory":
        value = listwise_loss("ap_q", second, second_labels, first.detach(), first_labels)
    elif use.startswith("proxies"):
        learned = [tensor.detach().requires_grad_() for tensor in loss_of("proxies").parameters]
        value = defined("proxy_nca", first, levels_of(first_labels), learned)
    else:
        value = listwise_loss("ap_q", first, first_labels) / 2
        value = value + listwise_loss("ap_q", second, second_labels) / 2

    value.backward()
    return value.item(), [tensor.grad for tensor in (*network.parameters(), *learned)]


def wrapped(wrapper, use, group):
    """Return the network, Multistage, what to call, and the context in which that keeps its
    gradients.
    """
    network = small_network()
    if wrapper.startswith("fsdp2"):
        mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
        if "hosts" in wrapper:  # with one rank each
            ranks = torch.arange(dist.get_world_size())[:, None]
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("hosts", "ranks"))
        if "blocks" in wrapper:
            fully_shard(network.block, mesh=mesh)
            fully_shard(network.stem, mesh=mesh)
        fully_shard(network, mesh=mesh)
    inner = network
    if wrapper == "ddp inside":
        inner = DistributedDataParallel(network, process_group=group)
    multistage = Multistage(
        inner,
        loss_of(use),
        micro_batch=4,
        group=group,
        reduce=wrapper == "summed here",
        memory=100 if use == "memory" else 0,
        reshard="pass" if "pass" in wrapper else "step",
        shard_classes=use == "proxies of each rank",
    )
    if multistage.learned is not None:
        multistage.learned.double()
    if wrapper != "ddp around":
        return network, multistage, multistage, multistage.no_sync
    replicas = DistributedDataParallel(multistage, process_group=group)
    return network, multistage, replicas, replicas.no_sync


def share_of(world, count):
    """Tell which of `count` images a rank has: the first rank has twice as many as each other
    one."""
    turn = torch.arange(count) % (world.size + 1)
    return (turn - 1).clamp(min=0) == world.rank


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cell(world, wrapper, use, groups):
    """Return the loss, the gradients and the drift of one cell of the table on this rank."""
    group = groups[world.rank] if use == "lone rank" else None
    ranks = 1 if use == "lone rank" else world.size
    network, multistage, outer, no_sync = wrapped(wrapper, use, group)

    def loss(images):
        pixels, labels = batch_of(images)
        if use == "lone rank":
            return outer(pixels, labels)
        rows = share_of(world, len(labels))
        if use.startswith("proxies"):
            return outer(pixels[rows], levels_of(labels[rows]))
        return outer(pixels[rows], labels[rows])

    if use == "memory":
        loss(FIRST).backward()
        outer.zero_grad()
        value = loss(SECOND)
        value.backward()
    elif use in ("no_sync", "accumulation"):
        with no_sync() if use == "no_sync" else nullcontext():
            first = loss(FIRST) / 2
            first.backward()
        second = loss(SECOND) / 2
        second.backward()
        value = first.detach() + second.detach()
    elif use == "two losses, one backward":
        value = loss(FIRST) / 2 + loss(SECOND) / 2
        value.backward()
    else:
        value = loss(FIRST)
        value.backward()

    gradients = [whole(parameter.grad) for parameter in network.parameters()]
    if wrapper == "not wrapped" and ranks > 1:
        gradients = [world.sum(gradient) / ranks for gradient in gradients]
    gradients += [whole(parameter.grad) for parameter in multistage.loss.parameters]
    is_sharded = [isinstance(parameter, DTensor) for parameter in multistage.loss.parameters]
    assert all(is_sharded) == (use != "proxies")
    return value.item(), [gradient.detach() for gradient in gradients], multistage.replay_drift


def passes_between(world):
    """Gradients of Multistage around a sharded network of which the caller describes images in
    between.
    """
    network, multistage, _, _ = wrapped("fsdp2", "plain", None)
    pixels, labels = batch_of(FIRST)
    share = share_of(world, len(labels))
    for _ in range(2):
        multistage.zero_grad()
        with torch.no_grad():
            network(pixels[:2])
        loss = multistage(pixels[share], labels[share])
        with torch.no_grad():
            network(pixels[:2])
        loss.backward()
    return [parameter.grad.full_tensor() for parameter in network.parameters()]


def reshards_as_before(world):
    """Whether the caller's own pass leaves the stem, the block and the head sharded: before a step
    of Multistage, and after it.
    """
    network, multistage, _, _ = wrapped("fsdp2 of blocks", "plain", None)
    network.block.set_reshard_after_forward(False)
    pixels, labels = batch_of(FIRST)
    share = share_of(world, len(labels))

    def sharded():
        with torch.no_grad():
            network(pixels[:2])
        units = (network.stem, network.block, network)
        weights = (
            next(network.stem.parameters()),
            next(network.block.parameters()),
            network.head.weight,
        )
        are_sharded = [isinstance(weight, DTensor) for weight in weights]
        for unit in units:
            unit.reshard()
        return are_sharded

    before = sharded()
    with torch.no_grad():
        multistage(pixels[share], labels[share])
    described = sharded()
    multistage(pixels[share], labels[share]).backward()
    return before, described, sharded()


def test_a_sharded_network_is_freed_as_the_caller_has_set_it():
    for before, described, after in on_ranks(2, reshards_as_before):
        assert before == described == after == [True, False, False]


def test_resharding_by_pass_needs_a_sharded_network():
    pixels, labels = batch_of(FIRST)
    with raises("network.not_sharded", "reshard", "fully_shard"):
        Multistage(small_network(), reshard="pass")(pixels, labels)


def test_a_sharded_network_may_describe_images_between_call_and_backward():
    _, gradients = expected("plain")
    for of_rank in on_ranks(2, passes_between):
        for gradient, reference in zip(of_rank, gradients, strict=True):
            assert (gradient - reference).abs().max() <= NEAR * reference.abs().max() + 1e-15


def all_cells(world):
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    return {(wrapper, use): cell(world, wrapper, use, groups) for wrapper, use in CELLS}


@pytest.fixture(scope="module")
def on_two_and_three_ranks():
    return {ranks: on_ranks(ranks, all_cells) for ranks in (2, 3)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("wrapper", "use"), CELLS)
def test_ranks_get_the_loss_and_the_gradient_of_the_whole_batch(
    on_two_and_three_ranks, wrapper, use, ranks
):
    loss, gradients = expected(use)
    for of_rank in on_two_and_three_ranks[ranks]:
        value, actual_gradients, drift = of_rank[wrapper, use]
        assert value == pytest.approx(loss, rel=NEAR)
        assert drift < NEAR
        for gradient, reference in zip(actual_gradients, gradients, strict=True):
            assert (gradient - reference).abs().max() <= NEAR * reference.abs().max() + 1e-15
