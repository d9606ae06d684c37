"""Many ranks give what one process gives, whatever share of the batch each has."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from definitions import OF_SETS, built
from problems import problem, remembering, slots_of_ranks
from ranks import on_ranks
from teachers import extra_of
from torch.nn.functional import normalize

from benchmarks.measuring import collectives_of
from distap.errors import DistapError
from distap.ranking.gather import gather
from distap.ranking.losses.base import DescriptorLoss
from distap.ranking.losses.building import build_loss
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.rank import rank, rank_descriptors
from distap.registry import REGISTRY
from distap.world import World

SLOTS = 23  # uneven on 3 and 4 ranks
OTHERS = {
    "violating": build_loss("calibration", preset="released"),
    "5 negatives": build_loss("contrastive", negatives=5),
    "semi-hard": build_loss("triplet", mining="semi_hard", squared=True),
    "of another package": build_loss(
        "benchmarks.metric_learning:MetricLearning", function="ContrastiveLoss"
    ),
    "proxies of another package": build_loss(
        "benchmarks.metric_learning:MetricLearning", function="ProxyAnchorLoss"
    ),
    "matryoshka of a sum": build_loss(
        {"matryoshka": {"dimensions": [2, 5], "inner": {"ap_q": 1, "arc_face": 0.5}}}
    ),
    "matryoshka of h_ap": build_loss({"matryoshka": {"dimensions": [2, 5], "inner": "h_ap"}}),
    "csl of levels": build_loss("csl", tree=[[number // 3, number // 9] for number in range(18)]),
}
LOSSES = {name: built(name, 18, 6) for name in REGISTRY["loss"] if name not in OF_SETS}
LOSSES |= {name: loss.sized(18, 6, 0) for name, loss in OTHERS.items()}
for loss in LOSSES.values():
    if loss.learned is not None:
        loss.learned.double()
MODES = ("sharded", "central")
batch = partial(slots_of_ranks, SLOTS)


def left_out():
    """The same with rows that take no part, one of them not a number, and all of rank 3's of
    four."""
    descriptors, labels, taking_part = batch()
    descriptors[5] = torch.nan
    taking_part[[0, 5]] = False
    taking_part[3::4] = False
    return descriptors, labels, taking_part


def of_levels():
    descriptors, labels, taking_part = batch()
    return descriptors, torch.stack([labels, labels // 3, labels // 9], dim=1), taking_part


CASES = {
    "batch": (batch, 0),
    "left_out": (left_out, 0),
    "remembered": (batch, 1),
    "levels": (of_levels, 0),
}
# Mode central runs one path for all losses, which one loss of each base class takes.
CENTRAL = ("ap_q", "smooth_ap", "arc_face", "matryoshka of a sum")
BY_LEVELS = ("h_ap", "smooth_ndcg", "sup_ndcg", "matryoshka of h_ap", "csl of levels", "ap_q")
RANKED = [
    (case, loss, mode)
    for case in CASES
    for loss in LOSSES
    for mode in MODES
    if (mode == "sharded" or loss in CENTRAL)
    and not (case == "remembered" and isinstance(LOSSES[loss], DescriptorLoss))
    and not (case == "remembered" and loss in ("distil_relations", "compatible"))
    and (case != "levels" or loss in BY_LEVELS)
]


def rank_share(world, case, loss, mode):
    make, with_memory = CASES[case]
    descriptors, labels, taking_part = make()
    own_rows = slice(world.rank, None, world.size)
    gathered = gather(descriptors[own_rows], labels[own_rows], taking_part[own_rows], world, SLOTS)
    extra = extra_of(LOSSES[loss], descriptors)
    gathered = gathered.with_extra({key: rows[own_rows] for key, rows in extra.items()})
    if with_memory:
        gathered = remembering(1, 9, dimensions=6).extend(gathered)
    ranking = rank_descriptors(LOSSES[loss], gathered, mode)
    per_query = ranking.per_query
    if per_query is not None:
        per_query = world.gather_rows(per_query, SLOTS)
    gradient = world.gather_rows(ranking.gradient, SLOTS)
    return ranking.loss, per_query, gradient, ranking.by_parameters, ranking.is_finite


@cache
def alone(case, loss):
    return rank_share(World(), case, loss, "sharded")


def rank_all_cases(world):
    return {element: rank_share(world, *element) for element in RANKED} | {
        "traffic": traffic_of_sharded_ranking(world)
    }


@pytest.fixture(scope="module", params=[2, 3])
def ranked(request):
    """Every case on some ranks; one start of the ranks for all."""
    return on_ranks(request.param, rank_all_cases)


@pytest.mark.parametrize(("case", "loss", "mode"), RANKED)
def test_many_ranks_give_what_one_process_gives(ranked, case, loss, mode):
    value, per_query, gradient, by_parameters, _ = alone(case, loss)
    for answer in ranked:
        got, got_per_query, got_gradient, got_by_parameters, is_finite = answer[case, loss, mode]
        assert is_finite
        assert all(map(torch.equal, got_by_parameters, ranked[0][case, loss, mode][3]))
        torch.testing.assert_close(got_by_parameters, by_parameters, rtol=1e-11, atol=1e-15)
        assert torch.equal(got, ranked[0][case, loss, mode][0])
        torch.testing.assert_close(got, value, rtol=1e-12, atol=0)
        torch.testing.assert_close(got_gradient, gradient, rtol=1e-11, atol=1e-15)
        if per_query is None:
            assert got_per_query is None
        else:
            torch.testing.assert_close(
                got_per_query, per_query, rtol=1e-12, atol=1e-15, equal_nan=True
            )


def test_rows_that_take_no_part_have_no_gradient(ranked):
    _, _, taking_part = left_out()
    gradient = ranked[0]["left_out", "ap_q", "sharded"][2]
    assert gradient[~taking_part].abs().max() == 0
    assert gradient[taking_part].abs().max() > 0


def too_hard(descriptors, labels):
    raise DistapError("loss.too_hard", "too hard")


def refusal(world, loss, labels, taking_part):
    own_rows = slice(world.rank, None, world.size)
    gathered = gather(batch()[0][own_rows], labels[own_rows], taking_part[own_rows], world, SLOTS)
    with pytest.raises(DistapError) as error:
        rank_descriptors(loss, gathered, "central")
    return str(error.value)


@pytest.fixture(scope="module")
def from_a_group():
    return on_ranks(3, rank_uneven_shares)


def test_a_group_with_shares_of_any_size_gives_what_one_process_gives(from_a_group):
    descriptors, labels, _ = batch()
    for mode in MODES:
        whole = rank(descriptors, labels, "smooth_ap")
        assert all(
            answer[mode].loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
            for answer in from_a_group
        )
        gradient = torch.cat([answer[mode].gradient for answer in from_a_group])
        torch.testing.assert_close(gradient, whole.gradient, rtol=1e-11, atol=1e-15)
        per_query = torch.cat([answer[mode].per_query for answer in from_a_group])
        torch.testing.assert_close(
            per_query, whole.per_query, rtol=1e-12, atol=1e-15, equal_nan=True
        )
        assert {answer[mode].queries for answer in from_a_group} == {whole.queries}


def test_a_group_of_some_ranks_ranks_among_itself(from_a_group):
    descriptors, labels, _ = batch()
    whole = pytest.approx(rank(descriptors[3:], labels[3:]).loss.item(), rel=1e-12)
    assert [answer["some"] for answer in from_a_group] == [None, whole, whole]


def test_every_rank_of_a_group_is_told_what_is_wrong_and_where(from_a_group):
    for number, answer in enumerate(from_a_group):
        assert ("rank 0 could not rank the batch" if number else "too hard") in answer["too hard"]
        assert "nothing can be ranked" in answer["nothing"]
        assert "rank 1: row 2: descriptors hold values that are not finite" in answer["not finite"]
        assert (
            "rank 2: rows 0, 4: descriptors hold values that are not finite" in answer["not finite"]
        )
        assert "rank 1: labels are torch.float" in answer["labels"]
        assert "rank 1 has labels (b), descriptors (b, 5) of torch.float64" in answer["dimensions"]
        assert "rank 2 has labels (b), descriptors (b, 6) of torch.float32" in answer["dtype"]


def rank_uneven_shares(world):
    descriptors, labels, taking_part = batch()
    own_rows = [slice(0, 3), slice(3, 7), slice(7, SLOTS)][world.rank]
    answers = {
        mode: rank(
            descriptors[own_rows], labels[own_rows], "smooth_ap", group=dist.group.WORLD, mode=mode
        )
        for mode in MODES
    }
    answers["too hard"] = refusal(world, build_loss(too_hard), labels, taking_part)
    answers["nothing"] = refusal(world, QuantizedAP(), torch.arange(SLOTS), taking_part)
    subgroup = dist.new_group([1, 2])
    answers["some"] = (
        rank(descriptors[own_rows], labels[own_rows], group=subgroup).loss.item()
        if world.rank
        else None
    )
    broken = descriptors.clone()
    broken[[5, 7]] = torch.nan
    broken[11, 0] = torch.inf
    answers["not finite"] = complaint(broken[own_rows], labels[own_rows])
    answers["dimensions"] = complaint(
        normalize(descriptors[own_rows, : 6 - world.rank]), labels[own_rows]
    )
    answers["dtype"] = complaint(
        descriptors[own_rows].to(torch.float32 if world.rank else torch.float64), labels[own_rows]
    )
    answers["labels"] = complaint(
        descriptors[own_rows], labels[own_rows].double() if world.rank == 1 else labels[own_rows]
    )
    return answers


def complaint(descriptors, labels):
    with pytest.raises(DistapError) as error:
        rank(descriptors, labels, group=dist.group.WORLD)
    return str(error.value)


ROWS = 240
DIMENSIONS = 64


def traffic_of_sharded_ranking(world):
    """Bytes that rank hands to collectives, by loss."""
    raw, labels = problem(0, ROWS, ROWS // 8, DIMENSIONS, dtype=torch.float32)
    own_rows = slice(world.rank, None, world.size)
    descriptors = normalize(raw)[own_rows]
    present = torch.ones(len(labels[own_rows]), dtype=torch.bool)

    def ranked(loss):
        rank_descriptors(
            loss, gather(descriptors, labels[own_rows], present, world, ROWS), "sharded"
        )

    losses = {"ap_q": QuantizedAP(bins=20), "sup_ap": build_loss("sup_ap")}
    return {
        name: {item.name: item.bytes for item in collectives_of(partial(ranked, loss))}
        for name, loss in losses.items()
    }


def test_a_sharded_loss_sends_its_own_rows_and_slopes_or_the_gradient_of_the_gallery(ranked):
    own_count = ROWS // len(ranked)
    # descriptors; label, image number and whether it takes part
    gathered = own_count * (4 * DIMENSIONS + 3 * 8)
    agreed = 8 + 8  # the loss, and whether all is finite
    slopes = own_count * 4 * 2 * 19
    gradient = ROWS * 4 * DIMENSIONS
    for traffic in (answer["traffic"] for answer in ranked):
        assert traffic["ap_q"] == {"gloo:all_gather": gathered + slopes, "gloo:all_reduce": agreed}
        # gloo reduces and scatters by an all_reduce.
        assert traffic["sup_ap"] == {
            "gloo:all_gather": gathered,
            "gloo:all_reduce": gradient + agreed,
        }
