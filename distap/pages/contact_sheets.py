"""Choose the queries that a report shows as pictures, with their retrieved images."""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.evaluation.saved import Retrieved
from distap.randomness import permutation

RANDOM, HARDEST, HITS = 10, 8, 10
FRAMES = "Best first: images of the query's class have a green frame (✓), others a dashed red one (✗)."


class Picture(NamedTuple):
    key: str
    label: str  # name of its class
    jpeg: bytes | None  # its thumbnail; None if it cannot be read
    right: bool = False  # of the query's class


class Answer(NamedTuple):
    name: str  # of a network, such as "before"
    average_precision: float
    first_positive: int  # rank, from 1, of the first hit of the query's class
    hits: list[Picture]  # best first


class Example(NamedTuple):
    query: Picture
    answers: list[Answer]  # of each network


class Sheet(NamedTuple):
    title: str
    about: str  # why these queries were chosen
    examples: list[Example]


class ContactSheets:
    """Choose pictures from the hits of several networks on one data set; the last network decides what is hard."""

    def __init__(self, retrieved: dict[str, Retrieved], thumbnail: Callable[[int], bytes | None]) -> None:
        self._retrieved, self._thumbnail = retrieved, thumbnail
        self._last = next(reversed(retrieved))
        queries = (each.sample[each.first_positive > 0] for each in retrieved.values())
        self._queries = reduce(np.intersect1d, queries)  # common to all, by their numbers in the data set

    def sheets(self) -> list[Sheet]:
        """Choose queries at random, and those with the lowest AP."""
        last = self._retrieved[self._last]
        precision = last.average_precision[np.searchsorted(last.sample, self._queries)]
        drawn, hardest = permutation(len(precision), 0)[:RANDOM], np.argsort(precision, kind="stable")[:HARDEST]
        lowest = f"The queries with the lowest AP ({self._last}). {FRAMES}"
        sheets = [
            self._sheet("Neighbours of some queries", f"Drawn at random, not selected. {FRAMES}", drawn),
            self._sheet("Hardest queries", lowest, hardest),
        ]
        return [sheet for sheet in sheets if sheet.examples]

    def _sheet(self, title: str, about: str, chosen: NDArray[np.int64]) -> Sheet:
        return Sheet(title, about, [self._example(sample) for sample in self._queries[chosen].tolist()])

    def _example(self, sample: int) -> Example:
        answers = []
        for name, retrieved in self._retrieved.items():
            row = int(np.searchsorted(retrieved.sample, sample))
            query = self._picture(retrieved, row)
            hits = [
                self._picture(retrieved, hit)._replace(right=bool(retrieved.label[hit] == retrieved.label[row]))
                for hit in retrieved.neighbours[row, :HITS].tolist()
            ]
            figures = float(retrieved.average_precision[row]), int(retrieved.first_positive[row])
            answers.append(Answer(name, *figures, hits))
        return Example(query, answers)

    def _picture(self, retrieved: Retrieved, row: int) -> Picture:
        jpeg = self._thumbnail(int(retrieved.sample[row]))
        return Picture(str(retrieved.key[row]), retrieved.class_of(row), jpeg)
