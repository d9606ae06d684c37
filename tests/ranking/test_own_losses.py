"""Losses that a user writes from the bases rank like ours."""

from dataclasses import dataclass

import pytest
import torch
from problems import problem, rank_raw, remembering
from raising import raises

from distap.errors import DistapError
from distap.ranking.listwise import ListwiseLoss
from distap.ranking.losses.base import SimilarityLoss
from distap.ranking.losses.calibration import Calibration


@dataclass(frozen=True)
class Margins(SimilarityLoss):
    """What Calibration computes, without its derivative."""

    alpha: float = 0.9
    beta: float = 0.6

    def loss(self, similarities, positive, negative):
        pull = (self.alpha - similarities).clamp(min=0) * positive
        push = (similarities - self.beta).clamp(min=0) * negative
        return pull.sum(1) / positive.sum(1) + push.sum(1) / negative.sum(1)


@dataclass(frozen=True)
class Constant(SimilarityLoss):
    def loss(self, similarities, positive, negative):
        return torch.full_like(similarities[:, 0], 0.25)


PAIRS = [
    (Margins(0.8, self_pair=False), Calibration(alpha=0.8), False),
    (Margins(self_pair=True, weights="class"), Calibration(self_pair=True, weights="class"), True),
]


@pytest.mark.parametrize(("mine", "ours", "with_memory"), PAIRS)
def test_autograd_through_a_formula_gives_the_derivative_by_hand(
    mine, ours, with_memory, monkeypatch
):
    monkeypatch.setattr("distap.ranking.loss.CPU_TILE_PAIRS", 300)
    raw, labels = problem(0, 40, 5)
    ranked = [
        rank_raw(raw, labels, loss, memory=remembering(1, 15) if with_memory else None)
        for loss in (mine, ours)
    ]
    (got, gradient), (expected, expected_gradient) = ranked
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got.per_query, expected.per_query, equal_nan=True)


def test_a_loss_without_any_pair_has_no_gradient():
    ranking, gradient = rank_raw(*problem(0, 20, 3), Constant())
    assert ranking.loss == pytest.approx(0.25)
    assert not gradient.any()


@dataclass(frozen=True)
class Mean(SimilarityLoss):
    def loss(self, similarities, positive, negative):
        return similarities.mean()


def test_a_mean_where_one_value_a_query_is_expected_is_refused():
    raw, labels = problem(0, 12, 3)
    with raises("loss.wrong_shape", "11"):
        rank_raw(raw, labels, Mean())


def test_a_function_of_similarities_has_to_be_made_a_loss():
    with pytest.raises(DistapError, match=r"needs @distap\.loss above it"):
        ListwiseLoss(lambda similarities, same_class: similarities.sum(1))
