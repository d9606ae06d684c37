"""Charts as SVG text: enough for a report page that needs no network and no script."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 32, 50
MOST_POINTS = 400
LETTER = 10  # about the width of one, in the picture's units, where a phone shows it
COLOURS, DASHES = 9, 5  # of lines, in report.css

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


def line_chart(
    series: Sequence[Series], y_label: str, y_format: Format = plain, from_zero: bool = False, x_label: str = "step"
) -> str:
    """Lines over the training steps, or over something else in whole numbers, with a legend where there are several.

    Args:
        series: each drawn in a colour and with dashes of its own.
        y_label: what is drawn, and its unit.
        y_format: how values of the axis are written.
        from_zero: whether the axis begins at zero.
        x_label: what it is drawn over, and its unit.
    """
    lines = [Series(one.name, thinned(one.points), one.marked) for one in series]
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="none">nothing to draw yet</p>'
    scale = _Scale(points, from_zero)
    parts = [_axes(scale, x_label, y_label, y_format)]
    for number, line in enumerate(lines):
        path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="{_stroke(number)}" points="{path}"/>')
        if line.marked or len(line.points) == 1:
            parts += [
                f'<circle class="dot f{number % COLOURS}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="4">'
                f"<title>{escape(line.name)}, {escape(x_label)} {x:.0f}: {y_format(y)}</title></circle>"
                for x, y in line.points
            ]
    return _figure(parts, f"{y_label} over {x_label}", _lines_legend([line.name for line in lines]))


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
    parts = [_y_label(y_label)]
    for value in log_ticks(scale.low, scale.high):
        parts.append(_grid_line(scale.y(math.log10(value)), plain(value)))
    xs = sorted({x for x, _ in points})
    for x in xs:
        place, anchor = scale.x(math.log10(x)), "end" if x == xs[-1] and len(xs) > 1 else "middle"
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - 28}" text-anchor="{anchor}">{x:,.0f}</text>')
    parts.append(_x_label(x_label))
    for number, line in enumerate(series):
        places = [(scale.x(math.log10(x)), scale.y(math.log10(y)), x, y) for x, y in line.points]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top, _, _ in places)
        parts.append(f'<polyline class="{_stroke(number)}" points="{path}"/>')
        parts += [
            f'<circle class="dot f{number % COLOURS}" cx="{left:.1f}" cy="{top:.1f}" r="4">'
            f"<title>{escape(line.name)}, {x:,.0f}: {plain(y)}</title></circle>"
            for left, top, x, y in places
        ]
    return _figure(parts, f"{y_label} over {x_label}", _lines_legend([line.name for line in series]))


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
    parts = [_axes(scale, "step", y_label, plain)]
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
    return _figure(parts, f"{y_label} over step", _areas_legend(list(heights)))


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
    parts = [_y_label(y_label)]
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
            parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{escape(name)}</text>')
    parts.append(_x_label(x_label))
    return _figure(parts, f"{y_label} by {x_label}", "")


def stacked_rows(rows: Mapping[str, Mapping[str, float]], x_label: str) -> str:
    """A horizontal bar for each name, made of the layers from the left.

    Args:
        rows: name -> layer -> length; every row has the same layers.
        x_label: what the lengths are, and their unit.
    """
    longest = max((sum(layers.values()) for layers in rows.values()), default=0.0)
    if not longest:
        return '<p class="none">nothing to draw yet</p>'
    left, high, pitch = 8, 26, 62
    bottom = pitch * len(rows) + 8
    unit = (WIDTH - 4 * left) / longest
    places = {value: left + unit * value for value in ticks(0, longest)}
    parts = [
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{bottom}"/>'
        f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="{"middle" if value else "start"}">{plain(value)}</text>'
        for value, x in places.items()
    ]
    for number, (name, layers) in enumerate(rows.items()):
        top, start = 8 + pitch * number, 0.0
        parts.append(f'<text x="{left}" y="{top + 18}">{escape(name)}: {plain(sum(layers.values()))}</text>')
        for layer, (what, length) in enumerate(layers.items()):
            parts.append(
                f'<rect class="f{layer % COLOURS}" x="{left + unit * start:.1f}" y="{top + 24}" '
                f'width="{unit * length:.1f}" height="{high}">'
                f"<title>{escape(name)}, {escape(what)}: {plain(length)}</title></rect>"
            )
            start += length
    parts.append(f'<text x="{WIDTH / 2}" y="{bottom + 40}" text-anchor="middle">{escape(x_label)}</text>')
    legend = _areas_legend(list(next(iter(rows.values()))))
    return _figure(parts, f"{x_label} of {', '.join(rows)}", legend, bottom + 48)


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


def _axes(scale: _Scale, x_label: str, y_label: str, y_format: Format) -> str:
    parts = [_y_label(y_label)]
    for value in ticks(scale.low, scale.high):
        parts.append(_grid_line(scale.y(value), y_format(value)))
    if scale.right > scale.left:
        for value in ticks(scale.left, scale.right):
            if value == int(value):
                x = scale.x(value)
                parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{value:.0f}</text>')
    parts.append(_x_label(x_label))
    return "".join(parts)


def _grid_line(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _x_label(text: str) -> str:
    return f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(text)}</text>'


def _y_label(text: str) -> str:
    return f'<text x="6" y="18">{escape(text)}</text>'


def _stroke(number: int) -> str:
    """Classes of a line: lines are told apart without their colours."""
    return f"line s{number % COLOURS} d{number % DASHES}"


def _lines_legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    return "".join(
        f'<span><svg viewBox="0 0 34 10" aria-hidden="true"><line class="{_stroke(number)}" x2="34" y1="5" y2="5"/>'
        f"</svg>{escape(name)}</span>"
        for number, name in enumerate(names)
    )


def _areas_legend(names: Sequence[str]) -> str:
    return "".join(
        f'<span><i class="b{number % COLOURS}"></i>{escape(name)}</span>' for number, name in enumerate(names)
    )


def _figure(parts: list[str], label: str, legend: str, height: float = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
        + (f'<p class="legend">{legend}</p>' if legend else "")
    )
