"""Random numbers as functions of a key, whatever the ranks, workers or earlier draws."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

# Orders of up to so many elements are drawn by sorting: the network is not even for very few.
SORTED = 64
FEISTEL_ROUNDS = 8


def seed_for(*key: int) -> int:
    """Return a 63-bit seed for a key such as (seed, step, slot), the same on every machine."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def permutation(count: int, *key: int) -> np.ndarray:
    """Return a random order of range(count), (count,) int64, a pure function of the key."""
    # numpy guarantees Philox's stream for every version, but not what `Generator.permutation` makes
    # of it.
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(raw, kind="stable")


def shuffled(
    counts: NDArray[np.int64],
    places: NDArray[np.int64],
    *key: int,
    of: Sequence[NDArray[np.int64]] = (),
) -> NDArray[np.int64]:
    """Return the elements, (m, k), at k places of m random orders of range(count).

    They are a pure function of the key. The cost is that of the places, however large the counts: a
    Feistel network permutes the numbers below the next power of two, again and again until one is
    below the count (cycle walking; Black and Rogaway 2002).

    Args:
        counts: (m,), 1 or more.
        places: (m, k), each from 0 to its count - 1.
        of: further parts of the key, each (m,).
    """
    *words, first_word = np.random.SeedSequence(key).generate_state(FEISTEL_ROUNDS + 1, np.uint64)
    words_of_orders = np.full(len(counts), first_word)
    for part in of:
        words_of_orders = _mixed(words_of_orders + part.astype(np.uint64))
    values = np.empty_like(places)
    is_short = counts <= SORTED
    orders = _sorted_orders(counts[is_short], words_of_orders[is_short])
    values[is_short] = np.take_along_axis(orders, places[is_short], axis=1)
    is_long = ~is_short
    if is_long.any():
        k = places.shape[1]
        values[is_long] = _walked(
            counts[is_long].repeat(k),
            places[is_long].ravel(),
            words,
            words_of_orders[is_long].repeat(k),
        ).reshape(-1, k)
    return values


def chosen_numbers(numbers: Numbers, share: float, *key: int) -> NDArray[np.bool_]:
    """Return which of the numbers belong to a random share, below 1, of all numbers.

    Each is chosen by itself, as a pure function of number and key.
    """
    (word,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    mixed = _mixed(word + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return mixed < np.uint64(share * 2.0**64)


def _sorted_orders(
    counts: NDArray[np.int64], words_of_orders: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return (m, n) random orders of range(count), one per row, padded to the longest."""
    columns = np.arange(counts.max(initial=0))
    numbers = columns.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ranks = _mixed(words_of_orders[:, None] + numbers)
    ranks[columns >= counts[:, None]] = np.iinfo(np.uint64).max
    return np.argsort(ranks, axis=1, kind="stable")


def _walked(
    counts: NDArray[np.int64],
    places: NDArray[np.int64],
    words: Sequence[np.uint64],
    words_of_orders: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Walk the Feistel network from each place, (n,), until the number is below its count."""
    limits = counts.astype(np.uint64)
    numbers = places.astype(np.uint64)
    # counts are far below 2^52, up to which this is exact
    bits = np.ceil(np.log2(limits)).astype(np.uint64)
    low = (bits + np.uint64(1)) >> np.uint64(1)
    high = bits >> np.uint64(1)
    left = np.arange(len(numbers))
    while len(left):
        numbers[left] = _feistel(numbers[left], low[left], high[left], words, words_of_orders[left])
        left = left[numbers[left] >= limits[left]]
    return numbers.astype(np.int64)


def _feistel(
    numbers: NDArray[np.uint64],
    low: NDArray[np.uint64],
    high: NDArray[np.uint64],
    words: Sequence[np.uint64],
    words_of_orders: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Permute numbers of `low` + `high` bits by a Feistel network.

    Each of `words` is the key of one round. `words_of_orders` has a key for each number, which
    chooses one of many permutations.
    """
    unit = np.uint64(1)
    masks = (unit << low) - unit, (unit << high) - unit
    halves = [numbers & masks[0], numbers >> low]
    for turn, word in enumerate(words):
        changed = turn % 2
        mixed = _mixed(halves[1 - changed] + (word ^ words_of_orders))
        halves[changed] = halves[changed] ^ mixed & masks[changed]
    return halves[1] << low | halves[0]


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each number to 64 random-looking bits (finaliser of SplitMix64; Steele et al. 2014)."""
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
