"""A batch that is gathered and counted in chunks ranks as one that is gathered at once."""

import time
from collections import Counter

import pytest
import torch
from problems import problem
from ranks import on_ranks
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from distap.errors import DistapError
from distap.ranking.gather import Gathering, gather
from distap.ranking.loss import build_loss
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import rank_descriptors
from distap.world import World

SLOTS = 23  # uneven on 2 and 3 ranks
NAMES = ["ap_q", "ap_t", "fast_ap", "smooth_ap", "sup_ap", "calibration", "roadmap", "blackbox_ap"]
LOSSES = {name: build_loss(name) for name in NAMES} | {
    "by class": build_loss("ap_q", weights="class"),
    "dirtorch": build_loss("ap_q", preset="dirtorch"),
    "contrastive": build_loss("metric_learning", function="ContrastiveLoss"),
}


def batch():
    """Descriptors, labels and which rows take part; class 9 is on one rank only, on 2 ranks."""
    raw, labels = problem(0, SLOTS, 5, dimensions=6)
    labels[[2, 6, 10]] = 9
    return normalize(raw), labels, torch.ones(SLOTS, dtype=torch.bool)


def left_out():
    """The same with rows that take no part, among them the first of each rank and a whole chunk."""
    descriptors, labels, taking_part = batch()
    taking_part[[0, 1, 2, 18]] = False
    taking_part[6:12] = False
    return descriptors, labels, taking_part


def not_finite():
    """The same with rows that say that they take part, and are no numbers."""
    descriptors, labels, taking_part = batch()
    descriptors[5], descriptors[13, 2] = torch.nan, torch.inf
    return descriptors, labels, taking_part


CASES = {"batch": batch, "left_out": left_out, "not_finite": not_finite, "remembered": batch}
COUNTED = ["ap_q", "ap_t", "fast_ap", "by class", "dirtorch"]  # while chunks arrive; the others rank as ever
COMPARED = [(case, loss, "sharded") for case in ("batch", "remembered") for loss in LOSSES]
COMPARED += [(case, loss, "sharded") for case in ("left_out", "not_finite") for loss in COUNTED]
COMPARED += [("remembered", "ap_q", "central"), ("left_out", "sup_ap", "central")]


def remembered(gathered):
    """The batch behind which a memory holds another, of which one image is met again."""
    raw, labels = problem(1, 9, 5, dimensions=6)
    memory = CrossBatchMemory(100)
    earlier = torch.arange(SLOTS - 1, SLOTS + 8)
    memory.remember(gather(normalize(raw), labels, torch.ones(9, dtype=torch.bool), World(), 9, earlier))
    return memory.extend(gathered)


def share(world, case):
    mine = slice(world.rank, None, world.size)
    descriptors, labels, taking_part = CASES[case]()
    return descriptors[mine], labels[mine], taking_part[mine], torch.arange(SLOTS)[mine]


def at_once(world, case, loss, mode):
    descriptors, labels, taking_part, images = share(world, case)
    taking_part = taking_part & descriptors.isfinite().all(1)
    gathered = gather(descriptors, labels, taking_part, world, SLOTS, images)
    ranked = remembered(gathered) if case == "remembered" else gathered
    return gathered, rank_descriptors(LOSSES[loss], ranked, mode)


def in_chunks(world, case, loss, mode, **options):
    """Each rank adds another number of rows at a time."""
    gathering = Gathering(world, SLOTS, LOSSES[loss], mode, least_counted=3, **options)
    values, size = share(world, case), 1 + 2 * world.rank
    for start in range(0, len(values[0]), size):
        gathering.add(*(value[start : start + size] for value in values))
    gathered = gathering.finish()
    return gathered, gathering.rank(remembered(gathered) if case == "remembered" else gathered)


def by_rows(ranking, rows):
    """The gradient, asked for three rows at a time from the last to the first, and then a row alone."""
    parts = [ranking.gradient_of(slice(max(stop - 3, 0), stop)) for stop in range(rows, 0, -3)]
    gradient = torch.cat(parts[::-1])
    alone = torch.tensor([rows - 1, 1])
    torch.testing.assert_close(ranking.gradient_of(alone), gradient[alone], rtol=0, atol=0)
    torch.testing.assert_close(ranking.gradient, gradient, rtol=0, atol=0)
    return gradient


def compare_all_cases(world):
    answers = {}
    for case, loss, mode in COMPARED:
        gathered, ranking = in_chunks(world, case, loss, mode)
        expected_gathered, expected = at_once(world, case, loss, mode)
        gradient = by_rows(ranking, len(world.slots(SLOTS)))
        answers[case, loss, mode] = (
            (batch_of(gathered), batch_of(expected_gathered)),
            (facts_of(ranking, gradient), facts_of(expected, expected.gradient)),
        )
    return answers


def batch_of(gathered):
    return gathered.gallery, gathered.gallery_labels, gathered.images, gathered.own, gathered.taking_part


def facts_of(ranking, gradient):
    of_queries = torch.tensor([ranking.queries, ranking.skipped_queries, ranking.is_finite])
    return [ranking.loss, gradient, of_queries, *([] if ranking.per_query is None else [ranking.per_query])]


@pytest.fixture(scope="module")
def on_two_ranks():
    """One start of the ranks for all that is asked of two."""
    return on_ranks(2, ask_two_ranks)


