"""Finding the files of a benchmark on disk, and saying clearly what is missing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bier.data.records import Dataset, Part
from bier.errors import DataError

Counts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Benchmark:
    """An official data set: how to read it, and how many images and classes its protocol expects.

    read: (root, size) -> Dataset. `size` names the test set where there are several (VehicleID), else is ignored.
    expected: by size, or under "" where there is one; a count that the protocol does not state is left out.
    note: what a person should know whose counts differ.
    """

    read: Callable[[Path, str], Dataset]
    expected: Mapping[str, Counts]
    note: str = ""

    def counts(self, size: str) -> Counts:
        """What the protocol expects for this size."""
        return self.expected.get(size, self.expected.get("", {}))


@dataclass(frozen=True)
class Layout:
    """The official layout of a benchmark. Its folder may be given itself, or the folder that contains it.

    title: its name for people. folders: the usual names of its folder. shape: the layout in a few words.
    """

    title: str
    folders: tuple[str, ...]
    shape: str

    def locate(self, root: Path, *markers: str) -> tuple[Path, Path]:
        """The folder of the data set and the first marker found in it; an error names what was looked for."""
        if not root.is_dir():
            raise DataError(f"The root of {self.title} must be a folder. There is no folder {root}. {self.expects}")
        for folder in (root, *(root / name for name in self.folders)):
            for marker in markers:
                if (folder / marker).exists():
                    return folder, folder / marker
        raise DataError(f"There is no {' or '.join(markers)} in {root} or in {root / self.folders[0]}. {self.expects}")

    def need(self, path: Path) -> Path:
        """The path, if it exists; else an error that names it."""
        if not path.exists():
            raise DataError(f"{self.title} is incomplete: there is no {path}. {self.expects}")
        return path

    @property
    def expects(self) -> str:
        """The sentence that shows the official layout."""
        return f"The official layout is {self.shape}."


def rows(path: Path, columns: int, skip: int = 0) -> list[list[str]]:
    """The lines of a list separated by spaces, without the first `skip`; the last column may contain spaces.

    File names of any encoding survive: bytes that are not UTF-8 become what `os.fsencode` turns back.
    """
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    found = []
    for number, line in enumerate(lines[skip:], start=skip + 1):
        fields = line.split(maxsplit=columns - 1)
        if not fields:
            continue
        if len(fields) != columns:
            raise DataError(f"{path}, line {number}: expected {columns} columns. Got '{line.strip()}' instead.")
        found.append([*fields[:-1], fields[-1].rstrip()])
    return found


def whole(text: str, path: Path, what: str) -> int:
    """A whole number read from a list."""
    try:
        return int(text)
    except ValueError:
        raise DataError(f"{path}: the {what} must be a whole number. Got '{text}' instead.") from None


def part(images: Sequence[Path], names: Sequence[str], boxes: Sequence[Sequence[float]] | None = None) -> Part:
    """A part whose classes are the distinct names in their order of appearance."""
    numbers: dict[str, int] = {}
    labels = [numbers.setdefault(name, len(numbers)) for name in names]
    cut = None if boxes is None else np.array(boxes, dtype=np.float32).reshape(-1, 4)
    return Part(tuple(images), np.array(labels, dtype=np.int64), tuple(numbers), cut)


def official(name: str, parts: Mapping[str, Part], ks: tuple[int, ...], **more: object) -> Dataset:
    """A data set whose test images are queries and gallery at once; neither part may be empty."""
    for which, some in parts.items():
        if not len(some):
            raise DataError(f"The data set '{name}' must have images in its part '{which}'. Its lists name none.")
    return Dataset(name, parts, ks, "self", {"kind": "official", **more})
