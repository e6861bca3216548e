"""A model as a folder: `model.safetensors`, and `model.json`, which says what it is. Reading runs no code from it."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from bier.durable import folder_aside
from bier.errors import ModelError

VERSION = 1
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"


def write_folder(path: Path, weights: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write aside, flush, rename: the folder is complete or absent. One that is there is replaced."""
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    text = json.dumps({"version": VERSION, **description, "sha256": sha256(data).hexdigest()}, indent=2)
    with folder_aside(path) as aside:
        (aside / WEIGHTS).write_bytes(data)
        (aside / DESCRIPTION).write_text(f"{text}\n")


def read_folder(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights, description) of a model folder, or of a run folder that holds one; ModelError where it is damaged."""
    folder = path / "model" if (path / "model" / DESCRIPTION).is_file() else path
    for name in (DESCRIPTION, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"The model {str(path)!r} must be a folder with {WEIGHTS} and {DESCRIPTION}. {name} is missing."
            )
    data = (folder / WEIGHTS).read_bytes()
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        if not isinstance(description, dict) or description.get("version") != VERSION:
            found = description.get("version") if isinstance(description, dict) else description
            raise ModelError(f"The model {str(path)!r} must have format version {VERSION}. Got {found!r} instead.")
        if description.get("sha256") != sha256(data).hexdigest():
            raise ModelError(
                f"The model {str(path)!r} is damaged: {WEIGHTS} is not the file that {DESCRIPTION} describes."
            )
        return load(data), description
    except (ValueError, SafetensorError) as error:
        raise ModelError(f"The model {str(path)!r} is damaged: {' '.join(str(error).split())}.") from error
