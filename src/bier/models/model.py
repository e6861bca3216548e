"""The model that users load: images in, vectors out."""

from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bier.errors import BierError, ModelError
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.equations import Weighting
from bier.models.backbone import Backbone, Scale
from bier.models.backbones import build_backbone
from bier.models.batches import Images, count, feature_batches, pixel_batches
from bier.models.files import read_folder, write_folder
from bier.models.folding import fold_batch_norm, folded
from bier.models.memory import reuse_memory
from bier.models.precision import autocast, resolve_precision

Progress = Callable[[int, int], None]


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
                `PreparedImages`. An iterator is read as it is used. For the backbone `features`: rows of features.
            learners: keep the first m learners only, weighted as an ensemble of m: a shorter vector.
            workers: threads that decode; None chooses.
            progress: called with (images done, images in all); all is 0 where only the end will tell.

        One image gives (1, d); none give (0, d).
        """
        dimension = sum(self.groups[:learners])
        batches = self._raw_batches(images, batch_size, workers, progress)
        return _stacked((self.ensemble.vector(z, self.weighting, learners) for z in batches), dimension)

    def embed_raw(
        self,
        images: Images,
        batch_size: int = 64,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> NDArray[np.float32]:
        """The raw embedding z, float32 (N, d), of which every learner's part and the test-time vector are made."""
        return _stacked(self._raw_batches(images, batch_size, workers, progress), self.dimension)

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
        reuse_memory()
        network, backbone, done = self.network(), self.backbone, 0
        if backbone.crop:
            total = count(images)
            batches = pixel_batches(images, backbone.resize, backbone.crop, batch_size, workers)
        else:
            total = len(images) if isinstance(images, Sized) else None
            batches = feature_batches(images, backbone.features, batch_size)
        for batch in batches:
            with torch.inference_mode(), autocast(self.precision, self.device):
                z: Tensor = network(batch.to(self.device))
            yield z.float().cpu()
            done += len(batch)
            if progress is not None:
                progress(done, total or 0)


def _stacked(batches: Iterator[Tensor], dimension: int) -> NDArray[np.float32]:
    rows = [batch.detach().numpy() for batch in batches]
    return np.concatenate(rows) if rows else np.empty((0, dimension), np.float32)


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
