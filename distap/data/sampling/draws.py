"""What several ways of sampling have in common."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes, Samples
from distap.errors import DistapError
from distap.randomness import permutation

EPOCH, WITHIN_CLASS = 11, 12  # first words of the keys that are drawn with


def refuse_more_than_there_are(batch_size: int, classes: Classes) -> None:
    """Refuse a batch larger than the data set."""
    if batch_size > len(classes):
        raise DistapError(
            f"sampling.batch_size is {batch_size}, but the data set has only {len(classes)} images and no "
            "image may be in a batch twice"
        )


def available(classes: Classes, labels: NDArray[np.int64], images: int) -> int:
    """Images that classes can give when none gives more than `images`."""
    return int(np.minimum(classes.sizes[labels], images).sum())


def some_of_each(
    classes: Classes, order: NDArray[np.int64], images: int, total: int, seed: int, step: int
) -> Samples:
    """(total,) up to `images` random samples of each class, in the order given, until there are `total`."""
    given = np.cumsum(np.minimum(classes.sizes[order], images))
    needed = order[: int(np.searchsorted(given, total)) + 1]
    chosen = []
    for label in needed.tolist():
        own = classes.samples(label)
        chosen.append(own[permutation(len(own), WITHIN_CLASS, seed, step, label)[:images]])
    return np.concatenate(chosen)[:total]


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A random order of range(count), a new one each epoch; not to be written to."""
    order = permutation(count, EPOCH, seed, epoch)
    order.flags.writeable = False
    return order
