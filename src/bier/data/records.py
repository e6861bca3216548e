"""What a reader returns: parts of a data set, each with its images, labels and class names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bier.errors import DataError

Protocol = Literal["self", "query-gallery", "repeated-gallery", "accuracy"]
Images = tuple[Path, ...] | NDArray[Any]


@dataclass(frozen=True, eq=False)
class Part:
    """N images with their labels.

    images: a tuple of N paths, or uint8 pixels (N, H, W, 3), or float32 features (N, h).
    labels: int64 (N,); labels[i] is an index into `classes`.
    boxes: float32 (N, 4) as x1, y1, x2, y2 in pixels of the file, or None. The reader of the images crops to them.
    """

    images: Images
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    boxes: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        count = len(self.images)
        if self.labels.shape != (count,):
            raise DataError(f"The labels of a part must be one per image. Got {self.labels.shape} for {count} images.")
        if count and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise DataError(f"The labels of a part must be from 0 to {len(self.classes) - 1}, one per class.")
        if self.boxes is not None and self.boxes.shape != (count, 4):
            raise DataError(f"The boxes of a part must have shape ({count}, 4). Got {self.boxes.shape} instead.")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def present(self) -> int:
        """How many classes have at least one image here."""
        return len(np.unique(self.labels))

    def select(self, indices: ArrayLike) -> "Part":
        """The part that holds only these images, in this order; classes and labels keep their meaning."""
        at = np.asarray(indices)
        at = np.flatnonzero(at) if at.dtype == np.bool_ else at.astype(np.int64)
        images: Images
        images = tuple(self.images[i] for i in at) if isinstance(self.images, tuple) else self.images[at]
        boxes = None if self.boxes is None else self.boxes[at]
        return Part(images, self.labels[at], self.classes, boxes)

    def only_present(self) -> "Part":
        """The same images with the classes that have none taken out and the labels renumbered, order kept."""
        kept, labels = np.unique(self.labels, return_inverse=True)
        classes = tuple(self.classes[i] for i in kept)
        return Part(self.images, labels.astype(np.int64).reshape(-1), classes, self.boxes)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set divided as its protocol says.

    parts: "train" and "test", or "train", "query" and "gallery" (which share their class numbers); "validation" too
        when it was asked for or belongs to the protocol.
    ks: the K of Recall@K. protocol: how test images are ranked. split: how the parts came about, as plain values.
    """

    name: str
    parts: Mapping[str, Part]
    ks: tuple[int, ...]
    protocol: Protocol = "self"
    split: Mapping[str, object] = field(default_factory=dict)

    def __getitem__(self, part: str) -> Part:
        if part not in self.parts:
            raise DataError(f"The data set '{self.name}' has the parts {', '.join(self.parts)}. Got '{part}' instead.")
        return self.parts[part]

    def counts(self) -> dict[str, dict[str, int]]:
        """Images and classes of every part."""
        return {name: {"images": len(part), "classes": part.present} for name, part in self.parts.items()}
