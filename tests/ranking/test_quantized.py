import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import quantized_ap_gradient, through_normalisation
from torch.nn.functional import normalize

from distap.distributed import World
from distap.errors import DistapError
from distap.ranking import QuantizedAP, gather, rank_descriptors


def rank_alone(raw, labels, **options):
    """Loss and gradient by `raw`, ranked by one process."""
    present = torch.ones(len(labels), dtype=torch.bool)
    gathered = gather(normalize(raw), labels, present, World(), len(labels))
    ranking = rank_descriptors(QuantizedAP(**options), gathered)
    return ranking, through_normalisation(raw, ranking.gradient)


def problem(seed, images, classes, dimensions=8, dtype=torch.float64):
    """Random descriptors, in clusters so that all bins occur, and labels of unequal classes in any order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=generator) ** 2
    labels[0] = labels[-1]
    raw = torch.randn(images, dimensions, generator=generator, dtype=dtype)
    return raw + 0.5 * torch.sin(labels[:, None] * torch.arange(1, dimensions + 1)).to(dtype), labels


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    images=st.integers(2, 60),
    classes=st.integers(1, 12),
    bins=st.integers(2, 100),
    low=st.sampled_from([-1.0, 0.0]),
    self_pair=st.booleans(),
    weights=st.sampled_from(["uniform", "class"]),
)
def test_value_and_gradient_equal_the_materialised_form(seed, images, classes, bins, low, self_pair, weights):
    raw, labels = problem(seed, images, classes)
    options = {"bins": bins, "low": low, "self_pair": self_pair, "weights": weights}
    ranking, gradient = rank_alone(raw, labels, **options)
    loss, expected = quantized_ap_gradient(raw, labels, **options)
    assert ranking.loss.item() == pytest.approx(loss, rel=1e-9)
    # Where the true gradient is zero, the reference itself has a rounding residue that grows with the bins.
    assert (gradient - expected).norm() <= 1e-9 * expected.norm() + 1e-15 * bins


def test_in_float32_value_and_gradient_are_close_to_float64():
    raw, labels = problem(1, 200, 20)
    ranking, gradient = rank_alone(raw.float(), labels)
    loss, expected = quantized_ap_gradient(raw, labels)
    assert ranking.loss.item() == pytest.approx(loss, rel=1e-5)
    assert (gradient - expected).norm() <= 1e-4 * expected.norm()


def test_many_blocks_of_rows_give_what_one_block_gives(monkeypatch):
    raw, labels = problem(2, 150, 15)
    whole, gradient = rank_alone(raw, labels)
    monkeypatch.setattr("distap.ranking.quantized.BLOCK_PAIRS", 1)
    monkeypatch.setattr("distap.ranking.quantized.MIN_BLOCK_ROWS", 7)
    in_blocks, again = rank_alone(raw, labels)
    assert in_blocks.loss == whole.loss
    torch.testing.assert_close(again, gradient, rtol=1e-12, atol=1e-15)


def test_exact_duplicates_are_ranked():
    raw, labels = problem(3, 40, 6)
    raw[5], raw[9] = raw[4], raw[4]
    ranking, gradient = rank_alone(raw, labels)
    loss, expected = quantized_ap_gradient(raw, labels)
    assert ranking.loss.item() == pytest.approx(loss, rel=1e-9)
    assert (gradient - expected).norm() <= 1e-9 * expected.norm()


def test_a_query_without_positive_is_left_out_and_counted():
    raw, labels = problem(4, 30, 5)
    labels[3], labels[7] = 1000, 2000
    ranking, _ = rank_alone(raw, labels)
    assert ranking.skipped_queries == sum(labels.tolist().count(label) == 1 for label in labels.tolist())
    assert ranking.per_query[[3, 7]].isnan().all()
    assert ranking.loss.item() == pytest.approx(quantized_ap_gradient(raw, labels)[0], rel=1e-9)


def test_a_batch_without_any_positive_is_an_error_and_not_nan():
    with pytest.raises(DistapError, match="nothing can be ranked"):
        rank_alone(torch.randn(5, 4), torch.arange(5))


def test_perfectly_separated_classes_have_no_loss_and_no_gradient():
    raw = torch.eye(4, dtype=torch.float64).repeat_interleave(3, dim=0)
    ranking, gradient = rank_alone(raw, torch.arange(4).repeat_interleave(3))
    assert ranking.loss.item() == pytest.approx(0, abs=1e-12)
    assert gradient.abs().max() < 1e-12


def test_class_weights_count_a_small_class_as_much_as_a_large_one():
    raw, _ = problem(5, 22, 2)
    labels = torch.tensor([0] * 20 + [1] * 2)
    uniform = rank_alone(raw, labels)[0]
    by_class = rank_alone(raw, labels, weights="class")[0]
    mean = torch.stack([uniform.per_query[:20].mean(), uniform.per_query[20:].mean()]).mean()
    assert by_class.loss.item() == pytest.approx(1 - mean.item())


def test_settings_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="bins is 1"):
        QuantizedAP(bins=1)
    with pytest.raises(ValueError, match="low must be below high"):
        QuantizedAP(low=1.0, high=0.0)
