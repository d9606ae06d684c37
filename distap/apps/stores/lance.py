"""An index in LanceDB, embedded: a folder or a bucket."""

import json
from collections.abc import Sequence
from typing import Any

import lancedb
import numpy as np
import pyarrow
from numpy.typing import NDArray

from distap.apps.stores.copying import StoreRow, hit_of
from distap.retrieval.filters import Condition
from distap.retrieval.searching import Hit

IMAGES_TABLE = "images"
RECORDS = "distap"
NOT_MORE = 2**31 - 1  # rows: all


class LanceStore:
    """A table of images, and one with the record. See `Store`."""

    def __init__(self, place: str) -> None:
        self._database = lancedb.connect(place)

    @property
    def _table(self) -> Any:
        return self._database.open_table(IMAGES_TABLE)

    def record(self) -> dict[str, Any] | None:
        if RECORDS not in self._database.list_tables().tables:
            return None
        [row] = self._database.open_table(RECORDS).to_arrow().to_pylist()
        record: dict[str, Any] = json.loads(row["record"])
        return record

    def create(self, record: dict[str, Any]) -> None:
        types = {"text": pyarrow.string(), "number": pyarrow.float64()}
        fields = {
            "key": pyarrow.string(),
            "class": pyarrow.string(),
            "vector": pyarrow.list_(pyarrow.float32(), record["dimensions"]),
            "stamp": pyarrow.int64(),
            **{name: types[kind] for name, kind in record["columns"].items()},
        }
        # Before the record: stopped in between, the old record asks for an empty table once more.
        self._database.create_table(IMAGES_TABLE, schema=pyarrow.schema(fields), mode="overwrite")
        # Not of this generation yet, so that a copy that is stopped goes on.
        self._keep({**record, "generation": "", "files": ""})

    def _keep(self, record: dict[str, Any]) -> None:
        rows = [{"record": json.dumps(record)}]
        self._database.create_table(RECORDS, rows, mode="overwrite")

    def stamps(self) -> dict[str, int]:
        rows = self._table.search().select(["key", "stamp"]).limit(NOT_MORE).to_arrow()
        return dict(zip(rows["key"].to_pylist(), rows["stamp"].to_pylist(), strict=True))

    def write(self, rows: Sequence[StoreRow]) -> None:
        table = self._table
        entries = [{**row.payload, "vector": row.vector} for row in rows]
        # The key finds the row to replace, so that writing twice does no harm.
        merging = table.merge_insert("key").when_matched_update_all().when_not_matched_insert_all()
        merging.execute(pyarrow.Table.from_pylist(entries, schema=table.schema))

    def delete(self, keys: Sequence[str]) -> None:
        self._table.delete(f"key IN ({', '.join(map(_quoted, keys))})")

    def finish(self, record: dict[str, Any]) -> None:
        table = self._table
        if record["kind"] == "hnsw":
            table.create_index(metric="dot", index_type="IVF_HNSW_SQ", replace=True)
        elif record["kind"] != "flat":
            table.create_index(metric="dot", index_type="IVF_PQ", replace=True)
        # Rows that were merged lie in small fragments, which the index does not cover yet.
        table.optimize()
        self._keep(record)

    def search(
        self, query: NDArray[np.float32], k: int, conditions: Sequence[Condition]
    ) -> list[Hit]:
        # Descriptors have length 1, so that this is the cosine, as exactly as distap computes it.
        asked = self._table.search(query).distance_type("dot").limit(k)
        if conditions:
            # Without `prefilter` the k nearest are found first and filtered then, and few are left.
            asked = asked.where(" AND ".join(map(_sql, conditions)), prefilter=True)
        # LanceDB's distance of inner products is 1 less the product.
        return [hit_of(row, 1 - row.pop("_distance")) for row in asked.to_list()]

    def vector(self, key: str) -> NDArray[np.float32] | None:
        rows = self._table.search().where(f"key = {_quoted(key)}").limit(1).to_list()
        return np.array(rows[0]["vector"], np.float32) if rows else None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _sql(condition: Condition) -> str:
    name = "`" + condition.column.replace("`", "``") + "`"
    values = [str(value) for value in condition.numbers]
    if not condition.is_numeric:
        values = list(map(_quoted, condition.values))
    # SQL compares nothing with NULL, which an empty cell is.
    if condition.is_range:
        return f"{name} {condition.sign} {values[0]}"
    listed = f"{name} IN ({', '.join(values)})" if values else "FALSE"
    # So NULL has to be asked for: `x != 1` holds for an empty cell, and `x=` for nothing else.
    wants_empty = (condition.sign == "!=") != ("" in condition.values)
    if condition.sign == "!=":
        listed = f"NOT {listed}"
    return f"({name} IS NULL OR {listed})" if wants_empty else f"({name} IS NOT NULL AND {listed})"
