"""Count the images before each positive by a smooth step, and differentiate the counts.

With s_j the similarities of a row and p_k those of its positives, a step h says how much image j counts as before k:

    count of k = sum over j of h(s_j - p_k)          slope of j = sum over k of (derivative by count k) h'(s_j - p_k)

Both are sums over (j, k) for each row, r N P terms of which none is kept: a compiled function goes over all positives
of a row while that row's similarities are in the cache.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import softplus

from distap.ranking import compiling

# A step takes differences t of similarities, their sigmoid of temperature tau, tau, and its own numbers. It returns
# its height and its slope at each t.
Step = Callable[..., tuple[Tensor, Tensor]]
# Terms of one call. Uncompiled they are all in memory at once; so they are if a compiler turns out to be missing.
MOST_TERMS, MOST_TERMS_COMPILED = 2**22, 2**25
LOG2_E = math.log2(math.e)
# From so many positives on they are sorted, and of so many neighbours the sigmoids come from quotients.
NEIGHBOURS = 64
MOST_POWER = 90  # of 2, between a positive and the middle of its neighbours; float32 ends at 126


def tie_width(similarities: Tensor) -> float:
    """Return the difference up to which rounding may have separated two equal similarities."""
    return 16 * torch.finfo(similarities.dtype).eps


def sigmoid_step(t: Tensor, sigmoid: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return the sigmoid (Brown et al. 2020, eq. 5)."""
    return sigmoid, sigmoid * (1 - sigmoid) / tau


def bounding_step(
    t: Tensor, sigmoid: Tensor, tau: float, rho: float, delta: float, offset: float, start: float
) -> tuple[Tensor, Tensor]:
    """Return SupAP's step for negatives (Ramzi et al. 2021, eq. 5)."""
    is_far = t > delta
    raised = torch.where(is_far, rho * t + offset, sigmoid + start * (t > tie_width(t)))
    return raised, torch.where(is_far, rho, sigmoid * (1 - sigmoid) / tau)


def hinge_step(t: Tensor, sigmoid: Tensor, tau: float, margin: float) -> tuple[Tensor, Tensor]:
    """Return by how much differences exceed -margin, and whether they do."""
    height = t + margin
    return height.clamp(min=0), (height > 0).to(t.dtype)


