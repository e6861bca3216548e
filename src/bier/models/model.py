"""The model that users load: images in, vectors out; and the folder it is saved in."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn

from bier.errors import BierError, ModelError
from bier.files import folder_aside
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.equations import Weighting
from bier.models.backbone import Backbone, Scale, fold_batch_norm, folded, resolve_precision
from bier.models.backbones import build_backbone
from bier.models.inference import Images, Progress, batches_for, run_network, to_array

VERSION = 1
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"


def write_folder(path: Path, weights: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write aside, flush, rename: the folder is complete or absent. One that is there is replaced."""
    data = safetensors.save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
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
        return safetensors.load(data), description
    except (ValueError, SafetensorError) as error:
        raise ModelError(f"The model {str(path)!r} is damaged: {' '.join(str(error).split())}.") from error


class Model:
    """A backbone and an embedding ensemble.

    Args:
        backbone: pixels to features.
        ensemble: features to the raw embedding, cut into learners.
        weighting: how `encode` weighs the learners, `alpha` (the paper's) or `sqrt`.
        precision: `auto` (bfloat16 where the hardware has it), `float32` or `bfloat16`.
        metadata: anything that JSON can hold, kept with the model, such as the data set it was trained on.
    """

    def __init__(
        self,
        backbone: Backbone,
        ensemble: EmbeddingEnsemble,
        weighting: Weighting = "alpha",
        precision: str = "auto",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        if ensemble.in_features != backbone.features:
            raise ModelError(
                f"The ensemble must take the {backbone.features} features of {backbone.name!r}."
                f" Got one for {ensemble.in_features} instead."
            )
        resolve_precision(precision, torch.device("cpu"))
        self.backbone = backbone
        self.ensemble = ensemble
        self.weighting: Weighting = weighting
        self.precision = precision
        self.metadata = dict(metadata or {})
        self._ready: tuple[object, nn.Module] | None = None

    @property
    def groups(self) -> tuple[int, ...]:
        return self.ensemble.groups

    @property
    def dimension(self) -> int:
        return self.ensemble.dimension

    @property
    def device(self) -> torch.device:
        return self.ensemble.weight.device

    def to(self, device: str | torch.device) -> Self:
        self.backbone.to(device)
        self.ensemble.to(device)
        return self

    def encode(
        self,
        images: Images,
        batch_size: int = 64,
        learners: int | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> NDArray[np.float32]:
        """The test-time vectors, float32 (N, d); a dot product compares two images.

        Args:
            images: one image or any iterable of them: paths, PIL images, arrays (H, W, 3), one array (N, H, W, 3), or a
                `ImageDataset`. An iterator is read as it is used. For the backbone `features`: rows of features.
            learners: keep the first m learners only, weighted as an ensemble of m: a shorter vector.
            workers: threads that decode; None chooses.
            progress: called with (images done, images in all); all is 0 where only the end will tell.

        One image gives (1, d); none give (0, d).
        """
        dimension = sum(self.groups[:learners])
        batches = self._raw_batches(images, batch_size, workers, progress)
        return to_array((self.ensemble.vector(z, self.weighting, learners) for z in batches), dimension)

    def embed_raw(
        self,
        images: Images,
        batch_size: int = 64,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> NDArray[np.float32]:
        """The raw embedding z, float32 (N, d), of which every learner's part and the test-time vector are made."""
        return to_array(self._raw_batches(images, batch_size, workers, progress), self.dimension)

    def vectors(self, raw: NDArray[np.float32], learners: int | None = None) -> NDArray[np.float32]:
        """The test-time vectors of raw embeddings (N, d)."""
        vectors: NDArray[np.float32] = self.ensemble.vector(
            torch.from_numpy(np.asarray(raw, np.float32)), self.weighting, learners
        ).numpy()
        return vectors

    def save(self, path: str | Path) -> None:
        """Write a folder with `model.safetensors` and `model.json`: complete or absent, replacing what was there."""
        parts = {"backbone": self.backbone, "ensemble": self.ensemble}
        weights = {
            f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()
        }
        scale = self.backbone.scale
        description = {
            "backbone": self.backbone.name,
            "features": self.backbone.features,
            "folded": self.backbone.folded,
            "resize": self.backbone.resize,
            "crop": self.backbone.crop,
            "mean": scale.mean.flatten().tolist() if isinstance(scale, Scale) else [],
            "std": (1 / scale.factor).flatten().tolist() if isinstance(scale, Scale) else [],
            "groups": list(self.groups),
            "bias": self.ensemble.bias is not None,
            "weighting": self.weighting,
            "precision": self.precision,
            "metadata": self.metadata,
        }
        write_folder(Path(path), weights, description)

    def network(self) -> nn.Module:
        """Pixels (or features) to the raw embedding, ready for use: batch norm folded, eval mode, a copy.

        It is made anew when the weights have changed since.
        """
        tensors = [*self.backbone.parameters(), *self.backbone.buffers(), *self.ensemble.parameters()]
        state = tuple((id(tensor), tensor._version, tensor.device) for tensor in tensors)
        if self._ready is None or self._ready[0] != state:
            self._ready = (state, nn.Sequential(folded(self.backbone), self.ensemble))
        return self._ready[1]

    def _raw_batches(
        self, images: Images, batch_size: int, workers: int | None, progress: Progress | None
    ) -> Iterator[Tensor]:
        batches, total = batches_for(self.backbone, images, batch_size, workers)
        outputs = run_network(self.network(), batches, self.device, self.precision, progress, total or 0)
        return (z.float().cpu() for z in outputs)


def load(path: str | Path, precision: str | None = None, device: str | torch.device | None = None) -> Model:
    """The model in a run folder or a model folder, on the GPU where there is one. No code from it is run."""
    weights, description = read_folder(Path(path))
    try:
        model = _described(description, precision)
        for part, module in (("backbone", model.backbone), ("ensemble", model.ensemble)):
            prefix = f"{part}."
            module.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
            module.eval()
    except (KeyError, TypeError, ValueError, RuntimeError, BierError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"The model {str(path)!r} cannot be used: {type(error).__name__}: {reason[:300]}") from error
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _described(description: Mapping[str, Any], precision: str | None) -> Model:
    backbone = build_backbone(description["backbone"], pretrained=False, features=description["features"])
    if description["folded"]:
        fold_batch_norm(backbone)
        backbone.folded = True
    backbone.resize, backbone.crop = int(description["resize"]), int(description["crop"])
    if backbone.crop:
        backbone.scale = Scale(description["mean"], description["std"])
    ensemble = EmbeddingEnsemble(
        backbone.features,
        description["groups"],
        bias=bool(description.get("bias", False)),  # models of 0.1 have none
    )
    return Model(
        backbone, ensemble, description["weighting"], precision or description["precision"], description["metadata"]
    )


def pretrained(
    name: str,
    weights: str | Path | None = None,
    precision: str = "auto",
    device: str | torch.device | None = None,
) -> Model:
    """A model that has not been trained here: the pretrained backbone `name`, with its features normalised.

    It is what training has to beat. The embedding layer is the identity, so that it is a model like any other.
    """
    backbone = folded(build_backbone(name, weights=Path(weights) if weights is not None else None))
    ensemble = EmbeddingEnsemble(backbone.features, (backbone.features,))
    with torch.no_grad():
        ensemble.weight.copy_(torch.eye(backbone.features))
    model = Model(backbone, ensemble, "sqrt", precision, {"method": "untrained"})
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
