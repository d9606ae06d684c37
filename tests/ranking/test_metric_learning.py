import pytest
import torch
from problems import problem, rank_raw
from pytorch_metric_learning import losses, miners
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.ranking.loss import build_loss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import rank


def their_gradient(loss, raw, labels, *arguments):
    raw = raw.clone().requires_grad_()
    value = loss(normalize(raw), labels, *arguments)
    value.backward()
    return value.item(), raw.grad


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ContrastiveLoss", {"pos_margin": 0.1}),
        ("TripletMarginLoss", {"margin": 0.2}),
        ("MultiSimilarityLoss", {}),
        ("NTXentLoss", {"temperature": 0.1}),
    ],
)
def test_a_loss_by_name_gives_what_it_gives(name, options):
    raw, labels = problem(0, 30, 5)
    value, expected = their_gradient(getattr(losses, name)(**options), raw, labels)
    ranking, gradient = rank_raw(raw, labels, "metric_learning", function=name, options=options)
    assert ranking.loss.item() == pytest.approx(value, rel=1e-9)
    assert ranking.per_query is None
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)


def test_a_miner_chooses_the_pairs():
    raw, labels = problem(1, 30, 5)
    pairs = miners.MultiSimilarityMiner(epsilon=0.1)(normalize(raw), labels)
    value, expected = their_gradient(losses.ContrastiveLoss(), raw, labels, pairs)
    ranking, gradient = rank_raw(
        raw,
        labels,
        "metric_learning",
        function="ContrastiveLoss",
        miner="MultiSimilarityMiner",
        miner_options={"epsilon": 0.1},
    )
    assert ranking.loss.item() == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)


def test_what_is_drawn_at_random_depends_on_the_batch_alone():
    raw, labels = problem(2, 40, 4)
    loss = build_loss("metric_learning", function="TripletMarginLoss", options={"triplets_per_anchor": 2})
    first = rank(normalize(raw), labels, loss)
    state = torch.get_rng_state()
    assert torch.equal(rank(normalize(raw), labels, loss).gradient, first.gradient)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_multi_similarity_is_that_of_pytorch_metric_learning(epsilon):
    raw, labels = problem(6, 40, 8)[0], torch.arange(40) % 10
    mined = {} if epsilon is None else {"miner": "MultiSimilarityMiner", "miner_options": {"epsilon": epsilon}}
    theirs, their_gradient = rank_raw(raw, labels, "metric_learning", function="MultiSimilarityLoss", **mined)
    ours, gradient = rank_raw(raw, labels, "multi_similarity", epsilon=epsilon)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-9)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-9, atol=1e-13)


def test_it_cannot_rank_against_a_memory():
    raw, labels = problem(5, 20, 4)
    memory = CrossBatchMemory(10)
    loss = build_loss("metric_learning", function="ContrastiveLoss")
    rank(normalize(raw), labels, loss, memory=memory)
    with pytest.raises(DistapError, match="MetricLearning is a loss of the batch's descriptors, so it cannot rank"):
        rank(normalize(raw), labels, loss, memory=memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": "TripletLoss"}, "has no loss 'TripletLoss'"),
        ({"function": "TripletMarginLoss", "options": {"marjin": 1}}, "marjin"),
        ({"function": "TripletMarginLoss", "miner": "BestMiner"}, "has no miner 'BestMiner'"),
        ({"function": "ProxyNCALoss", "options": {"num_clases": 3}}, "num_clases"),
        ({"function": "TripletMarginLoss", "weights": "class"}, "weights: unknown key"),
        ({}, "function"),
    ],
)
def test_what_cannot_be_used_is_named(options, message):
    with pytest.raises(DistapError, match=message):
        build_loss("metric_learning", **options)
