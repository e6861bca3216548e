"""What the adapters of external engines share: the record of a collection, batches, checks, results and errors."""

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from bier.errors import SearchError
from bier.search.store import (
    Columns,
    Conditions,
    Entry,
    Floats,
    Id,
    Neighbours,
    SearchRequest,
    Store,
    checked_groups,
    checked_ids,
    checked_model,
    id_array,
    spans,
    without_secrets,
)

Hits: TypeAlias = list[list[tuple[Id, float]]]  # (id, dot product) of each query's results, best first


class Row(NamedTuple):
    """A row as engines store it, beside its vectors: label and path for others to read, entry for `Store.entries`."""

    id: Id
    label: str | None
    path: str
    entry: dict[str, Any]

    @classmethod
    def of(cls, entry: Entry) -> "Row":
        path = (entry.metadata or {}).get("path", entry.id)
        known = {"label": entry.label, "metadata": None if entry.metadata is None else dict(entry.metadata)}
        return cls(entry.id, None if entry.label is None else str(entry.label), str(path), known)


class EngineStore(Store):
    """A collection in an external engine, with the columns id, label, path, entry, vector and learner_1.

    It differs from `Index` in this: ids are all strings or all whole numbers; `Neighbours.rows` is None;
    `learners=1` asks the engine's index of the first learner; rows are added in batches, of which each is written or
    not. Several threads may use one store.

    Beside the rows an engine keeps a record: {"groups", "about", "whole_numbers" (of the ids, from the first on)}.
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
        try:
            with self._asking():
                self._connect(uri)
                if rebuild:
                    self._drop()
                record = self._read_record()
                if record is None:
                    record = self._new_record(groups, about)
            self._record = record
            self._exists = False  # whether the collection of vectors has been seen
            self.about: dict[str, Any] = record["about"]
            if groups is not None and tuple(groups) != self.groups:
                raise SearchError(
                    f"The store {self.shown} holds vectors of groups {self.groups}. Got {tuple(groups)} instead."
                )
            if about is not None:
                checked_model(self.about, about, f"The store {self.shown}")
        except BaseException:
            self.close()  # a file that stays locked could not be opened again
            raise

    def _new_record(self, groups: Sequence[int] | None, about: Mapping[str, Any] | None) -> dict[str, Any]:
        if groups is None:
            raise SearchError(f"The store {self.shown} has no collection {self.collection!r}. Load it first.")
        sizes = checked_groups(groups, sum(groups))
        record = {"groups": list(sizes), "about": dict(about or {}), "whole_numbers": None}
        self._write_record(record)
        return record

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
        return [one for one in ids if one in there]

    def entries(self, ids: Sequence[Id]) -> list[Entry]:
        known = self._all_of(ids, "entry")
        return [Entry(one, entry["label"], entry["metadata"]) for one, entry in zip(ids, known, strict=True)]

    def vectors(self, ids: Sequence[Id]) -> Floats:
        return np.array(self._all_of(ids, "vector"), np.float32).reshape(len(ids), self.dimension)

    def remove(self, ids: Sequence[Id] | NDArray[Any]) -> None:
        plain = checked_ids(ids)
        self._all_of(plain, "id")
        with self._asking():
            for start in range(0, len(plain), self.BATCH):
                self._delete(plain[start : start + self.BATCH])

    def drop(self) -> None:
        """Delete the collection and what is known about it."""
        with self._asking():
            self._drop()
        self._exists = False

    def _add(self, vectors: Floats, columns: Columns) -> None:
        rows = [Row.of(Entry(*row)) for row in zip(*columns, strict=True)]
        with self._asking():
            self._ensure(columns[0])
            for start in range(0, len(rows), self.BATCH):
                self._put(rows[start : start + self.BATCH], vectors[start : start + self.BATCH])

    def _ensure(self, ids: Sequence[Id]) -> None:
        """Create the collection as soon as the first ids show their type; later ids must be of that type."""
        whole = {isinstance(one, int) for one in ids}
        with self._creating:
            there = self._there()
            if len(whole) > 1 or (there and self._record.get("whole_numbers") not in (None, *whole)):
                raise SearchError("The 'ids' parameter must be all strings or all whole numbers in a store. Got both.")
            if not there:
                self._record = {**self._record, "whole_numbers": whole.pop()}
                self._write_record(self._record)
                self._create(self._record["whole_numbers"])
                self._exists = True

    def _search(self, request: SearchRequest) -> Neighbours:
        queries, k, wanted, learners = request
        k = min(k, self.MOST)
        if not len(queries):
            k = min(k, len(self))
            return Neighbours(np.empty((0, k), object), np.empty((0, k), np.float32))
        with self._asking():
            if not self._there() or not all(wanted.values()):
                hits: Hits = [[] for _ in queries]
            elif learners == (0,) and len(self.groups) > 1:
                hits = self._nearest(queries, k, wanted, field="learner_1")
            else:
                hits = self._nearest(queries, k, wanted, exact=self.can_scan and len(learners) < len(self.groups))
        return _neighbours(hits)

    def _lengths(self) -> Floats:
        """The lengths of the learners' parts, read from any one row."""
        with self._asking():
            vector = self._any_vector() if self._there() else None
        if vector is None:
            return np.ones(len(self.groups), np.float32)
        return np.array([np.linalg.norm(vector[span]) for span in spans(self.groups)], np.float32)

    def _all_of(self, ids: Sequence[Id], field: str) -> list[Any]:
        rows = self._fetch(ids, field)
        for one in ids:
            if one not in rows:
                raise SearchError(f"The store must hold the ids that it is asked for. It has no {one!r}.")
        return [rows[one] for one in ids]

    def _fetch(self, ids: Sequence[Id], field: str) -> dict[Id, Any]:
        """One field of those ids that are there; an id of the other type is not."""
        found: dict[Id, Any] = {}
        with self._asking():
            there, whole = self._there(), self._record.get("whole_numbers")
            asked = [one for one in ids if there and (whole is None or isinstance(one, int) is whole)]
            for start in range(0, len(asked), self.BATCH):
                found |= self._read(asked[start : start + self.BATCH], field)
        return found

    def _there(self) -> bool:
        """Whether the collection exists, which another client may have created since."""
        if not self._exists and self._has_collection():
            self._record = self._read_record() or self._record
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

    # What an adapter has to say

    collection: str
    failures: tuple[type[Exception], ...] = ()  # the engine's own exceptions
    can_scan = True  # whether it can compare with all vectors
    HINTS: ClassVar[Mapping[str, str]] = {}  # a part of an engine's message -> what a user can do

    @abstractmethod
    def _connect(self, uri: str) -> None:
        """Set `collection` and `failures`, and connect; nothing is created."""

    @abstractmethod
    def _read_record(self) -> dict[str, Any] | None: ...

    @abstractmethod
    def _write_record(self, record: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _has_collection(self) -> bool: ...

    @abstractmethod
    def _create(self, whole_numbers: bool) -> None:
        """Create the empty collection; no error if another process has just done so."""

    @abstractmethod
    def _drop(self) -> None:
        """Delete the collection and the record, as far as they exist."""

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
    def _nearest(
        self, queries: Floats, k: int, wanted: Conditions, *, field: str = "vector", exact: bool = False
    ) -> Hits:
        """The k best of each query (Q, d), by the index of `vector` or of `learner_1` (then zero beyond its part)."""


def is_address(text: str) -> bool:
    """Whether this is the address of a server, such as http://host:6333."""
    try:
        return bool(urlsplit(text).hostname and urlsplit(text).port != 0)
    except ValueError:  # a port that is no number, brackets that are not closed
        return False


def _neighbours(hits: Hits) -> Neighbours:
    """Lists of hits as arrays; a query with fewer hits than another is filled up with None and -inf."""
    most = max(len(some) for some in hits)
    nothing: list[tuple[Any, float]] = [(None, -np.inf)]
    full = [some + nothing * (most - len(some)) for some in hits]
    ids = id_array([one for some in full for one, _ in some], (len(hits), most))
    scores = np.array([score for some in full for _, score in some], np.float32).reshape(len(hits), most)
    return Neighbours(ids, scores)
