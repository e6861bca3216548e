"""The vectors of an index (floats, or a byte per dimension), and what selects candidates among them (graph, bits).

The floats are kept learner by learner: each learner's part is a matrix of its own, so that the first learner is a
complete small embedding without a second copy, and each part can be memory-mapped by itself.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from bier.errors import SearchError, needs
from bier.memory import check_room
from bier.search.store import Floats, Mask, Rows, spans

Progress = Callable[[int, int], None] | None

_SCORES_AT_ONCE = 2**24  # floats of scratch space for scores, 64 MB
_ROWS_AT_ONCE = 256
_GATHER_SHARE = 0.1  # a filter that keeps less than this is answered from its own rows alone


class LearnerVectors:
    """Rows of vectors in a few chunks; a chunk has one matrix (rows, d_m) per learner."""

    def __init__(self, groups: Sequence[int], parts: Sequence[Floats] | None = None) -> None:
        self.groups = tuple(groups)
        self._chunks: list[tuple[Floats, ...]] = [tuple(parts)] if parts is not None and len(parts[0]) else []

    def __len__(self) -> int:
        return sum(len(chunk[0]) for chunk in self._chunks)

    def keep(self, alive: Mask) -> None:
        """Drop all other rows."""
        kept = LearnerVectors(self.groups)
        kept.append(self.take(np.flatnonzero(alive)))
        self._chunks = kept._chunks

    def append(self, vectors: Floats) -> None:
        """Add rows. Chunks of like size are merged, so that many small additions cost little each."""
        if not len(vectors):
            return
        new = tuple(np.ascontiguousarray(vectors[:, span]) for span in spans(self.groups))
        while self._chunks and len(self._chunks[-1][0]) <= 2 * len(new[0]):
            last = self._chunks.pop()
            new = tuple(np.concatenate(pair) for pair in zip(last, new, strict=True))
        self._chunks.append(new)

    def part(self, learner: int) -> Iterator[Floats]:
        """One learner's matrix, chunk by chunk."""
        return (chunk[learner] for chunk in self._chunks)

    def lengths(self) -> Floats:
        """The length of each learner's part, the same in every row of test-time vectors; (M,)."""
        if not self._chunks:
            return np.ones(len(self.groups), np.float32)
        return np.array([np.linalg.norm(part[0]) for part in self._chunks[0]], np.float32)

    def take(self, rows: Rows, learners: Sequence[int] | None = None) -> Floats:
        """Whole vectors (or some learners' parts of them) of the given rows, in their order."""
        chosen = range(len(self.groups)) if learners is None else learners
        if len(self._chunks) == 1:
            return np.concatenate([self._chunks[0][learner][rows] for learner in chosen], axis=1)
        taken = np.empty((len(rows), sum(self.groups[learner] for learner in chosen)), np.float32)
        start = 0
        for chunk in self._chunks:
            here = (rows >= start) & (rows < start + len(chunk[0]))
            taken[here] = np.concatenate([chunk[learner][rows[here] - start] for learner in chosen], axis=1)
            start += len(chunk[0])
        return taken

    def scores(self, query: Floats, rows: Rows) -> Floats:
        """Dot products (n,) of one query (d,) with the given rows, read in blocks that stay in cache."""
        if len(self._chunks) != 1:
            return self.take(rows) @ query
        total = np.zeros(len(rows), np.float32)
        block = np.empty((_ROWS_AT_ONCE, max(self.groups)), np.float32)
        for part, span in zip(self._chunks[0], spans(self.groups), strict=True):
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                some = rows[start : start + _ROWS_AT_ONCE]
                scratch = block.reshape(-1)[: len(some) * part.shape[1]].reshape(len(some), part.shape[1])
                np.take(part, some, axis=0, out=scratch, mode="clip")
                total[start : start + _ROWS_AT_ONCE] += scratch @ query[span]
        return total

    def nearest(
        self, queries: Floats, k: int, allowed: Mask | None = None, ordered: bool = True
    ) -> tuple[Rows, Floats]:
        """The k best rows of each query (Q, d) by dot product, best first; equal scores by row number.

        Without `ordered` they come in any order. Only the learners on which a query is not zero are looked at.
        `allowed` must hold at least k rows.
        """
        learners = [m for m, span in enumerate(spans(self.groups)) if queries[:, span].any()] or [0]
        parts = [np.ascontiguousarray(queries[:, spans(self.groups)[learner]]) for learner in learners]
        if allowed is not None and allowed.sum() < _GATHER_SHARE * len(allowed):
            blocks = self._gathered(np.flatnonzero(allowed), learners)
            allowed = None
        else:
            blocks = self._scanned(learners)
        best = _Best(len(queries), k)
        for rows, matrices in blocks:
            _score_block(best, parts, rows, matrices, allowed)
        return best.sorted() if ordered or best.scores.shape[1] > k else (best.rows, best.scores)

    def _scanned(self, learners: Sequence[int]) -> Iterator[tuple[Rows, list[Floats]]]:
        start = 0
        for chunk in self._chunks:
            yield np.arange(start, start + len(chunk[0])), [chunk[learner] for learner in learners]
            start += len(chunk[0])

    def _gathered(self, rows: Rows, learners: Sequence[int]) -> Iterator[tuple[Rows, list[Floats]]]:
        for start in range(0, len(rows), 16_384):
            some = rows[start : start + 16_384]
            yield some, [self.take(some, [learner]) for learner in learners]


