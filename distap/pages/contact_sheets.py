"""Choose the queries that a report shows as pictures, with their retrieved images."""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np

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


class Sheet(NamedTuple):
    title: str
    about: str  # why these queries were chosen
    examples: list[tuple[Picture, list[Answer]]]  # of each query


def sheets_of(retrieved: dict[str, Retrieved], thumbnail: Callable[[int], bytes | None]) -> list[Sheet]:
    """Choose queries that several networks answered on one data set: some at random, and those with the lowest AP.

    The last network decides what is hard.
    """
    name, last = list(retrieved.items())[-1]
    answered = (each.sample[np.flatnonzero(each.first_positive)] for each in retrieved.values())
    queries = reduce(np.intersect1d, answered)  # common to all, by their numbers in the data set
    precision = last.average_precision[np.searchsorted(last.sample, queries)]

    def picture(of: Retrieved, row: int) -> Picture:
        return Picture(str(of.key[row]), str(of.class_name[row]), thumbnail(int(of.sample[row])))

    def example(sample: int) -> tuple[Picture, list[Answer]]:
        answers = []
        for network, of in retrieved.items():
            row = int(np.searchsorted(of.sample, sample))
            query = picture(of, row)
            hits = [
                picture(of, hit)._replace(right=bool(of.class_name[hit] == of.class_name[row]))
                for hit in of.neighbours[row, :HITS].tolist()
            ]
            answers.append(Answer(network, float(of.average_precision[row]), int(of.first_positive[row]), hits))
        return query, answers

    some, hardest = permutation(len(precision), 0)[:RANDOM], np.argsort(precision, kind="stable")[:HARDEST]
    sheets = [
        Sheet(title, f"{about} {FRAMES}", [*map(example, queries[chosen].tolist())])
        for title, about, chosen in (
            ("Neighbours of some queries", "Drawn at random, not selected.", some),
            ("Hardest queries", f"The queries with the lowest AP ({name}).", hardest),
        )
    ]
    return [sheet for sheet in sheets if sheet.examples]
