import pytest
import torch
from ranks import on_ranks
from torch.nn.functional import normalize

from distap.distributed import World
from distap.errors import DistapError
from distap.ranking import QuantizedAP, gather, rank_descriptors

SLOTS = 23  # uneven on 2 and 4 ranks


def batch():
    """Descriptors, labels and which rows take part; class 9 ends up on one rank only, on 4 ranks."""
    generator = torch.Generator().manual_seed(0)
    descriptors = normalize(torch.randn(SLOTS, 6, generator=generator, dtype=torch.float64))
    labels = torch.randint(0, 5, (SLOTS,), generator=generator)
    labels[[2, 6, 10]] = 9
    taking_part = torch.ones(SLOTS, dtype=torch.bool)
    return descriptors, labels, taking_part


def left_out():
    """The same with rows that take no part, one of them not a number, and all of rank 3's of four."""
    descriptors, labels, taking_part = batch()
    descriptors[5] = torch.nan
    taking_part[[0, 5]] = False
    taking_part[3::4] = False
    return descriptors, labels, taking_part


def without_positives():
    """No class twice."""
    descriptors, _, taking_part = batch()
    return descriptors, torch.arange(SLOTS), taking_part


def rank_share(world, make, mode):
    descriptors, labels, taking_part = make()
    mine = slice(world.rank, None, world.size)
    gathered = gather(descriptors[mine], labels[mine], taking_part[mine], world, SLOTS)
    ranking = rank_descriptors(QuantizedAP(), gathered, mode)
    return ranking.loss, ranking.per_query, world.gather_rows(ranking.gradient, SLOTS), ranking.is_finite


@pytest.fixture(scope="module", params=[2, 4])
def ranked(request):
    """Every case on 2 and 4 ranks; one start of the ranks for all."""
    return on_ranks(request.param, rank_all_cases)


def rank_all_cases(world):
    return {(make.__name__, mode): rank_share(world, make, mode) for make in CASES for mode in ("sharded", "central")}


CASES = (batch, left_out)


@pytest.mark.parametrize("mode", ["sharded", "central"])
@pytest.mark.parametrize("make", CASES)
def test_many_ranks_give_what_one_process_gives(ranked, make, mode):
    loss, per_query, gradient, _ = rank_share(World(), make, "sharded")
    for answer in ranked:
        got_loss, got_per_query, got_gradient, is_finite = answer[make.__name__, mode]
        assert is_finite
        assert torch.equal(got_loss, ranked[0][make.__name__, mode][0])
        torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(got_per_query, per_query, rtol=1e-12, atol=0, equal_nan=True)
        torch.testing.assert_close(got_gradient, gradient, rtol=1e-12, atol=1e-15)


def test_rows_that_take_no_part_have_no_gradient(ranked):
    _, _, taking_part = left_out()
    gradient = ranked[0]["left_out", "sharded"][2]
    assert gradient[~taking_part].abs().max() == 0
    assert gradient[taking_part].abs().max() > 0


def test_nothing_to_rank_is_an_error_on_every_rank():
    assert on_ranks(2, nothing_to_rank) == ["nothing can be ranked"] * 2


def nothing_to_rank(world):
    with pytest.raises(DistapError) as error:
        rank_share(world, without_positives, "central")
    return "nothing can be ranked" if "nothing can be ranked" in str(error.value) else str(error.value)
