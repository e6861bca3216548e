"""One interface over the embedded index and over engines that span machines; a URI says which."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import ArrayLike, NDArray

from bier.errors import SearchError
from bier.search.answers import Entry, Floats, Found, Id, Label, Learners, Metadata, Where
from bier.search.index import Index

SCHEMES = ("milvus",)


class Store(Protocol):
    """What can be searched. `Index` documents each method; a store behaves like it but for what its own page says."""

    about: dict[str, Any]

    @property
    def groups(self) -> tuple[int, ...]: ...
    @property
    def dimension(self) -> int: ...
    @property
    def ids(self) -> list[Id]: ...
    def __len__(self) -> int: ...
    def known(self, ids: Sequence[Id]) -> list[Id]: ...
    def entries(self, ids: Sequence[Id]) -> list[Entry]: ...
    def vectors(self, ids: Sequence[Id]) -> Floats: ...
    def add(
        self,
        vectors: ArrayLike,
        ids: Sequence[Id] | NDArray[Any],
        labels: Sequence[Label] | NDArray[Any] | None = None,
        metadata: Sequence[Metadata] | None = None,
        replace: bool = False,
    ) -> None: ...
    def remove(self, ids: Sequence[Id] | NDArray[Any]) -> None: ...
    def search(
        self,
        queries: ArrayLike,
        k: int = 10,
        shortlist: int | None = None,
        where: Where | None = None,
        learners: Learners = None,
    ) -> Found: ...


def is_store_uri(text: str) -> bool:
    """Whether a text names an engine (`milvus:shop.db`) rather than a folder."""
    return text.split(":", 1)[0] in SCHEMES and ":" in text


def open_store(uri: str | Path, groups: Sequence[int] | None = None, about: Mapping[str, Any] | None = None) -> Store:
    """Open what a URI names.

    `milvus:shop.db` is a local file (Milvus Lite), `milvus:http://host:19530` a server or a cluster; `#name` picks the
    collection (default `bier`) and `?index=DISKANN` the index type of a new one. Anything else is the folder of
    a saved index. A collection that is not there yet is made if `groups` are given, with `about` kept beside it.
    """
    text = str(uri)
    if is_store_uri(text):
        from bier.search.milvus import MilvusStore

        return MilvusStore(text, groups, about)
    if "://" in text:
        raise SearchError(f"A store must be an index folder or start with one of {SCHEMES}. Got {text!r} instead.")
    return Index.load(Path(text))
