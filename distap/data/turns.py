"""Let the elements of sets take turns, in one random order after the other.

Which element comes when is a function of a key and of the place alone, so any step of a training
can be drawn first, and nothing is remembered between steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from distap.data.windows import Windows
from distap.randomness import Numbers, shuffled


def in_turn(
    counts: Numbers,
    starts: Numbers,
    takes: Numbers,
    longest: int,
    key: tuple[int, ...],
    numbers: Numbers,
    windows: Windows | None = None,
) -> Numbers:
    """Return the next `takes` elements of m sets, whose elements take turns in random orders.

    Each set goes through its elements 0 .. count - 1 in one random order after the other. Any
    `longest` in a row are different, also across the seam of two rounds: of those that begin a
    round, the ones that ended the round before come last, in the order in which they ended it. The
    cost is that of the elements taken, whatever came before.

    Args:
        counts: (m,) sizes of the sets. One with fewer than two times `longest` has the same order
            in every round.
        starts: (m,) elements of each set that had their turn before, over all rounds.
        takes: (m,) elements that have it now, at most `longest` and at most the count.
        key: words that the orders are a function of, with the number of each set.
        numbers: (m,) of the sets.
        windows: of the elements of a single set (m = 1), within which alone they are mixed.
    Returns:
        (sum of takes,) elements, set after set.
    """
    # A place counts the elements that a set has given since its first, so a round and a place
    # within it follow from the step alone: nothing is remembered between steps, and any step can be
    # drawn first.
    counts = np.maximum(counts, 1)  # an empty set takes none
    rounds, first = np.divmod(starts, counts)
    columns = np.arange(int(takes.max()))
    is_later, places = np.divmod(first[:, None] + columns, counts[:, None])
    sets = _Sets(counts, numbers, longest, key, windows)
    elements = sets.elements(rounds, places)

    # As takes <= longest <= counts, the elements taken lie in at most two rounds. Most sets stay in
    # one, so the second is drawn for those alone that cross.
    crossing = is_later.any(axis=1)
    if crossing.any():
        later = sets.only(crossing).elements(rounds[crossing] + 1, places[crossing])
        elements[crossing] = np.where(is_later[crossing], later, elements[crossing])
    return elements[columns < takes[:, None]]


@dataclass(frozen=True)
class _Sets:
    """m sets whose elements take turns, with one random order a round; see `in_turn`."""

    counts: Numbers
    numbers: Numbers
    longest: int
    key: tuple[int, ...]
    windows: Windows | None

    def only(self, rows: Any) -> "_Sets":
        """Return the sets in these rows, (m,) bool."""
        return replace(self, counts=self.counts[rows], numbers=self.numbers[rows])

    def elements(self, rounds: Numbers, places: Numbers) -> Numbers:
        """Return (m, k) the elements at k places of one round of each set."""
        # In a set this small, the elements that end a round and those that begin the next overlap
        # in any order. The same order in all rounds keeps `longest` in a row different.
        rounds = np.where(self.counts < 2 * self.longest, 0, rounds)
        elements = self._shuffled(rounds, places)
        # The seam: only the first `longest` places of a round depend on the one before, and only on
        # its order, not on its own seam, since with two times `longest` or more its last places are
        # none of its first. So no recursion.
        begun = (rounds > 0) & (places < self.longest).any(axis=1)
        if begun.any():
            begins = self.only(begun)._after_seam(rounds[begun])
            places = places[begun]
            arranged = np.take_along_axis(begins, np.minimum(places, self.longest - 1), axis=1)
            elements[begun] = np.where(places < self.longest, arranged, elements[begun])
        return elements

    def _shuffled(self, rounds: Numbers, places: Numbers) -> Numbers:
        if self.windows is not None:
            return self.windows.elements(int(rounds[0]), places[0], self.key)[None]
        return shuffled(self.counts, places, *self.key, of=(self.numbers, rounds))

    def _after_seam(self, rounds: Numbers) -> Numbers:
        """Return (m, longest) the first elements of a round, reordered.

        Elements that ended the round before must not come again within `longest` places, so they
        come last here, in the order in which they ended it. With `longest` 4, and of 9 elements:

            end of a round     5 2 7 1 |
            begins, shuffled           | 7 3 1 8
            begins, reordered          | 3 8 7 1    7 and 1 are four places from themselves
        """
        first = np.tile(np.arange(self.longest), (len(rounds), 1))
        begins = self._shuffled(rounds, first)
        ended = self._shuffled(rounds - 1, first + self.counts[:, None] - self.longest)
        # so that elements of two rows are never the same
        offsets = np.arange(len(rounds))[:, None] * int(self.counts.max())
        again = np.isin(begins + offsets, ended + offsets)
        arranged = np.empty_like(begins)
        is_new = np.arange(self.longest) < (~again).sum(axis=1)[:, None]
        arranged[is_new] = begins[~again]
        arranged[~is_new] = ended[np.isin(ended + offsets, begins + offsets)]
        return arranged


class Turn(NamedTuple):
    """Which elements of a set, of those that take turns, a batch takes."""

    batch: int  # number of the batch, by which what it takes of each element is drawn
    start: int  # elements that had their turn before
    takes: int  # elements that have it now
    longest: int  # elements that any batch takes


def turns(count: int, turn: Turn, *key: int, windows: Windows | None = None) -> Iterator[Numbers]:
    """Yield (turn.takes,) different elements of range(count), and as many of those that follow.

    The elements take turns as in `in_turn`. If they make less than two turns of the longest batch,
    each batch draws them anew.
    """
    _, words = round_of(count, turn, key)
    start = turn.start if words == key else 0
    while True:
        yield in_turn(
            counts=np.array([count]),
            starts=np.array([start]),
            takes=np.array([turn.takes]),
            longest=turn.longest,
            key=words,
            numbers=np.zeros(1, dtype=np.int64),
            windows=windows,
        )
        start += turn.takes


def round_of(count: int, turn: Turn, key: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the number of the round in which the batch of `turns` begins, and its key."""
    if count < 2 * turn.longest:
        return 0, (*key, turn.batch)
    return turn.start // count, key
