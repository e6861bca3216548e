"""External engines by URI, and what their adapters share: the record of a collection, batches, checks and errors.

An engine of another package is an entry point of the group `bier.stores`, named after its scheme. It must load a class
that is called as `EngineStore` is: (uri, groups=None, about=None, rebuild=False).
"""

import json
import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from bier.errors import SearchError
from bier.search.index import Index
from bier.search.store import (
    Columns,
    Entry,
    Floats,
    Id,
    Neighbours,
    Scalar,
    SearchRequest,
    Store,
    checked_groups,
    checked_ids,
    checked_model,
    id_array,
    spans,
    without_secrets,
)

GROUP = "bier.stores"
# Also in pyproject.toml; here, so that they are found in a source tree that is not installed.
BUILT_IN = {
    "milvus": "bier.search.engines.milvus:MilvusStore",
    "postgresql": "bier.search.engines.postgres:PostgresStore",
    "postgres": "bier.search.engines.postgres:PostgresStore",
    "qdrant": "bier.search.engines.qdrant:QdrantStore",
}
LONGEST_TERM = 256  # characters; indexes of engines have limits
FORMS = "milvus:NAME.db, milvus:http://HOST:PORT, postgresql://HOST/DATABASE, qdrant:FOLDER or qdrant:http://HOST:PORT"

Conditions: TypeAlias = list[list[str]]  # a row passes if it has one term of each list
Hits: TypeAlias = list[list[tuple[Id, float]]]  # (id, dot product) of each query's results, best first


@cache
def _others() -> dict[str, EntryPoint]:
    """The engines of other packages."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


def _scheme(text: str) -> str | None:
    scheme, colon, _ = text.partition(":")
    return scheme if colon and (scheme in BUILT_IN or scheme in _others()) else None


def is_store_uri(text: str) -> bool:
    """Whether a text names an external engine (`milvus:shop.db`) rather than a folder."""
    return _scheme(text) is not None


def _factory(scheme: str) -> Callable[..., Store]:
    if scheme in BUILT_IN:
        module, _, name = BUILT_IN[scheme].partition(":")
        factory: Callable[..., Store] = getattr(import_module(module), name)
        return factory
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
        groups: the learners' sizes. A collection that is missing is created with them when the first rows are added;
            those of one that is there must be the same.
        about: kept with a new collection. If the model that it names is not the collection's, that is an error.
        rebuild: delete what the collection holds first.
    """
    text = str(uri)
    if scheme := _scheme(text):
        return _factory(scheme)(text, groups, about, rebuild)
    if "://" in text:
        raise SearchError(f"A store must be an index folder or {FORMS}. Got {without_secrets(text)!r} instead.")
    return Index.load(Path(text))


class Row(NamedTuple):
    """A row as engines store it, beside its vector.

    label and path are for others to read, entry is for `Store.entries`. terms are what filters compare: label and
    metadata as texts that are equal where the table in `bier.search.store` says so, whatever an engine thinks of types.
    """

    id: Id
    label: str | None
    path: str
    entry: dict[str, Any]
    terms: list[str]

    @classmethod
    def of(cls, entry: Entry) -> "Row":
        metadata = None if entry.metadata is None else dict(entry.metadata)
        stored = _as_json({"label": entry.label, "metadata": metadata}, entry.id)
        label = None if entry.label is None else str(entry.label)
        values = {**(stored["metadata"] or {}), "label": label}
        terms = {term(key, value) for key, value in values.items() if not isinstance(value, list | dict)}
        return cls(entry.id, label, str((metadata or {}).get("path", entry.id)), stored, sorted(terms))


def term(key: str, value: Scalar) -> str:
    """A condition of a filter as text: 1 and 1.0 give the same, 1 and True and "1" do not."""
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    text = json.dumps([key, plain], ensure_ascii=False)
    return text if len(text) <= LONGEST_TERM else sha256(text.encode()).hexdigest()


