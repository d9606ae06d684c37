"""Random numbers as functions of a key, so that they do not depend on ranks, workers or earlier draws."""

import numpy as np


def seed_for(*key: int) -> int:
    """Return a 63-bit seed for a key such as (seed, step, slot), the same on every machine and numpy version."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def permutation(count: int, *key: int) -> np.ndarray:
    """Return a random order of range(count), (count,) int64, as a pure function of the key."""
    # numpy guarantees Philox's stream for every version, but not what `Generator.permutation` makes of it.
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(raw, kind="stable")
