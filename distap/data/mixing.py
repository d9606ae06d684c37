"""Draw batches from several data sets by their weights.

Which elements of which set a batch takes is a function of (weights, seed, step) alone, and the
shares of the sets are exact over blocks of batches. So any step can be drawn first, on any number
of ranks, as the batches of one data set.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes, MixedClasses, Samples, Sampling
from distap.data.sampling.in_turns import InTurns
from distap.data.turns import Turn
from distap.errors import DistapError
from distap.randomness import Numbers, seed_for

MIX = 26  # first word of random keys; no two uses share one
# Batches of a block at most. Shares for which more would be needed are rounded to whole elements in
# as many batches.
MOST_BATCHES = 1000
# A number, or the number of a set's images (size), or its square root (sqrt).
Weight = float | Literal["size", "sqrt"]


@dataclass(frozen=True, eq=False)  # cached by itself
class Shares:
    """How many of the `units` elements of each batch are of each of S sets.

    In a block of batches the sets have exactly the shares that their weights say, and in each batch
    the share rounded up or down. A set's remainders are spread evenly over the batches of a block,
    so shares are nearly exact after any number of batches.
    """

    weights: tuple[Fraction, ...]  # (S,), of any sum
    units: int
    first: int = 0  # step from which they hold
    taken: tuple[int, ...] = ()  # (S,) elements of each set in the batches before it; none: 0

    @cached_property
    def _block(self) -> tuple[int, Numbers]:
        """Return the number of batches in a block, and (S,) the elements of each set in it."""
        shares = [self.units * weight / sum(self.weights) for weight in self.weights]
        batches = math.lcm(*(share.denominator for share in shares))
        if batches <= MOST_BATCHES:
            return batches, np.array([int(batches * share) for share in shares])
        return MOST_BATCHES, _rounded([MOST_BATCHES * share for share in shares])

    @property
    def least(self) -> Numbers:
        """Return (S,) the fewest elements of each set in a batch."""
        batches, counts = self._block
        return counts // batches

    @property
    def most(self) -> Numbers:
        """Return (S,) the most elements of each set in a batch."""
        batches, counts = self._block
        return -(-counts // batches)

    def before(self, step: int, seed: int) -> Numbers:
        """Return (S,) the elements of each set in all batches before a step."""
        batches, counts = self._block
        block, place = divmod(step - self.first, batches)
        taken = np.array(self.taken or [0] * len(counts))
        return taken + block * counts + _elements_within(self, seed, block)[place]


@lru_cache(maxsize=8)
def _elements_within(shares: Shares, seed: int, block: int) -> Numbers:
    """Return (batches + 1, S) the elements of each set in the first batches of a block."""
    batches, counts = shares._block
    whole, remainders = np.divmod(counts, batches)
    # The remainders are dealt out like cards: set after set, one each to the batches 0, 1, 2 and so
    # on, and again from 0. So a batch gets as many as any other, and none of them twice of a set.
    # The batches come in strides in which each run of them is spread evenly.
    stride = _even_stride(batches)
    offset = seed_for(MIX, seed, shares.first, block)
    order = (offset % batches + stride * np.arange(batches)) % batches
    first_card = np.cumsum(remainders) - remainders
    takes = whole + ((order[:, None] - first_card) % batches < remainders)
    return np.concatenate([np.zeros((1, len(counts)), dtype=np.int64), np.cumsum(takes, axis=0)])


@lru_cache(maxsize=32)
def _even_stride(batches: int) -> int:
    """Return a stride whose multiples, modulo `batches`, are spread evenly from the first on.

    They are if the quotients of Euclid's algorithm are small, as of numbers in the golden ratio,
    where all are 1 (Niederreiter 1992, theorem 3.4).
    """

    def largest_quotient(stride: int) -> int:
        quotients = list[int]()
        number, divisor = batches, stride
        while divisor:
            quotients.append(number // divisor)
            number, divisor = divisor, number % divisor
        return max(quotients)

    strides = [stride for stride in range(1, batches + 1) if math.gcd(stride, batches) == 1]
    return min(strides, key=largest_quotient)


def _rounded(numbers: Sequence[Fraction]) -> Numbers:
    """Round numbers of a whole sum to whole ones, 1 at least, of the same sum."""
    counts = [max(1, int(number)) for number in numbers]
    # The largest remainders are rounded up; what 1 at least has added goes from the largest.
    order = sorted(range(len(numbers)), key=lambda place: counts[place] - numbers[place])
    excess = sum(counts) - int(sum(numbers))
    for place in order[: max(-excess, 0)]:
        counts[place] += 1
    counts[counts.index(max(counts))] -= max(excess, 0)
    return np.array(counts)


@dataclass(frozen=True, eq=False)  # cached by the plan
class Mixture:
    """A sampling of several sets: in each batch all of them (`all`), or one of them (`one`).

    The sets share out the elements of a batch, which are whole classes, or single images with
    `random`; or whole batches. The elements of each set take turns as they do without the others.
    """

    sampling: Sampling
    names: tuple[str, ...]  # of the S sets
    shares: Shares

    @property
    def size(self) -> int:
        return self.sampling.size

    @property
    def window(self) -> int | None:
        """Return the number of shards of a window of each set; None for all."""
        return getattr(self.sampling, "window", None)

    def images_before(self, step: int, seed: int) -> Numbers:
        """Return (S,) the images of each set in the batches before a step."""
        return self.shares.before(step, seed) * self.size // self.shares.units

    def check(self, data: MixedClasses) -> None:
        """Raise a DistapError, which names the set, if one cannot provide its part of a batch."""
        if getattr(self.sampling, "mix", None) == "all" and not takes_all(self.sampling):
            raise DistapError(
                "sampling.no_mix",
                f"sampling.mix is all, but {type(self.sampling).__name__} draws whole batches by"
                " itself: set it to one",
            )
        sampling = self.sampling
        if takes_all(sampling) and sampling.follow_loss is not None and not sampling.may_vary:
            raise DistapError(
                "sampling.unequal_parts",
                "sampling.follow_loss changes the parts of the sets, but this sampling takes as"
                " many of a set in each batch: leave it out, or set sampling.mix to one",
            )
        for number, name in enumerate(self.names):
            units = range(int(self.shares.least[number]), int(self.shares.most[number]) + 1)
            with naming_set(name):
                self._require_enough(data.sets[number], units[-1])
                for of_set in self._of_set(units):
                    of_set.check(data.sets[number])

    def _require_enough(self, classes: Classes, units: int) -> None:
        """Raise a DistapError if a set has fewer elements than a batch takes of it."""
        sampling = self.sampling
        if not takes_all(sampling) or units <= sampling.most_units(classes):
            return
        available = sampling.most_units(classes)
        raise DistapError(
            "sampling.set_too_small",
            f"its weight gives it {units} of the {sampling.units} of sampling.{sampling.unit}, but"
            f" it has only {available}: set sampling.{sampling.unit} to"
            f" {available * sampling.units // units} or less, or its weight lower",
        )

    def _of_set(self, units: range) -> list[Sampling]:
        """Return the samplings of the parts of a set, of so many elements of a batch."""
        sampling = self.sampling
        if not takes_all(sampling):
            return [sampling]
        if len(units) > 1 and not sampling.may_vary:
            raise DistapError(
                "sampling.unequal_parts",
                f"its weight gives it {units[0]} or {units[-1]} of the {sampling.units} of"
                f" sampling.{sampling.unit}, but this sampling takes as many in each batch: choose"
                " weights that share out whole numbers, or sampling.mix: one",
            )
        return [sampling.of_units(number) for number in units if number]

    def batch(self, data: MixedClasses, seed: int, step: int) -> Samples:
        """Return (B,) sample numbers, set after set."""
        of_sets = list[Samples]()
        for classes, first, turn in zip(
            data.sets, data.first.tolist(), self._turns(seed, step), strict=False
        ):
            if not turn.takes:
                continue
            if takes_all(self.sampling):
                samples = self.sampling.of_units(turn.longest).part(classes, seed, turn)
            else:
                samples = self.sampling.batch(classes, seed, turn.start)
            of_sets.append(samples + first)
        return np.concatenate(of_sets)

    def spread(self, data: MixedClasses, seed: int, step: int) -> NDArray[np.float64]:
        """Return `Plan.spread`: that of each set, so that each rank takes a part of each set."""
        if not isinstance(self.sampling, InTurns):
            return data.spread
        spread = list[NDArray[np.float64]]()
        for classes, turn in zip(data.sets, self._turns(seed, step), strict=True):
            if not takes_all(self.sampling):
                turn = self.sampling.turn(turn.start)
            spread.append(self.sampling.spread_at(classes, seed, turn))
        return np.concatenate(spread)

    def _turns(self, seed: int, step: int) -> list[Turn]:
        """Return which elements a step takes of each set, or which of its whole batches."""
        before = self.shares.before(step, seed)
        takes = self.shares.before(step + 1, seed) - before
        columns = (before.tolist(), takes.tolist(), self.shares.most.tolist())
        return [Turn(step, *numbers) for numbers in zip(*columns, strict=True)]


@contextmanager
def naming_set(name: str) -> Iterator[None]:
    """Say in an error of the block which set of data.train it is about."""
    try:
        yield
    except DistapError as error:
        raise type(error)(error.code, f"data.train.{name}: {error}") from error


def takes_all(sampling: Sampling) -> TypeGuard[InTurns]:
    """Return whether each batch holds all sets.

    A sampling from elsewhere, or one that draws batches of its own, draws those of one set.
    """
    if not isinstance(sampling, InTurns) or type(sampling).batch is not InTurns.batch:
        return False
    return sampling.mix != "one"


def numbers_of(weights: Mapping[str, Weight], images: Mapping[str, int]) -> dict[str, Fraction]:
    """Return the weight of each set as a number, given the numbers of their images."""
    numbers = dict[str, float]()
    for name, weight in weights.items():
        of_images = {"size": images[name], "sqrt": math.sqrt(images[name])}
        numbers[name] = of_images[weight] if isinstance(weight, str) else weight
    return {name: Fraction(str(number)) for name, number in numbers.items()}


def mixed(
    sampling: Sampling, weights: Mapping[str, Fraction], first: int = 0, taken: Sequence[int] = ()
) -> Mixture:
    """Return a sampling of several sets by their weights, which hold from step `first` on."""
    units = sampling.units if takes_all(sampling) else 1
    return Mixture(
        sampling, tuple(weights), Shares(tuple(weights.values()), units, first, tuple(taken))
    )
