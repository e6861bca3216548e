"""Data sets by name: official benchmarks, any folder or table, pre-computed features, and an embedded one."""

from pathlib import Path
from typing import Literal

from bier.data import glyphs
from bier.data.records import Dataset, Part
from bier.errors import DataError

__all__ = ["NAMES", "Dataset", "Part", "load"]

NAMES: tuple[str, ...] = ("glyphs",)


def load(
    name: str,
    root: Path | None = None,
    *,
    seed: int = 0,
    validation: float = 0.0,
    split: Literal["classes", "inside"] = "classes",
    test_share: float = 0.5,
    size: str = "small",
) -> Dataset:
    """The data set of this name."""
    if name != "glyphs":
        raise DataError(f"The data set must be one of {', '.join(NAMES)}. Got '{name}' instead.")
    return glyphs.read(seed, validation)
