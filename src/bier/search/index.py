"""`bier.Index`: exact search for small collections, a graph with exact re-scoring beyond, funnel search on both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bier.errors import SearchError
from bier.search import storage
from bier.search.entries import Entries
from bier.search.store import (
    Columns,
    Entry,
    Floats,
    Found,
    Id,
    Label,
    Mask,
    Metadata,
    Rows,
    Store,
    Where,
    checked_columns,
    checked_count,
    checked_groups,
    checked_ids,
    checked_vectors,
    id_array,
)
from bier.search.vectors import Graph, LearnerVectors, Progress

Kind: TypeAlias = Literal["auto", "flat", "hnsw", "funnel"]

EXACT_ROWS = 20_000  # `auto` searches exactly up to here
EFFORT = 192  # efSearch: candidates that the graph keeps; the better half is scored exactly
SHORTLIST = 400  # of a `funnel` index, where a search gives none
REBUILD_SHARE = 0.25  # removed rows, as a share of all, at which the index is rebuilt without them
_SCAN_ROWS = 5_000  # with a filter that no more rows pass, the search is exact
_SAMPLE_ROWS = 50_000  # from which the graph learns the range of each dimension
_BLOCK_ROWS = 10_000  # a step of the progress bar while the graph is built
_REACH = 8_192  # more candidates than this cost the graph more than a scan


class Index(Store):
    """The embedded index: a collection in memory, or in a folder that is memory-mapped.

    Kinds, chosen at `build`: `flat` compares with every vector; `hnsw` takes candidates from a faiss graph over 8-bit
    vectors and scores them exactly; `funnel` has that graph over the first learner alone, which selects a shortlist
    that the whole vector ranks; `auto` is `flat` up to 20,000 rows and `hnsw` beyond.

    Searches may run in several threads at once; `add`, `remove` and `save` must run alone.
    """

    def __init__(
        self,
        vectors: LearnerVectors,
        entries: Entries,
        kind: Kind,
        effort: int = EFFORT,
        graph: Graph | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._vectors = vectors
        self._entries = entries
        self._graph = graph
        self.kind = kind
        self.effort = effort
        self.about: dict[str, Any] = dict(about or {})

    @classmethod
    def build(
        cls,
        vectors: ArrayLike,
        ids: Sequence[Id] | NDArray[Any] | None = None,
        groups: Sequence[int] | None = None,
        labels: Sequence[Label] | NDArray[Any] | None = None,
        metadata: Sequence[Metadata] | None = None,
        kind: Kind = "auto",
        effort: int = EFFORT,
        about: Mapping[str, Any] | None = None,
        progress: Progress = None,
    ) -> "Index":
        """An index of vectors (N, d).

        Args:
            ids: unique strings or whole numbers; by default 0 to N-1. A repeated id is an error.
            groups: the learners' sizes, summing to d; the first selects the shortlist. Without it, no funnel.
            labels, metadata: stored with each id, returned by `entries` and usable in `where`.
            effort: faiss's efSearch, from 64 to 65,536. A higher value finds more and takes longer.
            about: anything JSON can hold about the collection, such as the model that computed the vectors.
        """
        floats = checked_vectors(vectors)
        if kind not in get_args(Kind):
            raise SearchError(f"The 'kind' parameter must be one of {get_args(Kind)}. Got {kind!r} instead.")
        checked_count(effort, "effort", least=64, most=storage.MOST_EFFORT)
        sizes = checked_groups(groups, floats.shape[1])
        columns = checked_columns(range(len(floats)) if ids is None else ids, labels, metadata, len(floats))
        index = cls(LearnerVectors(sizes), Entries(), kind, effort, about=about)
        index._entries.append(*columns)
        index._vectors.append(floats)
        index._settle(progress)
        return index

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def groups(self) -> tuple[int, ...]:
        return self._vectors.groups

    @property
    def method(self) -> Literal["flat", "hnsw", "funnel"]:
        """How a search without a shortlist is done at present."""
        if self._graph is None:
            return "flat"
        return "funnel" if self.kind == "funnel" else "hnsw"

    @property
    def ids(self) -> list[Id]:
        return [one for one, alive in zip(self._entries.ids, self._entries.alive, strict=True) if alive]

    def known(self, ids: Sequence[Id]) -> list[Id]:
        return self._entries.known(ids)

    def entries(self, ids: Sequence[Id]) -> list[Entry]:
        return [self._entries.entry(row) for row in self._entries.rows_of(ids)]

    def vectors(self, ids: Sequence[Id]) -> Floats:
        return self._vectors.take(self._entries.rows_of(ids))

    def remove(self, ids: Sequence[Id] | NDArray[Any]) -> None:
        """Remove ids: all of them, or none if one is unknown. It is rebuilt when a quarter of the rows is removed."""
        self._entries.remove(checked_ids(ids))
        self._settle()

    def save(self, path: str | Path) -> None:
        """Write a folder, and replace an index that is there in one step: a crash leaves the old one or the new one."""
        storage.save(Path(path), self._vectors, self._entries, self._graph, self.kind, self.effort, dict(self.about))

    @classmethod
    def load(cls, path: str | Path, mmap: bool = True, verify: bool = True) -> "Index":
        """Open a saved index. With `mmap`, vectors and graph stay on disk until they are touched.

        `verify` compares every file with its checksum (about a second for a gigabyte); without it, sizes only.
        """
        vectors, entries, graph, manifest = storage.load(Path(path), mmap, verify)
        return cls(vectors, entries, manifest["kind"], manifest["effort"], graph, manifest["about"])

    def _lengths(self) -> Floats:
        return self._vectors.lengths()

    def _add(self, vectors: Floats, columns: Columns) -> None:
        self._entries.remove(self._entries.known(columns[0]))
        self._entries.append(*columns)
        self._vectors.append(vectors)
        if self._graph is not None:
            self._graph.add(vectors[:, : self.groups[0]] if self.kind == "funnel" else vectors)
        self._settle()

    def _search(
        self,
        queries: Floats,
        k: int,
        shortlist: int | None,
        where: Where | None,
        learners: tuple[int, ...],
        exact: bool,
    ) -> Found:
        allowed = self._entries.allowed(where)
        available = len(self) if allowed is None else int(allowed.sum())
        k = min(k, available)
        if k == 0 or len(queries) == 0:
            rows, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        elif exact or len(learners) < len(self.groups):
            rows, scores = self._vectors.nearest(queries, k, allowed)
        elif shortlist is not None or self.method == "funnel":
            rows, scores = self._funnel(queries, k, shortlist or max(SHORTLIST, k), allowed, available)
        elif self._graph is not None:
            rows, scores = self._through_graph(queries, k, max(self.effort // 2, 2 * k), allowed, available)
        else:
            rows, scores = self._vectors.nearest(queries, k, allowed)
        return Found(id_array([self._entries.ids[row] for row in rows.ravel()], rows.shape), scores, rows)

    def _settle(self, progress: Progress = None) -> None:
        """Drop removed rows when they are many, and build the graph if the kind or the size requires one."""
        rows, removed = self._entries.rows, self._entries.rows - len(self._entries)
        if removed and removed >= REBUILD_SHARE * rows:
            kept = LearnerVectors(self.groups)
            kept.append(self._vectors.take(np.flatnonzero(self._entries.alive)))
            self._vectors, self._entries, self._graph = kept, self._entries.compacted(), None
            rows = self._entries.rows
        due = self.kind in ("hnsw", "funnel") or (self.kind == "auto" and rows > EXACT_ROWS)
        if due and self._graph is None and rows:
            step = max(1, rows // _SAMPLE_ROWS)
            sample = self._graph_rows(np.arange(0, rows, step))
            starts = range(0, rows, _BLOCK_ROWS)
            blocks = (self._graph_rows(np.arange(start, min(start + _BLOCK_ROWS, rows))) for start in starts)
            self._graph = Graph.build(sample, blocks, rows, progress)

    def _graph_rows(self, rows: Rows) -> Floats:
        return self._vectors.take(rows, (0,) if self.kind == "funnel" else None)

    def _funnel(
        self, queries: Floats, k: int, shortlist: int, allowed: Mask | None, available: int
    ) -> tuple[Rows, Floats]:
        if shortlist >= available:
            return self._vectors.nearest(queries, k, allowed)
        if self.method == "funnel":
            return self._through_graph(queries, k, max(shortlist, self.effort), allowed, available)
        first = queries.copy()
        first[:, self.groups[0] :] = 0
        return self._rescored(queries, k, self._vectors.nearest(first, shortlist, allowed, ordered=False)[0])

    def _through_graph(
        self, queries: Floats, k: int, reach: int, allowed: Mask | None, available: int
    ) -> tuple[Rows, Floats]:
        """Candidates from the graph; those that the filter excludes are dropped, the others are scored exactly.

        The graph is asked for more candidates in proportion to what the filter excludes. If fewer than half of `reach`
        are left (the images that pass are far from the query), that query is answered by a scan instead, so that a
        filter never costs recall.
        """
        assert self._graph is not None
        count = min(self._entries.rows, -(-reach * self._entries.rows // available))
        if allowed is not None and (available <= _SCAN_ROWS or count > _REACH):
            return self._vectors.nearest(queries, k, allowed)
        seen = queries[:, : self.groups[0]] if self.kind == "funnel" else queries
        candidates = self._graph.candidates(
            seen, count, max(self.effort, count if self.kind == "funnel" else 2 * count)
        )
        if allowed is not None:
            candidates[~allowed[candidates]] = -1
        short = 2 * (candidates >= 0).sum(axis=1) < reach
        rows, scores = self._rescored(queries, k, candidates)
        if short.any():
            rows[short], scores[short] = self._vectors.nearest(queries[short], k, allowed)
        return rows, scores

    def _rescored(self, queries: Floats, k: int, candidates: Rows) -> tuple[Rows, Floats]:
        """Exact scores of each query's candidates (Q, c), -1 being none; the k best, padded with -1."""
        rows = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        for number, query in enumerate(queries):
            some = np.sort(candidates[number][candidates[number] >= 0])
            exact = self._vectors.scores(query, some)
            order = np.argsort(-exact, kind="stable")[:k]
            rows[number, : len(order)] = some[order]
            scores[number, : len(order)] = exact[order]
        return rows, scores
