"""The same interface over Milvus, for collections that outgrow one machine."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np
from numpy.typing import NDArray

from bier.errors import SearchError, needs
from bier.search.store import (
    Columns,
    Entry,
    Floats,
    Found,
    Id,
    Store,
    Where,
    checked_ids,
    id_array,
    spans,
    wanted_values,
)

_GRAPH = {"M": 32, "efConstruction": 200}
_LONGEST = 4_096


class Address(NamedTuple):
    """Where a collection lives: the file or server, its name, and the index type of a new one."""

    target: str
    collection: str
    index_type: str
    local: bool

    @property
    def about(self) -> str:
        """The collection beside it that keeps groups and model; Milvus Lite stores no description."""
        return f"{self.collection}_about"


def parse_uri(uri: str) -> Address:
    """`milvus:shop.db`, `milvus:http://host:19530`, each with `?index=TYPE` and `#collection`."""
    rest = uri.removeprefix("milvus:")
    rest, _, collection = rest.partition("#")
    target, _, query = rest.partition("?")
    local = "://" not in target
    try:
        known = target.endswith(".db") if local else bool(urlsplit(target).hostname and urlsplit(target).port != 0)
    except ValueError:  # a port that is no number, brackets that are not closed
        known = False
    if not known:
        raise SearchError(
            f"A Milvus store must be milvus:NAME.db (a local file) or milvus:http://host:19530. Got {uri!r} instead."
        )
    options = parse_qs(query)
    if set(options) - {"index"}:
        raise SearchError(f"A Milvus store's only option is index. Got {sorted(options)} in {uri!r} instead.")
    index = options.get("index", ["FLAT" if local else "HNSW"])[0].upper()
    return Address(target, collection or "bier", index, local)


def import_pymilvus(address: Address) -> Any:
    """The client library; a local file needs Milvus Lite as well."""
    if address.local:
        needs("milvus_lite", "milvus")
    return needs("pymilvus", "milvus")


def make_collection(client: Any, address: Address, groups: Sequence[int], whole_numbers: bool) -> None:
    """The collection of vectors: compared by dot product, as a whole and by the first learner alone."""
    types = import_module("pymilvus").DataType
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    if whole_numbers:
        schema.add_field("id", types.INT64, is_primary=True)
    else:
        schema.add_field("id", types.VARCHAR, is_primary=True, max_length=_LONGEST)
    schema.add_field("label", types.VARCHAR, max_length=_LONGEST)
    schema.add_field("path", types.VARCHAR, max_length=_LONGEST)
    schema.add_field("entry", types.JSON)
    schema.add_field("vector", types.FLOAT_VECTOR, dim=sum(groups))
    schema.add_field("learner_1", types.FLOAT_VECTOR, dim=groups[0])
    indexes = client.prepare_index_params()
    for field in ("vector", "learner_1"):
        params = _GRAPH if address.index_type.startswith("HNSW") else {}
        indexes.add_index(field, index_type=address.index_type, metric_type="IP", params=params)
    client.create_collection(address.collection, schema=schema, index_params=indexes, consistency_level="Strong")


def make_about(client: Any, address: Address, stored: Mapping[str, Any]) -> None:
    """Remember the groups and the model of a collection in a collection of one row."""
    types = import_module("pymilvus").DataType
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("id", types.INT64, is_primary=True)
    schema.add_field("entry", types.JSON)
    schema.add_field("nothing", types.FLOAT_VECTOR, dim=2)  # Milvus wants a vector in every collection
    indexes = client.prepare_index_params()
    indexes.add_index("nothing", index_type="FLAT", metric_type="IP")
    if not client.has_collection(address.about):
        client.create_collection(address.about, schema=schema, index_params=indexes, consistency_level="Strong")
    client.upsert(address.about, [{"id": 0, "entry": dict(stored), "nothing": [0.0, 0.0]}])


def read_about(client: Any, address: Address) -> dict[str, Any] | None:
    """What `make_about` kept, or None where there is no such collection."""
    if not client.has_collection(address.about):
        return None
    client.load_collection(address.about)
    rows = list(client.query(address.about, filter="id == 0", output_fields=["entry"], consistency_level="Strong"))
    return dict(rows[0]["entry"]) if rows else None


def literal(value: Sequence[Id] | Any) -> str:
    """A value as Milvus's filter language writes it, which is JSON."""
    return json.dumps(value, ensure_ascii=False)


def expression(where: Where | None) -> str:
    """A mapping as a filter: every key must match one of its values. Labels are compared as text."""
    if where is None:
        return ""
    if not isinstance(where, Mapping):
        raise SearchError(
            "The 'where' parameter must be a mapping for Milvus, which cannot run a Python rule. "
            f"Got {type(where).__name__} instead."
        )
    conditions = []
    for key, wanted in where.items():
        values = wanted_values(wanted)
        if key == "label":
            conditions.append(f"label in {literal([str(one) for one in values])}")
        else:
            field = f'entry["metadata"][{literal(key)}]'
            either = [f"{field} == {literal(one)}" for one in values] or ["id in []"]
            conditions.append("(" + " or ".join(either) + ")")
    return " and ".join(conditions)


