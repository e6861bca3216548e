"""Where the vectors of a collection come from, and the index of them.

Nothing here needs a network: `bier index` of an embeddings file neither waits for torch nor takes its memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bier import files
from bier.search.embeddings import read_embeddings
from bier.search.index import Index
from bier.search.store import Floats, Id, Label, Metadata

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much (0: not known)
STAMP = "_stamp"  # the key of the metadata that says which content of a file was encoded


class Source(ABC):
    """What a collection can be filled from: an embeddings file, or images that are encoded when they are asked for.

    groups: the learners' sizes. about: what a collection keeps about the rows: the model, and the folder that the ids
    start from. place, by_folder: the folder that was listed, by its folders or by a table; None if it is not known.
    """

    ids: Sequence[Id]
    labels: Sequence[Label] | None
    groups: tuple[int, ...]
    about: Mapping[str, Any]
    metadata: Sequence[Metadata] | None = None
    place: Path | None = None
    by_folder: bool = False

    @abstractmethod
    def vectors(self, rows: Sequence[int], progress: Progress | None = None) -> Floats:
        """The vectors (n, d) of some rows."""

    def readable(self, rows: Sequence[int], progress: Progress | None = None) -> list[int]:
        """Those of some rows whose images can be read."""
        return list(rows)

    def described(self, rows: Sequence[int]) -> list[Metadata]:
        """What a collection keeps about some rows, with the stamps of their files; asked for after their vectors."""
        return [None] * len(rows) if self.metadata is None else [self.metadata[row] for row in rows]

    def is_unchanged(self, row: int, recorded: str | None) -> bool:
        """Whether a row is of the same content as the recorded stamp; True where one of them is not known."""
        given = ((self.metadata[row] if self.metadata else None) or {}).get(STAMP)
        return not recorded or not given or _same(recorded.split(), given.split())


def stamp_of(place: Path | str, digest: bool = False) -> str:
    """Which content a file has: size, times of content and of change, and with `digest` a part of its SHA-256.

    Of a URL, what its server says. Empty where the file cannot be looked at.
    """
    if isinstance(place, str):
        return _url_stamp(place)
    try:
        status = place.stat()
        # The time of change cannot be set by a program, as `rsync -t` sets that of the content. The digest decides.
        words = [str(number) for number in (status.st_size, status.st_mtime_ns, status.st_ctime_ns)]
        return " ".join([*words, files.checksum(place)[:16]] if digest else words)
    except (OSError, ValueError):  # a NUL in the name
        return ""


def _url_stamp(url: str) -> str:
    import fsspec

    if "::" in url:  # a chain may lead to a file without end, which is refused where it is read
        return ""
    try:
        system, path = fsspec.core.url_to_fs(url)
        return f"url {system.ukey(path)}"
    except Exception:  # of the packages that open URLs, of any type
        return ""


def is_same_file(recorded: str | None, place: Path | str) -> bool:
    """Whether a file still has the content that was recorded; True if nothing was. The digest decides last."""
    if not recorded:
        return True
    words, now = recorded.split(), stamp_of(place).split()
    if words[:3] == now[:3] or len(words) < 4 or not now or words[0] != now[0] or isinstance(place, str):
        return words[:3] == now[:3]
    return _same(words, stamp_of(place, digest=True).split())


def _same(first: Sequence[str], second: Sequence[str]) -> bool:
    return first[:3] == second[:3] or (len(first) == len(second) == 4 and first[0::3] == second[0::3])


@dataclass(frozen=True)
class StoredSource(Source):
    """The vectors of an embeddings file, memory-mapped."""

    ids: Sequence[Id]
    labels: Sequence[Label] | None
    groups: tuple[int, ...]
    about: Mapping[str, Any]
    stored: Floats
    metadata: Sequence[Metadata] | None = None

    @classmethod
    def read(cls, file: Path) -> "StoredSource":
        known = read_embeddings(file)
        about = {"model": known.model, "root": known.root}
        return cls(known.ids, known.labels, known.groups, about, known.vectors, known.metadata)

    def vectors(self, rows: Sequence[int], progress: Progress | None = None) -> Floats:
        """The vectors (n, d) of some rows; those of a range stay on disk until they are touched."""
        return self.stored[rows.start : rows.stop : rows.step] if isinstance(rows, range) else self.stored[list(rows)]


def build_index(source: Source, progress: Progress | None = None) -> Index:
    """An index of all vectors of a source."""
    rows = range(len(source.ids))
    vectors = source.vectors(rows, progress)
    building = progress and partial(progress, "building the index")
    return Index.build(
        vectors,
        list(source.ids),
        source.groups,
        source.labels,
        source.described(rows),
        about=source.about,
        progress=building,
        copy=not isinstance(source, StoredSource),
    )
