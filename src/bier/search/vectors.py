"""The vectors of an index, in memory or in a file, and the bits that select candidates among many of them.

Equal scores come in the order of the rows, at the cut too. What a library for matrices computes for a row depends on
the rows around it, in the last digit; so its scores only select, with room for their rounding, and what is selected is
scored again in double precision, each row by itself.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from bier.errors import SearchError
from bier.search.store import Floats, Mask, Rows, spans
from bier.system import check_room

Progress = Callable[[int, int], None] | None

_SCORES_AT_ONCE = 2**24  # floats of scratch space for scores, 64 MB
_PAIRS_AT_ONCE = 2**12  # of a query and a row that are scored again
_ROWS_AT_ONCE = 2**14  # of a file
_FEW_ROWS = 2**16  # a filter that passes no more, and less than a tenth, is answered from these rows alone


class VectorFile:
    """Float32 rows in a file, read when they are asked for, so that a file that shrinks is an error and no crash."""

    def __init__(self, path: Path, rows: int, dimension: int) -> None:
        self.path, self.shape = path, (rows, dimension)
        self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._handle)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Rows) -> Floats:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            block = np.empty((stop - start, self.shape[1]), "<f4")
            self._read(start, block)
            return block
        taken = np.empty((len(rows), self.shape[1]), "<f4")
        for place, row in enumerate(rows.tolist()):
            self._read(row, taken[place])
        return taken

    def _read(self, row: int, into: Floats) -> None:
        position, waiting = 4 * self.shape[1] * row, into.reshape(-1).view(np.uint8).data
        while waiting:
            if hasattr(os, "preadv"):
                count = os.preadv(self._handle, [waiting], position)
            else:
                with self._lock:
                    os.lseek(self._handle, position, os.SEEK_SET)
                    read = os.read(self._handle, len(waiting))
                count = len(read)
                waiting[:count] = read
            if not count:
                raise SearchError(f"The index file {self.path} was shortened since it was opened. Build it again.")
            position, waiting = position + count, waiting[count:]


class Vectors:
    """Rows of vectors in a few chunks, which are arrays or a file."""

    def __init__(self, groups: Sequence[int], rows: Floats | VectorFile | None = None) -> None:
        self.groups = tuple(groups)
        self._chunks = [rows] if rows is not None and len(rows) else []
        self._longest: float | None = None

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def keep(self, alive: Mask) -> None:
        """Drop all other rows."""
        left = self.take(np.flatnonzero(alive))
        self._chunks = [left] if len(left) else []

    def append(self, vectors: Floats) -> None:
        """Add rows. Chunks of like size are merged, so that many small additions cost little each."""
        new = np.array(vectors)
        while self._chunks and isinstance(last := self._chunks[-1], np.ndarray) and len(last) <= 2 * len(new):
            new = np.concatenate([self._chunks.pop()[:], new])
        self._chunks.append(new)
        self._longest = None

    def blocks(self) -> Iterator[Floats]:
        """All rows in order; those of a file in blocks that fit in memory."""
        for chunk in self._chunks:
            step = len(chunk) if isinstance(chunk, np.ndarray) else _ROWS_AT_ONCE
            for start in range(0, len(chunk), step):
                yield chunk[start : start + step]

    def lengths(self) -> Floats:
        """The length of each learner's part, the same in every row of test-time vectors; (M,)."""
        if not self._chunks:
            return np.ones(len(self.groups), np.float32)
        first = self._chunks[0][:1][0]
        return np.array([np.linalg.norm(first[span]) for span in spans(self.groups)], np.float32)

    def take(self, rows: Rows) -> Floats:
        """The vectors of the given rows, in their order."""
        if len(self._chunks) == 1:
            return self._chunks[0][rows]
        taken = np.empty((len(rows), sum(self.groups)), np.float32)
        start = 0
        for chunk in self._chunks:
            here = (rows >= start) & (rows < start + len(chunk))
            taken[here] = chunk[rows[here] - start]
            start += len(chunk)
        return taken

    def nearest(self, queries: Floats, k: int, allowed: Mask | None = None) -> tuple[Rows, Floats]:
        """Rows and scores (Q, k) of the best by dot product; equal scores by row. `allowed` must hold k rows."""
        if allowed is not None and 10 * (count := int(allowed.sum())) < len(allowed) and count <= _FEW_ROWS:
            few = np.flatnonzero(allowed)
            rows, scores = Vectors(self.groups, self.take(few)).nearest(queries, k)
            return few[rows], scores
        used = np.flatnonzero(queries.any(axis=0))  # the columns of the learners that are compared
        columns = slice(used[0], used[-1] + 1) if len(used) else slice(0, 1)
        step = max(1, _SCORES_AT_ONCE // len(self))
        found = [
            self._nearest(queries[start : start + step], k, columns, allowed) for start in range(0, len(queries), step)
        ]
        return np.concatenate([rows for rows, _ in found]), np.concatenate([scores for _, scores in found])

    def _nearest(self, queries: Floats, k: int, columns: slice, allowed: Mask | None) -> tuple[Rows, Floats]:
        pieces = [_dot(queries[:, columns], block[:, columns]) for block in self.blocks()]
        scores = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
        if allowed is not None:
            scores[:, ~allowed] = -np.inf
        cut = np.partition(scores, scores.shape[1] - k, axis=1)[:, -k]
        if not (np.isfinite(cut).all() and np.isfinite(scores.max())):
            raise _not_finite()
        # sums of d products in float32 are off by at most about d 2^-24 |q| |x|, both at the cut and at the row
        room = 2 * queries.shape[1] * 2.0**-24 * self._longest_row() * np.linalg.norm(queries, axis=1)
        numbers, rows = np.divmod(np.flatnonzero(scores >= (cut - room.astype(np.float32))[:, None]), scores.shape[1])
        return self.ranked(queries, numbers, rows, k)

    def ranked(self, queries: Floats, numbers: Rows, rows: Rows, k: int) -> tuple[Rows, Floats]:
        """The k best rows and their scores (Q, k), among `rows` of the queries `numbers`, at least k of each query."""
        scores = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _PAIRS_AT_ONCE):
            some = slice(start, start + _PAIRS_AT_ONCE)
            products = np.multiply(self.take(rows[some]), queries[numbers[some]], dtype=np.float64)
            scores[some] = products.sum(axis=1)
        if not np.isfinite(scores).all():
            raise _not_finite()
        order = np.lexsort((rows, -scores, numbers))
        starts = np.searchsorted(numbers[order], np.arange(len(queries)))
        best = order[starts[:, None] + np.arange(k)]
        return rows[best], scores[best]

    def _longest_row(self) -> float:
        if self._longest is None:
            squares = (np.einsum("nd,nd->n", block, block).max() for block in self.blocks())
            self._longest = float(np.sqrt(max(squares)))
        return self._longest


