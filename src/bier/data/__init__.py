"""Data sets by name: official benchmarks, any folder or table, pre-computed features, and an embedded one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bier.config import DataConfig
from bier.data import glyphs
from bier.data.benchmarks import (
    CARS,
    CARS_CROPPED,
    CIFAR10,
    CUB,
    CUB_CROPPED,
    INSHOP,
    SOP,
    VEHICLEID,
    Benchmark,
    Counts,
)
from bier.data.listing import list_images, read_features, read_folder, read_table
from bier.data.records import Dataset, Part, held_out, readable
from bier.errors import ConfigError, DataError, did_you_mean
from bier.files import place_of

if TYPE_CHECKING:
    from bier.data.sampler import BalancedBatches

__all__ = [
    "NAMES",
    "BalancedBatches",
    "Dataset",
    "Part",
    "check_name",
    "expected",
    "list_images",
    "load",
    "note",
    "readable",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The sampler is one of torch, which commands that only list images do not wait for."""
        if name == "BalancedBatches":
            from bier.data.sampler import BalancedBatches

            return BalancedBatches
        raise AttributeError(f"module 'bier.data' has no attribute {name!r}")


BENCHMARKS: Mapping[str, Benchmark] = {
    "cub": CUB,
    "cub-cropped": CUB_CROPPED,
    "cars": CARS,
    "cars-cropped": CARS_CROPPED,
    "sop": SOP,
    "inshop": INSHOP,
    "vehicleid": VEHICLEID,
    "cifar10": CIFAR10,
}
OWN: Mapping[str, Callable[[Any, DataConfig], Dataset]] = {
    "folder": read_folder,
    "table": read_table,
    "features": read_features,
}
NAMES: tuple[str, ...] = ("glyphs", *OWN, *BENCHMARKS)


def check_name(name: str) -> None:
    """An error that suggests the nearest name unless there is a data set of this name."""
    if name not in NAMES:
        raise DataError(
            f"The data set must be one of {', '.join(NAMES)}. Got '{name}' instead.{did_you_mean(name, NAMES)}"
        )


def load(data: str | DataConfig, root: str | Path | None = None, **settings: Any) -> Dataset:
    """The data set of this name, or the one that the settings of a run name, divided into parts.

    Args:
        data: a name, or the section `data` of a config. With a config, nothing else is given.
        root: the data set's own folder or the folder that contains it; a file for `table` and `features`; for `folder`
            and `table` also a URL that fsspec opens. `glyphs` needs none.
        settings: of the section `data`, such as `seed`, `validation`, `split`, `test_share` and `size`.

    Example:
        >>> import bier.data
        >>> bier.data.load("glyphs", validation=0.2).counts()["validation"]["classes"]
        24
    """
    if not isinstance(data, DataConfig):
        check_name(data)
        data = DataConfig(name=data, root=str(root or ""), **settings)
    check_name(data.name)
    dataset = _read(data)
    if data.train_classes:
        dataset = _fewer_classes(dataset, data.train_classes)
    return _fewer_images(dataset, data.train_images) if data.train_images else dataset


def _read(settings: DataConfig) -> Dataset:
    name = settings.name
    if name == "glyphs":
        return glyphs.read(settings.seed, settings.validation)
    if not settings.root:
        raise DataError(
            f"The data set '{name}' needs a root, the path of its folder or file. Only 'glyphs' needs none."
        )
    place = place_of(settings.root)
    if isinstance(place, str) and name not in ("folder", "table"):
        raise DataError(
            f"The root of '{name}' must be a path; only folder and table take a URL. Got '{place}' instead."
        )
    place = place.expanduser() if isinstance(place, Path) else place
    try:
        if name in OWN:
            return OWN[name](place, settings)
        assert isinstance(place, Path)
        return held_out(BENCHMARKS[name].read(place, settings.size), settings)
    except OSError as error:
        raise DataError(f"Cannot read {error.filename or place}: {error.strerror or error}.") from error


def _fewer_images(dataset: Dataset, count: int) -> Dataset:
    """The data set with `count` training images of each class (or all it has), spread evenly over them."""
    part = dataset["train"]
    chosen = np.zeros(len(part), bool)
    for label in np.unique(part.labels):
        members = np.flatnonzero(part.labels == label)
        chosen[_spread(members, min(count, len(members)))] = True
    fewer = part.select(chosen)
    return replace(dataset, parts={**dataset.parts, "train": fewer}, split={**dataset.split, "train_images": count})


def _fewer_classes(dataset: Dataset, count: int) -> Dataset:
    """The data set with `count` of its training classes, spread evenly over all of them."""
    part = dataset["train"]
    present = np.unique(part.labels)
    if count > len(present):
        raise ConfigError(f"'data.train_classes' = {count} asks for more than the {len(present)} classes there are.")
    chosen = _spread(present, count)
    fewer = part.select(np.isin(part.labels, chosen)).only_present()
    return replace(dataset, parts={**dataset.parts, "train": fewer}, split={**dataset.split, "train_classes": count})


def _spread(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` of the values, evenly spread over them."""
    return values[np.linspace(0, len(values) - 1, count).round().astype(np.int64)]


def expected(name: str, size: str = "small") -> Counts:
    """Images and classes of every part as the protocol states them; empty where there is no official protocol."""
    return BENCHMARKS[name].counts(size) if name in BENCHMARKS else {}


def note(name: str) -> str:
    """What is known about differences between the official counts and the files in circulation, or nothing."""
    return BENCHMARKS[name].note if name in BENCHMARKS else ""
