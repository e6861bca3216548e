"""`bier.Index`: the embedded index, exact for small collections, with bits that select candidates beyond."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bier.search import files
from bier.search.entries import Entries
from bier.search.store import (
    SCAN_ROWS,
    Columns,
    Entry,
    Floats,
    Id,
    Label,
    Mask,
    Metadata,
    Neighbours,
    Rows,
    SearchRequest,
    Store,
    checked_about,
    checked_columns,
    checked_groups,
    checked_ids,
    checked_vectors,
    id_array,
)
from bier.search.vectors import Bits, Progress, Vectors

EXACT_ROWS = 50_000  # up to here a query is compared with every vector (3 ms at 512 dimensions on one core)
CANDIDATES = 384  # rows that the bits select; at least four times as many as are asked for
REBUILD_SHARE = 0.25  # removed rows, as a share of all, at which the index is rebuilt without them
_SAMPLE_ROWS = 50_000  # from which the bits learn the mean of each dimension
_BLOCK_ROWS = 10_000  # a step of the progress bar while the index is built


class Index(Store):
    """The embedded index: a collection in memory, or in a folder. `Index.build` makes one.

    Up to 50,000 images a query is compared with every vector. Beyond, one bit per dimension selects candidates, which
    the vectors score exactly; with some learners only, or a filter that few images pass, the search is exact there too.
    Equal scores come in the order in which the images were added.

    Searches may run in several threads at once; `add`, `remove` and `save` must run alone.

    Example:
        >>> import bier, numpy as np
        >>> vectors = np.eye(3, dtype=np.float32)
        >>> index = bier.Index.build(vectors, ["heron", "gull", "swan"])
        >>> index.search(vectors[1], k=1).ids.tolist()
        ['gull']
    """

    def __init__(
        self, vectors: Vectors, entries: Entries, about: Mapping[str, Any] | None = None, bits: Bits | None = None
    ) -> None:
        self._vectors = vectors
        self._entries = entries
        self._bits = bits
        self._saved: files.Saved | None = None
        self.about: dict[str, Any] = checked_about(about or {})

    @classmethod
    def build(
        cls,
        vectors: ArrayLike,
        ids: Sequence[Id] | NDArray[Any] | None = None,
        groups: Sequence[int] | None = None,
        labels: Sequence[Label] | NDArray[Any] | None = None,
        metadata: Sequence[Metadata] | None = None,
        about: Mapping[str, Any] | None = None,
        progress: Progress = None,
        copy: bool = True,
    ) -> "Index":
        """An index of vectors.

        Args:
            vectors: test-time vectors (N, d), compared by dot product.
            ids: unique strings or whole numbers; by default 0 to N-1. A repeated id is an error.
            groups: the learners' sizes, summing to d; without them, one learner has all of it.
            labels, metadata: stored with each id, returned by `entries` and usable in `where`.
            about: anything JSON can hold about the collection. `model` (a mapping with the texts `path`, `backbone`,
                `weights`, `fingerprint`) and `root` (the folder that the ids start from) are used by the commands.
            progress: called with (rows done, rows in all) while bits are computed.
            copy: False uses the array itself, which may be memory-mapped and larger than memory, and must not change.

        Returns:
            The index.

        Raises:
            SearchError: vectors are not finite, ids repeat, or parameters do not fit together.
        """
        floats = checked_vectors(vectors)
        sizes = checked_groups(groups, floats.shape[1])
        columns = checked_columns(range(len(floats)) if ids is None else ids, labels, metadata, len(floats))
        index = cls(Vectors(sizes, np.array(floats) if copy else floats), Entries(), about)
        index._entries.append(*columns)
        index._settle(progress)
        return index

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def groups(self) -> tuple[int, ...]:
        return self._vectors.groups

    @property
    def method(self) -> Literal["exact", "bits"]:
        """How a search is done at present."""
        return "exact" if self._bits is None else "bits"

    @property
    def ids(self) -> list[Id]:
        return [image for image, alive in zip(self._entries.ids, self._entries.alive, strict=True) if alive]

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
        with files.locked(Path(path)):
            self.save_locked(Path(path))

    def save_locked(self, path: Path) -> None:
        """As `save`, for one who has held `files.locked` since the index was loaded and loses no change of others."""
        self._saved = files.save(path, files.Content(self._vectors, self._entries, self._bits, self.about))

    @classmethod
    def load(cls, path: str | Path, verify: bool | None = None) -> "Index":
        """Open a saved index. The vectors of more than 50,000 images stay on disk until they are asked for.

        `verify` compares every file with its checksum (about a second for a gigabyte); False compares sizes only. By
        default, large files that have the size and the modification time with which they were saved are not read.
        """
        content, saved = files.load(Path(path), EXACT_ROWS, verify)
        index = cls(content.vectors, content.entries, content.about, content.bits)
        index._saved = saved
        return index

    def is_replaced(self) -> bool:
        """Whether another index was saved to the folder since this one was loaded or saved; one look at a file."""
        return self._saved is not None and self._saved.is_replaced()

    def _lengths(self) -> Floats:
        return self._vectors.lengths()

    def _add(self, vectors: Floats, columns: Columns) -> None:
        self._entries.remove(self._entries.known(columns[0]))
        self._entries.append(*columns)
        self._vectors.append(vectors)
        if self._bits is not None:
            self._bits.append(vectors)
        self._settle()

    def _search(self, request: SearchRequest) -> Neighbours:
        queries, k, where, learners = request
        allowed = self._entries.allowed(where)
        available = len(self) if allowed is None else int(allowed.sum())
        k = min(k, available)
        if k == 0 or len(queries) == 0:
            rows, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        elif self._bits is None or len(learners) < len(self.groups) or available <= SCAN_ROWS:
            rows, scores = self._vectors.nearest(queries, k, allowed)
        else:
            rows, scores = self._through_bits(queries, k, allowed, available)
        return Neighbours(id_array([self._entries.ids[row] for row in rows.ravel()], rows.shape), scores, rows)

    def _through_bits(self, queries: Floats, k: int, allowed: Mask | None, available: int) -> tuple[Rows, Floats]:
        """The best by the bits, scored by the vectors."""
        assert self._bits is not None
        count = min(max(CANDIDATES, 4 * k), available)
        candidates = self._bits.candidates(queries, count, allowed)
        if (candidates < 0).any():  # estimates that are no numbers
            return self._vectors.nearest(queries, k, allowed)
        numbers = np.repeat(np.arange(len(queries)), count)
        rows, scores = self._vectors.ranked(queries, numbers, candidates.ravel(), count)
        tied = scores[:, k - 1] == scores[:, -1]  # there may be more of them, in earlier rows
        rows, scores = rows[:, :k], scores[:, :k]
        if tied.any() and count < available:
            rows[tied], scores[tied] = self._vectors.nearest(queries[tied], k, allowed)
        return rows, scores

    def _settle(self, progress: Progress = None) -> None:
        """Drop removed rows when they are many, and compute the bits when the size requires them."""
        rows, removed = self._entries.rows, self._entries.rows - len(self._entries)
        if removed and removed >= REBUILD_SHARE * rows:
            for stored in (self._vectors, self._bits):
                if stored is not None:
                    stored.keep(self._entries.alive)
            self._entries = self._entries.compacted()
            rows = self._entries.rows
        if rows <= EXACT_ROWS:
            self._bits = None
        elif self._bits is None:
            sample = self._vectors.take(np.arange(0, rows, -(-rows // _SAMPLE_ROWS)))
            blocks = (np.arange(start, min(start + _BLOCK_ROWS, rows)) for start in range(0, rows, _BLOCK_ROWS))
            self._bits = Bits.build(sample, (self._vectors.take(block) for block in blocks), rows, progress)
