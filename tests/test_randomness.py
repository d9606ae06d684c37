from math import factorial

import numpy as np
import pytest

from distap.randomness import permutation, seed_for, shuffled


def orders(count, number, *key):
    """(number, count) random orders, whole."""
    places = np.tile(np.arange(count), (number, 1))
    return shuffled(np.full(number, count), places, *key, of=(np.arange(number),))


def too_far(seen, expected):
    """Whether counts are further from what is expected of each than chance brings them once in a
    million times.
    """
    freedom = len(seen) - 1
    return ((seen - expected) ** 2 / expected).sum() > freedom + 5 * np.sqrt(2 * freedom) + 15


def test_seeds_and_orders_never_change():
    """Batches, augmentation and dropout of every run made so far hang on these."""
    assert seed_for(1, 2, 3) == 6498626229777268288
    assert permutation(6, 7, 8).tolist() == [5, 0, 2, 4, 1, 3]
    small_set, many = shuffled(
        np.array([6, 10**12]), np.array([[0, 1, 2], [3, 4, 10**11]]), 7, 8
    ).tolist()
    assert small_set == [4, 3, 0] and many == [219278381419, 979344024340, 891539248177]


def test_a_permutation_holds_everything_once():
    assert np.array_equal(np.sort(permutation(1000, 1)), np.arange(1000))
    assert not np.array_equal(permutation(1000, 1), permutation(1000, 2))


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 100, 4096, 4097, 70_000])
def test_a_shuffled_order_holds_everything_once(count):
    first, second = orders(count, 2, 1)
    assert np.array_equal(np.sort(first), np.arange(count))
    assert count < 3 or not np.array_equal(first, second)
    places = np.random.default_rng(0).integers(0, count, (1, 5))
    assert np.array_equal(
        shuffled(np.array([count]), places, 1, of=(np.zeros(1, np.int64),))[0], first[places[0]]
    )


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_order_of_a_few_is_as_likely_as_any_other(count):
    number = 20_000
    codes = (orders(count, number, 2) * count ** np.arange(count)).sum(axis=1)
    seen = np.unique(codes, return_counts=True)[1]
    assert len(seen) == factorial(count) and not too_far(seen, number / factorial(count))


@pytest.mark.parametrize("count", [9, 64, 65, 128, 129])
def test_an_element_is_as_likely_at_any_place_and_beside_any_other(count):
    number = 5_000
    drawn = orders(count, number, 3)
    for place in (0, 1, count // 2, count - 1):
        assert not too_far(np.bincount(drawn[:, place], minlength=count), number / count)
        beside = (drawn[:, place] - drawn[:, place - 1]) % count
        assert not too_far(np.bincount(beside, minlength=count)[1:], number / (count - 1))
