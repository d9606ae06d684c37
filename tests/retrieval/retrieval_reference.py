"""Slow, obvious versions of the retrieval figures, from lists of similarities."""

from collections.abc import Sequence


def pessimistic_order(similarities: Sequence[float], positives: set[int], ignored: set[int]) -> list[int]:
    """Gallery rows, most similar first, a positive after what it ties with, without the ignored."""
    rows = [row for row in range(len(similarities)) if row not in ignored]
    return sorted(rows, key=lambda row: (-similarities[row], row in positives))


def labelled_orders(similarities: list[list[float]], labels: list[int]) -> dict[int, list[bool]]:
    """For each query with a positive, which places of its ranking hold one."""
    orders = {}
    for query, label in enumerate(labels):
        positives = {other for other in range(len(labels)) if labels[other] == label and other != query}
        if label >= 0 and positives:
            order = pessimistic_order(similarities[query], positives, {query})
            orders[query] = [row in positives for row in order]
    return orders


def interpolated_precision(right: list[bool]) -> list[float]:
    """Greatest precision at any recall of at least r, for r = 0, 0.01 ... 1."""
    count = sum(right)
    points = [(sum(right[:place]), sum(right[:place]) / place) for place in range(1, len(right) + 1)]
    return [max(precision for found, precision in points if 100 * found >= r * count) for r in range(101)]
