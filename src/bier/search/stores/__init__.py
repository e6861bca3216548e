"""Stores by URI. A store of another package is an entry point of the group `bier.stores`, named after its scheme.

The entry point must load a class that is called as `EngineStore` is: (uri, groups=None, about=None, rebuild=False).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from bier.errors import SearchError
from bier.search.index import Index
from bier.search.store import Store, without_secrets

GROUP = "bier.stores"
# Also in pyproject.toml; here, so that they are found in a source tree that is not installed.
BUILT_IN = {
    "milvus": "bier.search.stores.milvus:MilvusStore",
    "postgresql": "bier.search.stores.postgres:PostgresStore",
    "postgres": "bier.search.stores.postgres:PostgresStore",
    "qdrant": "bier.search.stores.qdrant:QdrantStore",
}
FORMS = "milvus:NAME.db, milvus:http://HOST:PORT, postgresql://HOST/DATABASE, qdrant:FOLDER or qdrant:http://HOST:PORT"


@cache
def _others() -> dict[str, EntryPoint]:
    """The stores of other packages."""
    return {one.name: one for one in entry_points(group=GROUP) if one.name not in BUILT_IN}


def _scheme(text: str) -> str | None:
    scheme, colon, _ = text.partition(":")
    return scheme if colon and (scheme in BUILT_IN or scheme in _others()) else None


def is_store_uri(text: str) -> bool:
    """Whether a text names an external engine (`milvus:shop.db`) rather than a folder."""
    return _scheme(text) is not None


def _factory(scheme: str) -> Callable[..., Store]:
    if scheme in BUILT_IN:
        module, _, name = BUILT_IN[scheme].partition(":")
        found: Callable[..., Store] = getattr(import_module(module), name)
        return found
    try:
        return _others()[scheme].load()  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise SearchError(f"The store of {scheme}: could not be imported: {error}.") from error


def open_store(
    uri: str | Path,
    groups: Sequence[int] | None = None,
    about: Mapping[str, Any] | None = None,
    rebuild: bool = False,
) -> Store:
    """Open what a URI names: a collection in an external engine, or the folder of a saved index.

    Args:
        uri: `postgresql://host/database`, `qdrant:FOLDER`, `qdrant:http://host:6333`, `milvus:shop.db` or
            `milvus:http://host:19530`, each with `#name` for the collection (default `bier`); or a folder.
        groups: the learners' sizes. A collection that is missing is created if they are given; those of one that is
            there must be the same.
        about: kept with a new collection. If the model that it names is not the collection's, that is an error.
        rebuild: delete what the collection holds first.
    """
    text = str(uri)
    if scheme := _scheme(text):
        return _factory(scheme)(text, groups, about, rebuild)
    if "://" in text:
        raise SearchError(f"A store must be an index folder or {FORMS}. Got {without_secrets(text)!r} instead.")
    return Index.load(Path(text))