class _Best:
    """The k best rows of each query so far."""

    def __init__(self, queries: int, k: int) -> None:
        self.k = k
        self.rows = np.empty((queries, 0), np.int64)
        self.scores = np.empty((queries, 0), np.float32)

    def top(self, rows: Rows, scores: Floats) -> tuple[Rows, Floats]:
        """The k best of the scores (q, n) of the rows (n,), in any order."""
        if scores.shape[1] <= self.k:
            return np.broadcast_to(rows, scores.shape), scores
        best = np.argpartition(scores, scores.shape[1] - self.k, axis=1)[:, -self.k :]
        return rows[best], np.take_along_axis(scores, best, axis=1)

    def merge(self, kept: list[tuple[Rows, Floats]]) -> None:
        """`kept` holds all queries' best of one block, some queries after the other."""
        rows = np.concatenate([rows for rows, _ in kept])
        scores = np.concatenate([scores for _, scores in kept])
        self.rows = np.concatenate([self.rows, rows], axis=1)
        self.scores = np.concatenate([self.scores, scores], axis=1)
        if self.scores.shape[1] > self.k:
            self.rows, self.scores = self.sorted()

    def sorted(self) -> tuple[Rows, Floats]:
        order = np.lexsort((self.rows, -self.scores), axis=1)[:, : self.k]
        return np.take_along_axis(self.rows, order, axis=1), np.take_along_axis(self.scores, order, axis=1)


