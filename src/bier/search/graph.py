"""The approximate part: faiss's HNSW graph over 8-bit vectors, which names candidates to be scored exactly."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bier.errors import SearchError
from bier.search.answers import Floats, Rows

FACTORY = "HNSW32,SQ8"

Progress = Callable[[int, int], None] | None


class Graph:
    """Names candidates only: its own scores are of 8-bit vectors and are thrown away."""

    def __init__(self, index: Any, mapped: bool = False) -> None:
        self._index = index
        self._mapped = mapped

    @classmethod
    def build(cls, sample: Floats, blocks: Iterable[Floats], rows: int, progress: Progress = None) -> "Graph":
        """Link all rows, block by block. The range of each dimension, for 8 bits, is learned from the sample."""
        import faiss

        index = faiss.index_factory(sample.shape[1], FACTORY, faiss.METRIC_INNER_PRODUCT)
        index.train(np.ascontiguousarray(sample))
        done = 0
        for block in blocks:
            index.add(np.ascontiguousarray(block))
            done += len(block)
            if progress:
                progress(done, rows)
        return cls(index)

    def add(self, vectors: Floats) -> None:
        import faiss

        if self._mapped:  # faiss ends the process when a mapped index grows; its file may be gone by now
            self._index = faiss.deserialize_index(faiss.serialize_index(self._index))
            self._mapped = False
        self._index.add(np.ascontiguousarray(vectors))

    def candidates(self, queries: Floats, count: int, effort: int) -> Rows:
        """(Q, count) rows, best first as far as 8 bits tell; -1 where the graph found no more."""
        import faiss

        setting = faiss.SearchParametersHNSW(efSearch=effort)  # type: ignore[attr-defined]
        # faiss.contrib.torch_utils, which others may have imported, replaces `search` by one that takes no settings.
        search = getattr(self._index, "search_numpy", self._index.search)
        _, rows = search(np.ascontiguousarray(queries), count, params=setting)
        found: Rows = rows
        return found

    def write(self, path: Path) -> None:
        import faiss

        try:
            faiss.write_index(self._index, str(path))
        except RuntimeError as error:
            raise SearchError(f"The graph could not be written to {path}: {_last_line(error)}.") from error

    @classmethod
    def read(cls, path: Path, dimension: int, rows: int, mmap: bool) -> "Graph":
        import faiss

        flags = faiss.IO_FLAG_MMAP_IFC if mmap else 0
        try:
            index = faiss.read_index(str(path), flags)
        except RuntimeError as error:
            raise SearchError(f"The graph {path} is damaged: {_last_line(error)}. Build the index anew.") from error
        if index.d != dimension or index.ntotal != rows:
            raise SearchError(
                f"The graph {path} must hold {rows} vectors of {dimension} dimensions. "
                f"Found {index.ntotal} of {index.d}. Build the index anew."
            )
        return cls(index, mmap)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].rstrip(".") if str(error).strip() else type(error).__name__
