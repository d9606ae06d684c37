"""Contact sheets: queries with what was retrieved for them, right and wrong framed."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from distap.pages.markup import note, picture


@dataclass(frozen=True)
class Picture:
    """An image of the data set: its JPEG thumbnail, or none where it could not be read."""

    key: str
    label: str  # name of its class
    jpeg: bytes | None


@dataclass(frozen=True)
class Hit:
    """One retrieved image, and whether it is of the query's class."""

    picture: Picture
    right: bool


@dataclass(frozen=True)
class Answer:
    """What one network retrieved for a query, best first."""

    name: str  # of the network, such as "before"
    average_precision: float
    first_positive: int  # rank from 1 of the best hit that is right
    hits: list[Hit]


@dataclass(frozen=True)
class Example:
    """A query and its answers."""

    query: Picture
    answers: list[Answer]


@dataclass(frozen=True)
class Sheet:
    """Queries that were chosen for a reason."""

    title: str
    about: str
    examples: list[Example]


@dataclass(frozen=True)
class Confusion:
    """Queries of one class whose nearest image is of another, with one of them for an example."""

    query: Picture
    found: Picture
    counts: dict[str, int]  # by each network
    queries: int  # of the class


def sheet(of: Sheet) -> str:
    """A section of the page."""
    if not of.examples:
        return ""
    return f"<h2>{escape(of.title)}</h2>\n{note(of.about)}" + "".join(_example(example) for example in of.examples)


def confusions(pairs: Sequence[Confusion], name: str) -> str:
    """A section on the classes that are taken for each other.

    Args:
        pairs: most frequent first.
        name: of the network by which they were chosen.
    """
    if not pairs:
        return ""
    about = f"Queries whose nearest image is of another class, counted by the two classes; most frequent: {name}."
    return (
        f'<h2>Most confused classes</h2>\n{note(about)}<div class="pairs">'
        f"{''.join(_confusion(pair) for pair in pairs)}</div>\n"
    )


def _confusion(pair: Confusion) -> str:
    counts = ", ".join(f"{escape(name)} {count}" for name, count in pair.counts.items())
    query = f'<div class="hit plain">{_picture(pair.query, "query")}</div>'
    return (
        f'<figure class="pair"><div class="hits two"><div>{query}</div>{_hit(Hit(pair.found, False))}</div>'
        f"<figcaption><b>{escape(pair.query.label)}</b> taken for "
        f"<b>{escape(pair.found.label)}</b>: {counts} of {pair.queries} queries</figcaption></figure>"
    )


def _example(example: Example) -> str:
    return (
        f'<div class="example"><div class="query">{_picture(example.query, "query")}'
        f"<h3>{escape(example.query.label)}</h3></div>"
        f"<div>{''.join(_answer(answer) for answer in example.answers)}</div></div>\n"
    )


def _answer(answer: Answer) -> str:
    right = sum(hit.right for hit in answer.hits)
    told = (
        f"<b>{escape(answer.name)}</b>: {right} of {len(answer.hits)} right, AP {100 * answer.average_precision:.1f}%"
        f", first right at rank {answer.first_positive:,}"
    )
    return (
        f'<div class="row"><p class="note">{told}</p>'
        f'<div class="hits">{"".join(_hit(hit) for hit in answer.hits)}</div></div>'
    )


def _hit(hit: Hit) -> str:
    kind, mark = ("right", "✓") if hit.right else ("wrong", "✗")
    shown = f'<div class="hit {kind}">{_picture(hit.picture, kind)}<span aria-hidden="true">{mark}</span></div>'
    return f"<div>{shown}{'' if hit.right else _class_of(hit.picture)}</div>"


def _class_of(of: Picture) -> str:
    return f'<small title="{escape(of.label)}">{escape(of.label)}</small>'


def _picture(of: Picture, role: str) -> str:
    return picture(of.jpeg, f"{role}: {of.label}, {of.key}")
