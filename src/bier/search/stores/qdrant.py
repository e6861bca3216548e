"""Qdrant: a folder of this machine (the client's local mode), a server or a cluster."""

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from uuid import UUID, uuid5

import numpy as np

from bier.errors import SearchError, needs
from bier.search.store import Conditions, Floats, Id, spans
from bier.search.stores.engine import EngineStore, Hits, Row, is_address

EFFORT = 128  # hnsw_ef, on a server
_NAMES = UUID("5b1c9d4e-6f0a-4a57-9a8e-0d6c1f7a2b3c")  # Qdrant's ids are numbers or UUIDs; texts become the latter


def point_id(one: Id) -> int | str:
    """The id of a point: a whole number as it is, anything else as a UUID made from it."""
    return one if isinstance(one, int) and 0 <= one < 2**63 else str(uuid5(_NAMES, str(one)))


def parse_uri(uri: str) -> tuple[str, str, bool]:
    """(folder or address, collection, whether it is a folder) of `qdrant:FOLDER` or `qdrant:http://host:6333`."""
    target, _, collection = uri.removeprefix("qdrant:").partition("#")
    local = "://" not in target
    if not (target if local else is_address(target)):
        raise SearchError("A Qdrant store must be qdrant:FOLDER or qdrant:http://HOST:6333. Got another address.")
    return target, collection or "bier", local


