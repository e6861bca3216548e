"""Milvus: a local file (Milvus Lite), a server or a cluster."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import numpy as np

from bier.errors import SearchError, needs
from bier.search.engines import LONGEST_TERM, Conditions, EngineStore, Hits, Row, is_address, split_name
from bier.search.store import Floats, Id, without_secrets

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
    rest, collection = split_name(uri.removeprefix("milvus:"))
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
    return Address(target, collection, index, local)


def literal(value: Any) -> str:
    """A value as Milvus's filter language writes it, which is JSON."""
    return json.dumps(value, ensure_ascii=False)


def expression(wanted: Conditions) -> str:
    """Conditions as a filter."""
    return " and ".join(f"array_contains_any(terms, {literal(terms)})" for terms in wanted)


class MilvusStore(EngineStore):
    """A Milvus collection with the fields id, label, path, entry (JSON), terms and vector.

    k goes up to 16,384; `exact` needs the index type FLAT. A token is read from the environment variable MILVUS_TOKEN.
    """

    BATCH = 1_000  # 2.4 MB at 512 dimensions, well below gRPC's limit
    MOST = 16_384  # Milvus answers no more than this to one query
    HINTS = {  # noqa: RUF012
        "Open local milvus failed": "Is another process using the file?",
    }

    def _connect(self, uri: str, new: bool) -> None:
        self._address = parse_uri(uri)
        self.collection, self.can_scan = self._address.collection, self._address.index_type == "FLAT"
        if self._address.local:
            needs("milvus_lite", "milvus")
            self._check_folder(Path(self._address.target), "LOCK", new)
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

    def _read_note(self) -> str | None:
        if self._client.has_collection(self.collection):
            known = self._client.describe_collection(self.collection)
            self._client.load_collection(self.collection)
            return str(known.get("properties", {}).get("bier") or known.get("description", ""))
        foreign = Path(self._address.target) / "collections" / self.collection  # Milvus Lite would take it for its own
        return "" if self._address.local and foreign.exists() else None

    def _create(self, note: str, whole_numbers: bool) -> None:
        # Milvus Lite stores the properties and no description; a server stores any description.
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False, description=note)
        if whole_numbers:
            schema.add_field("id", self._types.INT64, is_primary=True)
        else:
            schema.add_field("id", self._types.VARCHAR, is_primary=True, max_length=_LONGEST)
        schema.add_field("label", self._types.VARCHAR, max_length=_LONGEST)
        schema.add_field("path", self._types.VARCHAR, max_length=_LONGEST)
        schema.add_field("entry", self._types.JSON)
        text = {"element_type": self._types.VARCHAR, "max_length": 4 * LONGEST_TERM}  # bytes
        schema.add_field("terms", self._types.ARRAY, max_capacity=_LONGEST, **text)
        schema.add_field("vector", self._types.FLOAT_VECTOR, dim=self.dimension)
        kind, params = self._address.index_type, self._client.prepare_index_params()
        graph = _GRAPH if kind.startswith("HNSW") else {}
        params.add_index("vector", index_type=kind, metric_type="IP", params=graph)
        properties = {"bier": note} if self._address.local else {}
        try:
            self._client.create_collection(
                self.collection, schema=schema, index_params=params, consistency_level="Strong", properties=properties
            )
        except self.failures:
            if not self._client.has_collection(self.collection):  # another client was faster
                raise

    def _drop(self) -> None:
        self._client.drop_collection(self.collection)

    def _put(self, rows: Sequence[Row], vectors: Floats) -> None:
        self._client.upsert(
            self.collection,
            [
                {**row._asdict(), "label": row.label or "", "vector": vector}
                for row, vector in zip(rows, vectors, strict=True)
            ],
        )

    def _delete(self, ids: Sequence[Id]) -> None:
        self._client.delete(self.collection, filter=f"id in {literal(list(ids))}")

    def _read(self, ids: Sequence[Id], field: str) -> dict[Id, Any]:
        rows = self._query(f"id in {literal(list(ids))}", ["id", field])
        return {row["id"]: row[field] for row in rows}

    def _every_id(self) -> list[Id]:
        """Page by page in the order of ids. pymilvus does so too, but breaks at a quotation mark in an id."""
        ids: list[Id] = []
        pages = {"limit": self.BATCH, "iterator": "True", "reduce_stop_for_best": "True"}
        while page := self._query(f"id > {literal(ids[-1])}" if ids else "", ["id"], **pages):
            ids += [row["id"] for row in page]
        return ids

    def _any_vector(self) -> Floats | None:
        rows = self._query('label != "\u0000"', ["vector"], limit=1)
        return np.asarray(rows[0]["vector"], np.float32) if rows else None

    def _count(self) -> int:
        return int(self._query("", ["count(*)"])[0]["count(*)"])

    def _nearest(self, queries: Floats, k: int, wanted: Conditions, exact: bool) -> Hits:
        answer = self._client.search(
            self.collection,
            data=list(queries),
            anns_field="vector",
            limit=k,
            filter=expression(wanted),
            output_fields=["id"],
            search_params={} if self._address.local else {"params": {"ef": max(128, 2 * k)}},
            consistency_level="Strong",
        )
        return [[(hit["id"], float(hit["distance"])) for hit in hits] for hits in answer]

    def _query(self, condition: str, fields: list[str], **options: Any) -> list[Mapping[str, Any]]:
        return list(
            self._client.query(
                self.collection, filter=condition, output_fields=fields, consistency_level="Strong", **options
            )
        )
