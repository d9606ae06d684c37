import pytest
import torch
from problems import problem, rank_raw
from pytorch_metric_learning import losses, miners
from torch.nn.functional import normalize

from distap.ranking.losses.building import build_loss
from distap.ranking.rank import rank

NAME = "benchmarks.metric_learning:MetricLearning"


@pytest.mark.parametrize("name", ["TripletMarginLoss", "NTXentLoss"])
def test_a_loss_by_name_gives_what_it_gives_with_the_pairs_of_a_miner(name):
    raw, labels = problem(0, 30, 5)
    leaf = raw.clone().requires_grad_()
    pairs = miners.MultiSimilarityMiner(epsilon=0.2)(normalize(raw), labels)
    value = getattr(losses, name)()(normalize(leaf), labels, pairs)
    value.backward()
    ranking, gradient = rank_raw(
        raw,
        labels,
        NAME,
        function=name,
        miner="MultiSimilarityMiner",
        miner_options={"epsilon": 0.2},
    )
    assert ranking.loss.item() == pytest.approx(value.item(), rel=1e-9)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-13)


def test_what_is_drawn_at_random_depends_on_the_batch_alone():
    raw, labels = problem(2, 40, 4)
    loss = build_loss(NAME, function="TripletMarginLoss", options={"triplets_per_anchor": 2})
    first = rank(normalize(raw), labels, loss)
    state = torch.get_rng_state()
    assert torch.equal(rank(normalize(raw), labels, loss).gradient, first.gradient)
    assert torch.equal(torch.get_rng_state(), state)


MINER = {"miner": "MultiSimilarityMiner", "miner_options": {"epsilon": 0.1}}


@pytest.mark.parametrize(
    ("function", "mined", "name", "options"),
    [
        ("MultiSimilarityLoss", {}, "multi_similarity", {"epsilon": None}),
        ("MultiSimilarityLoss", MINER, "multi_similarity", {}),
        ("ThresholdConsistentMarginLoss", {}, "calibration", {"preset": "tcm"}),
    ],
)
def test_losses_that_pytorch_metric_learning_has_are_its_own(function, mined, name, options):
    raw = problem(6, 40, 8)[0]
    labels = torch.arange(40) % 10
    theirs, their_gradient = rank_raw(raw, labels, NAME, function=function, **mined)
    ours, gradient = rank_raw(raw, labels, name, **options)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-9)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-9, atol=1e-13)
