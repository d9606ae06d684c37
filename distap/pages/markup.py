"""Pieces of pages as HTML text; what they are given is plain text unless it is said to be HTML."""

import base64
from collections.abc import Sequence
from html import escape


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table whose rows begin with their name; wide ones scroll by themselves.

    Args:
        heading: of each column.
        rows: HTML of the cells.
        caption: what the table tells, where no heading says it.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in heading)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    # Whoever has no pointer scrolls what has the focus.
    return (
        f'<div class="wide" tabindex="0"><table>{named}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>\n"
    )


def definitions(facts: dict[str, str]) -> str:
    """Names and what they are, in columns as there is room."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{items}</dl>\n"


def note(text: str) -> str:
    """A remark."""
    return f'<p class="note">{escape(text)}</p>\n'


def figures(charts: Sequence[tuple[str, str]]) -> str:
    """Charts or tables with their titles, side by side where there is room; the second of each is HTML."""
    return f'<div class="charts">{"".join(_figure(title, chart) for title, chart in charts)}</div>\n'


def picture(jpeg: bytes | None, text: str) -> str:
    """An image within the page, or its place where it could not be had; `text` says what it is of."""
    if jpeg is None:
        return f'<div class="lost" role="img" aria-label="{escape(text)}, not readable">not readable</div>'
    data = base64.b64encode(jpeg).decode()
    return f'<img src="data:image/jpeg;base64,{data}" alt="{escape(text)}" title="{escape(text)}" loading="lazy">'


def percent_cell(value: float | None) -> str:
    """A share of one in percent, for a table."""
    return "–" if value is None or value != value else f"{100 * value:.1f}"


def gain_cell(before: float | None, after: float | None) -> str:
    """What a share of one gained, in points."""
    if before is None or after is None:
        return "–"
    return f'<span class="gain">{100 * (after - before):+.1f}</span>'


def _figure(title: str, chart: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{chart}</figure>"
