"""Losses with proxies on ranks that each score their own classes, with whole and sharded proxies,
against autograd over the whole table of similarities.
"""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from definitions import levels_of
from problems import slots_of_ranks
from raising import raises
from ranks import on_ranks
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distap.ranking.gather import gather
from distap.ranking.losses.building import build_loss
from distap.ranking.losses.proxies import ArcFace
from distap.ranking.rank import rank_descriptors, shard_classes
from distap.ranking.row_shards import drawn_rows, part_of_rank
from distap.world import World

SLOTS = 23  # uneven on 2 and 4 ranks
DIMENSIONS = 6
SOFTMAX = ["arc_face", "cos_face", "normalized_softmax", "proxy_nca", "csl"]
NAMES = [*SOFTMAX, "proxy_anchor"]
# 3 classes are fewer than 4 ranks; 9 leave the last of 4 without any; 19 end in a shorter part.
COUNTS = [1, 3, 9, 19]
SHARE = 0.3
FEW_BYTES = 2**11  # so that each rank has several blocks of classes
NEAR = 1e-11


def batch_of(case):
    """Return descriptors, labels, which rows take part, and weights of images."""
    descriptors, labels, taking_part = slots_of_ranks(SLOTS)
    if case == "left out":
        descriptors[5] = torch.nan
        taking_part[[0, 5]] = False
        taking_part[3::4] = False  # all of rank 3 of four
    weights = torch.arange(SLOTS).remainder(4).double()
    return descriptors, labels, taking_part, weights


def loss_of(name, count, **options):
    if name == "csl":
        options["margins"] = (0.1, 0.2, 0.3)
        options["tree"] = levels_of(torch.arange(count), 3)[:, 1:].tolist()
    return build_loss(name, **options).sized(count, DIMENSIONS, 0)


def losses_of_images(name, descriptors, labels, proxies, chosen):
    """Return the loss of each image over the chosen proxies, or that of the batch for
    proxy_anchor.
    """
    similarities = descriptors @ functional.normalize(proxies).t()
    is_own = functional.one_hot(labels, len(proxies)).bool()
    own_similarities = similarities[is_own]
    if name == "proxy_anchor":
        pull = (torch.exp(-32 * (similarities - 0.1)) * is_own).sum(0).log1p()
        push = (torch.exp(32 * (similarities + 0.1)) * ~is_own).sum(0).log1p()
        return pull.sum() / len(labels.unique()) + push.mean()
    if name == "csl":
        classes = levels_of(torch.arange(len(proxies)), 3)
        total = 0
        for of_level, margin in zip(classes.unbind(1), (0.1, 0.2, 0.3), strict=True):
            is_other = (of_level != of_level[labels, None]) & chosen
            raised = 32 * (similarities + margin - own_similarities[:, None])
            total = total + torch.log1p((raised.exp() * is_other).sum(1))
        return total
    # beyond the half circle a line goes on falling
    with_angle = torch.where(
        similarities > -math.cos(0.5),
        (similarities.acos() + 0.5).cos(),
        similarities - 0.5 * math.sin(0.5),
    )
    squares = (descriptors[:, None] - functional.normalize(proxies)).square()
    logits = {
        "arc_face": 30 * torch.where(is_own, with_angle, similarities),
        "cos_face": 30 * torch.where(is_own, similarities - 0.35, similarities),
        "normalized_softmax": similarities / 0.05,
        "proxy_nca": -9 * squares.sum(2),
    }[name]
    logits = logits.masked_fill(~chosen, -torch.inf)
    return functional.cross_entropy(logits, labels, reduction="none")


@cache
def expected(name, count, case, weighing, chosen=None):
    """Return value, loss of each slot, and gradients by descriptors and proxies, by autograd."""
    descriptors, labels, taking_part, weights = batch_of(case)
    labels = labels[taking_part] % count
    leaf = descriptors[taking_part].clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    proxies = torch.randn(count, DIMENSIONS, generator=generator)
    deviation = 1 / 8 if name == "proxy_nca" else (3 * DIMENSIONS) ** -0.5
    proxies = (deviation * proxies).double().requires_grad_()
    weights = {
        "uniform": torch.ones(len(labels), dtype=torch.float64),
        "class": 1 / labels.bincount(minlength=count)[labels].double(),
        "given": weights[taking_part],
    }[weighing]
    is_chosen = torch.ones(count, dtype=torch.bool)
    if chosen is not None:
        is_chosen = torch.tensor(chosen)
    losses = losses_of_images(name, leaf, labels, proxies, is_chosen)
    value = losses
    if losses.ndim:
        value = (weights * losses).sum() / weights.sum()
    value.backward()
    gradient = torch.zeros_like(descriptors)
    gradient[taking_part] = leaf.grad
    per_query = torch.full((SLOTS,), torch.nan, dtype=torch.float64)
    if losses.ndim:
        per_query[taking_part] = losses.detach().where(weights > 0, torch.nan)
    return value.detach(), per_query, gradient, proxies.grad


