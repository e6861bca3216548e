"""Milvus: a local file (Milvus Lite), a server or a cluster."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import numpy as np

from bier.errors import SearchError, needs
from bier.search.store import Conditions, Floats, Id, spans, without_secrets
from bier.search.stores.engine import EngineStore, Hits, Row, is_address

_GRAPH = {"M": 32, "efConstruction": 200}
_LONGEST = 4_096  # characters of a text


class Address(NamedTuple):
    """Where a collection lives: the file or server, its name, and the index type of a new one."""

    target: str
    collection: str
    index_type: str
    local: bool


def parse_uri(uri: str) -> Address:
    """`milvus:shop.db`, `milvus:http://host:19530`, each with `?index=TYPE` and `#collection`."""
    rest, _, collection = uri.removeprefix("milvus:").partition("#")
    target, _, query = rest.partition("?")
    local = "://" not in target
    if not (target.endswith(".db") if local else is_address(target)):
        raise SearchError(
            "A Milvus store must be milvus:NAME.db (a local file) or milvus:http://host:19530. "
            f"Got {without_secrets(uri)!r} instead."
        )
    options = parse_qs(query)
    if set(options) - {"index"}:
        raise SearchError(f"A Milvus store's only option is index. Got {sorted(options)} instead.")
    index = options.get("index", ["FLAT" if local else "HNSW"])[0].upper()
    return Address(target, collection or "bier", index, local)


def literal(value: Any) -> str:
    """A value as Milvus's filter language writes it, which is JSON."""
    return json.dumps(value, ensure_ascii=False)


def expression(wanted: Conditions) -> str:
    """Conditions as a filter."""
    parts = []
    for key, values in wanted.items():
        if key == "label":
            parts.append(f"label in {literal(values)}")
        else:
            field = f'entry["metadata"][{literal(key)}]'
            parts.append("(" + " or ".join(f"{field} == {literal(one)}" for one in values) + ")")
    return " and ".join(parts)


