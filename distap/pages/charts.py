"""Choose the axes of curves; the macro `chart` of templates/macros.html draws them as SVG."""

import math
from collections.abc import Sequence

import numpy as np

HEIGHT = 300  # of the SVG, which is 520 wide, in its own units; the browser scales it
# Distances of the axes' ends from the edges at the left and at the top, and of the x axis from the
# bottom.
LEFT = 70
END = 500
TOP = 32
BOTTOM = 50
MOST_POINTS = 400

Point = tuple[float, float]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return about `wanted` multiples of 1, 2 or 5 times a power of ten between `low` and
    `high`."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


class Chart:
    """A line over the steps through points with a finite y (there may be none), and axes that span
    them.
    """

    def __init__(
        self,
        points: Sequence[tuple[float, float | None]],
        y_label: str,
        in_percent: bool = False,
        from_zero: bool = False,
        marked: bool = False,
    ) -> None:
        self.points = thinned(points)
        self.y_label = y_label
        self._in_percent = in_percent
        self.marked = marked  # draw a dot at each point
        xs, ys = zip(*self.points or [(0.0, 0.0)], strict=True)
        low = 0.0 if from_zero else min(ys)
        high = max(ys)
        self.is_zero = min(ys) == high == 0  # an axis would mean nothing
        margin = 0.06 * (high - low) or abs(high) * 0.1
        self._left = min(xs)
        self._right = max(xs)
        self._low = low if from_zero else low - margin
        self._high = high + margin
        if in_percent and high <= 1:
            self._high = min(self._high, 1.0)

    def x(self, value: float) -> float:
        """Return the distance of an x value from the left edge."""
        width = self._right - self._left
        return LEFT + ((value - self._left) / width if width else 0.5) * (END - LEFT)

    def y(self, value: float) -> float:
        """Return the distance of a y value from the top edge."""
        return (
            HEIGHT
            - BOTTOM
            - (value - self._low) / (self._high - self._low) * (HEIGHT - TOP - BOTTOM)
        )

    def x_ticks(self) -> list[tuple[float, str]]:
        """Return place and text of each mark on the x axis, whole numbers only."""
        values = ticks(self._left, self._right) if self._right > self._left else []
        return [(self.x(value), f"{value:.0f}") for value in values if value == int(value)]

    def text(self, value: float, digits: int = 4) -> str:
        return f"{100 * value:.{digits}g}%" if self._in_percent else f"{value:.{digits}g}"

    def y_ticks(self) -> list[tuple[float, str]]:
        """Return place and text of each mark on the y axis, with enough digits to differ."""
        values = ticks(self._low, self._high)
        of_digits = ([self.text(value, digits) for value in values] for digits in range(4, 18))
        texts = next(texts for texts in of_digits if len(set(texts)) == len(texts))
        return [(self.y(value), text) for value, text in zip(values, texts, strict=True)]

    def path(self) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in self.points)


def thinned(points: Sequence[tuple[float, float | None]], count: int = MOST_POINTS) -> list[Point]:
    """Return the finite points, or the means of `count` equal intervals if they are more."""
    finite = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if len(finite) <= count:
        return finite
    means = [points.mean(0).tolist() for points in np.array_split(np.array(finite), count)]
    return [(x, y) for x, y in means]
