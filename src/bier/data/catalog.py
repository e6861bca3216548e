"""Every data set by the name that users give it."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bier.config import DataConfig
from bier.data import glyphs
from bier.data.benchmarks import CARS, CARS_CROPPED, CUB, CUB_CROPPED, INSHOP, SOP, VEHICLEID, Benchmark, Counts
from bier.data.cifar10 import CIFAR10
from bier.data.part import Dataset, SplitPlan, held_out
from bier.data.sources import read_features, read_folder, read_table
from bier.errors import ConfigError, DataError

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
OWN: Mapping[str, Callable[[Path, SplitPlan], Dataset]] = {
    "folder": read_folder,
    "table": read_table,
    "features": read_features,
}
NAMES: tuple[str, ...] = ("glyphs", *OWN, *BENCHMARKS)


def check_name(name: str) -> None:
    """An error that suggests the nearest name unless there is a data set of this name."""
    if name not in NAMES:
        near = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise DataError(f"The data set must be one of {', '.join(NAMES)}. Got '{name}' instead{hint}")


def load(
    name: str,
    root: str | Path | None = None,
    *,
    seed: int = 0,
    validation: float = 0.0,
    split: Literal["classes", "inside"] = "classes",
    test_share: float = 0.5,
    size: str = "small",
    validation_order: Literal["random", "last"] = "random",
    validation_classes: int = 0,
) -> Dataset:
    """The data set of this name, read from `root` (which `glyphs` does not need) and divided into parts.

    root: the data set's own folder or the folder that contains it; a file for `table` and `features`.
    seed: fixes every split, and the pixels of `glyphs`.
    validation: the share of the training classes (of each class's images if split is "inside") to hold out as the part
        "validation"; `glyphs` holds out whole alphabets; `cifar10` always has its own.
    split, test_share: how `folder`, `table` and `features` are divided where they do not say it themselves.
    size: the test set of `vehicleid`: small, medium or large.
    validation_order: hold out classes drawn at random, or the last ones (random ones may have siblings in
        training, as birds of one genus have, and are then easier than the test classes).
    validation_classes: hold out at least this many classes where `validation` is above 0 (at most a quarter of them).
    """
    plan = SplitPlan(split, seed, test_share, validation, validation_order, validation_classes)
    check_name(name)
    if name == "glyphs":
        return glyphs.read(seed, validation)
    if root is None or root == "":
        raise DataError(
            f"The data set '{name}' needs a root, the path of its folder or file. Only 'glyphs' needs none."
        )
    place = Path(root).expanduser()
    try:
        return OWN[name](place, plan) if name in OWN else held_out(BENCHMARKS[name].read(place, size), plan)
    except OSError as error:
        raise DataError(f"Cannot read {error.filename or place}: {error.strerror or error}.") from error


def load_for(settings: DataConfig) -> Dataset:
    """The data set that the settings of a run name, divided as they say, for training and for all that follows."""
    dataset = load(
        settings.name,
        settings.root or None,
        seed=settings.seed,
        validation=settings.validation,
        split=settings.split,
        test_share=settings.test_share,
        size=settings.size,
        validation_order=settings.validation_order,
        validation_classes=settings.validation_classes,
    )
    if settings.train_classes:
        dataset = _fewer_classes(dataset, settings.train_classes)
    return _fewer_images(dataset, settings.train_images) if settings.train_images else dataset


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
