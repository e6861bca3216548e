"""Qdrant: a folder of this machine (the client's local mode), a server or a cluster."""

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import numpy as np

from bier.errors import SearchError, needs
from bier.search.engines import Conditions, EngineStore, Hits, Row, is_address, split_name
from bier.search.store import Floats, Id

EFFORT = 128  # hnsw_ef, on a server
_NAMES = UUID("5b1c9d4e-6f0a-4a57-9a8e-0d6c1f7a2b3c")  # Qdrant's ids are numbers or UUIDs; texts become the latter


def point_id(one: Id) -> int | str:
    """The id of a point: a whole number as it is, anything else as a UUID made from it."""
    return one if isinstance(one, int) and 0 <= one < 2**63 else str(uuid5(_NAMES, str(one)))


def parse_uri(uri: str) -> tuple[str, str, bool]:
    """(folder or address, collection, whether it is a folder) of `qdrant:FOLDER` or `qdrant:http://host:6333`."""
    target, collection = split_name(uri.removeprefix("qdrant:"))
    local = "://" not in target
    if not (target if local else is_address(target)):
        raise SearchError("A Qdrant store must be qdrant:FOLDER or qdrant:http://HOST:6333. Got another address.")
    return target, collection, local


class QdrantStore(EngineStore):
    """A Qdrant collection with the vector `vector` and the payload id, label, path, entry and terms.

    Its metadata is our note.

    A folder is searched exactly and by one process at a time. An API key is read from the environment variable
    QDRANT_API_KEY. A server must be Qdrant 1.16 or newer, the first with metadata of collections.
    """

    BATCH = 256  # 1 MB of JSON at 512 dimensions; a server takes up to 32 MB
    HINTS = {  # noqa: RUF012
        "already accessed": "Is another process using the folder?",
        "Connection refused": "Run the command again when the server is back; a load continues where it stopped.",
    }

    def _connect(self, uri: str, new: bool) -> None:
        client, self._models = needs("qdrant_client", "qdrant"), needs("qdrant_client.models", "qdrant")
        raised = needs("qdrant_client.http.exceptions", "qdrant")
        self.failures = (raised.ApiException, RuntimeError, ValueError, OSError)
        target, self.collection, self._local = parse_uri(uri)
        self._lock: Any = threading.RLock() if self._local else nullcontext()  # the local mode is not thread-safe
        if not self._local:
            key = os.environ.get("QDRANT_API_KEY")
            self._client = client.QdrantClient(target, api_key=key, timeout=60, check_compatibility=False)
            return
        self._check_folder(Path(target), "meta.json", new)
        self._folder = Path(target) / "collection" / self.collection
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that 20,000 points are many, which docs/stores.md says
                self._client = client.QdrantClient(path=target, force_disable_check_same_thread=True)
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise SearchError(
                f"The folder {target} must be one of Qdrant's local mode. Its meta.json is another file, or damaged."
            ) from error

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with super()._asking(), getattr(self, "_lock", nullcontext()):
            yield

    def _read_note(self) -> str | None:
        if self._client.collection_exists(self.collection):
            metadata = self._client.get_collection(self.collection).config.metadata or {}
            return str(metadata.get("bier", ""))
        # The local mode would take a folder that it does not know for its own, and delete it with the collection.
        return "" if self._local and self._folder.exists() and any(self._folder.iterdir()) else None

    def _create(self, note: str, whole_numbers: bool) -> None:
        vectors = {"vector": self._models.VectorParams(size=self.dimension, distance=self._models.Distance.DOT)}
        try:
            self._client.create_collection(self.collection, vectors_config=vectors, metadata={"bier": note})
        except self.failures:
            if not self._client.collection_exists(self.collection):  # another client was faster
                raise
        if not self._local:
            self._client.create_payload_index(self.collection, "terms", self._models.PayloadSchemaType.KEYWORD)

    def _drop(self) -> None:
        if self._local:
            others = [file.name for file in self._folder.iterdir() if not file.name.startswith("storage.sqlite")]
            if others:  # the local mode would delete them
                raise SearchError(
                    f"The folder {self._folder} must hold Qdrant's files alone. It has {others[0]!r} too."
                )
        self._client.delete_collection(self.collection)

    def _put(self, rows: Sequence[Row], vectors: Floats) -> None:
        points = [
            self._models.PointStruct(
                id=point_id(row.id),
                vector={"vector": vector.tolist()},
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

    def _nearest(self, queries: Floats, k: int, wanted: Conditions, exact: bool) -> Hits:
        models = self._models
        must = [models.FieldCondition(key="terms", match=models.MatchAny(any=terms)) for terms in wanted]
        only = models.Filter(must=must) if must else None
        # How wide the graph is searched; the local mode is always exact.
        params = None if self._local else self._models.SearchParams(hnsw_ef=max(EFFORT, 2 * k), exact=exact)
        hits: Hits = []
        # One request per query: several at once are checked number by number, in ten times the time of a local search.
        for query in queries:
            answer = self._client.query_points(
                self.collection,
                query=query.tolist(),
                using="vector",
                limit=k,
                query_filter=only,
                search_params=params,
                with_payload=["id"],
            )
            hits.append([(point.payload["id"], float(point.score)) for point in answer.points])
        return hits
