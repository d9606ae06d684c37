"""`distap neighbours`: the most similar images of every image, and groups of near duplicates."""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.apps.search import Query, open_thumbnails, write_search_page
from distap.errors import DistapError
from distap.retrieval.row_blocks import row_blocks, without_rows
from distap.retrieval.searching import SearchIndex
from distap.storage.atomic import write_whole
from distap.telemetry.terminal import track

SEARCHED_AT_ONCE = 256  # that are searched for at once
FIRST_K = 8  # hits that are looked at for duplicates at first; then four times as many
SHOWN_GROUPS = 100  # of near duplicates, on a page


class Neighbours(NamedTuple):
    """The k nearest of M images or groups: one after the other, best first."""

    names: list[str]  # (M,) keys, or cells of the column that groups
    query: NDArray[np.int64]  # (n,) place in `names`
    neighbour: NDArray[np.int64]  # (n,)
    rank: NDArray[np.int64]  # (n,) from 1
    similarity: NDArray[np.float32]  # (n,)


def neighbours_of_all(index: SearchIndex, k: int, group: str | None = None) -> Neighbours:
    """Search for every image of an index, without itself.

    Args:
        group: a column: search for every value of it, such as every product, the nearest others;
            the similarity is that of their most similar images.
    """
    groups = np.arange(len(index)) if group is None else index.columns.groups(group)
    of_hit = np.append(groups, -1)  # a hit of -1 is none
    queries = list[NDArray[np.int64]]()
    others = list[NDArray[np.int64]]()
    values = list[NDArray[np.float32]]()
    for places, block in _blocks(index, "searching"):
        similarities, rows = index.ranked(block, k + 1, group=group)
        query_groups = groups[places]
        # One hit more than wanted, since each image or product finds itself.
        values_of_block, hits = without_rows(similarities, of_hit[rows], query_groups)
        queries.append(np.repeat(query_groups, hits.shape[1]))
        others.append(hits.ravel())
        values.append(values_of_block.ravel())
    query = np.concatenate(queries)
    neighbour = np.concatenate(others)
    similarity = np.concatenate(values)

    # Several images of a product may have found the same one. With the best hits first, the first
    # of equal pairs is kept:
    #
    #     query       p1    p1    p1    p2          images 0, 1 and 2 are of p1
    #     similarity  0.9   0.8   0.7   0.9
    #     neighbour   p2    p3    p2    p1
    #     kept        yes   yes         yes
    order = np.lexsort((neighbour, -similarity, query))
    order = order[neighbour[order] >= 0]
    # A number for each pair, which NumPy compares faster than two.
    pairs = query[order] * len(index) + neighbour[order]
    order = order[np.sort(np.unique(pairs, return_index=True)[1])]
    # Within the neighbours of a query, the place is the rank.
    starts = np.searchsorted(query[order], query[order])
    rank = np.arange(len(order)) - starts + 1
    chosen = order[rank <= k]
    return Neighbours(
        _names(index, groups, group),
        query[chosen],
        neighbour[chosen],
        rank[rank <= k],
        similarity[chosen],
    )


def _names(index: SearchIndex, groups: NDArray[np.int64], group: str | None) -> list[str]:
    """Return the name of each group: its cell; the key of an image whose cell is empty."""
    numbers, rows = np.unique(groups, return_index=True)
    names = [""] * (int(numbers[-1]) + 1)
    cells = index.keys
    if group is not None and group != "key":
        cells = index.images.columns.get(group, index.classes)
    for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
        names[number] = str(cells[row]) or str(index.keys[row])
    return names


def _blocks(index: SearchIndex, description: str) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    numbers = SEARCHED_AT_ONCE * index.index.d
    blocks = row_blocks(index.images.descriptors, numbers=numbers)
    yield from track(blocks, description, -(-len(index) // SEARCHED_AT_ONCE))


def write_neighbours(path: Path, neighbours: Neighbours) -> None:
    """Write a table with the columns key, neighbour, rank and similarity: .parquet or .csv."""
    names = np.array(neighbours.names, dtype=object)
    columns: dict[str, Any] = {
        "key": names[neighbours.query],
        "neighbour": names[neighbours.neighbour],
        "rank": neighbours.rank,
        "similarity": neighbours.similarity,
    }
    if path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
        write_whole(path, text.getvalue())
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DistapError(
            "package.missing",
            f"{path}: Parquet needs pyarrow: pip install 'distap[parquet]', or name a .csv file"
            f" ({error})",
        ) from error
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    write_whole(path, buffer.getvalue())


def near_duplicates(index: SearchIndex, threshold: float) -> list[list[int]]:
    """Return groups of rows that chains of similarities of at least `threshold` join.

    The largest group comes first. A flat index finds all pairs; another one those that it finds.
    """
    # Union-find: each row points to one above it, and the uppermost, which points to itself,
    # stands for its group. With rows 0 and 1 in a group, and 2 and 3 in another, the pair (1, 3)
    # joins both:
    #
    #     before    0 0 2 2
    #     after     0 0 0 2      2, which stood for its group, points to 0
    above = np.arange(len(index))

    def first_of(row: int) -> int:
        while above[row] != row:
            # halves the way for the next one that goes it
            above[row] = above[above[row]]
            row = int(above[row])
        return row

    for places, block in _blocks(index, "comparing"):
        # Most images have no duplicate, so a few hits prove that there is none.
        k = FIRST_K
        similarities, rows = index.ranked(block, k)
        # All hits of a query may be duplicates: then there may be more of them.
        while k < len(index) and similarities[:, -1].max() >= threshold:
            k *= 4
            similarities, rows = index.ranked(block, k)
        queries, hits = np.nonzero((similarities >= threshold) & (rows >= 0))
        pairs = zip((queries + places.start).tolist(), rows[queries, hits].tolist(), strict=True)
        for query, hit in pairs:
            above[first_of(hit)] = first_of(query)
    groups = defaultdict[int, list[int]](list)
    for row in range(len(index)):
        groups[first_of(row)].append(row)
    return sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)


def write_duplicates(
    path: Path, index: SearchIndex, groups: list[list[int]], threshold: float
) -> None:
    """Write the keys of groups as JSON."""
    keys = [[str(index.keys[row]) for row in group] for group in groups]
    record = {"similarity": threshold, "groups": keys}
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def write_duplicates_page(
    path: Path, index: SearchIndex, groups: list[list[int]], images: str | None
) -> None:
    """Write a page that shows the largest groups, each as hits of its first image."""
    results = list[Query]()
    for first, *further in groups[:SHOWN_GROUPS]:
        descriptor = np.asarray(index.images.descriptors[first], np.float32)
        key = str(index.keys[first])
        hits = [
            index.hit(row, float(index.images.descriptors[row] @ descriptor)) for row in further
        ]
        results.append(Query(key, key=key, hits=hits))
    # The page names both numbers, since groups beyond SHOWN_GROUPS are in the JSON alone.
    title = f"Near duplicates: {len(results):,} of {len(groups):,} groups"
    write_search_page(path, results, index, open_thumbnails(index, images), title)