CASES = [
    (name, count, case, weighing, is_sharded)
    for name in NAMES
    for count in COUNTS
    for case, weighing in [
        ("batch", "class"),
        ("left out", "uniform"),
        ("batch", "given"),
    ]
    for is_sharded in (False, True)
    if name != "proxy_anchor" or weighing == "uniform"
]
SAMPLED = [
    (name, is_sharded, step) for name in SOFTMAX for is_sharded in (False, True) for step in (4, 5)
]
SUMS = {
    "sum": {"sup_ap": 0.3, "arc_face": 0.7, "csl": 0.2},
    "matryoshka": {
        "matryoshka": {
            "dimensions": [2, 5],
            "inner": {"ap_q": 1, "cos_face": 0.5},
        }
    },
    "within": {"within": {"inner": "arc_face"}},
    "by_set": {"by_set": {"losses": {f"{number:04}": "proxy_anchor" for number in range(7)}}},
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ranked(world, loss, batch, count, *, is_sharded, key=(0, 0), depth=1):
    """Return what `expected` does, with gradients by parameters as a list, whole on each rank."""
    descriptors, labels, taking_part, weights = batch
    if is_sharded:
        shard_classes(loss, world, "sharded")
    loss.learned.double()
    is_spread = [isinstance(parameter, DTensor) for parameter in loss.parameters]
    assert is_spread == [is_sharded and world.size > 1] * len(is_spread)
    rows = slice(world.rank, None, world.size)
    levels = levels_of(labels % count, depth)
    gathered = gather(descriptors[rows], levels[rows], taking_part[rows], world, SLOTS)
    gathered = replace(gathered, key=key)
    gathered = gathered.with_extra(dict.fromkeys(loss.extras, weights[rows]))
    ranking = rank_descriptors(loss, gathered, memory_bytes=FEW_BYTES)
    assert ranking.is_finite
    per_query = ranking.per_query
    if per_query is not None:
        per_query = world.gather_rows(per_query, SLOTS)
    gradient = world.gather_rows(ranking.gradient, SLOTS)
    return (
        ranking.loss,
        per_query,
        gradient,
        [*map(whole, ranking.by_parameters)],
    )


def all_on(world):
    results = {}
    for case in CASES:
        name, count, images, weighing, is_sharded = case
        options = {} if name == "proxy_anchor" else {"weights": weighing}
        loss = loss_of(name, count, **options)
        results[case] = ranked(world, loss, batch_of(images), count, is_sharded=is_sharded)
    for case in SAMPLED:
        name, is_sharded, step = case
        loss = loss_of(name, 19, sampled_negatives=SHARE)
        batch = batch_of("left out")
        results[case] = ranked(world, loss, batch, 19, is_sharded=is_sharded, key=(7, step))
    for name, mapping in SUMS.items():
        numbers = levels_of(torch.arange(19))
        loss = build_loss(mapping).sized(numbers, DIMENSIONS, 0)
        batch = batch_of("left out")
        results[name] = ranked(world, loss, batch, 19, is_sharded=True, depth=2)
    return results


@pytest.fixture(scope="module", params=[1, 2, 4])
def by_rank(request):
    if request.param == 1:
        return [all_on(World())]
    return on_ranks(request.param, all_on)


@cache
def alone():
    return all_on(World())


def assert_near(actual, reference):
    if reference is None:
        assert actual is None
        return
    torch.testing.assert_close(actual, reference, rtol=NEAR, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_scoring_its_classes_gives_the_loss_and_gradients_of_the_whole_table(
    by_rank, case
):
    value, losses, by_descriptors, by_proxies = expected(*case[:-1])
    for answer in by_rank:
        actual, per_query, gradient, (of_proxies,) = answer[case]
        assert_near(actual, value)
        assert_near(gradient, by_descriptors)
        assert_near(of_proxies, by_proxies)
        if case[0] != "proxy_anchor":
            assert_near(per_query, losses)


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sampled_negatives_are_an_exact_softmax_over_the_same_classes_on_any_ranks(by_rank, case):
    name, _, step = case
    _, _, _, (of_proxies,) = alone()[case]
    is_chosen = of_proxies.abs().sum(1) > 0
    _, labels, taking_part, _ = batch_of("left out")
    of_batch = labels[taking_part] % 19
    assert is_chosen[of_batch].all()
    is_drawn = is_chosen[~torch.isin(torch.arange(19), of_batch)]
    assert is_drawn.any() and not is_drawn.all()
    other_step = alone()[name, False, 9 - step][3][0].abs().sum(1) > 0
    assert not torch.equal(is_chosen, other_step)
    reference = expected(name, 19, "left out", "uniform", tuple(is_chosen.tolist()))
    for answer in by_rank:
        value, per_query, gradient, (of_proxies,) = answer[case]
        for actual, right in zip((value, per_query, gradient, of_proxies), reference, strict=True):
            assert_near(actual, right)


@pytest.mark.parametrize("name", SUMS)
def test_losses_within_others_share_their_classes_out_too(by_rank, name):
    value, losses, by_descriptors, by_parameters = alone()[name]
    for answer in by_rank:
        actual, per_query, gradient, of_parameters = answer[name]
        assert_near(actual, value)
        assert_near(per_query, losses)
        assert_near(gradient, by_descriptors)
        assert len(of_parameters) == len(by_parameters)
        for of_parameter, reference in zip(of_parameters, by_parameters, strict=True):
            assert_near(of_parameter, reference)


class TableSizes(TorchDispatchMode):
    """Collect the numbers of elements of tensors that operations return, by the memory they use."""

    def __init__(self):
        super().__init__()
        self.elements = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                place = tensor.untyped_storage().data_ptr()
                # memory that a large table has left may be used again
                self.elements[place] = max(self.elements.get(place, 0), tensor.numel())
        return result


@pytest.mark.parametrize("name", NAMES)
def test_no_table_of_all_images_and_classes_is_made_and_one_of_the_proxies(name):
    count = 20_000
    loss = loss_of(name, count)
    if name == "csl":
        assert loss.levels.shape == (count, 3)
    descriptors, labels, taking_part, _ = batch_of("batch")
    gathered = gather(descriptors.float(), labels, taking_part, World(), SLOTS)
    proxies = loss.learned["proxies"].detach()
    with TableSizes() as sizes:
        rank_descriptors(loss, gathered, memory_bytes=2**18)
    del sizes.elements[proxies.data_ptr()]
    large = [elements for elements in sizes.elements.values() if elements > count]
    assert large == [proxies.numel()]  # their gradient


@pytest.mark.parametrize(("count", "dimensions"), [(3, 5), (8191, 3), (12_289, 3), (20_003, 7)])
def test_rows_of_any_rank_are_those_of_one_draw(count, dimensions):
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(count, dimensions, generator=generator)
    for size in (1, 3, 4):
        ranges = [part_of_rank(count, World(rank, size)) for rank in range(size)]
        cut = torch.arange(count).chunk(size)
        assert [*map(len, cut)] == [len(held) for held in ranges if held]
        rows = torch.cat([drawn_rows(count, dimensions, 4, held) for held in ranges])
        assert torch.equal(rows, drawn)


def refused(world):
    loss = loss_of("arc_face", 9)
    with raises("loss.sharded_classes", "central"):
        shard_classes(loss, world, "central")
    with raises("loss.no_classes", "QuantizedAP"):
        shard_classes(build_loss("ap_q"), world, "sharded")
    assert ArcFace(classes=9, dimensions=6).shard_classes(world, above=9)
    shard_classes(loss, world, "sharded")
    with raises("loss.sharded_classes", "ArcFace"):
        shard_classes(loss, world, "sharded")
    descriptors, labels, taking_part, _ = batch_of("batch")
    gathered = gather(descriptors.float(), labels % 9, taking_part, World(), SLOTS)
    with raises("loss.sharded_classes", "ArcFace", "2 ranks"):
        rank_descriptors(loss, gathered)


def test_what_sharded_classes_cannot_do_is_refused():
    on_ranks(2, refused)
