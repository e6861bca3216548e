"""`bier.Index`: exact search for small collections, a graph with exact re-scoring beyond, funnel search on both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bier.errors import SearchError
from bier.search import answers, storage
from bier.search.answers import (
    Entry,
    Floats,
    Found,
    Id,
    Label,
    Learners,
    Mask,
    Metadata,
    Rows,
    Where,
    checked_queries,
    chosen_learners,
)
from bier.search.entries import Entries
from bier.search.graph import Graph, Progress
from bier.search.vectors import LearnerVectors

Kind: TypeAlias = Literal["auto", "flat", "hnsw", "funnel"]

EXACT_ROWS = 20_000  # `auto` searches exactly up to here
EFFORT = 192  # efSearch: candidates that the graph keeps, the better half of which is scored exactly
SHORTLIST = 400  # what a `funnel` index takes where a search names none
REBUILD_SHARE = 0.25  # removed rows, as a share of all, at which the index is rebuilt without them
_SCAN_ROWS = 5_000  # a filter that lets through no more is answered exactly
_SAMPLE_ROWS = 50_000  # from which the graph learns the range of each dimension
_BLOCK_ROWS = 10_000  # a step of the progress bar while the graph is built
_REACH = 8_192  # more candidates than this cost the graph more than a scan


class Index:
    """A collection of test-time vectors, whose dot product is the similarity of two images.

    Kinds, chosen at `build`: `flat` scans every vector; `hnsw` asks a faiss graph over 8-bit vectors for candidates
    and scores them exactly; `funnel` has that graph over the first learner alone, which names a shortlist
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
            ids: unique strings or whole numbers; 0 to N-1 where not given. A repeated id is an error.
            groups: the learners' sizes, summing to d; the first is the one that shortlists. Without it, no funnel.
            labels, metadata: kept with each id, returned by `entries` and usable in `where`.
            effort: faiss's efSearch, at least 64. More finds more and takes longer.
            about: anything JSON can hold about the collection, such as the model that made it.
        """
        floats = answers.checked_vectors(vectors)
        if kind not in get_args(Kind):
            raise SearchError(f"The 'kind' parameter must be one of {get_args(Kind)}. Got {kind!r} instead.")
        answers.checked_count(effort, "effort", least=64)
        sizes = answers.checked_groups(groups, floats.shape[1])
        index = cls(LearnerVectors(sizes), Entries(), kind, effort, about=about)
        index._append(floats, range(len(floats)) if ids is None else ids, labels, metadata)
        index._settle(progress)
        return index

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def groups(self) -> tuple[int, ...]:
        return self._vectors.groups

    @property
    def dimension(self) -> int:
        return sum(self.groups)

    @property
    def method(self) -> Literal["flat", "hnsw", "funnel"]:
        """How a search without a shortlist goes at present."""
        if self._graph is None:
            return "flat"
        return "funnel" if self.kind == "funnel" else "hnsw"

    @property
    def ids(self) -> list[Id]:
        return [one for one, alive in zip(self._entries.ids, self._entries.alive, strict=True) if alive]

    def known(self, ids: Sequence[Id]) -> list[Id]:
        """Those of the given ids that are in the index."""
        return self._entries.known(ids)

    def entries(self, ids: Sequence[Id]) -> list[Entry]:
        """Label and metadata of each id; an unknown id is an error."""
        return [self._entries.entry(row) for row in self._entries.rows_of(ids)]

    def vectors(self, ids: Sequence[Id]) -> Floats:
        """The stored vectors (n, d) of the given ids."""
        return self._vectors.take(self._entries.rows_of(ids))

    def add(
        self,
        vectors: ArrayLike,
        ids: Sequence[Id] | NDArray[Any],
        labels: Sequence[Label] | NDArray[Any] | None = None,
        metadata: Sequence[Metadata] | None = None,
        replace: bool = False,
    ) -> None:
        """Add rows. An id that is already there is an error, or with `replace` gets the new vector. All or nothing."""
        floats = answers.checked_vectors(vectors, self.dimension)
        plain = answers.checked_ids(ids, len(floats))
        known = self._entries.known(plain)
        if known and not replace:
            raise SearchError(
                f"The 'ids' parameter must hold new ids. {known[0]!r} is in the index; use replace=True to replace it."
            )
        answers.checked_labels(labels, len(floats))
        answers.checked_metadata(metadata, len(floats))
        self._entries.remove(known)
        self._append(floats, plain, labels, metadata)
        if self._graph is not None:
            self._graph.add(floats[:, : self.groups[0]] if self.kind == "funnel" else floats)
        self._settle()

    def remove(self, ids: Sequence[Id] | NDArray[Any]) -> None:
        """Remove ids, all or (if one is unknown) none. A quarter of the rows removed makes it rebuild itself."""
        self._entries.remove(answers.checked_ids(ids))
        self._settle()

    def search(
        self,
        queries: ArrayLike,
        k: int = 10,
        shortlist: int | None = None,
        where: Where | None = None,
        learners: Learners = None,
        exact: bool = False,
    ) -> Found:
        """The k best of each query, or as many as there are.

        Args:
            queries: (Q, d), or (d,) for one, whose answer then has no leading dimension.
            shortlist: funnel search: the first learner names this many, the whole vector ranks them.
            where: only among these: a mapping of `label` (compared as text) and metadata keys to a value or a list of
                values, a mask over the rows, or a function of an `Entry`. k answers come if k pass.
            learners: compare the first m learners only (an int), or those listed by number from 1. Always exact. For
                an int, queries may also be the shorter vectors of those learners.
            exact: scan all vectors whatever the kind.
        """
        k = answers.checked_count(k, "k")
        shortlist = answers.checked_shortlist(shortlist, k)
        lengths = self._vectors.lengths() if learners is not None else None
        wanted = checked_queries(queries, self.groups, learners, lengths)
        allowed = self._entries.allowed(where)
        available = len(self) if allowed is None else int(allowed.sum())
        k = min(k, available)
        partial = len(chosen_learners(learners, len(self.groups))) < len(self.groups)
        if k == 0 or len(wanted) == 0:
            rows, scores = np.empty((len(wanted), k), np.int64), np.empty((len(wanted), k), np.float32)
        elif exact or partial:
            rows, scores = self._vectors.nearest(wanted, k, allowed)
        elif shortlist is not None or self.method == "funnel":
            rows, scores = self._funnel(wanted, k, shortlist or max(SHORTLIST, k), allowed, available)
        elif self._graph is not None:
            rows, scores = self._through_graph(wanted, k, max(self.effort // 2, 2 * k), allowed, available)
        else:
            rows, scores = self._vectors.nearest(wanted, k, allowed)
        if np.ndim(queries) == 1:
            rows, scores = rows[0], scores[0]
        ids = answers.id_array([self._entries.ids[row] for row in rows.ravel()], rows.shape)
        return Found(ids, scores, rows)

    def save(self, path: str | Path) -> None:
        """Write the folder aside, then switch to it in one step: a crash leaves the old index or the new one."""
        storage.save(Path(path), self._vectors, self._entries, self._graph, self.kind, self.effort, dict(self.about))

    @classmethod
    def load(cls, path: str | Path, mmap: bool = True, verify: bool = True) -> "Index":
        """Open a saved index. With `mmap`, vectors and graph stay on disk until they are touched.

        `verify` compares every file with its checksum (about a second for a gigabyte); without it, sizes only.
        """
        vectors, entries, graph, manifest = storage.load(Path(path), mmap, verify)
        return cls(vectors, entries, manifest["kind"], manifest["effort"], graph, manifest["about"])

    def _append(self, floats: Floats, ids: Any, labels: Any, metadata: Any) -> None:
        plain = answers.checked_ids(ids, len(floats))
        some_labels = answers.checked_labels(labels, len(floats))
        some_metadata = answers.checked_metadata(metadata, len(floats))
        self._entries.append(plain, some_labels, some_metadata)
        self._vectors.append(floats)

    def _settle(self, progress: Progress = None) -> None:
        """Drop removed rows when they are many, and make the graph when the kind or the size asks for one."""
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
        """Candidates by the graph, those that are not allowed struck out, the rest scored exactly.

        The graph is asked for as many more as the filter strikes out. Where fewer than half of `reach` are left (the
        filter's images lie far from the query) that query is answered by a scan, so that a filter never costs recall.
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