class QdrantStore(EngineStore):
    """A Qdrant collection with the vectors `vector` and `learner_1` and the payload id, label, path and entry.

    A folder is searched exactly and by one process at a time. An API key is read from the environment variable
    QDRANT_API_KEY.
    """

    BATCH = 256  # 1 MB of JSON at 512 dimensions; a server takes up to 32 MB
    HINTS = {  # noqa: RUF012
        "already accessed": "Is another process using the folder?",
        "Connection refused": "Run the command again when the server is back; a load continues where it stopped.",
    }

    def _connect(self, uri: str) -> None:
        client, self._models = needs("qdrant_client", "qdrant"), needs("qdrant_client.models", "qdrant")
        raised = needs("qdrant_client.http.exceptions", "qdrant")
        self.failures = (raised.ApiException, RuntimeError, ValueError, OSError)
        target, self.collection, self._local = parse_uri(uri)
        self._about = f"{self.collection}_about"  # a collection of one point
        self._lock: Any = threading.RLock() if self._local else nullcontext()  # the local mode is not thread-safe
        if self._local:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that 20,000 points are many, which docs/stores.md says
                self._client = client.QdrantClient(path=target, force_disable_check_same_thread=True)
        else:
            key = os.environ.get("QDRANT_API_KEY")
            self._client = client.QdrantClient(target, api_key=key, timeout=60, check_compatibility=False)

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with super()._asking(), getattr(self, "_lock", nullcontext()):
            yield

    def _read_record(self) -> dict[str, Any] | None:
        if not self._client.collection_exists(self._about):
            return None
        points = self._client.retrieve(self._about, [0], with_payload=True)
        return dict(points[0].payload) if points else None

    def _write_record(self, record: Mapping[str, Any]) -> None:
        self._make(self._about, {})
        point = self._models.PointStruct(id=0, vector={}, payload=dict(record))
        self._client.upsert(self._about, [point], wait=True)

    def _has_collection(self) -> bool:
        return bool(self._client.collection_exists(self.collection))

    def _create(self, whole_numbers: bool) -> None:
        dot = self._models.Distance.DOT
        sizes = {"vector": self.dimension, "learner_1": self.groups[0]}
        self._make(
            self.collection, {name: self._models.VectorParams(size=size, distance=dot) for name, size in sizes.items()}
        )
        if not self._local:
            self._client.create_payload_index(self.collection, "label", self._models.PayloadSchemaType.KEYWORD)

    def _make(self, name: str, vectors: Mapping[str, Any]) -> None:
        if self._client.collection_exists(name):
            return
        try:
            self._client.create_collection(name, vectors_config=dict(vectors))
        except self.failures:
            if not self._client.collection_exists(name):  # another client was faster
                raise

    def _drop(self) -> None:
        for name in (self.collection, self._about):
            if self._client.collection_exists(name):
                self._client.delete_collection(name)

    def _put(self, rows: Sequence[Row], vectors: Floats) -> None:
        first = spans(self.groups)[0]
        points = [
            self._models.PointStruct(
                id=point_id(row.id),
                vector={"vector": vector.tolist(), "learner_1": vector[first].tolist()},
                payload={key: value for key, value in row._asdict().items() if value is not None},
            )
            for row, vector in zip(rows, vectors, strict=True)
        ]
        if self._local:
            self._write_ahead()
        self._client.upsert(self.collection, points, wait=True)

    def _write_ahead(self) -> None:
        """Let the local mode, which commits every point by itself, not wait for the disk each time (20 times faster).

        After a loss of power the last points may be missing; the file stays whole, and a load continues.
        """
        with suppress(AttributeError):  # the client's own parts
            database = self._client._client.collections[self.collection].storage.storage
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")

    def _delete(self, ids: Sequence[Id]) -> None:
        self._client.delete(self.collection, [point_id(one) for one in ids], wait=True)

    def _read(self, ids: Sequence[Id], field: str) -> dict[Id, Any]:
        points = self._client.retrieve(
            self.collection,
            [point_id(one) for one in ids],
            with_payload=["id", "entry"] if field == "entry" else ["id"],
            with_vectors=["vector"] if field == "vector" else False,
        )
        return {one.payload["id"]: (one.vector if field == "vector" else one.payload)[field] for one in points}

    def _every_id(self) -> list[Id]:
        found: list[Id] = []
        offset = None
        while True:
            points, offset = self._client.scroll(self.collection, limit=10_000, offset=offset, with_payload=["id"])
            found += [one.payload["id"] for one in points]
            if offset is None:
                return found

    def _any_vector(self) -> Floats | None:
        points, _ = self._client.scroll(self.collection, limit=1, with_payload=False, with_vectors=["vector"])
        return np.asarray(points[0].vector["vector"], np.float32) if points else None

    def _count(self) -> int:
        return int(self._client.count(self.collection, exact=True).count)

    def _nearest(
        self, queries: Floats, k: int, wanted: Conditions, *, field: str = "vector", exact: bool = False
    ) -> Hits:
        same = {"using": field, "query_filter": self._filter(wanted), "search_params": self._params(k, exact)}
        return [self._ask(self._part(query, field), k, **same) for query in queries]

    def _part(self, query: Floats, field: str) -> list[float]:
        part: list[float] = (query[spans(self.groups)[0]] if field == "learner_1" else query).tolist()
        return part

    def _params(self, count: int, exact: bool) -> Any:
        """How wide the graph is searched; the local mode is always exact."""
        return None if self._local else self._models.SearchParams(hnsw_ef=max(EFFORT, 2 * count), exact=exact)

    def _ask(self, query: list[float], k: int, **how: Any) -> list[tuple[Id, float]]:
        # One request per query: several at once are checked number by number, in ten times the time of a local search.
        answer = self._client.query_points(self.collection, query=query, limit=k, with_payload=["id"], **how)
        return [(point.payload["id"], float(point.score)) for point in answer.points]

    def _filter(self, wanted: Conditions) -> Any:
        """Conditions as a filter."""
        models, must = self._models, []
        for key, values in wanted.items():
            if key == "label":
                must.append(models.FieldCondition(key="label", match=models.MatchAny(any=values)))
            else:
                must.append(models.Filter(should=[self._condition(key, value) for value in values]))
        return models.Filter(must=must) if must else None

    def _condition(self, key: str, value: Any) -> Any:
        if '"' in key:
            raise SearchError(f"A key of the 'where' parameter must have no quotation marks in Qdrant. Got {key!r}.")
        models, field = self._models, f'entry.metadata."{key}"'
        if value is None:
            return models.IsNullCondition(is_null=models.PayloadField(key=field))
        if isinstance(value, float):
            return models.FieldCondition(key=field, range=models.Range(gte=value, lte=value))
        return models.FieldCondition(key=field, match=models.MatchValue(value=value))
