"""Count the images before each positive by a smooth step, and differentiate the counts.

With s_j the similarities of a row and p_k those of its positives, a step h says how much image j
counts as before k:

    count of k = sum over j of h(s_j - p_k)          slope of j = sum over k of (derivative by count
    k) h'(s_j - p_k)

Both are sums over (j, k) for each row, r N P terms of which none is kept: a compiled function goes
over all positives of a row while that row's similarities are in the cache. Of a smooth step, the
sums of many positives are interpolated from those at fewer points.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.nn import functional

from distap.ranking import compiling
from distap.ranking.gathered import tie_width
from distap.ranking.losses.base import PerPositive, Scores

# A step takes differences t of similarities, their sigmoid of temperature tau, tau, and its own
# numbers. It returns its height and its slope at each t.
Step = Callable[..., tuple[Tensor, Tensor]]
# Terms of one call. Uncompiled they are all in memory at once; so they are if a compiler turns out
# to be missing.
MOST_TERMS = 2**22
MOST_TERMS_COMPILED = 2**25
LOG2_E = math.log2(math.e)
# Points of an interval of interpolation, and its width in temperatures.
POINTS = {torch.float32: 16, torch.float64: 32}
WIDTH = 4


def sigmoid_step(t: Tensor, sigmoid: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return the sigmoid (Brown et al. 2020, eq. 5)."""
    return sigmoid, sigmoid * (1 - sigmoid) / tau


def bounding_step(
    t: Tensor, sigmoid: Tensor, tau: float, rho: float, delta: float, offset: float, start: float
) -> tuple[Tensor, Tensor]:
    """Return SupAP's step for negatives (Ramzi et al. 2021, eq. 5)."""
    is_far = t > delta
    raised = torch.where(is_far, rho * t + offset, sigmoid + start * (t > tie_width(t.dtype)))
    return raised, torch.where(is_far, rho, sigmoid * (1 - sigmoid) / tau)


def hinge_step(t: Tensor, sigmoid: Tensor, tau: float, margin: float) -> tuple[Tensor, Tensor]:
    """Return by how much differences exceed -margin, and whether they do."""
    height = t + margin
    return height.clamp(min=0), (height > tie_width(t.dtype)).to(t.dtype)


def softplus(values: Tensor) -> Tensor:
    """Return ln(1 + e^x) to the last bit; torch's own threshold of 20 is 2e-9 off."""
    return functional.softplus(values, threshold=40.0)


