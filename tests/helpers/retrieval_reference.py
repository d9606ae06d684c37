"""Slow, obvious versions of the retrieval figures, from lists of similarities."""

from collections.abc import Sequence


def order_of(
    similarities: Sequence[float],
    positives: set[int],
    ignored: set[int],
    head: Sequence[int] = (),
) -> list[int]:
    """Gallery rows, the head first and then the most similar ones, without the ignored."""
    rows = [row for row in range(len(similarities)) if row not in head]
    rows.sort(key=lambda row: (-similarities[row], row in positives))
    return [row for row in [*head, *rows] if row not in ignored]


def labelled_orders(
    similarities: list[list[float]], labels: list[int], head: list[list[int]] | None = None
) -> dict[int, list[bool]]:
    """For each query with a positive, which places of its ranking hold one."""
    orders = {}
    for query, label in enumerate(labels):
        positives = {other for other in range(len(labels)) if labels[other] == label and other != query}
        if label >= 0 and positives:
            order = order_of(similarities[query], positives, {query}, head[query] if head else ())
            orders[query] = [row in positives for row in order]
    return orders


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def average_precision(right: list[bool]) -> float:
    found = [sum(right[:place]) / place for place, hit in enumerate(right, 1) if hit]
    return mean(found)


def average_precision_at_r(right: list[bool]) -> float:
    count = sum(right)
    return sum(sum(right[:place]) / place for place in range(1, count + 1) if right[place - 1]) / count


def labelled_figures(orders: dict[int, list[bool]], at: Sequence[int]) -> dict[str, float]:
    """Means over the queries of every figure of a labelled set."""
    rights = list(orders.values())
    return {
        "mAP": mean([average_precision(right) for right in rights]),
        "mAP@R": mean([average_precision_at_r(right) for right in rights]),
        **{f"R@{k}": mean([any(right[:k]) for right in rights]) for k in at},
        **{f"mP@{k}": mean([sum(right[:k]) / min(k, len(right)) for right in rights]) for k in at},
    }


def trapezoid_average_precision(right: list[bool]) -> float:
    """Area under the curve of precision over recall, straight between the places before and at each positive."""
    area, recall, precision = 0.0, 0.0, 1.0
    for place in range(1, len(right) + 1):
        found = sum(right[:place])
        area += (found / sum(right) - recall) * (precision + found / place) / 2
        recall, precision = found / sum(right), found / place
    return area


def precision_at(right: list[bool], k: int) -> float:
    """Positives among the first k, or up to the last positive where that comes earlier."""
    shown = min(k, max(place for place, hit in enumerate(right, 1) if hit))
    return sum(right[:shown]) / shown


def average_precision_at_100(right: list[bool]) -> float:
    found = sum(sum(right[:place]) / place for place, hit in enumerate(right[:100], 1) if hit)
    return found / min(sum(right), 100)
