"""Charts as SVG text: enough for a report page that needs no network and no script."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 38
MOST_POINTS = 400
LETTER = 7.5  # about the width of one, in the picture's units

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A named line; points whose y is not finite leave a gap out."""

    name: str
    points: Sequence[Point]
    marked: bool = False  # a dot at each point, for series of few points


def plain(value: float) -> str:
    """A number as short as its size allows."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def percent(value: float) -> str:
    """A share of one in percent."""
    return f"{100 * value:.3g}%"


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: the means of equal intervals where there are more. Non-finite points are left out."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= most:
        return finite
    cuts = [round(k * len(finite) / most) for k in range(most + 1)]
    return [_mean(finite[start:end]) for start, end in pairwise(cuts)]


def _mean(points: Sequence[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `wanted` of them."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], y_label: str, y_format: Format = plain, from_zero: bool = False) -> str:
    """Lines over the training steps, with a legend where there are several.

    Args:
        series: each drawn in a colour of its own.
        y_label: what is drawn, and its unit.
        y_format: how values of the axis are written.
        from_zero: whether the axis begins at zero.
    """
    lines = [Series(one.name, thinned(one.points), one.marked) for one in series]
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="none">nothing to draw yet</p>'
    scale = _Scale(points, from_zero)
    parts = [_axes(scale, y_label, y_format)]
    for number, line in enumerate(lines):
        path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line s{number}" points="{path}"/>')
        if line.marked or len(line.points) == 1:
            parts += [
                f'<circle class="dot f{number}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="4">'
                f"<title>{escape(line.name)}, step {x:.0f}: {y_format(y)}</title></circle>"
                for x, y in line.points
            ]
    return _figure(parts, [line.name for line in lines] if len(lines) > 1 else [])


def log_chart(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Lines with a dot a point over two logarithmic axes, where a power law is straight; a legend below.

    Args:
        series: each drawn in a colour of its own; x and y are above 0.
        x_label, y_label: what the axes are, and their units.
    """
    points = [point for line in series for point in line.points]
    if not points:
        return '<p class="none">nothing to draw yet</p>'
    scale = _Scale([(math.log10(x), math.log10(y)) for x, y in points], from_zero=False)
    parts = [f"<title>{escape(y_label)} over {escape(x_label)}</title>"]
    for value in log_ticks(scale.low, scale.high):
        parts.append(_grid_line(scale.y(math.log10(value)), plain(value)))
    xs = sorted({x for x, _ in points})
    for x in xs:
        place, anchor = scale.x(math.log10(x)), "end" if x == xs[-1] and len(xs) > 1 else "middle"
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - 20}" text-anchor="{anchor}">{x:,.0f}</text>')
    parts.append(_x_label(x_label))
    for number, line in enumerate(series):
        places = [(scale.x(math.log10(x)), scale.y(math.log10(y)), x, y) for x, y in line.points]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top, _, _ in places)
        parts.append(f'<polyline class="line s{number}" points="{path}"/>')
        parts += [
            f'<circle class="dot f{number}" cx="{left:.1f}" cy="{top:.1f}" r="4">'
            f"<title>{escape(line.name)}, {x:,.0f}: {plain(y)}</title></circle>"
            for left, top, x, y in places
        ]
    return _figure(parts, [line.name for line in series])


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from 10^low to 10^high: powers of ten, or 1, 2 and 5 times them where those are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1,), (1, 2, 5)):
        values = [factor * 10.0**power for power in powers for factor in factors]
        values = [value for value in values if low <= math.log10(value) <= high]
        if len(values) >= 4:
            break
    return values


