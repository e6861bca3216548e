"""Data sets and their parts: images with labels, and how a part is divided into training and test."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bier.config import DataConfig
from bier.errors import ConfigError, DataError
from bier.files import name_text

if TYPE_CHECKING:
    from bier.images import Broken


class RandomStream:
    """A stream of random integers, fixed by a tuple of whole numbers (a seed and whatever names the stream)."""

    def __init__(self, *key: int) -> None:
        # The length is part of the key because NumPy ignores zeros at the end; negative seeds are taken modulo 2^64.
        words = [len(key), *(part % 2**64 for part in key)]
        self._bits = np.random.PCG64(np.random.SeedSequence(words))

    def words(self, count: int) -> NDArray[np.uint64]:
        """`count` raw 64-bit words."""
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64).reshape(count)

    def between(self, low: int, high: int, count: int) -> NDArray[np.int64]:
        """`count` integers from `low` to `high`, both included; ranges up to 2^32 wide."""
        width = np.uint64(high - low + 1)
        return ((self.words(count) >> np.uint64(32)) * width >> np.uint64(32)).astype(np.int64) + low

    def bytes(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Random bytes of this shape."""
        count = int(np.prod(shape))
        return self.words(-(-count // 8)).astype("<u8").view(np.uint8)[:count].reshape(shape)

    def order(self, count: int) -> NDArray[np.int64]:
        """A random permutation of 0 .. count - 1."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64)


Protocol = Literal["self", "query-gallery", "repeated-gallery", "accuracy"]
Images = tuple[Path | str, ...] | NDArray[Any]
ALL = "all"
UNLABELLED = -1  # the label of an image whose class is not known, as in scikit-learn


@dataclass(frozen=True, eq=False)
class Part:
    """N images with their labels.

    images: a tuple of N paths (text: URLs that fsspec opens), or uint8 pixels (N, H, W, 3), or float32 features (N, h).
    labels: int64 (N,); labels[i] is an index into `classes`, or UNLABELLED (-1). Parts to train on have no such images.
    boxes: float32 (N, 4) as x1, y1, x2, y2 in pixels of the file, or None. The reader of the images crops to them.
    root, ids: where the images are listed from a folder or a table, its folder and the path of each image from there,
        as text with "/" (of a table: as it is written there); otherwise None. Where a table has several boxes of one
        file, each id has its box behind the path: `a.jpg#10,20,110,120`.
    metadata: of a table, what its other columns say about each image; `_path` is the file and `_box` the box, where
        the id does not say it.
    by_folder: whether the images are all of a folder, with the class of each by its folder.
    """

    images: Images
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    boxes: NDArray[np.float32] | None = None
    root: Path | str | None = None
    ids: tuple[str, ...] | None = None
    metadata: tuple[Mapping[str, Any], ...] | None = None
    by_folder: bool = False

    def __post_init__(self) -> None:
        count = len(self.images)
        if self.labels.shape != (count,):
            raise DataError(f"The labels of a part must be one per image. Got {self.labels.shape} for {count} images.")
        if count and not UNLABELLED <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise DataError(
                f"The labels of a part must be from 0 to {len(self.classes) - 1}, one per class, or -1 for none. "
                f"Got labels from {self.labels.min()} to {self.labels.max()} instead."
            )
        if self.boxes is not None and self.boxes.shape != (count, 4):
            raise DataError(f"The boxes of a part must have shape ({count}, 4). Got {self.boxes.shape} instead.")
        for name, column in (("ids", self.ids), ("metadata", self.metadata)):
            if column is not None and len(column) != count:
                raise DataError(f"The {name} of a part must be one per image. Got {len(column)} for {count} images.")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def width(self) -> int | None:
        """The size h of pre-computed features (N, h); None for pictures."""
        return self.images.shape[1] if isinstance(self.images, np.ndarray) and self.images.ndim == 2 else None

    @property
    def present(self) -> int:
        """How many classes have at least one image here."""
        return len(np.unique(self.labels[self.labels >= 0]))

    def label_names(self) -> list[str | None] | None:
        """The class of each image by its name, None for an image without a label; None if no image has one."""
        if not (self.labels >= 0).any():
            return None
        return [None if label < 0 else self.classes[label] for label in self.labels.tolist()]

    def select(self, indices: ArrayLike) -> "Part":
        """The part that holds only these images, in this order; classes and labels keep their meaning."""
        at = np.asarray(indices)
        at = np.flatnonzero(at) if at.dtype == np.bool_ else at.astype(np.int64)
        images: Images
        images = tuple(self.images[i] for i in at) if isinstance(self.images, tuple) else self.images[at]
        boxes = None if self.boxes is None else self.boxes[at]
        ids = None if self.ids is None else tuple(self.ids[i] for i in at)
        metadata = None if self.metadata is None else tuple(self.metadata[i] for i in at)
        return replace(self, images=images, labels=self.labels[at], boxes=boxes, ids=ids, metadata=metadata)

    def readable(
        self,
        *,
        cache: str | Path | None = None,
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "tuple[Part, list[Broken]]":
        """The part without the images that cannot be read, and these; arguments as `bier.images.find_broken` has."""
        from bier.images import find_broken

        broken = find_broken(self.images, self.boxes, workers, progress, cache)
        if not broken:
            return self, broken
        return self.select(np.delete(np.arange(len(self)), [image.number for image in broken])), broken

    def only_present(self) -> "Part":
        """The same images with the classes that have none taken out and the labels renumbered, order kept."""
        kept = np.unique(self.labels[self.labels >= 0])
        labels = np.where(self.labels < 0, UNLABELLED, np.searchsorted(kept, self.labels)).astype(np.int64)
        return replace(self, labels=labels, classes=tuple(self.classes[i] for i in kept))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set divided as its protocol says.

    parts: "train" and "test", or "train", "query" and "gallery" (which share their class numbers); "validation" too
        when it was asked for or belongs to the protocol.
    ks: the K of Recall@K. protocol: how test images are ranked. split: how the parts came about, as plain values.
    broken: images that `readable` has left out.
    """

    name: str
    parts: Mapping[str, Part]
    ks: tuple[int, ...]
    protocol: Protocol = "self"
    split: Mapping[str, object] = field(default_factory=dict)
    broken: "tuple[Broken, ...]" = ()

    def __getitem__(self, part: str) -> Part:
        """A part by its name; "all" stands for the images of all parts."""
        if part == ALL and part not in self.parts:
            return joined(tuple(self.parts.values()))
        if part not in self.parts:
            names = ", ".join((*self.parts, ALL))
            raise DataError(f"The data set '{self.name}' has the parts {names}. Got '{part}' instead.")
        return self.parts[part]

    @property
    def divided(self) -> bool:
        """Whether the test part was drawn, because the data does not say which images are for test."""
        return "test_share" in self.split

    def counts(self) -> dict[str, dict[str, int]]:
        """Images and classes of every part."""
        return {name: {"images": len(part), "classes": part.present} for name, part in self.parts.items()}


def readable(dataset: Dataset, names: Sequence[str] = (), **options: Any) -> Dataset:
    """The data set without the images that cannot be read, which it lists as `broken`. Classes stay as they are.

    names: the parts to look at, by default all; the others stay as they are. options: as `Part.readable` has them.
    """
    parts, broken = dict(dataset.parts), list(dataset.broken)
    for name in names or tuple(parts):
        if name in parts:
            parts[name], found = parts[name].readable(**options)
            broken += found
            if found and not len(parts[name]):
                raise DataError(f"None of the {len(found)} {name} images of '{dataset.name}' can be read.")
    return replace(dataset, parts=parts, broken=tuple(broken))


def joined(parts: Sequence[Part]) -> Part:
    """One part with the images of several. Classes of the same name are one class."""
    classes = tuple(sorted({name for part in parts for name in part.classes}))
    number = {name: index for index, name in enumerate(classes)}
    labels = [np.array([number[part.classes[label]] for label in part.labels], np.int64) for part in parts]
    images, boxes = concatenated(parts)
    return Part(images, np.concatenate(labels), classes, boxes).only_present()


def concatenated(parts: Sequence[Part]) -> tuple[Images, NDArray[np.float32] | None]:
    """The images of several parts and their boxes, where any of them has boxes."""
    images: Images
    if all(isinstance(part.images, tuple) for part in parts):
        images = tuple(image for part in parts for image in part.images)
    else:
        images = np.concatenate([np.asarray(part.images) for part in parts])
    if all(part.boxes is None for part in parts):
        return images, None
    whole = [np.full((len(part), 4), np.nan, np.float32) if part.boxes is None else part.boxes for part in parts]
    return images, np.concatenate(whole)  # NaN: the whole image


NAMES_WRITTEN_OUT = 200  # a part with more classes is described by a digest of their names
_TEST, _VALIDATION = 1, 2  # streams of random numbers, so that one share never moves the other's classes


def divide(name: str, everything: Part, settings: DataConfig, ks: tuple[int, ...]) -> Dataset:
    """Everything divided into "train" and "test", and "validation" if the settings ask for a share of it."""
    train, test = _apart(everything, settings.test_share, settings, _TEST, f"the data set '{name}'")
    return held_out(Dataset(name, {"train": train, "test": test}, ks), settings, divided=True)


def held_out(dataset: Dataset, settings: DataConfig, divided: bool = False) -> Dataset:
    """The data set with a share of its training moved to the part "validation", and its split described.

    divided: whether the test part was drawn by these settings too (then the test's share belongs in the description).
    """
    parts = dict(dataset.parts)
    split: dict[str, object] = {"kind": settings.split, "seed": settings.seed} if divided else dict(dataset.split)
    if divided:
        split["test_share"] = settings.test_share
    if settings.validation > 0 and "validation" not in parts:
        where = f"the training part of '{dataset.name}'"
        train, validation = _apart(parts.pop("train"), settings.validation, settings, _VALIDATION, where)
        parts = {"train": train, "validation": validation, **parts}
        split |= {"seed": settings.seed, "validation": settings.validation, "validation_kind": settings.split}
        if settings.validation_classes and settings.split == "classes":
            split["validation_classes"] = settings.validation_classes
        if settings.validation_order != "random":
            split["validation_order"] = settings.validation_order
    if divided or "validation_kind" in split:
        split["parts"] = described(parts)
    return Dataset(dataset.name, parts, dataset.ks, dataset.protocol, split)


def described(parts: Mapping[str, Part]) -> dict[str, dict[str, object]]:
    """Plain values that tell two different splits apart: counts, and the classes' names or their digest."""
    out: dict[str, dict[str, object]] = {}
    for which, part in parts.items():
        names = [name_text(part.classes[i]) for i in np.unique(part.labels)]
        text = "\n".join(names).encode()
        classes: dict[str, object] = {"names": names}
        if len(names) > NAMES_WRITTEN_OUT:
            classes = {"sha256": hashlib.sha256(text).hexdigest()}
        out[which] = {"images": len(part), "classes": len(names), **classes}
    return out


def _apart(part: Part, share: float, settings: DataConfig, stream: int, where: str) -> tuple[Part, Part]:
    """The part without and with the share that was drawn."""
    if settings.split == "inside":
        if stream == _VALIDATION and settings.validation_order == "last":
            raise ConfigError("'validation_order' = last holds out classes; it does not go with split = inside.")
        drawn = _inside(part.labels, share, RandomStream(settings.seed, stream))
        if not drawn.any():
            raise DataError(f"A split inside classes needs a class with two images. There is none in {where}.")
        return part.select(~drawn), part.select(drawn)
    present = np.unique(part.labels)
    if len(present) < 2:
        raise DataError(
            f"A split by classes needs at least two classes in {where}. Got {len(present)}; use split='inside' instead."
        )
    least = min(settings.validation_classes, len(present) // 4) if stream == _VALIDATION else 0
    count = min(max(round(len(present) * share), least, 1), len(present) - 1)
    if stream == _VALIDATION and settings.validation_order == "last":
        chosen = present[-count:]
    else:
        chosen = present[RandomStream(settings.seed, stream).order(len(present))[:count]]
    drawn = np.isin(part.labels, chosen)
    return part.select(~drawn).only_present(), part.select(drawn).only_present()


def _inside(labels: NDArray[np.int64], share: float, random: RandomStream) -> NDArray[np.bool_]:
    """True for the drawn images: the share of each class, at least one and not all; none of a class of one."""
    drawn = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = random.order(len(members))
        if len(members) > 1:
            drawn[members[order[: min(max(round(len(members) * share), 1), len(members) - 1)]]] = True
    return drawn