class EngineStore(Store):
    """A collection in an external engine, with the columns id, label, path, entry, terms and vector.

    It differs from `Index` in this: ids are all strings or all whole numbers of 64 bits; texts are UTF-8 without NUL;
    metadata is JSON; `Neighbours.rows` is None; rows are added in batches, of which each is
    written or not. Several threads may use one store.

    The engine keeps a note with the collection: {"bier": 1, "groups", "about", "whole_numbers" (of the ids)} as JSON.
    It is written with the first rows. What has the collection's name and no such note is somebody else's: it is an
    error, and is neither read, nor filled, nor deleted.
    """

    BATCH: ClassVar[int] = 1_000  # rows per request
    MOST: ClassVar[int] = 2**31 - 1  # results of one query

    def __init__(
        self,
        uri: str,
        groups: Sequence[int] | None = None,
        about: Mapping[str, Any] | None = None,
        rebuild: bool = False,
    ) -> None:
        self.shown = without_secrets(uri)
        self._creating = threading.Lock()
        self._exists = False  # whether the collection has been seen
        self._expected = None if groups is None else checked_groups(groups, sum(groups)), about
        try:
            with self._asking():
                self._connect(uri, new=groups is not None)
                record = self._read_record()
                if record is not None and rebuild:
                    self._drop()
                    record = None
            if record is None and groups is None:
                raise self._missing()
            sizes = list(self._expected[0] or ())
            self._take(record or {"bier": 1, "groups": sizes, "about": dict(about or {}), "whole_numbers": None})
        except BaseException:
            self.close()  # a file that stays locked could not be opened again
            raise

    def _take(self, record: dict[str, Any]) -> None:
        """Use a collection's record; an error if it has other groups or another model than were asked for."""
        groups, about = self._expected
        if groups is not None and tuple(record["groups"]) != groups:
            raise SearchError(
                f"The store {self.shown} holds vectors of groups {tuple(record['groups'])}. Got {groups} instead."
            )
        if about is not None:
            checked_model(record["about"], about, f"The store {self.shown}")
        self._record = record
        self.about: dict[str, Any] = record["about"]

    def _read_record(self) -> dict[str, Any] | None:
        """The record of the collection, None if there is no such collection; an error if it is not ours."""
        note = self._read_note()
        if note is None:
            return None
        try:
            record: dict[str, Any] = json.loads(note)
            checked_groups(record["groups"], sum(record["groups"]))
            if record["bier"] == 1 and isinstance(record["about"], dict) and isinstance(record["whole_numbers"], bool):
                return record
        except (ValueError, TypeError, KeyError, RecursionError, SearchError):
            pass
        raise SearchError(
            f"The store {self.shown} must be a new collection or one that bier has made. "
            f"Something else has the name {self.collection!r} there; choose another name after #."
        )

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(self._record["groups"])

    @property
    def ids(self) -> list[Id]:
        with self._asking():
            return self._every_id() if self._there() else []

    def __len__(self) -> int:
        with self._asking():
            return self._count() if self._there() else 0

    def known(self, ids: Sequence[Id]) -> list[Id]:
        there = self._fetch(ids, "id")
        return [name for name in ids if name in there]

    def entries(self, ids: Sequence[Id]) -> list[Entry]:
        stored = self._all_of(ids, "entry")
        return [Entry(name, entry["label"], entry["metadata"]) for name, entry in zip(ids, stored, strict=True)]

    def vectors(self, ids: Sequence[Id]) -> Floats:
        return np.array(self._all_of(ids, "vector"), np.float32).reshape(len(ids), self.dimension)

    def remove(self, ids: Sequence[Id] | NDArray[Any]) -> None:
        plain = checked_ids(ids)
        self._all_of(plain, "id")
        with self._asking():
            for start in range(0, len(plain), self.BATCH):
                self._delete(plain[start : start + self.BATCH])

    def drop(self) -> None:
        """Delete the collection."""
        with self._asking():
            if self._read_record() is not None:
                self._drop()
        self._exists = False

    def _add(self, vectors: Floats, columns: Columns) -> None:
        for name in columns[0]:
            _check_id(name)
        rows = [Row.of(Entry(*row)) for row in zip(*columns, strict=True)]
        with self._asking():
            self._ensure(columns[0])
            for start in range(0, len(rows), self.BATCH):
                self._put(rows[start : start + self.BATCH], vectors[start : start + self.BATCH])

    def _ensure(self, ids: Sequence[Id]) -> None:
        """Create the collection as soon as the first ids show their type; later ids must be of that type."""
        whole = {isinstance(name, int) for name in ids}
        with self._creating:
            self._exists = False  # another client may have replaced it
            there = self._there()
            if len(whole) > 1 or (there and self._record["whole_numbers"] not in whole):
                raise SearchError("The 'ids' parameter must be all strings or all whole numbers in a store. Got both.")
            if not there:
                self._create(json.dumps({**self._record, "whole_numbers": whole == {True}}), whole == {True})
                self._there()  # the record of another client that was faster must fit

    def _search(self, request: SearchRequest) -> Neighbours:
        queries, k = request.queries, min(request.k, self.MOST)
        wanted = [
            [term(key, value) for value in values if _is_storable(value)] for key, values in request.where.items()
        ]
        if not len(queries):
            k = min(k, len(self))
            return Neighbours(np.empty((0, k), object), np.empty((0, k), np.float32))
        with self._asking():
            if self._there() and all(wanted):
                exact = self.can_scan and len(request.learners) < len(self.groups)
                return _neighbours(self._nearest(queries, k, wanted, exact))
        return _neighbours([[] for _ in queries])

    def _lengths(self) -> Floats:
        """The lengths of the learners' parts, read from any one row."""
        with self._asking():
            vector = self._any_vector() if self._there() else None
        if vector is None:
            return np.ones(len(self.groups), np.float32)
        return np.array([np.linalg.norm(vector[span]) for span in spans(self.groups)], np.float32)

    def _all_of(self, ids: Sequence[Id], field: str) -> list[Any]:
        rows = self._fetch(ids, field)
        for name in ids:
            if name not in rows:
                raise SearchError(f"The store must hold the ids that it is asked for. It has no {name!r}.")
        return [rows[name] for name in ids]

    def _fetch(self, ids: Sequence[Id], field: str) -> dict[Id, Any]:
        """One field of those ids that are there; an id that could not be stored is not."""
        rows: dict[Id, Any] = {}
        with self._asking():
            there = self._there()
            whole = self._record["whole_numbers"]
            asked = [name for name in ids if there and isinstance(name, int) is whole and _is_storable(name)]
            for start in range(0, len(asked), self.BATCH):
                rows |= self._read(asked[start : start + self.BATCH], field)
        return rows

    def _there(self) -> bool:
        """Whether the collection exists, which another client may have created since."""
        if not self._exists and (record := self._read_record()) is not None:
            self._take(record)
            self._exists = True
        return self._exists

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """An error of the engine as one line, without credentials."""
        try:
            yield
        except self.failures as error:
            reason = without_secrets(" ".join(str(getattr(error, "message", error)).split()))[:300].rstrip(".")
            hints = [f" {hint}" for sign, hint in self.HINTS.items() if sign in reason]
            raise SearchError(
                f"The store {self.shown} could not do what was asked: {reason}.{''.join(hints)}"
            ) from error

    def _missing(self) -> SearchError:
        return SearchError(f"The store {self.shown} has no collection {self.collection!r}. Load it first.")

    def _check_folder(self, folder: Path, sign: str, new: bool) -> None:
        """An error unless a local folder is the engine's own, which has the file `sign`, or may be made."""
        if (folder / sign).exists():
            return
        if not new:
            raise self._missing()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SearchError(
                f"The store {self.shown} must be a new or empty folder, or an earlier one. It has no {sign}."
            )

    # What an adapter has to say

    collection: str
    failures: tuple[type[Exception], ...] = ()  # the engine's own exceptions
    can_scan = True  # whether it can compare with all vectors
    HINTS: ClassVar[Mapping[str, str]] = {}  # a part of an engine's message -> what a user can do

    @abstractmethod
    def _connect(self, uri: str, new: bool) -> None:
        """Set `collection` and `failures`, and connect. Without `new`, a local file must be there already."""

    @abstractmethod
    def _read_note(self) -> str | None:
        """The text that `_create` has stored with the collection; "" if it has none, None without a collection."""

    @abstractmethod
    def _create(self, note: str, whole_numbers: bool) -> None:
        """Create the empty collection with its note; no error if another process has just done so."""

    @abstractmethod
    def _drop(self) -> None:
        """Delete the collection, which is there and ours."""

    @abstractmethod
    def _put(self, rows: Sequence[Row], vectors: Floats) -> None:
        """Add rows; an id that is already there gets the new row."""

    @abstractmethod
    def _delete(self, ids: Sequence[Id]) -> None: ...

    @abstractmethod
    def _read(self, ids: Sequence[Id], field: str) -> dict[Id, Any]:
        """The field `id`, `entry` or `vector` of those ids that are there."""

    @abstractmethod
    def _every_id(self) -> list[Id]: ...

    @abstractmethod
    def _any_vector(self) -> Floats | None: ...

    @abstractmethod
    def _count(self) -> int: ...

    @abstractmethod
    def _nearest(self, queries: Floats, k: int, wanted: Conditions, exact: bool) -> Hits:
        """The k best of each query (Q, d); with `exact`, by comparing all vectors that pass."""


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")