def softplus_step(t: Tensor, sigmoid: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return the soft margin ln(1 + e^t) and its derivative, for a tau of 1."""
    return softplus(t), sigmoid


SMOOTH = (sigmoid_step, softplus_step)


def step_sums(
    step: Step,
    numbers: tuple[float, ...],
    pairs: int,
    similarities: Scores,
    positives: PerPositive,
) -> "Sums":
    """Return the sums of a step, interpolated where that is exact and halves the terms at least."""
    sums = partial(StepSums, step, numbers, pairs)
    points = POINTS[positives.dtype]
    count = positives.shape[1]
    if step in SMOOTH and count >= 2 * points:
        # An image of -inf is never counted; the interpolation needs a number in its place.
        is_counted = ~similarities.isinf()
        images = torch.where(is_counted, similarities, positives[:, :1])
        between = Interpolation(points, WIDTH * numbers[0], images, positives)
        if count >= 2 * between.points.shape[1]:
            return InterpolatedSums(
                of_images=sums(similarities, between.points),
                of_points=sums(between.points, positives),
                between=between,
                is_counted=is_counted,
            )
    return sums(similarities, positives)


class StepSums:
    """Sums of a smooth step function over images, compiled if the batch is large enough.

    Args:
        numbers: tau, and the step's further parameters.
        pairs: number of pairs of the whole batch.
        similarities: (r, N) of the images that are counted; -inf is never counted.
        positives: (r, P) of those before which they are counted.
    """

    def __init__(
        self,
        step: Step,
        numbers: tuple[float, ...],
        pairs: int,
        similarities: Tensor,
        positives: Tensor,
    ) -> None:
        # Each positive takes a pass over all similarities, so many positives make compiling pay at
        # fewer pairs.
        compiles = pairs * max(1, positives.shape[1] // 8) >= compiling.PAYS_FROM_PAIRS
        self._numbers = numbers
        self._most_terms = MOST_TERMS_COMPILED if compiles else MOST_TERMS
        first, last = positives.aminmax(dim=1, keepdim=True)
        centre = ((first + last) / 2).double()
        factor = LOG2_E / numbers[0]
        # e^(-t / tau) is a power of two of the image times one of the positive: a multiplication
        # for each pair, in a third of the time of a power. Images whose own power overflows are so
        # far behind or before all positives that they count 0 or 1. A GPU has time for a power for
        # each pair. With 3/4 of the exponents for positives, 2^-96 to 2^96 in float32, an image
        # whose power overflows, beyond 2^128, has a product of 2^32 or more with each: its sigmoid
        # is below what float32 can add to 1.
        exponents = 0.75 * math.log2(torch.finfo(positives.dtype).max)
        spread = float((last - first).max()) * factor
        by_powers = positives.device.type == "cpu" and spread <= 2 * exponents
        functions: list[Callable[..., Any]] = [*_sums(step, by_powers), powers_of_two]
        if compiles:
            functions = [*map(compiling.compiled, functions)]
        self._counts, self._slopes, powers = functions
        # Similarities, and their powers.
        self._images = (similarities, similarities)
        self._positives = (positives, positives)
        if by_powers:
            self._images = similarities, powers(similarities, centre, -factor)
            self._positives = positives, powers(positives, centre, factor)

    def counts(self) -> tuple[PerPositive, PerPositive]:
        """Return the count of images before each positive, and its fall as the positive rises."""
        counts = list[Tensor]()
        falls = list[Tensor]()
        for positives in self._cuts(*self._positives):
            count, fall = self._counts(*self._images, *positives, *self._numbers)
            counts.append(count)
            falls.append(fall)
        return torch.cat(counts, dim=1), torch.cat(falls, dim=1)

    def slopes(self, by_count: PerPositive) -> Scores:
        """Return the derivative of the loss by each similarity, given that by each count."""
        # (P, r): with rows inside, the generated code goes along the gallery in vectors.
        slopes = (
            self._slopes(
                *self._images, *(table.t().contiguous() for table in tables), *self._numbers
            )
            for tables in self._cuts(*self._positives, by_count)
        )
        return reduce(torch.add, slopes)

    def _cuts(self, *tables: PerPositive) -> Iterator[tuple[Tensor, ...]]:
        """Cut tables along P, so that a cut's terms, r N for each positive, fit into one call."""
        width = max(1, self._most_terms // max(1, self._images[0].numel()))
        return zip(*(table.split(width, dim=1) for table in tables), strict=True)


class Interpolation:
    """Polynomials through Chebyshev points, on those intervals in which images or positives lie.

    Args:
        points: number of points of each interval, and of coefficients of its polynomial.
        width: of an interval.
    """

    def __init__(self, points: int, width: float, images: Scores, positives: PerPositive) -> None:
        tables = images, positives
        lowest = min(float(table.amin()) for table in tables)
        places = [(table - lowest) / width for table in tables]
        count = 1 + int(max(float(place.amax()) for place in places))
        is_taken = torch.zeros(count, dtype=torch.bool, device=images.device)
        for place in places:
            is_taken[place.long()] = True
        # Rows share intervals, of which few are taken: most similarities of a row are alike but for
        # its own, 1.
        number = is_taken.cumsum(0) - 1
        angles = (
            torch.arange(0.5, points, dtype=torch.float64, device=images.device) * math.pi / points
        )
        of_intervals = lowest + width * (is_taken.nonzero() + (angles.cos() + 1) / 2)
        self.points = of_intervals.flatten().to(images.dtype).expand(len(images), -1).contiguous()
        # The interval of each image and positive, and its place there, from -1 to 1.
        self.images, self.positives = (
            (number[place.long()], 2 * (place - place.long()) - 1) for place in places
        )
        basis = torch.cos(torch.arange(points, device=images.device)[:, None] * angles) * 2 / points
        basis[0] /= 2
        self._basis = basis.to(images.dtype)

    def __call__(
        self,
        values: Float[Tensor, "r points"],
        interval: Int64[Tensor, "r M"],
        x: Float[Tensor, "r M"],
    ) -> Float[Tensor, "r M"]:
        """Return, at `images` or at `positives`, what has these values at `points`."""
        coefficients = (values.view(len(values), -1, len(self._basis)) @ self._basis.t()).unbind(2)
        last = before = torch.zeros_like(x)
        for coefficient in coefficients[:0:-1]:  # Clenshaw's recurrence
            last, before = coefficient.gather(1, interval) + 2 * x * last - before, last
        return coefficients[0].gather(1, interval) + x * last - before


@dataclass(frozen=True)
class InterpolatedSums:
    """The sums of `StepSums` for many positives: those at fewer points, and polynomials between.

    A step of temperature tau is analytic up to pi tau off the real axis, and so are its sums. On
    intervals of 4 tau, polynomials of n coefficients are therefore off by some 3.4^-n of the sum
    (Trefethen, Approximation Theory and Approximation Practice, theorem 8.2): less than rounding,
    by the numbers in POINTS.
    """

    of_images: StepSums  # of all images before each point
    of_points: StepSums  # of each point before all positives
    between: Interpolation
    is_counted: Bool[Tensor, "r N"]  # which images are not -inf

    def counts(self) -> tuple[PerPositive, PerPositive]:
        counts, falls = self.of_images.counts()
        positives = self.between.positives
        return self.between(counts, *positives), self.between(falls, *positives)

    def slopes(self, by_count: PerPositive) -> Scores:
        return self.between(self.of_points.slopes(by_count), *self.between.images) * self.is_counted


Sums = StepSums | InterpolatedSums


def powers_of_two(numbers: Tensor, centre: Float64[Tensor, "r 1"], factor: float) -> Tensor:
    """Return 2 ** ((numbers - centre) * factor), as exact as the dtype of the numbers."""
    return torch.exp2((numbers.double() - centre) * factor).to(numbers.dtype)


@cache
def _sums(step: Step, by_powers: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return functions that sum heights and slopes over images, and slopes over positives.

    They take images s with their powers, then positives p with theirs; without `by_powers` these
    may be any tensors.
    """

    def of_pairs(
        t: Tensor, powers: Tensor, of_positives: Tensor, *numbers: float
    ) -> tuple[Tensor, Tensor]:
        # By exp2, which torch.compile leaves inside the sums: a sigmoid used twice would be written
        # to memory.
        ratio = powers * of_positives if by_powers else torch.exp2(t * (-LOG2_E / numbers[0]))
        return step(t, 1 / (1 + ratio), *numbers)

    def counts(
        s: Tensor, powers: Tensor, p: Tensor, of_positives: Tensor, *numbers: float
    ) -> tuple[Tensor, Tensor]:
        height, slope = of_pairs(
            s[:, None] - p[:, :, None], powers[:, None], of_positives[:, :, None], *numbers
        )
        return height.sum(-1), slope.sum(-1)

    def slopes(
        s: Tensor,
        powers: Tensor,
        p: Tensor,
        of_positives: Tensor,
        by_count: Tensor,
        *numbers: float,
    ) -> Tensor:
        _, slope = of_pairs(
            s[None] - p[:, :, None], powers[None], of_positives[:, :, None], *numbers
        )
        return (by_count[:, :, None] * slope).sum(0)

    for function in (counts, slopes):
        function.__name__ = f"{step.__name__}_{function.__name__}"
    return counts, slopes