def softplus_step(t: Tensor, sigmoid: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return the soft margin ln(1 + e^t) and its derivative, for a tau of 1."""
    return softplus(t), sigmoid


class StepSums:
    """Sums of a smooth step function over images, compiled if the batch is large enough.

    Args:
        numbers: tau, and the step's further parameters.
        pairs: number of pairs of the whole batch.
        positives: number of positives of a query.
    """

    def __init__(self, step: Step, numbers: tuple[float, ...], pairs: int, positives: int) -> None:
        self._numbers, self._compiles = numbers, pairs * max(1, positives // 8) >= compiling.PAYS_FROM_PAIRS
        self._functions = [compiling.compiled(one) if self._compiles else one for one in _sums(step)]

    def counts(
        self, similarities: Float[Tensor, "r N"], positives: Float[Tensor, "r P"]
    ) -> tuple[Float[Tensor, "r P"], Float[Tensor, "r P"]]:
        """Return the smooth count of images before each positive, and how fast it falls as the positive rises."""
        counts, falls = torch.empty_like(positives), torch.empty_like(positives)
        for rows, columns, powers in self._parts(similarities, positives):
            own, function = positives[rows].gather(1, columns), self._functions[0 if powers is None else 1]
            arguments = (similarities[rows], own) if powers is None else (similarities[rows], own, *powers)
            for total, part in zip((counts, falls), function(*arguments, *self._numbers), strict=True):
                total[rows] = total[rows].scatter(1, columns, part)
        return counts, falls

    def slopes(
        self, similarities: Float[Tensor, "r N"], positives: Float[Tensor, "r P"], by_count: Float[Tensor, "r P"]
    ) -> Float[Tensor, "r N"]:
        """Turn derivatives of the loss by each count into derivatives by each similarity."""
        total = torch.zeros_like(similarities)
        for rows, columns, powers in self._parts(similarities, positives):
            # (P, r): with rows inside, the generated code goes along the gallery in vectors.
            own, by_own = (one[rows].gather(1, columns).t().contiguous() for one in (positives, by_count))
            function = self._functions[2 if powers is None else 3]
            more = () if powers is None else (powers[0], powers[1].t().contiguous())
            total[rows] += function(similarities[rows], own, by_own, *more, *self._numbers)
        return total

    def _parts(
        self, similarities: Float[Tensor, "r N"], positives: Float[Tensor, "r P"]
    ) -> Iterator[tuple[slice, Int64[Tensor, "r p"], tuple[Tensor, Tensor] | None]]:
        """Yield rows, columns of positives, and 2^(s log2(e) / tau) of similarities and positives, for large P."""
        (r, n), count = similarities.shape, positives.shape[1]
        many = self._compiles and count >= NEIGHBOURS
        terms = MOST_TERMS_COMPILED if self._compiles else MOST_TERMS
        order = positives.argsort(dim=1) if many else torch.arange(count, device=positives.device).expand(r, count)
        height = max(1, terms // (max(1, n) * NEIGHBOURS)) if many else r
        width = NEIGHBOURS if many else max(1, terms // max(1, similarities.numel()))
        scale = LOG2_E / self._numbers[0]
        for start in range(0, r, height):
            rows = slice(start, start + height)
            for columns in order[rows].split(width, dim=1):
                own = positives[rows].gather(1, columns)
                middle, powers = (own[:, :1] + own[:, -1:]) / 2, None
                # sigmoid((s - p) / tau) = 2^a / (2^a + 2^b) for powers a and b of s and p: one division a term, and
                # an exponential only for each image and each positive. Neighbours do not overflow.
                if many and float((own - middle).abs().max()) * scale < MOST_POWER:
                    above = ((similarities[rows] - middle) * scale).clamp(max=126)
                    powers = above.exp2(), ((own - middle) * scale).exp2()
                yield rows, columns, powers


@cache
def _sums(step: Step) -> list[Callable[..., Any]]:
    """Return counts and slopes, each by exponentials and by powers that are given."""

    def counts(s: Tensor, p: Tensor, *numbers: float) -> tuple[Tensor, Tensor]:
        t = s[:, None] - p[:, :, None]
        height, slope = step(t, _sigmoid(t, numbers[0]), *numbers)
        return height.sum(-1), slope.sum(-1)

    def counts_of_powers(s: Tensor, p: Tensor, of_s: Tensor, of_p: Tensor, *numbers: float) -> tuple[Tensor, Tensor]:
        quotient = of_s[:, None] / (of_s[:, None] + of_p[:, :, None])
        height, slope = step(s[:, None] - p[:, :, None], quotient, *numbers)
        return height.sum(-1), slope.sum(-1)

    def slopes(s: Tensor, p: Tensor, by_count: Tensor, *numbers: float) -> Tensor:
        t = s[None] - p[:, :, None]
        _, slope = step(t, _sigmoid(t, numbers[0]), *numbers)
        return (by_count[:, :, None] * slope).sum(0)

    def slopes_of_powers(
        s: Tensor, p: Tensor, by_count: Tensor, of_s: Tensor, of_p: Tensor, *numbers: float
    ) -> Tensor:
        quotient = of_s[None] / (of_s[None] + of_p[:, :, None])
        _, slope = step(s[None] - p[:, :, None], quotient, *numbers)
        return (by_count[:, :, None] * slope).sum(0)

    found: list[Callable[..., Any]] = [counts, counts_of_powers, slopes, slopes_of_powers]
    for one in found:
        one.__name__ = f"{step.__name__}_{one.__name__}"
    return found


def _sigmoid(t: Tensor, tau: float) -> Tensor:
    # By exp2, which torch.compile leaves inside the sums: a sigmoid used twice would be written to memory.
    return 1 / (1 + torch.exp2(t * (-LOG2_E / tau)))