def split_name(uri: str) -> tuple[str, str]:
    """(address, collection) of a URI. A name is never a path, a quotation mark or an option of the engine."""
    address, _, name = uri.partition("#")
    if name and not _NAME.fullmatch(name):
        raise SearchError(
            "The name of a collection, after #, must be up to 40 letters, digits and underscores and not begin with a "
            "digit. Got another one; in a password, # is written %23."
        )
    return address, name or "bier"


def is_address(text: str) -> bool:
    """Whether this is the address of a server, such as http://host:6333."""
    try:
        return bool(urlsplit(text).hostname and urlsplit(text).port != 0)
    except ValueError:  # a port that is no number, brackets that are not closed
        return False


def _is_storable(value: Any) -> bool:
    """Whether engines can hold a value: whole numbers have 64 bits, text is UTF-8 and has no NUL."""
    if isinstance(value, str):
        return "\0" not in value and not any(0xD800 <= ord(character) < 0xE000 for character in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _check_id(name: Id) -> None:
    if not _is_storable(name):
        raise SearchError(
            "The 'ids' parameter must hold whole numbers of 64 bits or UTF-8 text without NUL in a store. "
            f"Got {name!r} instead."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def _as_json(entry: dict[str, Any], name: Id) -> dict[str, Any]:
    """Label and metadata as every engine gives them back: through JSON."""
    try:
        text = json.dumps(entry, allow_nan=False, ensure_ascii=False, default=_plain)
        if "\\u0000" not in text and text.encode():
            return json.loads(text)  # type: ignore[no-any-return]
    except (TypeError, ValueError, RecursionError):  # a UnicodeEncodeError is a ValueError
        pass
    raise SearchError(
        "Labels and metadata must be JSON in a store: texts in UTF-8 without NUL, finite numbers, lists and mappings. "
        f"Those of {name!r} are not."
    )


def _neighbours(hits: Hits) -> Neighbours:
    """Lists of hits as arrays; a query with fewer hits than another is filled up with None and -inf."""
    most = max(len(some) for some in hits)
    nothing: list[tuple[Any, float]] = [(None, -np.inf)]
    full = [some + nothing * (most - len(some)) for some in hits]
    ids = id_array([name for some in full for name, _ in some], (len(hits), most))
    scores = np.array([score for some in full for _, score in some], np.float32).reshape(len(hits), most)
    return Neighbours(ids, scores)
