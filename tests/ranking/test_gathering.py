"""A batch that is gathered and counted in chunks ranks as one that is gathered at once."""

import time
from functools import partial
from unittest import mock

import pytest
import torch
from problems import remembering, slots_of_ranks
from ranks import on_ranks

from distap.ranking.gather import Gathering, gather
from distap.ranking.losses.building import build_loss
from distap.ranking.rank import rank_descriptors, start_gathering
from distap.world import World

SLOTS = 23  # uneven on 2 and 3 ranks
LOSSES = {name: build_loss(name) for name in ("ap_q", "ap_t", "fast_ap", "sup_ap")} | {
    "by class": build_loss("ap_q", weights="class"),
    "dirtorch": build_loss("ap_q", preset="dirtorch"),
}
batch = partial(slots_of_ranks, SLOTS)


def left_out():
    """The same with rows that take no part, among them the first of each rank and a whole chunk."""
    descriptors, labels, taking_part = batch()
    taking_part[[0, 1, 2, 18]] = False
    taking_part[6:12] = False
    return descriptors, labels, taking_part


def not_finite():
    """The same with rows that say that they take part, and are no numbers."""
    descriptors, labels, taking_part = batch()
    descriptors[5] = torch.nan
    descriptors[13, 2] = torch.inf
    return descriptors, labels, taking_part


CASES = {"batch": batch, "left_out": left_out, "not_finite": not_finite, "remembered": batch}
# All but sup_ap count pairs while chunks arrive, and none does in mode central.
COMPARED = [(case, loss, "sharded") for case in CASES for loss in LOSSES if loss != "sup_ap"]
COMPARED += [("remembered", "ap_q", "central"), ("left_out", "sup_ap", "sharded")]


def extended(gathered):
    """The batch behind which a memory holds another, of which one image comes again."""
    return remembering(1, 9, SLOTS - 1, dimensions=6).extend(gathered)


def share(world, case):
    own_rows = slice(world.rank, None, world.size)
    descriptors, labels, taking_part = CASES[case]()
    return (
        descriptors[own_rows],
        labels[own_rows],
        taking_part[own_rows],
        torch.arange(SLOTS)[own_rows],
    )


def small_chunks():
    return mock.patch.multiple("distap.ranking.gather", LEAST_SENT=3, LEAST_COUNTED=3)


def rank_at_once(world, case, loss, mode):
    descriptors, labels, taking_part, images = share(world, case)
    taking_part = taking_part & descriptors.isfinite().all(1)
    gathered = gather(descriptors, labels, taking_part, world, SLOTS, images)
    return rank_descriptors(
        LOSSES[loss], extended(gathered) if case == "remembered" else gathered, mode
    )


def rank_in_chunks(world, case, loss, mode, memory_bytes=None, size=None):
    """The batch and its ranking; each rank adds another number of rows at a time."""
    values, size = share(world, case), size or 1 + 2 * world.rank
    with small_chunks():
        gathering = start_gathering(LOSSES[loss], world, SLOTS, mode, memory_bytes)
        for start in range(0, len(values[0]), size):
            gathering.add(*(value[start : start + size] for value in values))
        gathered = gathering.finish()
    ranked = extended(gathered) if case == "remembered" else gathered
    return gathered, rank_descriptors(LOSSES[loss], ranked, mode, memory_bytes, gathering.counter)


def compare_all_cases(world):
    answers = {"arrived": first_half_alone(world) if world.size == 2 else None}
    for compared in COMPARED:
        gathered, ranking = rank_in_chunks(world, *compared)
        batch = (
            gathered.gallery,
            gathered.gallery_labels,
            gathered.samples,
            gathered.own,
            gathered.taking_part,
        )
        answers[compared] = batch, facts_of(ranking), facts_of(rank_at_once(world, *compared))
    return answers


def facts_of(ranking):
    of_queries = torch.tensor([ranking.queries, ranking.skipped_queries, ranking.is_finite])
    return [ranking.loss, ranking.gradient, of_queries, ranking.per_query]


@pytest.fixture(scope="module", params=[1, 2, 3])
def compared(request):
    return (
        [compare_all_cases(World())]
        if request.param == 1
        else on_ranks(request.param, compare_all_cases)
    )


