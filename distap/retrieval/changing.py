"""Add and remove rows of an index."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError, logger
from distap.retrieval.descriptor_files import DescriptorSet
from distap.retrieval.indexing import build_index
from distap.retrieval.joining import joined_rows, taken_images
from distap.retrieval.row_blocks import DescriptorParts, installed_faiss
from distap.retrieval.searching import FlatRows, SearchIndex


def changed_index(
    index: SearchIndex,
    removed: NDArray[np.int64],
    added: DescriptorSet | None,
    track: Callable[[Iterable[Any], str, int], Iterable[Any]] | None = None,
) -> SearchIndex:
    """Return an index without some rows, and with further ones at its end.

    Lists and codes keep what they were trained to; a graph from which rows are removed is built
    anew.

    Args:
        index: read as `changeable`; it cannot be used any more.
        removed: (n,) numbers of rows, each once.
    """
    # An image that is replaced is removed and added:
    #
    #     rows before    0  1  2  3  4           removed: 1, 3    added: x, y
    #     rows after     0  2  4  x  y
    #     IVF numbers    0  2  4  5  6           kept in `ids`, as lists do not count anew
    #     other kinds    0  1  2  3  4           counted anew by Faiss, so the row is the number
    #
    # So remaining rows keep their order, and all arrays of the new index are cut in the same way.
    remaining = np.setdiff1d(np.arange(len(index)), removed)
    images = taken_images(index.images, remaining)
    parts = [("index", images.descriptors)]
    values = np.zeros((0, index.index.d), np.float32)
    if added is not None:
        values = np.ascontiguousarray(added.descriptors, np.float32)
        parts.append(("added", values))
        images = joined_rows(images, added)
    images = replace(images, descriptors=DescriptorParts(parts))
    if not len(images):
        raise DistapError(
            "index.empty", f"the index of {index.data} would have no image left: keep one"
        )
    entries = {"index": index.about["index"]}
    if isinstance(index.index, FlatRows):
        return SearchIndex(FlatRows(images.descriptors), images, entries)
    try:
        ids = _change(index, removed, remaining, values)
        return SearchIndex(index.index, images, entries, ids)
    except RuntimeError:  # of Faiss
        kind = entries["index"]["kind"]
        logger.info("no rows can be removed from an index of kind %s: it is built anew", kind)
    built = build_index(images, entries["index"]["factory"], entries["index"]["search"], track)
    return replace(built, about=entries)


def _change(
    index: SearchIndex,
    removed: NDArray[np.int64],
    remaining: NDArray[np.int64],
    values: NDArray[np.float32],
) -> NDArray[np.int64] | None:
    """Change an index of Faiss, and return the numbers of its rows, as `SearchIndex.ids`."""
    faiss = installed_faiss()
    numbers = np.arange(len(index)) if index.ids is None else index.ids
    if len(removed):
        index.index.remove_ids(faiss.IDSelectorBatch(numbers[removed]))
    # Lists keep the numbers of their rows, where others count anew.
    has_numbers = faiss.try_extract_index_ivf(index.index) is not None
    if not has_numbers or (index.ids is None and not len(removed)):
        index.index.add(values)
        return None
    # Above all others, so that `ids` stays ascending.
    new = numbers[-1] + 1 + np.arange(len(values))
    index.index.add_with_ids(values, new)
    return np.concatenate([numbers[remaining], new])
