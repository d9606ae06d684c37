"""Copy an index to a store, and search in it.

A store has a record of the generation that it holds. Each of its rows has a stamp of what was
written, so that another copy writes and deletes only what differs, and a stopped one goes on.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.retrieval.descriptor_files import DescribedBy
from distap.retrieval.filters import Condition, Where, conditions_of
from distap.retrieval.row_blocks import given_rows, on_device
from distap.retrieval.searching import Hit, SearchIndex
from distap.telemetry.terminal import track

BATCH = 512  # rows that are written at once
STORE_NAMES = ("key", "class", "vector", "stamp")  # names in a store beside the list's columns


class StoreRow(NamedTuple):
    """An image in a store."""

    vector: NDArray[np.float32]  # (C,)
    payload: dict[str, Any]  # key, class, stamp and columns; empty cells are None


class Store(Protocol):
    """A store's own client. `record` describes the index whose rows it holds."""

    def record(self) -> dict[str, Any] | None:
        """Return the record of the last copy, even a stopped one; None without any."""

    def create(self, record: dict[str, Any]) -> None:
        """Make an empty table, in place of any other, for rows as the record describes them."""

    def stamps(self) -> dict[str, int]:
        """Return the stamp of each row by its key."""

    def write(self, rows: Sequence[StoreRow]) -> None:
        """Write rows, in place of those of the same keys."""

    def delete(self, keys: Sequence[str]) -> None: ...

    def finish(self, record: dict[str, Any]) -> None:
        """Build the index that the record's `kind` asks for, and keep the record."""

    def search(
        self, query: NDArray[np.float32], k: int, conditions: Sequence[Condition]
    ) -> list[Hit]:
        """Return the k rows of the highest inner product that fulfil all conditions."""

    def vector(self, key: str) -> NDArray[np.float32] | None: ...


def copy_index(index: SearchIndex, store: Store) -> dict[str, int]:
    """Make a store hold a generation of an index; return numbers of rows by what was done."""
    record = _record(index)
    #     record of the store      what a copy does
    #     equal                    nothing
    #     other rows               writes and deletes by the stamps, then keeps the record
    #     other fixed entries      begins with an empty table, whose record has no generation
    before = store.record()
    counts = {"written": 0, "deleted": 0, "images": len(index)}
    if before == record:
        return counts
    # Descriptors of another network, or a column that was numbers and is texts, fit no table.
    fixed = ("dimensions", "described_by", "columns", "kind")
    if before is None or any(before.get(name) != record[name] for name in fixed):
        store.create(record)
    # Rows of a copy that was stopped have the stamps of what was written, and stay.
    stored = store.stamps()
    # One batch at a time: a million vectors of 512 numbers would take 2 GB of memory.
    rows = track(_rows(index), "copying", len(index))
    changed = (row for row in rows if stored.get(row.payload["key"]) != row.payload["stamp"])
    while batch := list(islice(changed, BATCH)):
        store.write(batch)
        counts["written"] += len(batch)
    # Deleted last, so that a search during the copy misses no image that stays.
    gone = sorted(stored.keys() - {*index.keys.tolist()})
    for start in range(0, len(gone), BATCH):
        store.delete(gone[start : start + BATCH])
    # The record comes last: until then the store counts as one whose copy was stopped.
    store.finish(record)
    return counts | {"deleted": len(gone)}


def require_free_columns(index: SearchIndex) -> None:
    """Raise a DistapError for a column whose name a store uses itself, or cannot hold."""
    # LanceDB adds _distance and the like to answers, and takes a dot for a field within a field.
    taken = [
        name
        for name in index.images.columns
        if name.lower() in STORE_NAMES or name.startswith("_") or "." in name
    ]
    if taken:
        raise DistapError(
            "index.reserved_column",
            f"the column {taken[0]!r} has a name that stores use or cannot hold: give it another"
            " one, without a dot or a leading _",
        )


def _record(index: SearchIndex) -> dict[str, Any]:
    require_free_columns(index)
    record = {
        "generation": index.generation,
        # Sizes and hashes, since an index that is built anew begins with the same generation.
        "files": index.about["files"],
        "data": index.data,
        "dimensions": index.index.d,
        "kind": index.about["index"]["kind"],
        "described_by": [asdict(maker) for maker in index.makers],
        "columns": index.columns.types(),
    }
    # Through JSON, as stores keep it: a tuple would not equal the list that it becomes there.
    plain: dict[str, Any] = json.loads(json.dumps(record))
    return plain


def _rows(index: SearchIndex) -> Iterator[StoreRow]:
    images = index.images
    for row, (key, class_name) in enumerate(
        zip(images.keys.tolist(), images.classes.tolist(), strict=True)
    ):
        vector = np.array(images.descriptors[row], np.float32)
        cells = index.columns.cells(row)
        columns = {name: cells.get(name) for name in images.columns}
        contents = json.dumps([class_name, columns]).encode()
        stamp = zlib.crc32(contents, zlib.crc32(vector.tobytes()))
        # Without the generation, so that a row that stays the same is not written again.
        yield StoreRow(vector, {"key": key, "class": class_name, "stamp": stamp, **columns})


def hit_of(payload: Mapping[str, Any], similarity: float) -> Hit:
    """Return the hit of a row in a store."""
    columns = {
        name: cell for name, cell in payload.items() if name not in STORE_NAMES and cell is not None
    }
    return Hit(payload["key"], payload["class"], similarity, row=-1, columns=columns)


@dataclass(frozen=True, eq=False)
class StoreGallery:
    """A store that is searched as a `SearchIndex` is."""

    store: Store
    record: dict[str, Any]

    @property
    def data(self) -> str:
        return str(self.record["data"])

    @property
    def makers(self) -> tuple[DescribedBy, ...]:
        return tuple(DescribedBy(**maker) for maker in self.record["described_by"])

    def search(
        self, descriptors: Any, k: int, *, where: Where = None, group: str | None = None
    ) -> list[list[Hit]]:
        """Return hits as `SearchIndex.search` does, but for groups, which stores lack."""
        if group is not None:
            raise DistapError(
                "search.no_groups", f"{group}: a store finds no groups: search in an index"
            )
        types = {"key": "text", "class": "text", **self.record["columns"]}
        conditions = list(conditions_of(where, types, self.data))
        queries = on_device(given_rows(descriptors, "query", single=True)).numpy()
        return [self.store.search(query, k, conditions) for query in queries]

    def has(self, key: str) -> bool:
        return self.store.vector(key) is not None

    def descriptor_of(self, key: str) -> NDArray[np.float32]:
        vector = self.store.vector(key)
        if vector is None:
            raise DistapError(
                "index.no_such_key", f"the index of {self.data} has no image with the key {key!r}"
            )
        return vector
