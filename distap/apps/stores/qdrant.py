"""An index in Qdrant: a server, or a folder of its local mode."""

import atexit
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models

from distap.apps.stores.copying import StoreRow, hit_of
from distap.retrieval.filters import Condition
from distap.retrieval.searching import Hit

COLLECTION = "images"
RECORDS = "distap"  # collection with one point, whose payload is the record
SCROLLED = 4096  # points that are read at once


class QdrantStore:
    """A collection of images, and one with the record. See `Store`."""

    def __init__(self, place: str) -> None:
        # The local mode locks its folder until the client is closed.
        is_server = place.startswith(("http://", "https://"))
        self._client = QdrantClient(url=place) if is_server else QdrantClient(path=place)
        atexit.register(self._client.close)
        record = self.record()
        self._is_exact = record is not None and record["kind"] == "flat"

    def record(self) -> dict[str, Any] | None:
        if not self._client.collection_exists(RECORDS):
            return None
        points = self._client.retrieve(RECORDS, [0])
        return dict(points[0].payload or {}) if points else None

    def create(self, record: dict[str, Any]) -> None:
        self._is_exact = record["kind"] == "flat"
        # m: links of the graph that Qdrant builds for each point; without any it searches exactly.
        graph = models.HnswConfigDiff(m=0) if self._is_exact else None
        for name, size in ((COLLECTION, record["dimensions"]), (RECORDS, 1)):
            if self._client.collection_exists(name):
                self._client.delete_collection(name)
            vectors = models.VectorParams(size=size, distance=models.Distance.DOT)
            self._client.create_collection(name, vectors_config=vectors, hnsw_config=graph)
        self.finish({**record, "generation": "", "files": ""})

    def stamps(self) -> dict[str, int]:
        stamps = dict[str, int]()
        offset: Any = None
        while True:
            points, offset = self._client.scroll(
                COLLECTION, limit=SCROLLED, offset=offset, with_payload=["key", "stamp"]
            )
            for point in points:
                payload = point.payload or {}
                stamps[payload["key"]] = payload["stamp"]
            if offset is None:
                return stamps

    def write(self, rows: Sequence[StoreRow]) -> None:
        points = [
            models.PointStruct(
                id=_identity(row.payload["key"]), vector=row.vector.tolist(), payload=row.payload
            )
            for row in rows
        ]
        self._client.upsert(COLLECTION, points)

    def delete(self, keys: Sequence[str]) -> None:
        self._client.delete(COLLECTION, list(map(_identity, keys)))

    def finish(self, record: dict[str, Any]) -> None:
        self._client.upsert(RECORDS, [models.PointStruct(id=0, vector=[1.0], payload=record)])

    def search(
        self, query: NDArray[np.float32], k: int, conditions: Sequence[Condition]
    ) -> list[Hit]:
        answer = self._client.query_points(
            COLLECTION,
            query=query.tolist(),
            limit=k,
            query_filter=models.Filter(must=list(map(_filter, conditions))),
            search_params=models.SearchParams(exact=self._is_exact),
        )
        return [hit_of(point.payload or {}, point.score) for point in answer.points]

    def vector(self, key: str) -> NDArray[np.float32] | None:
        points = self._client.retrieve(COLLECTION, [_identity(key)], with_vectors=True)
        return np.array(points[0].vector, np.float32) if points else None


def _identity(key: str) -> str:
    """Return the identifier of a point, which Qdrant wants to be a number or a UUID."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, key))


def _filter(condition: Condition) -> models.Filter:
    # Without quotes a dot or a space would lead into nested payloads.
    name = f'"{condition.column}"'
    ranges: list[Any] = []
    if condition.is_range:
        limit = {"<=": "lte", ">=": "gte", "<": "lt", ">": "gt"}[condition.sign]
        ranges.append(models.Range(**{limit: condition.numbers[0]}))
    elif condition.is_numeric:
        # Qdrant compares whole numbers alone for equality.
        ranges += [models.Range(gte=number, lte=number) for number in condition.numbers]
    conditions: list[Any] = [models.FieldCondition(key=name, range=limits) for limits in ranges]
    if not condition.is_numeric:
        match = models.MatchAny(any=list(condition.values))
        conditions.append(models.FieldCondition(key=name, match=match))
    if "" in condition.values:
        # An empty cell is null there, which equals no text.
        conditions.append(models.IsEmptyCondition(is_empty=models.PayloadField(key=name)))
    if not conditions:
        # A number is asked to equal a text. Qdrant takes a filter of no conditions for any point.
        conditions.append(models.HasIdCondition(has_id=[]))
    if condition.sign == "!=":
        return models.Filter(must_not=conditions)
    return models.Filter(should=conditions)
