"""The columns of an index of a data set, and the rules that their values keep."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from distap.data.shards.index import Index

_SHA256 = re.compile(r"[0-9a-f]{64}")
FURTHER = "further"  # names of the further columns
# The columns by name, with their types as `read_columns` takes them.
COLUMNS = {
    "shard": "int32",
    "offset": "int64",
    "size": "int64",
    "crc32": "uint32",
    "label": "int64",
    "width": "int32",
    "height": "int32",
    "key": "str",
    "path": "str",
    "shard_name": "str",
    "shard_size": "int64",
    "shard_sha256": "str",
    "class_name": "str",
    "class_levels": "table",
}


def problems_of_index(index: "Index") -> Iterator[str]:
    """Yield the impossible values of an index whose columns have the right types."""
    for group in ("", "shard", "class"):
        columns = [name for name in COLUMNS if name.rpartition("_")[0] == group]
        lengths = [len(getattr(index, name)) for name in columns]
        if len(set(lengths)) > 1:
            yield f"columns of unequal length: {', '.join(map('{} {}'.format, columns, lengths))}"
            return
    if {len(texts) for texts in index.further.values()} - {len(index)}:
        yield "further columns of another length"
        return
    shards = len(index.shard_name)
    classes = len(index.class_name)
    if (index.shard_size < 0).any():
        yield "a shard of negative size"
    if len(set(index.shard_name.tolist())) < shards:
        yield "two shards of one name"
    if len(set(index.class_name.tolist())) < classes:
        yield "two classes of one name, which an evaluation could not tell apart"
    if not all(map(_SHA256.fullmatch, index.shard_sha256.tolist())):
        yield "shard_sha256 holds something that is no SHA-256"
    for wrong, problem in _wrong_rows(index, shards, classes):
        if wrong.any():
            row = int(wrong.argmax())
            yield f"sample {row} ({str(index.key[row])!r}): its {problem}"


def _wrong_rows(
    index: "Index", shards: int, classes: int
) -> Iterator[tuple[NDArray[np.bool_], str]]:
    """Yield for each rule the samples (N,) that break it, and the problem."""
    has_shard = (index.shard >= 0) & (index.shard < shards)
    yield ~has_shard, f"shard is none of 0 .. {shards - 1}"
    yield (index.label < 0) | (index.label >= classes), f"label is none of 0 .. {classes - 1}"
    yield index.size < 1, "size is below 1"
    ends = np.zeros(len(index), dtype=np.int64)
    ends[has_shard] = index.shard_size[index.shard[has_shard]]
    # offset + size could overflow, so the difference is compared instead.
    starts_outside = (index.offset < 0) | (index.offset > ends - index.size)
    yield starts_outside | (index.size > ends), "image reaches beyond its shard"
    yield (index.width < 1) | (index.height < 1), "width or height is below 1"
