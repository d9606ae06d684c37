"""Slow, obvious versions of the retrieval figures, from lists of similarities."""

import math
from collections.abc import Sequence


def order_of(
    similarities: Sequence[float], positives: set[int], ignored: set[int], head: Sequence[int] = ()
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
        positives = {
            other for other in range(len(labels)) if labels[other] == label and other != query
        }
        if label >= 0 and positives:
            order = order_of(similarities[query], positives, {query}, head[query] if head else ())
            orders[query] = [row in positives for row in order]
    return orders


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def figure_of(name: str, relevance: Sequence[int]) -> float:
    """A figure of one query from its definition, by the relevance of each place of its ranking."""
    right = [bool(item) for item in relevance]
    count = sum(right)
    k = int("".join(filter(str.isdigit, name)) or 0)
    at_hits = [sum(right[:place]) / place for place, hit in enumerate(right, 1) if hit]
    until = {"mAP": len(right), "mAP@R": count}.get(name, k)
    precisions = [sum(right[:place]) / place for place, hit in enumerate(right[:until], 1) if hit]
    last = max(place for place, hit in enumerate(right, 1) if hit)
    of_level = {level: relevance.count(level) for level in relevance}
    weights = [level and level / of_level[level] for level in relevance]
    ideal = sorted(relevance, reverse=True)

    def gain(levels: list[int]) -> float:
        return sum((2**level - 1) / math.log2(1 + place) for place, level in enumerate(levels, 1))

    def shared(k: int) -> float:
        return (
            sum(
                min(relevance[:k].count(level), ideal[:k].count(level))
                for level in of_level
                if level
            )
            / k
        )

    def up_to(place: int) -> float:
        return sum(min(weights[place], other) for other in weights[: place + 1]) / (place + 1)

    return {
        "mAP@R": lambda: sum(precisions) / count,
        "R": lambda: float(any(right[:k])),
        "CMC": lambda: float(any(right[:k])),
        "mP": lambda: sum(right[:k]) / min(k, len(right)),
        "min": lambda: sum(right[: min(k, count)]) / min(k, count),
        "trapezoids": lambda: trapezoid_average_precision(right),
        "last": lambda: sum(right[: min(k, last)]) / min(k, last),
        "mAP": lambda: sum(precisions) / (min(count, k) if k else len(at_hits)),
        "H-AP": lambda: sum(up_to(place) for place in range(len(right))) / sum(weights),
        "NDCG": lambda: gain(relevance) / gain(ideal),
        "ASI": lambda: mean([shared(k) for k in range(1, count + 1)]),
    }[name if name == "mAP@R" else name.rsplit("/", 1)[-1].split("@")[0]]()


def labelled_figures(orders: dict[int, list[bool]], at: Sequence[int]) -> dict[str, float]:
    """Means over the queries of every figure of a labelled set."""
    names = ["mAP", "mAP@R", *(f"{name}@{k}" for name in ("R", "mP") for k in at)]
    return {name: mean([figure_of(name, right) for right in orders.values()]) for name in names}


def trapezoid_average_precision(right: list[bool]) -> float:
    """Area under the curve of precision over recall, straight between the places before and at each
    positive.
    """
    area = 0.0
    recall = 0.0
    precision = 1.0
    for place in range(1, len(right) + 1):
        hits = sum(right[:place])
        area += (hits / sum(right) - recall) * (precision + hits / place) / 2
        recall = hits / sum(right)
        precision = hits / place
    return area
