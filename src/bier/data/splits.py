"""Dividing images of named classes into training, validation and test: seeded, the same on every machine.

By default whole classes go to one part, so that no test class was ever seen in training (the paper's setting);
`inside` divides the images of every class instead. Every split is described by plain values for the run's config.

A class with a single image is kept. In a split by classes it goes where its class goes: in training it only ever gives
negative pairs, in test it is a distractor that no query can find. In a split inside classes it goes to training.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bier.data.draws import Draws
from bier.data.records import Dataset, Part
from bier.errors import ConfigError, DataError

NAMES_WRITTEN_OUT = 200  # a part with more classes is described by a digest of their names
_TEST, _VALIDATION = 1, 2  # streams of random numbers, so that one share never moves the other's classes


@dataclass(frozen=True)
class SplitPlan:
    """How to divide: by `classes` or `inside` them, the seed, and the shares (validation is a share of training)."""

    kind: Literal["classes", "inside"] = "classes"
    seed: int = 0
    test_share: float = 0.5
    validation: float = 0.0
    validation_order: Literal["random", "last"] = "random"

    def __post_init__(self) -> None:
        if self.kind not in ("classes", "inside"):
            raise ConfigError(f"The 'split' of a data set must be 'classes' or 'inside'. Got '{self.kind}' instead.")
        if not 0 < self.test_share < 1:
            raise ConfigError(
                f"The 'test_share' of a data set must be above 0 and below 1. Got {self.test_share} instead."
            )
        if self.validation_order not in ("random", "last"):
            raise ConfigError(
                "The 'validation_order' of a data set must be 'random' or 'last'. "
                f"Got '{self.validation_order}' instead."
            )
        if self.validation_order == "last" and self.kind == "inside":
            raise ConfigError("'validation_order' = last holds out classes; it does not go with split = inside.")
        if not 0 <= self.validation < 1:
            raise ConfigError(
                f"The 'validation' of a data set must be from 0 to below 1. Got {self.validation} instead."
            )


def divide(name: str, everything: Part, plan: SplitPlan, ks: tuple[int, ...]) -> Dataset:
    """Everything divided into "train" and "test", and "validation" if the plan asks for a share of it."""
    train, test = _apart(everything, plan.test_share, plan, _TEST, f"the data set '{name}'")
    return held_out(Dataset(name, {"train": train, "test": test}, ks), plan, divided=True)


def held_out(dataset: Dataset, plan: SplitPlan, divided: bool = False) -> Dataset:
    """The data set with a share of its training moved to the part "validation", and its split described.

    divided: whether the test part is the plan's own work too (then the test's share belongs in the description).
    """
    parts = dict(dataset.parts)
    split: dict[str, object] = {"kind": plan.kind, "seed": plan.seed} if divided else dict(dataset.split)
    if divided:
        split["test_share"] = plan.test_share
    if plan.validation > 0 and "validation" not in parts:
        where = f"the training part of '{dataset.name}'"
        train, validation = _apart(parts.pop("train"), plan.validation, plan, _VALIDATION, where)
        parts = {"train": train, "validation": validation, **parts}
        split |= {"seed": plan.seed, "validation": plan.validation, "validation_kind": plan.kind}
        if plan.validation_order != "random":
            split["validation_order"] = plan.validation_order
    if divided or "validation_kind" in split:
        split["parts"] = described(parts)
    return Dataset(dataset.name, parts, dataset.ks, dataset.protocol, split)


def described(parts: Mapping[str, Part]) -> dict[str, dict[str, object]]:
    """Plain values that tell two different splits apart: counts, and the classes' names or their digest."""
    out: dict[str, dict[str, object]] = {}
    for which, part in parts.items():
        names = [_plain(part.classes[i]) for i in np.unique(part.labels)]
        text = "\n".join(names).encode()
        classes: dict[str, object] = {"names": names}
        if len(names) > NAMES_WRITTEN_OUT:
            classes = {"sha256": hashlib.sha256(text).hexdigest()}
        out[which] = {"images": len(part), "classes": len(names), **classes}
    return out


def _plain(name: str) -> str:
    """A name that a text file can hold: a folder's name need not be UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _apart(part: Part, share: float, plan: SplitPlan, stream: int, where: str) -> tuple[Part, Part]:
    """The part without and with the share that was drawn."""
    if plan.kind == "inside":
        drawn = _inside(part.labels, share, Draws(plan.seed, stream))
        if not drawn.any():
            raise DataError(f"A split inside classes needs a class with two images. There is none in {where}.")
        return part.select(~drawn), part.select(drawn)
    present = np.unique(part.labels)
    if len(present) < 2:
        raise DataError(
            f"A split by classes needs at least two classes in {where}. Got {len(present)}; use split='inside' instead."
        )
    count = min(max(round(len(present) * share), 1), len(present) - 1)
    if stream == _VALIDATION and plan.validation_order == "last":
        chosen = present[-count:]
    else:
        chosen = present[Draws(plan.seed, stream).order(len(present))[:count]]
    drawn = np.isin(part.labels, chosen)
    return part.select(~drawn).only_present(), part.select(drawn).only_present()


def _inside(labels: NDArray[np.int64], share: float, draws: Draws) -> NDArray[np.bool_]:
    """True for the drawn images: the share of each class, at least one and not all; none of a class of one."""
    drawn = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = draws.order(len(members))
        if len(members) > 1:
            drawn[members[order[: min(max(round(len(members) * share), 1), len(members) - 1)]]] = True
    return drawn
