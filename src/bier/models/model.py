"""The model that users load: images in, vectors out; and the folder it is saved in."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn

from bier.errors import BierError, ConfigError, DataError, ModelError
from bier.files import folder_aside
from bier.images import Batches, PreparedImages, Source, augment, default_workers, in_order, read_prepared
from bier.images.dataset import check_workers, run_in_threads
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.equations import Weighting
from bier.models.backbone import Backbone, Scale, autocast, fold_batch_norm, folded, resolve_precision, reuse_memory
from bier.models.backbones import build_backbone

Images: TypeAlias = Source | Iterable[Source] | NDArray[np.uint8] | PreparedImages
_FEW = 64  # up to so many files, starting worker processes takes longer than they save


def pixel_batches(images: Images, size: int, crop: int, batch_size: int, workers: int | None) -> Iterator[Tensor]:
    """Centre crops, uint8 (B, 3, crop, crop), of one image or of any iterable of them, never all in memory at once.

    An image is a path, the bytes of a file, a PIL image or an array (H, W, 3); an array (N, H, W, 3) is N of them.
    """
    if batch_size < 1:
        raise ConfigError(f"The 'batch_size' parameter must be at least 1. Got {batch_size} instead.")
    if isinstance(images, PreparedImages):
        batches = Batches(images, in_order(images.kept, batch_size), crop, workers=workers, threads=True)
        yield from (pixels for pixels, _ in batches)
        return
    sources = _each(images)
    first = list(islice(sources, _FEW + 1))
    chosen = check_workers(workers)
    if chosen is None:
        many_files = len(first) > _FEW and isinstance(first[0], str | os.PathLike | bytes)
        chosen = default_workers() if many_files else 0
    task = partial(_centre_crops, size=size, crop=crop)
    for pixels in run_in_threads(task, _grouped(chain(first, sources), batch_size), chosen):
        yield pixels.permute(0, 3, 1, 2)


def feature_batches(features: Any, width: int, batch_size: int) -> Iterator[Tensor]:
    """The rows of an array (N, width), or of any iterable of rows, as float32 (B, width)."""
    for rows in _grouped(iter(features), batch_size):
        batch = torch.from_numpy(np.asarray(rows, np.float32))
        if batch.ndim != 2 or batch.shape[1] != width:
            raise DataError(f"Features must have the shape (N, {width}). Got rows of {tuple(batch.shape[1:])} instead.")
        yield batch


def count(images: Images) -> int | None:
    """How many images there are; None where only reading them all would tell."""
    if isinstance(images, PreparedImages):
        return len(images.kept)
    if _is_one(images):
        return 1
    return len(images) if isinstance(images, Sequence | np.ndarray) else None


def _is_one(images: Images) -> bool:
    single = isinstance(images, str | os.PathLike | bytes | Image)
    return single or (isinstance(images, np.ndarray) and images.ndim in (2, 3) and images.shape[-1] != 0)


def _each(images: Images) -> Iterator[Source]:
    if _is_one(images):
        return iter([images])  # type: ignore[list-item]
    if not isinstance(images, Iterable):
        raise DataError(f"Images must be paths, PIL images or arrays. Got {type(images).__name__} instead.")
    return iter(images)  # type: ignore[arg-type]


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := list(islice(items, size)):
        yield group


def _centre_crops(sources: list[Source], *, size: int, crop: int) -> Tensor:
    rows = [augment(read_prepared(source, size), crop, "none", 0) for source in sources]
    return torch.from_numpy(np.stack(rows))


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
