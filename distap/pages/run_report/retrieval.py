"""Which queries and classes a report shows, and what was retrieved for them."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from distap.evaluation.saved import Retrieved
from distap.pages.contact_sheets import Answer, Confusion, Example, Hit, Picture, Sheet
from distap.pages.run_report.pictures import Thumbnails
from distap.randomness import permutation

RANDOM, HARDEST, MOVED, CONFUSED, HITS = 10, 8, 4, 12, 10


class Gallery:
    """What several networks retrieved from one data set.

    Args:
        retrieved: by the network's name; the last is the one that is asked about.
        thumbnails: of the data set's images.
    """

    def __init__(self, retrieved: dict[str, Retrieved], thumbnails: Thumbnails) -> None:
        self._retrieved, self._thumbnails = retrieved, thumbnails
        self._names = list(retrieved)
        samples = [each.sample[each.first_positive > 0] for each in retrieved.values()]
        common = samples[0]
        for other in samples[1:]:
            common = np.intersect1d(common, other)
        self._queries = common  # numbers in the data set's index

    def sheets(self) -> list[Sheet]:
        """Queries drawn at random, those with the lowest AP, and those whose AP moved most."""
        if not len(self._queries):
            return []
        drawn = self._queries[permutation(len(self._queries), 0)[:RANDOM]]
        last = self._precision(self._names[-1])
        hardest = self._queries[np.argsort(last, kind="stable")[:HARDEST]]
        framed = "Best first: of the query's class framed in green (✓), of others in red dashes (✗)."
        return [
            Sheet(
                "Neighbours of some queries",
                f"Queries drawn at random, not the most flattering. {framed}",
                self._examples(drawn),
            ),
            Sheet(
                "Hardest queries", f"Those with the lowest AP ({self._names[-1]}). {framed}", self._examples(hardest)
            ),
            *self._moved(),
        ]

    def confusions(self) -> list[Confusion]:
        """Pairs of classes that the last network takes for each other most often."""
        retrieved = self._retrieved[self._names[-1]]
        mistakes = {name: _mistakes(each) for name, each in self._retrieved.items()}
        by_network = {name: Counter(pair for _, pair in rows) for name, rows in mistakes.items()}
        example = {pair: row for row, pair in reversed(mistakes[self._names[-1]])}
        pairs = by_network[self._names[-1]]
        sizes = np.bincount(retrieved.label[retrieved.first_positive > 0], minlength=len(retrieved.class_name))
        frequent = sorted(pairs, key=lambda pair: (-pairs[pair], -pairs[pair] / sizes[pair[0]], pair))[:CONFUSED]
        return [
            Confusion(
                self._picture(retrieved, example[pair]),
                self._picture(retrieved, int(retrieved.neighbours[example[pair], 0])),
                {name: counts[pair] for name, counts in by_network.items()},
                int(sizes[pair[0]]),
            )
            for pair in frequent
        ]

    def _moved(self) -> list[Sheet]:
        """From the first network to the last."""
        if len(self._names) < 2:
            return []
        first, last = self._names[0], self._names[-1]
        gain = self._precision(last) - self._precision(first)
        order = np.argsort(-gain, kind="stable")
        better = [number for number in order[:MOVED].tolist() if gain[number] > 0]
        worse = [number for number in order[::-1][:MOVED].tolist() if gain[number] < 0]
        share = f"{int((gain > 0).sum()):,} of {len(gain):,} queries gained, {int((gain < 0).sum()):,} lost."
        return [
            Sheet(f"Greatest gains from {first} to {last}", f"By AP. {share}", self._examples(self._queries[better])),
            Sheet(f"Greatest losses from {first} to {last}", "By AP.", self._examples(self._queries[worse])),
        ]

    def _precision(self, name: str) -> NDArray[np.float64]:
        """(Q,) AP of the common queries."""
        retrieved = self._retrieved[name]
        of_queries: NDArray[np.float64] = retrieved.average_precision[
            np.searchsorted(retrieved.sample, self._queries)
        ]
        return of_queries

    def _examples(self, samples: Iterable[np.int64]) -> list[Example]:
        return [self._example(int(sample)) for sample in samples]

    def _example(self, sample: int) -> Example:
        rows = {name: int(np.searchsorted(each.sample, sample)) for name, each in self._retrieved.items()}
        answers = [self._answer(name, self._retrieved[name], row) for name, row in rows.items()]
        last = self._names[-1]
        return Example(self._picture(self._retrieved[last], rows[last]), answers)

    def _answer(self, name: str, retrieved: Retrieved, row: int) -> Answer:
        nearest: Sequence[int] = retrieved.neighbours[row, :HITS].tolist()
        hits = [
            Hit(self._picture(retrieved, hit), bool(retrieved.label[hit] == retrieved.label[row])) for hit in nearest
        ]
        return Answer(name, float(retrieved.average_precision[row]), int(retrieved.first_positive[row]), hits)

    def _picture(self, retrieved: Retrieved, row: int) -> Picture:
        jpeg = self._thumbnails(int(retrieved.sample[row]))
        return Picture(str(retrieved.key[row]), retrieved.class_of(row), jpeg)


def _mistakes(retrieved: Retrieved) -> list[tuple[int, tuple[int, int]]]:
    """Rows of the queries whose nearest image is of another class, with the two classes."""
    if not retrieved.neighbours.shape[1]:
        return []
    nearest = retrieved.label[retrieved.neighbours[:, 0]]
    wrong = np.flatnonzero((retrieved.first_positive > 0) & (nearest != retrieved.label))
    return [(row, (int(retrieved.label[row]), int(nearest[row]))) for row in wrong.tolist()]
