"""`bier.Index`: exact search for small collections, candidates that are scored again beyond."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bier.errors import SearchError
from bier.search import storage
from bier.search.entries import Entries
from bier.search.store import (
    SCAN_ROWS,
    Columns,
    Entry,
    Floats,
    Id,
    Kind,
    Label,
    Mask,
    Metadata,
    Neighbours,
    Precision,
    Rows,
    SearchRequest,
    Store,
    checked_columns,
    checked_count,
    checked_groups,
    checked_ids,
    checked_vectors,
    id_array,
    spans,
)
from bier.search.vectors import BinaryCodes, Graph, Int8Vectors, LearnerVectors, Progress

EXACT_ROWS = 20_000  # `auto` searches exactly up to here
SCANNED_ROWS = 2_000_000  # `auto` compares bits up to here (20 ms a query), beyond which it builds a graph
EFFORT = 192  # efSearch: candidates that the graph keeps, of which the better half is scored; twice as many of the bits
REBUILD_SHARE = 0.25  # removed rows, as a share of all, at which the index is rebuilt without them
_SAMPLE_ROWS = 50_000  # from which graph and codes learn the range or the mean of each dimension
_FEWEST_ROWS = 256  # with fewer, the ranges of an int8 index would not hold for the next image
_BLOCK_ROWS = 10_000  # a step of the progress bar while the index is built
_REACH = 8_192  # more candidates than this cost the graph more than a scan


class Index(Store):
    """The embedded index: a collection in memory, or in a folder that is memory-mapped. `Index.build` makes one.

    Kinds, chosen at `build`, say how candidates are found. `flat` compares with every vector; `binary` compares with
    one bit per dimension and scores the best of that exactly; `hnsw` takes candidates from a faiss graph over 8-bit
    vectors and scores them exactly; `auto` is `flat` up to 20,000 rows, `binary` up to 2,000,000 and `hnsw` beyond.

    Precisions say how the vectors are kept. `float32` keeps them as they are, `int8` a byte per dimension, from which
    scores are right to about 0.003. `binary` keeps one bit per dimension: scores are estimates, and what needs the
    vectors (their learners, re-ranking, thresholds) is refused.

    Searches may run in several threads at once; `add`, `remove` and `save` must run alone.

    Example:
        >>> import bier, numpy as np
        >>> vectors = np.eye(3, dtype=np.float32)
        >>> index = bier.Index.build(vectors, ["heron", "gull", "swan"])
        >>> index.search(vectors[1], k=1).ids.tolist()
        ['gull']
    """

    def __init__(
        self,
        vectors: LearnerVectors | Int8Vectors,
        entries: Entries,
        kind: Kind,
        effort: int = EFFORT,
        graph: Graph | None = None,
        about: Mapping[str, Any] | None = None,
        bits: BinaryCodes | None = None,
        precision: Precision = "float32",
    ) -> None:
        self._vectors = vectors  # without rows if the precision is binary
        self._entries = entries
        self._graph = graph
        self._bits = bits
        self.kind = kind
        self.precision = precision
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
        precision: Precision = "float32",
        copy: bool = True,
    ) -> "Index":
        """An index of vectors.

        Args:
            vectors: test-time vectors (N, d), compared by dot product.
            ids: unique strings or whole numbers; by default 0 to N-1. A repeated id is an error.
            groups: the learners' sizes, summing to d; without them, one learner has all of it.
            labels, metadata: stored with each id, returned by `entries` and usable in `where`.
            kind: how images are found: `auto`, `flat`, `binary` or `hnsw`.
            effort: faiss's efSearch, from 64 to 65,536. A higher value finds more and takes longer.
            about: anything JSON can hold about the collection, such as the model that computed the vectors.
            progress: called with (rows done, rows in all) while a graph or codes are built.
            precision: how the vectors are kept: `float32`, `int8` or `binary`.
            copy: False uses the array itself, which may be memory-mapped and larger than memory, and must not change.

        Returns:
            The index.

        Raises:
            SearchError: vectors are not finite, ids repeat, or parameters do not fit together.
        """
        floats = checked_vectors(vectors)
        _check_choices(kind, precision, len(floats))
        checked_count(effort, "effort", least=64, most=storage.MOST_EFFORT)
        sizes = checked_groups(groups, floats.shape[1])
        columns = checked_columns(range(len(floats)) if ids is None else ids, labels, metadata, len(floats))
        given = LearnerVectors(sizes, [floats[:, span] for span in spans(sizes)])
        index = cls(given, Entries(), kind, effort, about=about, precision=precision)
        index._entries.append(*columns)
        if precision != "float32":
            index._quantize(progress)
        elif copy:
            index._vectors = LearnerVectors(sizes)
            index._vectors.append(floats)
        index._settle(progress)
        return index

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def groups(self) -> tuple[int, ...]:
        return self._vectors.groups

    @property
    def method(self) -> Literal["flat", "binary", "hnsw"]:
        """How a search is done at present."""
        if self._graph is None:
            return "flat" if self._bits is None else "binary"
        return "hnsw"

    @property
    def ids(self) -> list[Id]:
        return [one for one, alive in zip(self._entries.ids, self._entries.alive, strict=True) if alive]

    def known(self, ids: Sequence[Id]) -> list[Id]:
        return self._entries.known(ids)

    def entries(self, ids: Sequence[Id]) -> list[Entry]:
        return [self._entries.entry(row) for row in self._entries.rows_of(ids)]

    def vectors(self, ids: Sequence[Id]) -> Floats:
        rows = self._entries.rows_of(ids)
        self._need_vectors("return vectors")
        return self._vectors.take(rows)

    def remove(self, ids: Sequence[Id] | NDArray[Any]) -> None:
        """Remove ids: all of them, or none if one is unknown. It is rebuilt when a quarter of the rows is removed."""
        self._entries.remove(checked_ids(ids))
        self._settle()

    def save(self, path: str | Path) -> None:
        """Write a folder, and replace an index that is there in one step: a crash leaves the old one or the new one."""
        with storage.locked(Path(path)):
            self.save_locked(Path(path))

    def save_locked(self, path: Path) -> None:
        """As `save`, for one who has held `storage.locked` since the index was loaded and loses no change of others."""
        parts = storage.Parts(self._vectors, self._entries, self._graph, self._bits)
        storage.save(path, parts, self.kind, self.effort, dict(self.about), self.precision)

    @classmethod
    def load(cls, path: str | Path, mmap: bool = True, verify: bool | None = None) -> "Index":
        """Open a saved index. With `mmap`, vectors and graph stay on disk until they are touched.

        `verify` compares every file with its checksum (about a second for a gigabyte); False compares sizes only. By
        default, large files that have the size and the modification time with which they were saved are not read.
        """
        parts, known = storage.load(Path(path), mmap, verify)
        return cls(
            parts.vectors,
            parts.entries,
            known.kind,
            known.effort,
            parts.graph,
            known.about,
            parts.bits,
            known.precision,
        )

    def _lengths(self) -> Floats:
        return self._vectors.lengths()

    def _add(self, vectors: Floats, columns: Columns) -> None:
        self._entries.remove(self._entries.known(columns[0]))
        self._entries.append(*columns)
        if self.precision != "binary":
            self._vectors.append(vectors)
        if self._bits is not None:
            self._bits.append(vectors)
        if self._graph is not None:
            self._graph.append(vectors)
        self._settle()

    def _search(self, request: SearchRequest) -> Neighbours:
        queries, k, where, learners = request
        allowed = self._entries.allowed(where)
        available = len(self) if allowed is None else int(allowed.sum())
        k = min(k, available)
        if k == 0 or len(queries) == 0:
            rows, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        elif len(learners) < len(self.groups):
            self._need_vectors("compare some learners only")
            rows, scores = self._vectors.nearest(queries, k, allowed)
        elif self._graph is not None:
            rows, scores = self._through_graph(queries, k, max(self.effort // 2, 2 * k), allowed, available)
        elif self._bits is not None:
            rows, scores = self._through_bits(queries, k, allowed, available)
        else:
            rows, scores = self._vectors.nearest(queries, k, allowed)
        return Neighbours(id_array([self._entries.ids[row] for row in rows.ravel()], rows.shape), scores, rows)

    def _settle(self, progress: Progress = None) -> None:
        """Drop removed rows when they are many, and build graph or bits if the kind or the size requires them."""
        rows, removed = self._entries.rows, self._entries.rows - len(self._entries)
        if removed and removed >= REBUILD_SHARE * rows:
            for codes in (self._vectors, self._bits):
                if codes is not None and len(codes):
                    codes.keep(self._entries.alive)
            self._entries, self._graph = self._entries.compacted(), None
            rows = self._entries.rows
        if not rows or self._graph is not None or self._bits is not None:
            return
        if self.kind == "binary" or (self.kind == "auto" and EXACT_ROWS < rows <= SCANNED_ROWS):
            self._bits = BinaryCodes.build(*self._sample_and_blocks(), rows, progress)
        elif self.kind == "hnsw" or (self.kind == "auto" and rows > SCANNED_ROWS):
            self._graph = Graph.build(*self._sample_and_blocks(), rows, progress)

    def _sample_and_blocks(self) -> tuple[Floats, Iterator[Floats]]:
        """Some of the vectors, to learn their range from, and all of them in blocks that fit in memory."""
        rows = self._entries.rows
        sample = self._vectors.take(np.arange(0, rows, -(-rows // _SAMPLE_ROWS)))
        blocks = (np.arange(start, min(start + _BLOCK_ROWS, rows)) for start in range(0, rows, _BLOCK_ROWS))
        return sample, (self._vectors.take(block) for block in blocks)

    def _quantize(self, progress: Progress) -> None:
        """Keep the vectors in the precision of the index instead of the floats that were given."""
        groups, rows = self.groups, self._entries.rows
        if self.precision == "binary":
            self._bits = BinaryCodes.build(*self._sample_and_blocks(), rows, progress)
            self._vectors = LearnerVectors(groups)
            return
        made = Int8Vectors.build(*self._sample_and_blocks(), rows, progress)
        made.groups = groups
        self._vectors = made

    def _need_vectors(self, what: str) -> None:
        if self.precision == "binary":
            raise SearchError(
                f"An index must keep vectors to {what}. This one keeps a bit per dimension; build it with the "
                "precision int8 or float32."
            )

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
        if allowed is not None and (available <= SCAN_ROWS or count > _REACH):
            return self._vectors.nearest(queries, k, allowed)
        candidates = self._graph.candidates(queries, count, max(self.effort, 2 * count))
        if allowed is not None:
            candidates[~allowed[candidates]] = -1
        short = 2 * (candidates >= 0).sum(axis=1) < reach
        rows, scores = self._rescored(queries, k, candidates)
        if short.any():
            rows[short], scores[short] = self._vectors.nearest(queries[short], k, allowed)
        return rows, scores

    def _through_bits(self, queries: Floats, k: int, allowed: Mask | None, available: int) -> tuple[Rows, Floats]:
        """The best by the bits, scored again by the vectors if there are any."""
        assert self._bits is not None
        if self.precision == "binary":
            scores, rows = self._bits.candidates(queries, k, allowed)
            return rows, scores
        if allowed is not None and available <= SCAN_ROWS:
            return self._vectors.nearest(queries, k, allowed)
        reach = min(max(2 * self.effort, 4 * k), available)
        return self._rescored(queries, k, self._bits.candidates(queries, reach, allowed)[1])

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


def _check_choices(kind: str, precision: str, rows: int) -> None:
    if kind not in get_args(Kind):
        raise SearchError(f"The 'kind' parameter must be one of {get_args(Kind)}. Got {kind!r} instead.")
    if precision not in get_args(Precision):
        raise SearchError(f"The 'precision' parameter must be one of {get_args(Precision)}. Got {precision!r} instead.")
    if precision == "binary" and kind not in ("auto", "binary"):
        raise SearchError(f"The 'kind' parameter must be 'auto' or 'binary' for binary vectors. Got {kind!r} instead.")
    least = {"float32": 0, "int8": _FEWEST_ROWS, "binary": 1}[precision]
    if rows < least:
        raise SearchError(
            f"An index of the precision {precision} must be built from at least {least} vectors, from which it learns "
            f"their range. Got {rows} instead."
        )