def ask_two_ranks(world):
    answers = {"nothing": nothing_to_rank(world), "traffic": traffic_of_a_step(world)}
    return answers | {"arrived": first_half_alone(world)} | compare_all_cases(world)


@pytest.fixture(scope="module", params=[1, 2, 3])
def compared(request):
    if request.param == 2:
        return request.getfixturevalue("on_two_ranks")
    return [compare_all_cases(World())] if request.param == 1 else on_ranks(request.param, compare_all_cases)


@pytest.mark.parametrize("case", CASES)
def test_chunks_give_the_same_batch(compared, case):
    for answer in compared:
        got, expected = answer[case, "ap_q", "sharded"][0]
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(("case", "loss", "mode"), COMPARED)
def test_chunks_give_the_same_loss_and_gradient(compared, case, loss, mode):
    for answer in compared:
        got, expected = answer[case, loss, mode][1]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("memory_budget", [0, 600])
def test_bins_that_are_not_or_only_partly_kept_give_the_same_gradient(memory_budget):
    kept, other = (
        in_chunks(World(), "batch", "ap_q", "sharded", memory_budget=size)[1] for size in (None, memory_budget)
    )
    torch.testing.assert_close(other.gradient, kept.gradient, rtol=1e-11, atol=1e-15)


def test_the_gradient_has_the_same_bits_whenever_chunks_arrive():
    values = share(World(), "batch")
    gradients = []
    for size in (1, 7, SLOTS):
        gathering = Gathering(World(), SLOTS, QuantizedAP(), least_counted=3)
        for start in range(0, SLOTS, size):
            gathering.add(*(value[start : start + size] for value in values))
        gradients.append(gathering.rank(gathering.finish()).gradient)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_rows_too_many_or_too_few_are_refused():
    descriptors, labels, taking_part, images = share(World(), "batch")
    gathering = Gathering(World(), SLOTS - 1, QuantizedAP())
    with pytest.raises(ValueError, match="row 22 of rank 0 was added, which has 22 rows"):
        gathering.add(descriptors, labels, taking_part, images)
    gathering.add(descriptors[:4], labels[:4], taking_part[:4], images[:4])
    with pytest.raises(ValueError, match="added 4 of its 22 rows"):
        gathering.finish()


def test_nothing_to_rank_is_an_error_on_every_rank(on_two_ranks):
    assert all("nothing can be ranked" in answer["nothing"] for answer in on_two_ranks)


def nothing_to_rank(world):
    descriptors, _, taking_part, images = share(world, "batch")
    gathering = Gathering(world, SLOTS, QuantizedAP(), least_counted=3)
    gathering.add(descriptors, images, taking_part)
    with pytest.raises(DistapError) as error:
        gathering.rank(gathering.finish())
    return str(error.value)


ROWS, DIMENSIONS, BINS = 512, 64, 20
DESCRIPTORS, SLOPES = ROWS * 4 * DIMENSIONS, ROWS * 4 * 2 * (BINS - 1)


class Traffic(TorchDispatchMode):
    """Calls of each kind of collective and the bytes that a rank gets from it."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            received = arguments[0] if isinstance(arguments[0], torch.Tensor) else arguments[0][0]
            self.calls[name] += 1
            self.bytes[name] += received.numel() * received.element_size()
        return function(*arguments, **(settings or {}))


def traffic_of_a_step(world):
    raw, labels = problem(0, ROWS, ROWS // 8, DIMENSIONS, dtype=torch.float32)
    mine = slice(world.rank, None, world.size)
    descriptors, labels = normalize(raw)[mine], labels[mine]
    gathering = Gathering(world, ROWS, QuantizedAP(bins=BINS), least_counted=64)
    with Traffic() as traffic:
        for start in range(0, len(labels), 16):
            part = slice(start, start + 16)
            gathering.add(descriptors[part], labels[part], torch.ones(16, dtype=torch.bool))
        ranking = gathering.rank(gathering.finish())
        for start in range(0, len(labels), 16):
            ranking.gradient_of(slice(start, start + 16))
    return traffic.calls, traffic.bytes


def test_chunks_take_no_more_bytes_than_one_all_gather_of_descriptors_and_slope_tables(on_two_ranks):
    for answer in on_two_ranks:
        calls, received = answer["traffic"]
        assert calls == {"_allgather_base_": 4 + 1, "allreduce_": 2}
        assert 1 <= sum(received.values()) / (DESCRIPTORS + SLOPES) < 1.15


def first_half_alone(world):
    """Slots that have arrived while all ranks still have rows to add."""
    descriptors, labels, taking_part, images = share(world, "batch")
    gathering = Gathering(world, SLOTS, QuantizedAP(), least_counted=3)
    gathering.add(descriptors[:6], labels[:6], taking_part[:6], images[:6])
    deadline = time.monotonic() + 60
    while gathering.arrived < 6 * world.size and time.monotonic() < deadline:
        gathering.add(descriptors[:0], labels[:0], taking_part[:0], images[:0])
    arrived = gathering.arrived
    gathering.add(descriptors[6:], labels[6:], taking_part[6:], images[6:])
    gathering.finish()
    return arrived


def test_chunks_arrive_while_rows_are_added(on_two_ranks):
    assert [answer["arrived"] for answer in on_two_ranks] == [12, 12]
