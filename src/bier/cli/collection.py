"""What `index`, `search` and `serve` share: finding images, opening a collection, and the model that made it."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bier.errors import DataError, ModelError, SearchError

if TYPE_CHECKING:
    from bier.models.model import Model
    from bier.search import Id, Store

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


def find_images(folder: Path) -> tuple[list[str], list[str | None]]:
    """Every image below a folder, by its path from there, and the folder it lies in as its label.

    Hidden files and folders are passed over. Images directly in the folder have no label.
    """
    if not folder.is_dir():
        raise DataError(f"Images must be in a folder. Found none at {folder}.")
    paths: list[str] = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(place).relative_to(folder)
        names = sorted(
            name for name in files if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_SUFFIXES
        )
        paths += [(here / name).as_posix() for name in names]
    if not paths:
        raise DataError(f"The folder {folder} must hold images ({', '.join(sorted(IMAGE_SUFFIXES))}). Found none.")
    labels = [parent if (parent := Path(path).parent.as_posix()) != "." else None for path in paths]
    return paths, labels


def model_folder(path: Path) -> Path:
    """The folder with model.json: the given one, or `model` inside a run."""
    for folder in (path / "model", path):
        if (folder / "model.json").is_file():
            return folder
    raise ModelError(f"A model must be a folder with model.json, or a run that has one. Found none at {path}.")


def about_model(path: Path) -> dict[str, str]:
    """Where a model is and the checksum of its description, which has that of the weights; kept with what it made."""
    description = (model_folder(path) / "model.json").read_bytes()
    return {"path": str(path.resolve()), "fingerprint": hashlib.sha256(description).hexdigest()}


def open_collection(target: str) -> "Store":
    """A store's URI, the folder of an index, or a run whose folder `index` is one."""
    from bier.search import Index, is_store_uri, open_store

    if is_store_uri(target):
        return open_store(target)
    folder = Path(target)
    if not (folder / "manifest.json").is_file():
        run = folder.parent if folder.name == "model" else folder
        if not (run / "index" / "manifest.json").is_file():
            raise SearchError(
                f"{target} must be an index, a store's URI or a run with an index. Found none; "
                f"make one with: bier index {target} IMAGES --out {run / 'index'}"
            )
        folder = run / "index"
    return Index.load(folder)


def model_of(store: "Store", model: Path | None) -> "Model":
    """The model that made a collection, or the one given instead; it must be the same by its fingerprint."""
    from bier.models.model import load

    known: Mapping[str, Any] = store.about.get("model") or {}
    path = model or (Path(known["path"]) if known.get("path") else None)
    if path is None:
        raise SearchError("The collection does not say which model made it. Give it with --model.")
    if not path.exists():
        raise SearchError(f"The collection's model must be at {path}, where it was. It is gone; give it with --model.")
    if known.get("fingerprint") and about_model(path)["fingerprint"] != known["fingerprint"]:
        raise SearchError(
            f"The model {path} must be the one that made the collection. It has other weights; index anew."
        )
    return load(path)


def image_path(store: "Store", one: "Id") -> Path:
    """Where the image of an id is: as its metadata or its id say, from the folder that was indexed."""
    [entry] = store.entries([one])
    path = Path(str((entry.metadata or {}).get("path", one)))
    return path if path.is_absolute() else Path(str(store.about.get("root") or ".")) / path


def id_of_file(store: "Store", file: Path) -> "Id | None":
    """The id of a file that is itself in the collection, or None."""
    names = [str(file), str(file.resolve())]
    root = store.about.get("root")
    if root and file.resolve().is_relative_to(Path(str(root)).resolve()):
        names.append(file.resolve().relative_to(Path(str(root)).resolve()).as_posix())
    known = store.known(names)
    return known[0] if known else None
