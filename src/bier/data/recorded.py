"""The images of a data set as a run records them, and the data set divided again as a run has recorded it."""

import hashlib
import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bier.data.records import Dataset, Part, concatenated
from bier.files import is_url, name_text, printable
from bier.runs import RecordedImage


def record(dataset: Dataset, root: str = "") -> Iterator[RecordedImage]:
    """Every image of every part. Paths of a data set without ids are taken from `root`, its folder."""
    for split, part in dataset.parts.items():
        labels = part.labels.tolist()
        for image, label, path in zip(part.images, labels, image_ids(part, root), strict=True):
            yield RecordedImage(split, part.classes[label], path, label, *_stamp(image))


def image_ids(part: Part, root: str = "") -> list[str]:
    """What an image is called in the record of a run."""
    if part.ids is not None:
        return list(part.ids)
    if not isinstance(part.images, tuple):
        return [hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=8).hexdigest() for row in part.images]
    base = os.path.abspath(Path(root).expanduser()) + os.sep  # noqa: PTH100 (speed, and links stay as they are)
    return [name_text(os.path.abspath(image).removeprefix(base)) for image in part.images]  # noqa: PTH100


def _stamp(image: object) -> tuple[int, int]:
    if not isinstance(image, Path) or is_url(image):
        return 0, 0
    try:
        status = image.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Changes:
    """What differs between a data set and its record.

    gone, gone_classes: recorded images that are there no more, and classes of which none is left.
    changed: images whose files have another size. touched: of the same size, with another time of change.
    added: images that are not recorded, by their class, and new_images those of classes that are not recorded.
    """

    gone: tuple[RecordedImage, ...] = ()
    gone_classes: tuple[str, ...] = ()
    changed: tuple[RecordedImage, ...] = ()
    touched: tuple[RecordedImage, ...] = ()
    added: Mapping[str, int] = field(default_factory=dict)
    new_images: Part | None = None

    @property
    def new_classes(self) -> tuple[str, ...]:
        return self.new_images.classes if self.new_images is not None else ()

    def lost(self) -> str:
        """What the record has and the data set has not, in a few words; empty where there is all of it."""
        words = [_images(self.gone, "gone"), _images(self.changed, "changed")]
        if self.gone_classes:
            words.append(_classes(self.gone_classes, "gone or renamed"))
        return ", ".join(filter(None, words))

    def others(self) -> str:
        """What the data set has besides, in a few words."""
        words = [_images(self.touched, "of another time, with equal sizes")]
        if count := sum(self.added.values()):
            words.append(f"{count:,} image{'s' * (count > 1)} added")
        if self.new_classes:
            words.append(_classes(self.new_classes, "new"))
        return ", ".join(filter(None, words))


def _images(images: tuple[RecordedImage, ...], what: str) -> str:
    if not images:
        return ""
    return f"{len(images):,} image{'s' * (len(images) > 1)} {what} (the first is {printable(images[0].path)})"


def _classes(names: tuple[str, ...], what: str) -> str:
    shown = ", ".join(map(repr, map(printable, names[:3]))) + (", ..." if len(names) > 3 else "")
    return f"{len(names):,} class{'es' * (len(names) > 1)} {what} ({shown})"


def as_recorded(dataset: Dataset, images: Iterable[RecordedImage], root: str = "") -> tuple[Dataset, Changes]:
    """The data set with each image in the part that the record says, and what differs.

    Images that are not in the record are in no part: a class that a run has trained on is never measured as unseen.
    The number of a class in its part is that of the record too.
    """
    everything = _Everything(dataset, root)
    images, rows = list(images), everything.rows_of(images)
    there = [(image, row) for image, row in zip(images, rows, strict=True) if row is not None]
    changes = everything.changes(images, there)
    if len(there) == len(images) == len(everything.labels) and all(
        everything.is_at(row, image) for image, row in there
    ):
        return dataset, changes
    names: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for image in images:
        names[_space(image.split)][image.number] = image.label
    parts = {}
    for split in dict.fromkeys(image.split for image in images):
        known = names[_space(split)]
        classes = tuple(known.get(number, f"class {number} without images") for number in range(max(known) + 1))
        mine = [(row, image.number) for image, row in there if image.split == split]
        parts[split] = everything.select(mine, classes)
    return replace(dataset, parts=parts), changes


def _space(split: str) -> str:
    """The parts "query" and "gallery" share the numbers of their classes."""
    return "test" if split in ("query", "gallery") else split


class _Everything:
    """The images of all parts in one row."""

    def __init__(self, dataset: Dataset, root: str) -> None:
        self.parts = list(dataset.parts.items())
        values = [part for _, part in self.parts]
        self.images, self.boxes = concatenated(values)
        self.paths = [path for part in values for path in image_ids(part, root)]
        self.labels = [part.classes[label] for part in values for label in part.labels.tolist()]
        self.has_ids = all(part.ids is not None for part in values)

    def rows_of(self, images: Iterable[RecordedImage]) -> list[int | None]:
        """The row of each recorded image; a picture of several boxes has as many rows."""
        places: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        for row, key in enumerate(zip(self.paths, self.labels, strict=True)):
            places[key].append(row)
        waiting = (places[image.path, image.label] for image in images)
        return [rows.popleft() if rows else None for rows in waiting]

    def is_at(self, row: int, image: RecordedImage) -> bool:
        """Whether the data set has been divided so that this row is where the record says."""
        for split, part in self.parts:
            if row < len(part):
                return split == image.split and int(part.labels[row]) == image.number
            row -= len(part)
        return False

    def changes(self, images: list[RecordedImage], there: list[tuple[RecordedImage, int]]) -> Changes:
        used = {row for _, row in there}
        left, classes = {image.label for image, _ in there}, {image.label for image in images}
        stamps = [(image, _stamp(self.images[row])) for image, row in there]
        others = [(row, label) for row, label in enumerate(self.labels) if row not in used]
        unseen = sorted({label for _, label in others} - classes, key=os.fsencode)
        numbers = {label: number for number, label in enumerate(unseen)}
        new = [(row, numbers[label]) for row, label in others if label in numbers]
        is_there = Counter(image for image, _ in there)
        return Changes(
            gone=tuple((Counter(images) - is_there).elements()),
            gone_classes=tuple(sorted(classes - left)),
            changed=tuple(image for image, (size, _) in stamps if size != image.size),
            touched=tuple(image for image, (size, time) in stamps if size == image.size and time != image.time),
            added=Counter(label for _, label in others),
            new_images=self.select(sorted(new, key=lambda pair: pair[1]), tuple(unseen)) if new else None,
        )

    def select(self, rows: list[tuple[int, int]], classes: tuple[str, ...]) -> Part:
        """A part of rows and the numbers of their classes."""
        at, numbers = np.array(rows, np.int64).reshape(-1, 2).T
        return Part(
            tuple(self.images[row] for row in at) if isinstance(self.images, tuple) else self.images[at],
            numbers.copy(),
            classes,
            None if self.boxes is None else self.boxes[at],
            self.parts[0][1].root,
            tuple(self.paths[row] for row in at) if self.has_ids else None,
        )
