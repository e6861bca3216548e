"""Addresses, fields and filters of Milvus collections."""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from bier.errors import SearchError
from bier.search.answers import Id, Where, wanted_values

EXTRA = "Milvus needs parts that are not installed. Install them with: pip install 'bier-ml[milvus]'"
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
    if not target or (local and not target.endswith(".db")):
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
    if find_spec("pymilvus") is None or (address.local and find_spec("milvus_lite") is None):
        raise SearchError(f"{EXTRA}.")
    return import_module("pymilvus")


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