_BATCH = 1_000  # rows per request: 2.4 MB at 512 dimensions, well below gRPC's limit
_MOST = 16_384  # Milvus answers no more than this to one query
_HINTS = {
    "Open local milvus failed": "Is another process using the file?",
    "multiple vector fields": "Milvus 2.4 or newer is needed.",
}


class MilvusStore(Store):
    """A Milvus collection with the fields id, label, path, entry (JSON), vector and learner_1.

    It differs from `Index` in this: ids are all strings or all whole numbers; `where` must be a mapping; `Found.rows`
    is None; k and shortlist go up to 16,384; `exact` needs the index type FLAT. A token is read from the environment
    variable MILVUS_TOKEN. A server must be Milvus 2.4 or newer, the first with two vectors per row.
    """

    def __init__(self, uri: str, groups: Sequence[int] | None = None, about: Mapping[str, Any] | None = None) -> None:
        self._address: Address = parse_uri(uri)
        self._uri = uri
        pymilvus = import_pymilvus(self._address)
        # It logs a traceback of every error before raising it; the error itself is enough.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        logging.getLogger("milvus_lite").setLevel(logging.CRITICAL)
        self._failure = pymilvus.MilvusException
        with self._asking():
            token = os.environ.get("MILVUS_TOKEN", "")
            self._client = pymilvus.MilvusClient(self._address.target, token=token)
            stored = read_about(self._client, self._address)
            if stored is None and groups is None:
                raise SearchError(f"The store {uri} has no collection {self._address.collection!r}. Load it first.")
            if stored is None:
                stored = {"groups": [int(size) for size in groups or ()], "about": dict(about or {})}
                make_about(self._client, self._address, stored)
            self._groups: tuple[int, ...] = tuple(stored["groups"])
            self.about: dict[str, Any] = stored["about"]
            self._exists: bool = self._client.has_collection(self._address.collection)
            if self._exists:
                self._client.load_collection(self._address.collection)
        if groups is not None and tuple(groups) != self.groups:
            raise SearchError(f"The store {uri} holds vectors of groups {self.groups}. Got {tuple(groups)} instead.")

    def close(self) -> None:
        """Close the connection; of a local file, release its lock too, so that another process may open it."""
        self._client.close()
        if self._address.local:
            manager = import_module("milvus_lite.server_manager").server_manager_instance
            manager.release_server(self._address.target)

    def drop(self) -> None:
        """Delete the collection and what is known about it."""
        with self._asking():
            for name in (self._address.collection, self._address.about):
                if self._client.has_collection(name):
                    self._client.drop_collection(name)
        self._exists = False

    def __len__(self) -> int:
        if not self._exists:
            return 0
        with self._asking():
            return int(self._query("", ["count(*)"])[0]["count(*)"])

    @property
    def groups(self) -> tuple[int, ...]:
        return self._groups

    @property
    def ids(self) -> list[Id]:
        if not self._exists:
            return []
        found: list[Id] = []
        with self._asking():
            pages = self._client.query_iterator(
                self._address.collection, batch_size=_BATCH, output_fields=["id"], consistency_level="Strong"
            )
            while page := pages.next():
                found += [row["id"] for row in page]
            pages.close()
        return found

    def known(self, ids: Sequence[Id]) -> list[Id]:
        return list(self._fetch(ids, ["id"]))

    def entries(self, ids: Sequence[Id]) -> list[Entry]:
        rows = self._all_of(ids, ["entry"])
        return [Entry(one, row["entry"]["label"], row["entry"]["metadata"]) for one, row in zip(ids, rows, strict=True)]

    def vectors(self, ids: Sequence[Id]) -> Floats:
        rows = self._all_of(ids, ["vector"])
        return np.array([row["vector"] for row in rows], np.float32).reshape(len(rows), self.dimension)

    def remove(self, ids: Sequence[Id] | NDArray[Any]) -> None:
        plain = checked_ids(ids)
        self._all_of(plain, ["id"])
        with self._asking():
            for start in range(0, len(plain), _BATCH):
                condition = f"id in {literal(plain[start : start + _BATCH])}"
                self._client.delete(self._address.collection, filter=condition)

    def _add(self, vectors: Floats, columns: Columns) -> None:
        self._ensure(columns[0])
        entries = [Entry(*row) for row in zip(*columns, strict=True)]
        with self._asking():
            for start in range(0, len(entries), _BATCH):
                stop = start + _BATCH
                rows = [self._row(*pair) for pair in zip(entries[start:stop], vectors[start:stop], strict=True)]
                self._client.upsert(self._address.collection, rows)

    def _search(
        self,
        queries: Floats,
        k: int,
        shortlist: int | None,
        where: Where | None,
        learners: tuple[int, ...],
        exact: bool,
    ) -> Found:
        if exact and self._address.index_type != "FLAT":
            raise SearchError(f"The 'exact' parameter needs the index type FLAT in Milvus. Got {self._uri!r} instead.")
        k = min(k, _MOST)
        condition = expression(where)
        if not self._exists or not len(queries):
            hits: list[list[tuple[Id, float]]] = [[] for _ in queries]
        elif shortlist is not None and len(learners) == len(self.groups):
            hits = [self._funnel(query, k, min(shortlist, _MOST), condition) for query in queries]
        elif learners == (0,):
            hits = self._ask(queries[:, spans(self.groups)[0]], "learner_1", k, condition)
        else:
            hits = self._ask(queries, "vector", k, condition)
        if not hits:
            k = min(k, len(self))
            return Found(np.empty((0, k), object), np.empty((0, k), np.float32))
        return _found(hits)

    def _funnel(self, query: Floats, k: int, shortlist: int, condition: str) -> list[tuple[Id, float]]:
        """Both steps inside Milvus: the first learner's field selects the shortlist, the whole vector ranks it."""
        [first] = self._ask(query[None, spans(self.groups)[0]], "learner_1", shortlist, condition)
        [best] = self._ask(query[None], "vector", k, f"id in {literal([one for one, _ in first])}") if first else [[]]
        return best

    def _ask(self, queries: Floats, field: str, k: int, condition: str) -> list[list[tuple[Id, float]]]:
        with self._asking():
            answer = self._client.search(
                self._address.collection,
                data=list(queries),
                anns_field=field,
                limit=k,
                filter=condition,
                output_fields=["id"],
                search_params={} if self._address.local else {"params": {"ef": max(128, 2 * k)}},
                consistency_level="Strong",
            )
        return [[(hit["id"], float(hit["distance"])) for hit in hits] for hits in answer]

    def _row(self, entry: Entry, vector: Floats) -> dict[str, Any]:
        path = (entry.metadata or {}).get("path", entry.id)
        return {
            "id": entry.id,
            "label": "" if entry.label is None else str(entry.label),
            "path": str(path),
            "entry": {"label": entry.label, "metadata": dict(entry.metadata) if entry.metadata is not None else None},
            "vector": vector,
            "learner_1": vector[spans(self.groups)[0]],
        }

    def _ensure(self, ids: Sequence[Id]) -> None:
        """Create the collection as soon as the first ids show their type."""
        kinds = {type(one) for one in ids}
        if len(kinds) > 1:
            raise SearchError("The 'ids' parameter must be all strings or all whole numbers for Milvus. Got both.")
        if not self._exists:
            with self._asking():
                make_collection(self._client, self._address, self.groups, whole_numbers=kinds == {int})
            self._exists = True

    def _lengths(self) -> Floats:
        """The lengths of the learners' parts, read from any one row."""
        with self._asking():
            rows = self._query('label != "\u0000"', ["vector"], limit=1) if self._exists else []
        if not rows:
            return np.ones(len(self.groups), np.float32)
        vector = np.asarray(rows[0]["vector"], np.float32)
        return np.array([np.linalg.norm(vector[span]) for span in spans(self.groups)], np.float32)

    def _all_of(self, ids: Sequence[Id], fields: list[str]) -> list[Mapping[str, Any]]:
        rows = self._fetch(ids, fields)
        for one in ids:
            if one not in rows:
                raise SearchError(f"The store must hold the ids that it is asked for. It has no {one!r}.")
        return [rows[one] for one in ids]

    def _fetch(self, ids: Sequence[Id], fields: list[str]) -> dict[Id, Mapping[str, Any]]:
        found: dict[Id, Mapping[str, Any]] = {}
        with self._asking():
            for start in range(0, len(ids) if self._exists else 0, _BATCH):
                condition = f"id in {literal(list(ids[start : start + _BATCH]))}"
                found |= {row["id"]: row for row in self._query(condition, [*fields, "id"])}
        return found

    def _query(self, condition: str, fields: list[str], limit: int | None = None) -> list[Mapping[str, Any]]:
        extra = {} if limit is None else {"limit": limit}
        return list(
            self._client.query(
                self._address.collection, filter=condition, output_fields=fields, consistency_level="Strong", **extra
            )
        )

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except self._failure as error:
            place = self._address.target if not self._address.local else Path(self._address.target).name
            reason = str(getattr(error, "message", error)).strip().splitlines()[0].rstrip(".")
            hints = [f" {hint}" for sign, hint in _HINTS.items() if sign in reason]
            raise SearchError(
                f"The Milvus store {place} could not do what was asked: {reason}.{''.join(hints)}"
            ) from error


def _found(hits: list[list[tuple[Id, float]]]) -> Found:
    """Lists of hits as arrays; a query with fewer hits than another is filled up with None and -inf."""
    most = max((len(some) for some in hits), default=0)
    nothing: list[tuple[Any, float]] = [(None, -np.inf)]
    full = [some + nothing * (most - len(some)) for some in hits]
    ids = id_array([one for some in full for one, _ in some], (len(hits), most))
    scores = np.array([score for some in full for _, score in some], np.float32).reshape(len(hits), most)
    return Found(ids, scores)
