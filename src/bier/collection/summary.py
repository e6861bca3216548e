"""What photographs are found to be before any training, and whether training may help: the lines of `bier try`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bier import files
from bier.collection.collection import Collection
from bier.collection.encoding import STAMP
from bier.data.listing import list_with_parts
from bier.evaluate.recall import nearest
from bier.search import Entry

QUERIES = 2_000  # drawn at random from larger collections
SOLVED = 97.0  # percent of nearest photographs of the same class, from which training can hardly gain anything
LEAST_CLASSES = 20  # with fewer to learn from, runs on groceries gained nothing
LEAST_IMAGES = 5  # of the median class, for the same reason


class Summary(NamedTuple):
    """Counts of a collection of images, and how often the nearest image is of the same class.

    duplicates: images with the same content as one before them; they are left out of `nearest_right`.
    leaks: contents that lie in more than one part of a folder divided into train and test; None without such parts.
    nearest_right: percent of `queries` images whose nearest other image is of their class; None without labels.
    training: whether training may help, and why; None without labels.
    """

    images: int
    classes: int
    unlabelled: int
    unreadable: int
    duplicates: int
    leaks: int | None
    nearest_right: float | None
    queries: int
    training: str | None

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()

    def lines(self) -> Iterator[str]:
        """For people."""
        counts = [f"{self.images:,} images"]
        counts += [f"{self.classes:,} classes (one per folder)"] if self.classes else ["no classes"]
        counts += [f"{self.unlabelled:,} images without a class"] if self.classes and self.unlabelled else []
        counts += [f"{self.unreadable:,} unreadable", f"{self.duplicates:,} duplicates"]
        counts += [] if self.leaks is None else [f"{self.leaks:,} in more than one part of the split"]
        yield ", ".join(counts)
        if self.nearest_right is not None:
            yield f"Today the nearest photograph is of the same class {self.nearest_right:.0f}% of the time."
        if self.training is not None:
            yield f"{self.training}."


def summarise(collection: Collection, place: Path | str) -> Summary:
    """Count the images of a collection that `image_collection` has made of a folder or a table."""
    listed, divided = list_with_parts(files.place_of(place))
    part_of = dict(zip(listed.ids or (), divided or (), strict=False))
    store = collection.store
    entries = store.entries(store.ids)
    parts: dict[str, set[str]] = {}  # of each content
    first: list[Entry] = []
    for entry in entries:
        content = _content(entry)
        if content not in parts:
            first.append(entry)
        parts.setdefault(content, set()).add(part_of.get(str(entry.id), ""))
    labelled = [entry for entry in first if entry.label is not None]
    sizes = Counter(str(entry.label) for entry in labelled)
    right, queries = _nearest_right(collection, labelled, sizes)
    return Summary(
        images=len(entries),
        classes=len({str(entry.label) for entry in entries if entry.label is not None}),
        unlabelled=sum(entry.label is None for entry in entries),
        unreadable=len(listed) - len(entries),
        duplicates=len(entries) - len(first),
        leaks=sum(len(names) > 1 for names in parts.values()) if part_of else None,
        nearest_right=right,
        queries=queries,
        training=None if right is None else training_outlook(right, sizes),
    )


def _content(entry: Entry) -> str:
    """Of its file as it was encoded, and its box; the id where nothing is recorded."""
    metadata = entry.metadata or {}
    words = str(metadata.get(STAMP, "")).split()
    return f"{words[3]} {metadata.get('_box', '')}" if len(words) == 4 else f"id {entry.id}"


def _nearest_right(collection: Collection, labelled: list[Entry], sizes: Counter[str]) -> tuple[float | None, int]:
    """Over images of classes with two or more."""
    if len(sizes) < 2:
        return None, 0
    numbers = {name: number for number, name in enumerate(sizes)}
    names = np.array([numbers[str(entry.label)] for entry in labelled], np.int64)
    queries = np.flatnonzero([sizes[str(entry.label)] > 1 for entry in labelled])
    if not len(queries):
        return None, 0
    if len(queries) > QUERIES:
        queries = np.random.default_rng(0).choice(queries, QUERIES, replace=False)
    vectors = collection.store.vectors([entry.id for entry in labelled])
    matches = nearest(vectors, queries, 1).indices[:, 0]
    return 100 * float((names[matches] == names[queries]).mean()), len(queries)


def training_outlook(right: float, sizes: Mapping[str, int]) -> str:
    """Whether training may help: by the percent of photographs that lie nearest to their class, and class sizes."""
    usual = int(np.median(list(sizes.values())))
    if right >= SOLVED:
        return "Training will hardly help, because nearly every photograph lies nearest to one of its class already"
    if len(sizes) < LEAST_CLASSES:
        return (
            f"Training will hardly help, because it takes {LEAST_CLASSES} classes or more to learn from, "
            f"and these are {len(sizes)}"
        )
    if usual < LEAST_IMAGES:
        return f"Training will hardly help, because half of the classes have no more than {usual} photographs"
    return (
        f"Training may help, because {100 - right:.0f}% lie nearest to another class, "
        f"and there are {len(sizes)} classes to learn from"
    )