@pytest.mark.parametrize("case", CASES)
def test_chunks_give_the_batch_in_the_order_of_its_slots(compared, case):
    descriptors, labels, taking_part = CASES[case]()
    taking_part &= descriptors.isfinite().all(1)
    images = torch.arange(SLOTS)[taking_part]
    for rank, answer in enumerate(compared):
        own_row = (images % len(compared) == rank).nonzero().flatten()
        expected = descriptors[taking_part], labels[taking_part], images, own_row, taking_part
        assert all(map(torch.equal, answer[case, "ap_q", "sharded"][0], expected))


@pytest.mark.parametrize(("case", "loss", "mode"), COMPARED)
def test_chunks_give_the_same_loss_and_gradient(compared, case, loss, mode):
    for answer in compared:
        for item, other in zip(*answer[case, loss, mode][1:], strict=True):
            torch.testing.assert_close(item, other, rtol=1e-11, atol=1e-15, equal_nan=True)


def test_the_gradient_has_the_same_bits_whenever_chunks_arrive():
    first, *remaining = (
        rank_in_chunks(World(), "batch", "ap_q", "sharded", size=size)[1] for size in (1, 7, SLOTS)
    )
    assert all(torch.equal(first.gradient, other.gradient) for other in remaining)


def test_too_few_rows_are_refused():
    descriptors, labels, taking_part, images = share(World(), "batch")
    gathering = Gathering(World(), SLOTS - 1)
    gathering.add(descriptors[:4], labels[:4], taking_part[:4], images[:4])
    with pytest.raises(ValueError, match="added 4 of its 22 rows"):
        gathering.finish()


def first_half_alone(world):
    """Slots that have arrived while all ranks still have rows to add."""
    descriptors, labels, taking_part, images = share(world, "batch")
    with small_chunks():
        gathering = Gathering(world, SLOTS)
    gathering.add(descriptors[:6], labels[:6], taking_part[:6], images[:6])
    deadline = time.monotonic() + 60
    while gathering.arrived < 6 * world.size and time.monotonic() < deadline:
        gathering.add(descriptors[:0], labels[:0], taking_part[:0], images[:0])
    arrived = gathering.arrived
    gathering.add(descriptors[6:], labels[6:], taking_part[6:], images[6:])
    gathering.finish()
    return arrived


@pytest.mark.parametrize("compared", [2], indirect=True)
def test_chunks_arrive_while_rows_are_added(compared):
    assert [answer["arrived"] for answer in compared] == [12, 12]


# In any order of the slots, since a rank holds the images that are stored together.
DEALT = ("ap_q", "fast_ap", "sup_ap", "simix", "smooth_ap", "contrastive")


def dealt(size):
    """The slot at each place: each rank has a random set of them, ascending."""
    order = torch.empty(SLOTS, dtype=torch.int64)
    mixed = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(5))
    sizes = [len(range(rank, SLOTS, size)) for rank in range(size)]
    for rank, slots in enumerate(mixed.split(sizes)):
        order[rank::size] = slots.sort().values
    return order


def rank_dealt(world):
    """Each loss of a batch whose slots rank r, r + W, ... has, or those at these places."""
    answers = {}
    order = dealt(world.size)
    for case in ("left_out", "remembered"):
        columns = (*CASES[case](), torch.arange(SLOTS))
        for name in DEALT:
            for mode in ("sharded", "central"):
                loss = build_loss(name)
                rankings = []
                for slots in (None, order):
                    rows = slice(world.rank, None, world.size)
                    rows = rows if slots is None else slots[rows]
                    with small_chunks():
                        gathering = start_gathering(loss, world, SLOTS, mode, order=slots)
                        gathering.add(*(column[rows] for column in columns))
                        gathered = gathering.finish()
                    if case == "remembered" and name != "simix":
                        gathered = extended(gathered)
                    ranking = rank_descriptors(loss, gathered, mode, counter=gathering.counter)
                    gradient = torch.zeros(SLOTS, 6, dtype=torch.float64)
                    gradient[rows] = ranking.gradient
                    rankings.append((gathered.samples, ranking.loss, world.sum(gradient)))
                answers[case, name, mode] = rankings
    return answers


@pytest.fixture(scope="module", params=[2, 3])
def dealt_rankings(request):
    return on_ranks(request.param, rank_dealt)


@pytest.mark.parametrize("mode", ["sharded", "central"])
@pytest.mark.parametrize("loss", DEALT)
@pytest.mark.parametrize("case", ["left_out", "remembered"])
def test_the_ranks_may_hold_any_slots(dealt_rankings, case, loss, mode):
    for answer in dealt_rankings:
        for item, other in zip(*answer[case, loss, mode], strict=True):
            torch.testing.assert_close(item, other, rtol=1e-11, atol=1e-15)