def _dot(queries: Floats, block: Floats) -> Floats:
    """(Q, n) dot products. One query is a matrix times a vector, which reads memory once."""
    products: Floats = (block @ queries[0])[None] if len(queries) == 1 else queries @ block.T
    return products


def _not_finite() -> SearchError:
    return SearchError("The index must hold finite numbers. It has NaN or infinity; build it again.")


class Bits:
    """One bit per dimension and eight bytes per row, with which faiss's RaBitQ estimates dot products.

    The rotation spreads what a few dimensions say over all of them: without it, plain features of a network that ends
    in a ReLU lose a tenth of their recall (benchmarks/search.py).
    """

    def __init__(self, index: Any) -> None:
        self._index = index

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @classmethod
    def build(cls, sample: Floats, blocks: Iterable[Floats], rows: int, progress: Progress = None) -> Self:
        """All rows, block by block, with means that are learned from the sample."""
        faiss, dimension = _faiss(), sample.shape[1]
        bits = cls(faiss.index_factory(dimension, f"RR{dimension},RaBitQ", faiss.METRIC_INNER_PRODUCT))
        bits._index.train(np.ascontiguousarray(sample))
        for block in blocks:
            bits.append(block)
            if progress:
                progress(len(bits), rows)
        return bits

    def append(self, vectors: Floats) -> None:
        self._index.add(np.ascontiguousarray(vectors))

    def keep(self, alive: Mask) -> None:
        """Drop all other rows."""
        self._index.remove_ids(_selector(~alive))

    def candidates(self, queries: Floats, count: int, allowed: Mask | None = None) -> Rows:
        """Rows (Q, count), best first by estimated scores; `allowed` must hold at least `count` rows."""
        faiss = _faiss()
        inner = None if allowed is None else faiss.RaBitQSearchParameters(sel=_selector(allowed))
        setting = None if inner is None else faiss.SearchParametersPreTransform(index_params=inner)
        # faiss.contrib.torch_utils, which others may have imported, replaces `search` by one that takes no settings.
        search = getattr(self._index, "search_numpy", self._index.search)
        rows: Rows = search(np.ascontiguousarray(queries), count, params=setting)[1]
        return rows

    def write(self, path: Path) -> None:
        try:
            _faiss().write_index(self._index, str(path))
        except RuntimeError as error:
            raise SearchError(f"The index could not be written to {path}: {_last_line(error)}.") from error

    @classmethod
    def read(cls, path: Path, dimension: int, rows: int) -> Self:
        try:
            index = _faiss().read_index(str(path))
        except (RuntimeError, MemoryError) as error:
            raise ValueError(f"{path.name}: {_last_line(error)}") from error
        if (index.ntotal, index.d) != (rows, dimension):
            raise ValueError(f"{path.name} must hold {rows} rows of {dimension}, found {index.ntotal} of {index.d}")
        return cls(index)


def _selector(rows: Mask) -> Any:
    return _faiss().IDSelectorBitmap(np.packbits(rows, bitorder="little"))


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].rstrip(".") if str(error).strip() else type(error).__name__


def _faiss() -> Any:
    if "faiss" not in sys.modules:  # its OpenBLAS, which has buffers for each core, crashes where there is no memory
        check_room((192 + 64 * (os.cpu_count() or 1)) * 2**20, "faiss")
    import faiss

    return faiss
