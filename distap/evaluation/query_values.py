"""Figures of each query by its name, to compare networks with each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distap.randomness import permutation

if TYPE_CHECKING:
    from distap.retrieval.evaluate import Evaluated

GALLERY = 31  # first word of the key that galleries are drawn with: the same ones in every run
# of each drawn gallery, or the one that there is: rows of its queries, and what was evaluated
Draws = Sequence[tuple[Any, "Evaluated"]]


@dataclass(frozen=True)
class QueryValues:
    """F figures of each of Q queries."""

    key: NDArray[np.str_]  # (Q,) names of the queries
    # (Q,) queries that share their right images: the class, or the first right image of a ground
    # truth; "" for a query without any
    class_name: NDArray[np.str_]
    part: NDArray[np.str_]  # (Q,) domain or other part of the queries, "" for none
    positives: NDArray[np.int64]  # (Q,) number of right images
    figure: NDArray[np.str_]  # (F,) names
    values: NDArray[np.float64]  # (Q, F) from 0 to 1, NaN without a right image


def rows_of_draws(classes: NDArray[np.str_], draws: int) -> Iterator[tuple[Any, Any]]:
    """Yield the rows of queries and of the gallery in each draw, or once, all of them.

    Args:
        classes: (N,) of the images, of which one a class is drawn for the gallery.
    """
    if not draws:
        yield slice(None), slice(None)
    for draw in range(draws):
        order = permutation(len(classes), GALLERY, draw)
        # The first image of each class in a random order of all is a random one of the class.
        chosen = order[np.unique(classes[order], return_index=True)[1]]
        yield np.setdiff1d(order, chosen), chosen


def values_by_query(results: Draws, keys: Sequence[str], classes: Sequence[str]) -> QueryValues:
    """Return the figures of Q queries, of several drawn galleries their means.

    Args:
        keys, classes: (Q,) see `QueryValues`.
    """
    first = results[0][1]
    shape = len(keys), len(first.values)
    totals = np.zeros(shape)
    draws = np.zeros(shape)
    positives = np.zeros(len(keys), np.int64)
    domains = np.full(len(keys), "", object)
    for rows, evaluated in results:
        # Without torch, so that a page about a run is written without it.
        values = np.stack([figure.cpu().numpy() for figure in evaluated.values.values()], axis=1)
        totals[rows] += np.nan_to_num(values)
        draws[rows] += ~np.isnan(values)
        positives[rows] = evaluated.positives.cpu().numpy()
        for domain, is_in_domain in evaluated.in_part.items():
            if domain:
                domains[rows] = np.where(is_in_domain.cpu().numpy(), domain, domains[rows])
    # A query without a right image, or one that no draw asked, is 0 of 0, and has no figure.
    with np.errstate(invalid="ignore"):
        values = totals / draws
    return QueryValues(
        np.array(keys, np.str_),
        np.array(classes, np.str_),
        domains.astype(np.str_),
        positives,
        np.array([*first.values], np.str_),
        values,
    )


def right_image_classes(positives: Sequence[Any]) -> list[str]:
    """Return, in place of classes, the row of each query's first right image, "" without any."""
    return [f"right image {min(rows)}" if len(rows) else "" for rows in positives]