def _score_block(best: _Best, parts: list[Floats], rows: Rows, matrices: list[Floats], allowed: Mask | None) -> None:
    """Score all queries against one chunk in pieces that fit the scratch space."""
    queries = len(parts[0])
    if not queries:
        return
    at_once = min(queries, 256)
    step = max(1, _SCORES_AT_ONCE // at_once)
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        kept: list[tuple[Rows, Floats]] = []
        for first in range(0, queries, at_once):
            span = slice(first, first + at_once)
            scores = _dot(parts, matrices, span, slice(start, stop))
            if allowed is not None:
                scores[:, ~allowed[rows[start:stop]]] = -np.inf
            kept.append(best.top(rows[start:stop], scores))
        best.merge(kept)


def _dot(parts: list[Floats], matrices: list[Floats], queries: slice, rows: slice) -> Floats:
    """(q, n) sums of the learners' dot products. One query is a matrix times a vector, which reads memory once."""
    total: Floats | None = None
    for part, matrix in zip(parts, matrices, strict=True):
        some = part[queries]
        scores: Floats = (matrix[rows] @ some[0])[None] if len(some) == 1 else some @ matrix[rows].T
        total = scores if total is None else np.add(total, scores, out=total)
    assert total is not None
    return total


class _Quantized:
    """Rows in a faiss index: trained on a sample, filled block by block, memory-mapped when it is read."""

    factory: ClassVar[str]  # faiss's description, in which {} is the dimension

    def __init__(self, index: Any, mapped: bool = False) -> None:
        self._index = index
        self._mapped = mapped

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @classmethod
    def build(cls, sample: Floats, blocks: Iterable[Floats], rows: int, progress: Progress = None) -> Self:
        """Add all rows, block by block, to an index that is trained on the sample."""
        faiss = _faiss()
        dimension = sample.shape[1]
        index = faiss.index_factory(dimension, cls.factory.format(dimension), faiss.METRIC_INNER_PRODUCT)
        index.train(np.ascontiguousarray(sample))
        done = 0
        for block in blocks:
            index.add(np.ascontiguousarray(block))
            done += len(block)
            if progress:
                progress(done, rows)
        return cls(index)

    def append(self, vectors: Floats) -> None:
        self._own()
        self._index.add(np.ascontiguousarray(vectors))

    def _own(self) -> None:
        """Copy a mapped index: faiss ends the process when one grows, and its file may have been removed."""
        if self._mapped:
            faiss = _faiss()
            self._index = faiss.deserialize_index(faiss.serialize_index(self._index))
            self._mapped = False

    def _nearest(self, queries: Floats, count: int, setting: Any) -> tuple[Floats, Rows]:
        # faiss.contrib.torch_utils, which others may have imported, replaces `search` by one that takes no settings.
        search = getattr(self._index, "search_numpy", self._index.search)
        scores, rows = search(np.ascontiguousarray(queries), count, params=setting)
        return scores, rows

    def write(self, path: Path) -> None:
        try:
            _faiss().write_index(self._index, str(path))
        except RuntimeError as error:
            raise SearchError(f"The index could not be written to {path}: {_last_line(error)}.") from error

    @classmethod
    def read(cls, path: Path, dimension: int, rows: int, mmap: bool) -> Self:
        faiss = _faiss()
        flags = faiss.IO_FLAG_MMAP_IFC if mmap else 0
        try:
            index = faiss.read_index(str(path), flags)
        except (RuntimeError, MemoryError) as error:
            raise SearchError(
                f"The index file {path} is damaged: {_last_line(error)}. Build the index again."
            ) from error
        if index.d != dimension or index.ntotal != rows:
            raise SearchError(
                f"The index file {path} must hold {rows} vectors of {dimension} dimensions. "
                f"Found {index.ntotal} of {index.d}. Build the index again."
            )
        return cls(index, mmap)


class Graph(_Quantized):
    """Faiss's HNSW graph over 8-bit vectors. It selects candidates only: its own scores are rounded and not used."""

    factory = "HNSW32,SQ8"

    def candidates(self, queries: Floats, count: int, effort: int) -> Rows:
        """(Q, count) rows, best first by the 8-bit scores; -1 where the graph found no more."""
        return self._nearest(queries, count, _faiss().SearchParametersHNSW(efSearch=effort))[1]


class _Compacted(_Quantized):
    """Codes that are compared one after the other, so that rows can be excluded and removed."""

    def keep(self, alive: Mask) -> None:
        """Drop all other rows."""
        self._own()
        self._index.remove_ids(_selector(~alive))


class BinaryCodes(_Compacted):
    """One bit per dimension and eight bytes per row, with which faiss's RaBitQ estimates dot products.

    The rotation spreads what a few dimensions say over all of them: without it, plain features of a network that ends
    in a ReLU lose a tenth of their recall (benchmarks/quantized.py).
    """

    factory = "RR{},RaBitQ"

    def candidates(self, queries: Floats, count: int, allowed: Mask | None = None) -> tuple[Floats, Rows]:
        """Estimated scores and rows (Q, count), best first; `allowed` must hold at least `count` rows."""
        faiss = _faiss()
        inner = None if allowed is None else faiss.RaBitQSearchParameters(sel=_selector(allowed))
        setting = None if inner is None else faiss.SearchParametersPreTransform(index_params=inner)
        return self._nearest(queries, count, setting)


class Int8Vectors(_Compacted):
    """The vectors with a byte per dimension, in place of `LearnerVectors`: the range of a dimension in 256 steps."""

    factory = "SQ8"
    groups: tuple[int, ...]  # to be set after `build` and `read`

    def lengths(self) -> Floats:
        if not len(self):
            return np.ones(len(self.groups), np.float32)
        [first] = self.take(np.zeros(1, np.int64))
        return np.array([np.linalg.norm(first[span]) for span in spans(self.groups)], np.float32)

    def take(self, rows: Rows, learners: Sequence[int] | None = None) -> Floats:
        """Whole vectors (or some learners' parts of them) of the given rows, in their order."""
        if not len(rows):
            taken = np.empty((0, sum(self.groups)), np.float32)
        else:
            taken = self._index.reconstruct_batch(np.ascontiguousarray(rows, np.int64))
        if learners is None:
            return taken
        return np.concatenate([taken[:, spans(self.groups)[learner]] for learner in learners], axis=1)

    def scores(self, query: Floats, rows: Rows) -> Floats:
        found: Floats = self.take(rows) @ query
        return found

    def nearest(
        self, queries: Floats, k: int, allowed: Mask | None = None, ordered: bool = True
    ) -> tuple[Rows, Floats]:
        """As `LearnerVectors.nearest`; always in order."""
        setting = None if allowed is None else _faiss().SearchParameters(sel=_selector(allowed))
        scores, rows = self._nearest(queries, k, setting)
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)


def _selector(rows: Mask) -> Any:
    return _faiss().IDSelectorBitmap(np.packbits(rows, bitorder="little"))


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].rstrip(".") if str(error).strip() else type(error).__name__


def _faiss() -> Any:
    if "faiss" not in sys.modules:  # its OpenBLAS, which has buffers for each core, crashes where there is no memory
        check_room((192 + 64 * (os.cpu_count() or 1)) * 2**20, "faiss")
    return needs("faiss", "index")
