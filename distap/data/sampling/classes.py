"""Batches of every class."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes, Samples
from distap.data.sampling.draws import refuse_more_than_there_are
from distap.errors import DistapError
from distap.randomness import permutation

TURN, EXTRA = 14, 15  # first words of the keys that orders within a class, and of larger shares, are drawn with


@dataclass(frozen=True)
class ClassesSampling:
    """Every class in every batch, as Revaud et al. 2019 train on Landmarks.

    The B images are shared out among the K classes as evenly as can be: a class gives its share, or all it has,
    and what is missing then comes from the larger classes. Where that leaves shares of L and of L + 1, the larger
    share goes round. The images of a class are used up in a random order before any of them is used again.

    Args:
        batch_size: B, images of a global batch, at least twice the classes.
    """

    name: Literal["classes"] = "classes"
    batch_size: int = 4096

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    @property
    def size(self) -> int:
        """B, images of a global batch."""
        return self.batch_size

    def check(self, classes: Classes) -> None:
        """Refuse a batch without two images for each class, or larger than the data set."""
        if self.batch_size < 2 * classes.count:
            raise DistapError(
                f"sampling.batch_size is {self.batch_size}, but sampling by classes takes two images at least of "
                f"each of the {classes.count} classes: set it to {2 * classes.count} or more, or choose p_by_k"
            )
        refuse_more_than_there_are(self.batch_size, classes)

    def steps_per_epoch(self, classes: Classes) -> int:
        """Steps until every image had its turn, at least."""
        level, _ = _shares(classes, self.batch_size)
        return max(1, -(-int(classes.sizes.max()) // level))

    def batch(self, classes: Classes, seed: int, step: int) -> Samples:
        """(B,) sample numbers, class by class."""
        level, larger = _shares(classes, self.batch_size)
        takes = np.minimum(classes.sizes, level)
        starts = step * takes
        extra = self.batch_size - int(takes.sum())
        if extra:
            # Dealt out like cards, in an order of the larger classes that stays, so that it is known what each of
            # them has been given before without going through the steps.
            order = larger[permutation(len(larger), EXTRA, seed)]
            starts[order] -= (np.arange(len(larger)) - step * extra) // len(larger)
            takes[order[(step * extra + np.arange(extra)) % len(larger)]] += 1
        turns = _turns(classes, seed, level + bool(extra))
        given = zip(starts.tolist(), takes.tolist(), strict=True)
        return np.concatenate([turns.next_of(label, start, take) for label, (start, take) in enumerate(given)])


@lru_cache(maxsize=2)
def _shares(classes: Classes, total: int) -> tuple[int, NDArray[np.int64]]:
    """The images that each class gives of `total`, or all it has if that is less; and the classes with more."""
    sizes = np.sort(classes.sizes)
    # With the smaller classes giving all they have, what the rest would give each; the first that can is the level.
    given_before = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    levels = (total - given_before) // (len(sizes) - np.arange(len(sizes)))
    stuck = np.flatnonzero(levels < sizes)
    level = int(levels[stuck[0]]) if len(stuck) else int(sizes[-1])
    return level, np.flatnonzero(classes.sizes > level)


class _Turns:
    """Goes through the images of each class in one random order after the other.

    Args:
        classes: of the data set.
        seed: of the training.
        longest: images that are taken of a class at once, at most.
    """

    def __init__(self, classes: Classes, seed: int, longest: int) -> None:
        self._classes, self._seed, self._longest = classes, seed, longest
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}  # of the present turn, which lasts many steps

    def next_of(self, label: int, start: int, take: int) -> Samples:
        """(take,) samples of a class of which `start` have been taken before, over all turns; none twice."""
        own = self._classes.samples(label)
        if take == len(own):
            return own
        turn, place = divmod(start, len(own))
        taken = self._order(label, len(own), turn)[place : place + take]
        if len(taken) < take:
            taken = np.concatenate([taken, self._order(label, len(own), turn + 1)[: take - len(taken)]])
        return own[taken]

    def _order(self, label: int, count: int, turn: int) -> NDArray[np.int64]:
        """The order of a turn; any `longest` images in a row are different ones, over the seam of two turns too."""
        if count < 2 * self._longest:
            turn = 0  # too few to choose those that may follow: every turn has the same order
        known, order = self._orders.get(label, (-1, np.empty(0, np.int64)))
        if known != turn:
            order = self._new_order(label, count, turn)
            self._orders[label] = turn, order
        return order

    def _new_order(self, label: int, count: int, turn: int) -> NDArray[np.int64]:
        order = permutation(count, TURN, self._seed, label, turn)
        if turn == 0:
            return order
        # What was used last in the turn before is moved behind what was not, but never into the last places: so
        # these are as drawn, and no turn depends on more than one before it.
        before = permutation(count, TURN, self._seed, label, turn - 1)[-self._longest :]
        head, last = order[: -self._longest], order[-self._longest :]
        return np.concatenate([head[~np.isin(head, before)], before[np.isin(before, head)], last])


@lru_cache(maxsize=2)
def _turns(classes: Classes, seed: int, longest: int) -> _Turns:
    return _Turns(classes, seed, longest)
