"""The folder of a model: model.safetensors, and model.json, whose content is checked before it is used."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from bier import files
from bier.errors import ModelError
from bier.method.defaults import Weighting
from bier.models.backbone import Precision

VERSION = 1
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"
HUB_DESCRIPTION = "config.json"  # the same record under the name that hubs expect
_LARGEST_SIDE = 8192  # pixels: a batch of one such picture takes 800 MB
_LARGEST_PIXEL = 1e4  # pixels are 0..255, and so are their mean and deviation in any unit that makes sense


_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class _Same(BaseModel):
    """What is read of `bier.evaluate.thresholds.find_same`."""

    model_config = _STRICT
    prefixes: list[float | None]
    learners: list[float | None]
    precision: float
    part: str
    classes: int


class _Scores(BaseModel):
    model_config = _STRICT
    recall: float
    map: float | None = None


class _Metadata(BaseModel):
    """The metadata that commands read; anything else in them is not checked."""

    model_config = _STRICT
    same: _Same | None = None
    validation: _Scores | None = None
    untrained: _Scores | None = None


class Description(BaseModel):
    """What model.json must hold: types and ranges, checked before anything of that size is built."""

    model_config = _STRICT
    backbone: str
    features: int = Field(ge=1, le=2**20)
    folded: bool
    pool: str  # empty for the network's own way
    resize: int = Field(ge=0, le=_LARGEST_SIDE)
    crop: int = Field(ge=0, le=_LARGEST_SIDE)
    mean: list[Annotated[float, Field(ge=-_LARGEST_PIXEL, le=_LARGEST_PIXEL)]] = Field(max_length=3)
    std: list[Annotated[float, Field(ge=1 / _LARGEST_PIXEL, le=_LARGEST_PIXEL)]] = Field(max_length=3)
    groups: list[Annotated[int, Field(ge=1, le=2**20)]] = Field(min_length=1, max_length=4096)
    bias: bool
    weighting: Weighting
    precision: Precision
    mirror: bool = False
    trained_at: int = Field(default=0, ge=0, le=_LARGEST_SIDE)  # 0 for `crop`
    metadata: dict[str, Any]

    @field_validator("metadata")
    @classmethod
    def _checked(cls, metadata: dict[str, Any], known: ValidationInfo) -> dict[str, Any]:
        same = _Metadata.model_validate(metadata).same
        learners = len(known.data.get("groups", ()))
        if same is not None and not len(same.prefixes) == len(same.learners) == learners:
            raise ValueError(f"'same' must have a threshold for each of {learners} learners")
        return metadata


def description_file(folder: Path) -> Path:
    """model.json, or config.json in a folder that came from a hub."""
    hubs = folder / HUB_DESCRIPTION
    return hubs if hubs.is_file() and not (folder / DESCRIPTION).is_file() else folder / DESCRIPTION


def contents(weights: dict[str, Tensor], description: dict[str, Any]) -> tuple[bytes, bytes]:
    """The weights and the description as they are written; the description has the checksum of the weights."""
    data = safetensors.save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    record = files.with_checksum({"version": VERSION, **description, "sha256": files.checksum(data)})
    return data, f"{json.dumps(record, indent=2)}\n".encode()


def write_folder(path: Path, weights: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write aside, flush, rename: the folder is complete or absent. One that is there is replaced."""
    data, text = contents(weights, description)
    with files.folder_aside(path) as aside:
        (aside / WEIGHTS).write_bytes(data)
        (aside / DESCRIPTION).write_bytes(text)


def read_folder(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights, description) of a model folder, or of a run folder that holds one; ModelError where it is damaged."""
    for folder in (path, path / "model"):
        files.restore(folder)
    folder = path / "model" if (path / "model" / DESCRIPTION).is_file() else path
    described = description_file(folder)
    for file in (described, folder / WEIGHTS):
        if not file.is_file():
            raise ModelError(
                f"The model {str(path)!r} must be a folder with {WEIGHTS} and {DESCRIPTION}. {file.name} is missing."
            )
    try:
        data = (folder / WEIGHTS).read_bytes()
        description = json.loads(described.read_text(encoding="utf-8"))
        if not isinstance(description, dict) or description.get("version") != VERSION:
            found = description.get("version") if isinstance(description, dict) else description
            raise ModelError(f"The model {str(path)!r} must have format version {VERSION}. Got {found!r} instead.")
        if description.get("sha256") != files.checksum(data):
            raise ModelError(
                f"The model {str(path)!r} is damaged: {WEIGHTS} is not the file that {described.name} describes."
            )
        files.check_record(description)
        return safetensors.load(data), description
    except (ValueError, SafetensorError, RecursionError, OSError) as error:
        reason = files.reason(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise ModelError(f"The model {str(path)!r} is damaged: {reason}.") from error
