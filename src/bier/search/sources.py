"""Where the vectors of a collection come from, and the index of them.

Nothing here needs a network: `bier index` of an embeddings file neither waits for torch nor takes its memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bier.search.embeddings import read_embeddings
from bier.search.index import Index
from bier.search.store import Floats, Id, Label

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much (0: not known)


class Stream(ABC):
    """What a store can be filled from: ids and labels of rows, and their vectors as they are computed.

    groups: the learners' sizes. about: what a collection keeps about the rows: the model, and the folder that the ids
    start from.
    """

    ids: Sequence[Id]
    labels: Sequence[Label] | None
    groups: tuple[int, ...]
    about: Mapping[str, Any]

    @abstractmethod
    def stream(self, blocks: Iterable[Sequence[int]]) -> Iterator[tuple[Sequence[int], Floats]]:
        """(rows, their vectors) in any order, without rows that cannot be read."""


class Source(Stream):
    """An embeddings file, or images that a model encodes when their vectors are asked for."""

    @abstractmethod
    def vectors(self, rows: Sequence[int], progress: Progress | None = None) -> Floats:
        """The vectors (n, d) of some rows."""

    def stream(self, blocks: Iterable[Sequence[int]]) -> Iterator[tuple[Sequence[int], Floats]]:
        """The vectors of one block of rows after the other."""
        return ((rows, self.vectors(rows)) for rows in blocks)


@dataclass(frozen=True)
class StoredSource(Source):
    """The vectors of an embeddings file, memory-mapped."""

    ids: Sequence[Id]
    labels: Sequence[Label] | None
    groups: tuple[int, ...]
    about: Mapping[str, Any]
    stored: Floats

    @classmethod
    def read(cls, file: Path) -> "StoredSource":
        known = read_embeddings(file)
        return cls(known.paths, known.labels, known.groups, {"model": known.model, "root": known.root}, known.vectors)

    def vectors(self, rows: Sequence[int], progress: Progress | None = None) -> Floats:
        """The vectors (n, d) of some rows; those of a range stay on disk until they are touched."""
        return self.stored[rows.start : rows.stop : rows.step] if isinstance(rows, range) else self.stored[list(rows)]


def build_index(source: Source, progress: Progress | None = None) -> Index:
    """An index of all vectors of a source."""
    vectors = source.vectors(range(len(source.ids)), progress)
    building = progress and partial(progress, "building the index")
    return Index.build(
        vectors,
        list(source.ids),
        source.groups,
        source.labels,
        about=source.about,
        progress=building,
        copy=not isinstance(source, StoredSource),
    )