def stacked_bars(steps: Sequence[float], layers: Mapping[str, Sequence[float]], y_label: str) -> str:
    """A bar a step, made of the layers from the bottom up; many steps are averaged in intervals.

    Args:
        steps: (S,) positions.
        layers: name -> (S,) heights.
        y_label: what is drawn, and its unit.
    """
    most = 120
    heights = {name: thinned(list(zip(steps, values, strict=True)), most) for name, values in layers.items()}
    bars = len(next(iter(heights.values()), []))
    if not bars:
        return '<p class="none">nothing to draw yet</p>'
    tops = [(points[0][0], sum(p[1] for p in points)) for points in zip(*heights.values(), strict=True)]
    scale = _Scale(tops, from_zero=True)
    # The first and last bar stand half a bar within the axis.
    half = (scale.right - scale.left) / max(bars - 1, 1) / 2
    scale.left, scale.right = scale.left - half, scale.right + half
    width = (WIDTH - LEFT - RIGHT) / bars
    parts = [_axes(scale, y_label, plain)]
    for bar in range(bars):
        floor = 0.0
        for number, (name, points) in enumerate(heights.items()):
            step, height = points[bar]
            top, bottom = scale.y(floor + height), scale.y(floor)
            parts.append(
                f'<rect class="f{number}" x="{LEFT + bar * width + width * 0.1:.1f}" y="{top:.1f}" '
                f'width="{width * 0.8:.1f}" height="{max(bottom - top, 0):.1f}">'
                f"<title>step {step:.0f}, {escape(name)}: {height:.3g}</title></rect>"
            )
            floor += height
    return _figure(parts, list(heights))


def bar_chart(bars: Sequence[tuple[str, float]], x_label: str, y_label: str) -> str:
    """A bar for each name, in the order given.

    Args:
        bars: names and heights.
        x_label, y_label: what the names and heights are, and their units.
    """
    if not bars:
        return '<p class="none">nothing to draw yet</p>'
    scale = _Scale([(0, height) for _, height in bars], from_zero=True)
    width = (WIDTH - LEFT - RIGHT) / len(bars)
    parts = [f"<title>{escape(y_label)} by {escape(x_label)}</title>"]
    parts += [_grid_line(scale.y(value), f"{value:,.4g}") for value in ticks(scale.low, scale.high)]
    longest = max(len(name) for name, _ in bars)
    every = math.ceil((longest + 1) * LETTER / width)  # names that would overlap are left out
    for number, (name, height) in enumerate(bars):
        left, top = LEFT + number * width, scale.y(height)
        parts.append(
            f'<rect class="f0" x="{left + width * 0.1:.1f}" y="{top:.1f}" width="{min(width * 0.8, 60):.1f}" '
            f'height="{max(scale.y(0) - top, 0):.1f}"><title>{escape(name)}: {height:,.6g}</title></rect>'
        )
        if number % every == 0:
            middle = left + width * 0.1 + min(width * 0.8, 60) / 2
            parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{escape(name)}</text>')
    parts.append(_x_label(x_label))
    return _figure(parts, [])


class _Scale:
    """From values to places in the picture."""

    def __init__(self, points: Sequence[Point], from_zero: bool) -> None:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self.left, self.right = min(xs), max(xs)
        low, high = (0.0 if from_zero else min(ys)), max(ys)
        margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        self.low = low if from_zero else low - margin
        self.high = high + margin

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _axes(scale: _Scale, y_label: str, y_format: Format) -> str:
    parts = [f"<title>{escape(y_label)}</title>"]
    for value in ticks(scale.low, scale.high):
        parts.append(_grid_line(scale.y(value), y_format(value)))
    if scale.right > scale.left:
        for value in ticks(scale.left, scale.right):
            if value == int(value):
                x = scale.x(value)
                parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{value:.0f}</text>')
    parts.append(_x_label("step"))
    return "".join(parts)


def _grid_line(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _x_label(text: str) -> str:
    return f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(text)}</text>'


def _figure(parts: list[str], names: list[str]) -> str:
    legend = "".join(f'<span><i class="b{number}"></i>{escape(name)}</span>' for number, name in enumerate(names))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>' + (
        f'<p class="legend">{legend}</p>' if legend else ""
    )
