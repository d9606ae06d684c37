"""Differences between networks by query: intervals, p-values and their correction."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.coverage import DIFFERENCE, covered, distance_to_uniform, simulated
from distap.errors import DistapError
from distap.evaluation.comparing import corrected, differences


def compared(values, classes=None, baseline=None, **settings):
    """Compare one figure of one run a side, whose baseline is 0."""
    values = np.asarray(values, float).reshape(1, -1, 1)
    baseline = np.zeros_like(values) if baseline is None else baseline
    classes = np.arange(values.shape[1]) if classes is None else np.asarray(classes)
    [difference] = differences(["mAP"], baseline, values, classes, **settings)
    return difference


def means(values, axis):
    return values.mean(axis=axis)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_few_classes_give_the_exact_p_value_of_scipy(rng):
    values = rng.normal(0.3, 1, 12)
    exact = stats.permutation_test((values,), means, permutation_type="samples", vectorized=True)
    assert compared(values).p == pytest.approx(exact.pvalue, abs=1e-12)


def test_many_classes_give_the_p_value_of_scipy(rng):
    values = rng.normal(0.05, 1, 400)
    drawn = stats.permutation_test((values,), means, permutation_type="samples", rng=1)
    assert compared(values).p == pytest.approx(drawn.pvalue, abs=0.02)


def test_an_interval_without_classes_is_that_of_scipy_s_bootstrap(rng):
    values = rng.normal(0.05, 1, 400)
    expected = stats.bootstrap((values,), np.mean, rng=1).confidence_interval
    difference = compared(values)
    assert [difference.low, difference.high] == pytest.approx([*expected], abs=0.008)


def test_an_interval_holds_what_the_test_does_not_reject(rng):
    classes = rng.integers(0, 40, 300)
    values = rng.normal(0.1, 1, 300) + rng.normal(0, 0.5, 40)[classes]
    difference = compared(values, classes)
    inside = 0.99 * difference.low + 0.01 * difference.value
    outside = 1.01 * difference.low - 0.01 * difference.value
    assert compared(values - inside, classes).p > 0.05
    assert compared(values - outside, classes).p <= 0.05


@pytest.mark.parametrize("seed", [8, 42, 45])
def test_classes_without_a_change_leave_interval_and_p_in_agreement(seed):
    """Flipping them changes no sum but by its last bit, which must not decide."""
    random = np.random.default_rng(seed)
    classes = np.repeat(np.arange(8), random.integers(1, 9, 8))
    baseline = random.random((1, len(classes), 1))
    values = baseline + random.normal(0.05, 0.1, baseline.shape)
    is_unchanged = (random.random(8) < 0.4)[classes]
    values[:, is_unchanged] = baseline[:, is_unchanged]
    difference = compared(values, classes, baseline)
    assert (difference.low <= 0 <= difference.high) == (difference.p > 0.05)


def test_queries_of_a_class_count_together(rng):
    """Copies of a query add nothing that is known: the interval stays as wide."""
    values = rng.normal(0.1, 1, 50)
    once = compared(values)
    copied = compared(np.repeat(values, 8), np.repeat(np.arange(50), 8))
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high))
    assert copied.queries == 400


def test_a_mean_is_over_queries_and_not_over_classes():
    assert compared([0.0, 0.0, 0.0, 1.0], [0, 0, 0, 1]).other == 0.25


def test_a_query_without_a_value_on_one_side_does_not_count():
    baseline = np.array([0.5, np.nan, 0.5, 0.5]).reshape(1, 4, 1)
    difference = compared([1.0, 1.0, np.nan, 0.5], baseline=baseline)
    assert (difference.queries, difference.value) == (2, 0.25)


def test_classes_that_are_too_few_bound_nothing():
    difference = compared([0.1, 0.2, 0.1, 0.3, 0.2])
    assert (difference.low, difference.high) == (-np.inf, np.inf)


def test_runs_that_alone_vary_are_compared_by_student_s_t():
    """All queries alike: what is left is the test of two means of seeds."""
    runs = ([0.1, 0.2, 0.15], [0.3, 0.2, 0.35])
    values = [np.tile(np.array(side).reshape(3, 1, 1), (1, 50, 1)) for side in runs]
    [difference] = differences(["mAP"], *values, np.arange(50), resamples=40_000)
    expected = stats.ttest_ind(runs[1], runs[0])
    interval = expected.confidence_interval()
    assert difference.p == pytest.approx(expected.pvalue, abs=0.006)
    assert [difference.low, difference.high] == pytest.approx([*interval], abs=0.01)


def test_several_runs_of_one_side_vary_for_both():
    runs = np.array([0.2, 0.3, 0.4]).reshape(3, 1, 1) + np.zeros((3, 40, 1))
    [difference] = differences(["mAP"], np.zeros((1, 40, 1)), runs, np.arange(40))
    half = stats.t.ppf(0.975, 2) * 0.1 * np.sqrt(1 + 1 / 3)
    assert difference.high - difference.low == pytest.approx(2 * half, rel=0.06)


def test_figures_are_corrected_by_holm(rng):
    shifts = np.array([0.5, 0.15, 0.1, 0.0])
    values = rng.normal(0, 1, (1, 300, 4)) + shifts
    results = differences(list("abcd"), np.zeros_like(values), values, np.arange(300))
    ordered = sorted(results, key=lambda result: result.p)
    expected = np.maximum.accumulate(
        [min(1, (4 - rank) * result.p) for rank, result in enumerate(ordered)]
    )
    assert [result.corrected for result in ordered] == pytest.approx(expected.tolist())
    assert corrected(results) == results


def test_a_seed_gives_the_same_figures_again(rng):
    values = rng.normal(0.1, 1, 100)
    assert compared(values, seed=3) == compared(values, seed=3) != compared(values, seed=4)


def test_intervals_cover_a_known_difference_and_p_values_are_uniform():
    """A short form of `python -m benchmarks coverage`."""
    different, alike = simulated(200, 40, "normal", "log-normal", resamples=400)
    assert 0.90 <= covered(different, DIFFERENCE) <= 0.985
    p_values = [result.p for result in alike]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    assert distance_to_uniform(p_values) == pytest.approx(
        stats.kstest(p_values, "uniform").statistic
    )


def test_intervals_cover_with_three_seeds_of_each_side():
    different, _ = simulated(150, 40, "normal", "log-normal", runs=3, resamples=400)
    assert 0.90 <= covered(different, DIFFERENCE) <= 0.995


@pytest.mark.parametrize("classes", [30, 3])
def test_no_queries_and_too_few_resamples_are_refused(classes):
    with pytest.raises(DistapError, match="mAP") as caught:
        compared(np.full(classes, np.nan))
    assert caught.value.code == "comparison.no_queries"
    with pytest.raises(DistapError, match="20") as caught:
        compared(np.ones(classes), resamples=19)
    assert caught.value.code == "comparison.too_few_resamples"
