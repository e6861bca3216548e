"""`folder`: one folder a class, images at any depth inside it.

Where the root holds `train` and `test` (or `train`, `query` and `gallery`, and perhaps `validation`) and nothing else,
each with one folder a class, these are the parts as they are. Otherwise the classes are divided as the
plan says. Hidden files and folders, and files that are no images by their ending, are ignored.
"""

import os
from pathlib import Path

import numpy as np

from bier.data.records import Dataset, Part, Protocol
from bier.data.splits import SplitPlan, described, divide, held_out
from bier.errors import DataError

ENDINGS = frozenset(
    (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
)
KS = (1, 2, 4, 8, 16, 32)
GIVEN = ({"train", "test"}, {"train", "query", "gallery"})


def read(root: Path, plan: SplitPlan) -> Dataset:
    """The images below this folder, divided."""
    folders = class_folders(root)
    names = {folder.name for folder in folders}
    if names - {"validation"} in GIVEN and all(class_folders(folder, empty=True) for folder in folders):
        return _given(root, names, plan)
    return divide("folder", _part(root, folders), plan, KS)


def class_folders(root: Path, empty: bool = False) -> list[Path]:
    """The folders in this folder, sorted by name; an error if there is none, unless `empty` is allowed."""
    if not root.is_dir():
        raise DataError(f"The root of images must be a folder with one folder a class. There is no folder {root}.")
    found = sorted(
        (path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")), key=os.fsencode
    )
    if not found and not empty:
        raise DataError(
            f"The folder {root} must hold one folder a class, like {root / 'NAME' / 'image.jpg'}. It holds none."
        )
    return found


def images_below(folder: Path) -> list[Path]:
    """All images at any depth, sorted by path."""
    found = []
    for here, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [
            Path(here, name)
            for name in files
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in ENDINGS  # noqa: PTH122 (speed)
        ]
    return sorted(found, key=os.fsencode)


def _part(root: Path, folders: list[Path], classes: tuple[str, ...] | None = None) -> Part:
    """The images of these class folders; folders without images make no class."""
    by_name = {folder.name: images_below(folder) for folder in folders}
    names = classes or tuple(name for name, images in by_name.items() if images)
    images = [path for name in names for path in by_name.get(name, [])]
    if not images:
        raise DataError(
            f"The folder {root} must hold images ({' '.join(sorted(ENDINGS))}), one folder a class. It holds none."
        )
    sizes = [len(by_name.get(name, [])) for name in names]
    return Part(tuple(images), np.repeat(np.arange(len(names), dtype=np.int64), sizes), names)


def _given(root: Path, names: set[str], plan: SplitPlan) -> Dataset:
    """The parts that the folder itself names; query and gallery share their classes."""
    order = [name for name in ("train", "validation", "test", "query", "gallery") if name in names]
    folders = {name: class_folders(root / name) for name in order}
    shared = sorted({folder.name for name in ("query", "gallery") for folder in folders.get(name, [])})
    parts: dict[str, Part] = {
        name: _part(root / name, folders[name], tuple(shared) if name in ("query", "gallery") else None)
        for name in order
    }
    protocol: Protocol = "query-gallery" if "query" in names else "self"
    given = Dataset("folder", parts, KS, protocol, {"kind": "given", "parts": described(parts)})
    return held_out(given, plan)