class MilvusStore(EngineStore):
    """A Milvus collection with the fields id, label, path, entry (JSON), vector and learner_1.

    k and shortlist go up to 16,384; `exact` needs the index type FLAT. The funnel takes two requests: Milvus has no
    search among the results of another. A token is read from the environment variable MILVUS_TOKEN. A server must be
    Milvus 2.4 or newer, the first with two vectors per row.
    """

    BATCH = 1_000  # 2.4 MB at 512 dimensions, well below gRPC's limit
    MOST = 16_384  # Milvus answers no more than this to one query
    HINTS = {  # noqa: RUF012
        "Open local milvus failed": "Is another process using the file?",
        "multiple vector fields": "Milvus 2.4 or newer is needed.",
    }

    def _connect(self, uri: str) -> None:
        self._address = parse_uri(uri)
        self.collection, self.can_scan = self._address.collection, self._address.index_type == "FLAT"
        self._about = f"{self.collection}_about"  # a collection of one row; Milvus Lite stores no description
        if self._address.local:
            needs("milvus_lite", "milvus")
        pymilvus = needs("pymilvus", "milvus")
        # It logs a traceback of every error before raising it; the error itself is enough.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        logging.getLogger("milvus_lite").setLevel(logging.CRITICAL)
        self.failures = (pymilvus.MilvusException,)
        self._types = pymilvus.DataType
        self._client = pymilvus.MilvusClient(self._address.target, token=os.environ.get("MILVUS_TOKEN", ""))

    def close(self) -> None:
        """Close the connection; of a local file, release its lock too, so that another process may open it."""
        if hasattr(self, "_client"):
            self._client.close()
            if self._address.local:
                manager = import_module("milvus_lite.server_manager").server_manager_instance
                manager.release_server(self._address.target)

    def _read_record(self) -> dict[str, Any] | None:
        if not self._client.has_collection(self._about):
            return None
        self._client.load_collection(self._about)
        rows = list(
            self._client.query(self._about, filter="id == 0", output_fields=["entry"], consistency_level="Strong")
        )
        return dict(rows[0]["entry"]) if rows else None

    def _write_record(self, record: Mapping[str, Any]) -> None:
        if not self._client.has_collection(self._about):
            schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field("id", self._types.INT64, is_primary=True)
            schema.add_field("entry", self._types.JSON)
            schema.add_field("nothing", self._types.FLOAT_VECTOR, dim=2)  # Milvus wants a vector in every collection
            self._make(self._about, schema, {"nothing": ("FLAT", {})})
        self._client.upsert(self._about, [{"id": 0, "entry": dict(record), "nothing": [0.0, 0.0]}])

    def _has_collection(self) -> bool:
        if not self._client.has_collection(self.collection):
            return False
        self._client.load_collection(self.collection)
        return True

    def _create(self, whole_numbers: bool) -> None:
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        if whole_numbers:
            schema.add_field("id", self._types.INT64, is_primary=True)
        else:
            schema.add_field("id", self._types.VARCHAR, is_primary=True, max_length=_LONGEST)
        schema.add_field("label", self._types.VARCHAR, max_length=_LONGEST)
        schema.add_field("path", self._types.VARCHAR, max_length=_LONGEST)
        schema.add_field("entry", self._types.JSON)
        schema.add_field("vector", self._types.FLOAT_VECTOR, dim=self.dimension)
        schema.add_field("learner_1", self._types.FLOAT_VECTOR, dim=self.groups[0])
        index = self._address.index_type, _GRAPH if self._address.index_type.startswith("HNSW") else {}
        self._make(self.collection, schema, {"vector": index, "learner_1": index})

    def _make(self, name: str, schema: Any, indexes: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        params = self._client.prepare_index_params()
        for field, (kind, settings) in indexes.items():
            params.add_index(field, index_type=kind, metric_type="IP", params=dict(settings))
        try:
            self._client.create_collection(name, schema=schema, index_params=params, consistency_level="Strong")
        except self.failures:
            if not self._client.has_collection(name):  # another client was faster
                raise

    def _drop(self) -> None:
        for name in (self.collection, self._about):
            if self._client.has_collection(name):
                self._client.drop_collection(name)

    def _put(self, rows: Sequence[Row], vectors: Floats) -> None:
        first = spans(self.groups)[0]
        self._client.upsert(
            self.collection,
            [
                {**row._asdict(), "label": row.label or "", "vector": vector, "learner_1": vector[first]}
                for row, vector in zip(rows, vectors, strict=True)
            ],
        )

    def _delete(self, ids: Sequence[Id]) -> None:
        self._client.delete(self.collection, filter=f"id in {literal(list(ids))}")

    def _read(self, ids: Sequence[Id], field: str) -> dict[Id, Any]:
        rows = self._query(f"id in {literal(list(ids))}", ["id", field])
        return {row["id"]: row[field] for row in rows}

    def _every_id(self) -> list[Id]:
        found: list[Id] = []
        pages = self._client.query_iterator(
            self.collection, batch_size=self.BATCH, output_fields=["id"], consistency_level="Strong"
        )
        while page := pages.next():
            found += [row["id"] for row in page]
        pages.close()
        return found

    def _any_vector(self) -> Floats | None:
        rows = self._query('label != "\u0000"', ["vector"], limit=1)
        return np.asarray(rows[0]["vector"], np.float32) if rows else None

    def _count(self) -> int:
        return int(self._query("", ["count(*)"])[0]["count(*)"])

    def _nearest(
        self, queries: Floats, k: int, wanted: Conditions, *, field: str = "vector", exact: bool = False
    ) -> Hits:
        return self._ask(queries, field, k, expression(wanted))

    def _ask(self, queries: Floats, field: str, k: int, condition: str) -> Hits:
        part = spans(self.groups)[0] if field == "learner_1" else slice(None)
        answer = self._client.search(
            self.collection,
            data=list(queries[:, part]),
            anns_field=field,
            limit=k,
            filter=condition,
            output_fields=["id"],
            search_params={} if self._address.local else {"params": {"ef": max(128, 2 * k)}},
            consistency_level="Strong",
        )
        return [[(hit["id"], float(hit["distance"])) for hit in hits] for hits in answer]

    def _query(self, condition: str, fields: list[str], limit: int | None = None) -> list[Mapping[str, Any]]:
        extra = {} if limit is None else {"limit": limit}
        return list(
            self._client.query(
                self.collection, filter=condition, output_fields=fields, consistency_level="Strong", **extra
            )
        )
