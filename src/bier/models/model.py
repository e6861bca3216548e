"""The model that users load: images in, vectors out; and the folder it is saved in."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from huggingface_hub import ModelCard, ModelHubMixin
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.progress import Progress as RichProgress
from torch import Tensor, nn

from bier import files, system
from bier.config import ModelConfig
from bier.errors import BierError, DataError, ModelError
from bier.method.defaults import WEIGHTING, Weighting, encoding_look
from bier.method.ensemble import EmbeddingEnsemble
from bier.models import hub
from bier.models.backbone import Backbone, Scale, autocast, fold_batch_norm, folded, resolve_precision
from bier.models.backbones import FROM_SCRATCH, NAMES, build_backbone, empty_backbone, is_backbone
from bier.models.backends import Backend, check_backend, compiled
from bier.models.embed import Images, Progress, batches_for, run_network, to_array
from bier.models.folder import HUB_DESCRIPTION, WEIGHTS, Description, contents, read_folder, write_folder


class Model(nn.Module, ModelHubMixin):
    """A backbone and an embedding ensemble: images in, test-time vectors out.

    Args:
        backbone: pixels to features.
        ensemble: features to the raw embedding, split into learners.
        weighting: weights of the learners in the vector, `sqrt` or `alpha` (the paper's); Eq. (10) of docs/method.md.
        precision: `auto` (bfloat16 where the hardware has it), `float32` or `bfloat16`.
        metadata: anything that JSON can hold, kept with the model, such as the data set it was trained on.
        mirror: look at each picture and at its mirror image, and take the mean: better vectors for twice the time.
        trained_at: the side of the pictures in training, where it is not that of `backbone`; `fast` goes back to it.

    Returns:
        float32 (B, d): called with pixels (B, 3, crop, crop) RGB, uint8 or float in 0..255, or with features (B, h) for
        the backbone `features`. The dot product of two vectors is their similarity. `encode` takes whole images.

    Raises:
        ModelError: the ensemble does not fit the backbone.
        DataError: the input has a wrong shape.

    Example:
        >>> import bier, torch
        >>> from bier.models.backbones import build_backbone
        >>> model = bier.Model(build_backbone("conv4"), bier.EmbeddingEnsemble(512, (8, 16))).eval()
        >>> model(torch.zeros(2, 3, 48, 48, dtype=torch.uint8)).shape
        torch.Size([2, 24])
    """

    def __init__(
        self,
        backbone: Backbone,
        ensemble: EmbeddingEnsemble,
        weighting: Weighting = WEIGHTING,
        precision: str = "auto",
        metadata: Mapping[str, Any] | None = None,
        mirror: bool = False,
        trained_at: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(backbone, Backbone):
            raise ModelError(
                "The 'backbone' must be a bier.models.backbone.Backbone, which says what pictures a network takes: "
                f"Backbone(NAME, {{'all': network}}, features=..., crop=..., resize=..., mean=..., std=...). "
                f"Got {type(backbone).__name__} instead."
            )
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
        self.mirror = mirror
        self.trained_at = trained_at or backbone.crop
        self._ready: tuple[object, nn.Sequential] | None = None
        self._compiled: dict[object, Callable[[Tensor], Tensor]] = {}  # that network in other engines

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": {}}  # what other engines hold can be neither pickled nor copied

    def __repr__(self) -> str:
        learners = f"{len(self.groups)} learner{'s' * (len(self.groups) > 1)} of {', '.join(map(str, self.groups))}"
        trained = f"{self.metadata.get('method', 'no method')} on {self.metadata.get('data', 'data not stated')}"
        threshold = "none" if self.threshold is None else f"{self.threshold:.3f}"
        return (
            f"Model: {self.backbone.name}, {self.look}, {self.device}, {self.precision}\n"
            f"  {self.dimension} dimensions: {learners}, weighted by {self.weighting}\n"
            f"  trained: {trained}; similarity from which two images match: {threshold}"
        )

    @property
    def threshold(self) -> float | None:
        """The similarity from which two images count as the same, as training has found it; None where it has not."""
        same = self.metadata.get("same")
        return same["prefixes"][-1] if same else None

    @property
    def look(self) -> str:
        """How `encode` looks at a picture, in a few words."""
        if not self.backbone.crop:
            return "features"
        return f"{self.backbone.crop} x {self.backbone.crop} pixels{' and mirrored' * self.mirror}"

    @property
    def is_fast(self) -> bool:
        """Whether a picture is looked at once, at the resolution of training."""
        return not self.backbone.crop or (not self.mirror and self.backbone.crop == self.trained_at)

    def fast(self) -> "Model":
        """This model, with the same weights, looking at a picture once and at the resolution of training."""
        if self.is_fast:
            return self
        model = Model(
            self.backbone.seen_at(self.trained_at), self.ensemble, self.weighting, self.precision, self.metadata
        ).train(self.training)
        self.network()
        model._ready, model._compiled = self._ready, self._compiled
        return model

    @property
    def groups(self) -> tuple[int, ...]:
        return self.ensemble.groups

    @property
    def dimension(self) -> int:
        return self.ensemble.dimension

    @property
    def device(self) -> torch.device:
        return self.ensemble.weight.device

    def forward(self, inputs: Tensor, learners: int | None = None) -> Tensor:
        """Pixels (B, 3, crop, crop) or features (B, h) -> the test-time vector (B, d), of the first `learners` only."""
        crop = self.backbone.crop
        expected = (3, crop, crop) if crop else (self.backbone.features,)
        if tuple(inputs.shape[1:]) != expected:
            shape = ", ".join(map(str, expected))
            raise DataError(f"Expected inputs of shape (B, {shape}). Got {tuple(inputs.shape)} instead.")
        with autocast(self.precision, self.device):
            features = self._looking(self.backbone)(inputs)
        z = self.ensemble(features.to(self.ensemble.weight.dtype))  # in full precision, as in training
        return self.ensemble.vector(z.float(), self.weighting, learners)

    def _looking(self, network: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A network of pixels as this model uses it: with `mirror` the mean of both looks."""
        if not self.mirror or not self.backbone.crop:
            return network
        return lambda pixels: (network(pixels) + network(pixels.flip(-1))) / 2

    @overload
    def encode(
        self,
        images: Images,
        batch_size: int = ...,
        learners: int | None = ...,
        workers: int | None = ...,
        progress: bool | Progress | None = ...,
        *,
        backend: Backend = ...,
        fast: bool = ...,
        convert_to_tensor: Literal[False] = ...,
    ) -> NDArray[np.float32]: ...

    @overload
    def encode(
        self,
        images: Images,
        batch_size: int = ...,
        learners: int | None = ...,
        workers: int | None = ...,
        progress: bool | Progress | None = ...,
        *,
        backend: Backend = ...,
        fast: bool = ...,
        convert_to_tensor: Literal[True],
    ) -> Tensor: ...

    def encode(
        self,
        images: Images,
        batch_size: int = 64,
        learners: int | None = None,
        workers: int | None = None,
        progress: bool | Progress | None = None,
        *,
        backend: Backend = "torch",
        fast: bool = False,
        convert_to_tensor: bool = False,
    ) -> NDArray[np.float32] | Tensor:
        """The test-time vectors of images, as `forward` in eval mode gives them for their centre crops.

        Args:
            images: one image or any iterable of them: paths, PIL images, arrays (H, W, 3), tensors (3, H, W) of uint8
                or of floats from 0 to 1; one array (N, H, W, 3) or tensor (N, 3, H, W); a torch `Dataset` of any of
                these, alone or before a label. An iterator is read as it is used. For the backbone `features`: rows of
                features.
            batch_size: images that pass through the network at once.
            learners: keep the first m learners only, weighted as an ensemble of m: a shorter vector.
            workers: threads that decode; None chooses.
            progress: True shows a progress bar on standard error. A function is called with (images done, images in
                all); all is 0 where their number is not known before the end.
            backend: what runs the network: `torch`, or on a CPU `onnx` (ONNX Runtime) or `openvino`, which are faster
                for some networks (figures in docs/models.md). The first call compiles it, later ones find it ready.
            fast: one look at the resolution of training, see `fast`; not to be compared with vectors of another look.
            convert_to_tensor: return a tensor on the device of the model.

        Returns:
            float32 (N, d). One image gives (1, d); none give (0, d).
        """
        dimension = sum(self.groups[:learners])
        with _following(progress) as follow:
            model = self.fast() if fast else self
            batches = model._raw_batches(images, batch_size, workers, follow, backend)
            vectors = to_array((self.ensemble.vector(z, self.weighting, learners) for z in batches), dimension)
        return torch.from_numpy(vectors).to(self.device) if convert_to_tensor else vectors

    @staticmethod
    def similarity(first: NDArray[np.float32] | Tensor, second: NDArray[np.float32] | Tensor) -> Any:
        """The similarity of each vector (N, d) with each of the others (K, d): (N, K), a tensor where one is given."""
        if isinstance(first, Tensor) or isinstance(second, Tensor):
            first, second = torch.as_tensor(first), torch.as_tensor(second)
            return first @ second.to(first.device).T
        return np.asarray(first) @ np.asarray(second).T

    def embed_raw(
        self,
        images: Images,
        batch_size: int = 64,
        workers: int | None = None,
        progress: Progress | None = None,
        *,
        backend: Backend = "torch",
    ) -> NDArray[np.float32]:
        """The raw embedding z, float32 (N, d), of which every learner's part and the test-time vector are made."""
        return to_array(self._raw_batches(images, batch_size, workers, progress, backend), self.dimension)

    def vectors(self, raw: NDArray[np.float32], learners: int | None = None) -> NDArray[np.float32]:
        """The test-time vectors of raw embeddings (N, d)."""
        vectors: NDArray[np.float32] = self.ensemble.vector(
            torch.from_numpy(np.asarray(raw, np.float32)), self.weighting, learners
        ).numpy()
        return vectors

    def description(self) -> dict[str, Any]:
        """What model.json (on a hub, config.json) holds besides version and checksums."""
        scale = self.backbone.scale
        return {
            "backbone": self.backbone.name,
            "features": self.backbone.features,
            "folded": self.backbone.folded,
            "pool": self.backbone.pool,
            "resize": self.backbone.resize,
            "crop": self.backbone.crop,
            "mean": scale.mean.flatten().tolist() if isinstance(scale, Scale) else [],
            "std": (1 / scale.factor).flatten().tolist() if isinstance(scale, Scale) else [],
            "groups": list(self.groups),
            "bias": self.ensemble.bias is not None,
            "weighting": self.weighting,
            "precision": self.precision,
            "mirror": self.mirror,
            "trained_at": self.trained_at,
            "metadata": self.metadata,
        }

    def save(self, path: str | Path) -> None:
        """Write a folder with `model.safetensors` and `model.json`: complete or absent, replacing what was there."""
        write_folder(Path(path), self.state_dict(), self.description())

    # `save_pretrained`, `from_pretrained` and `push_to_hub` are ModelHubMixin's own; these say what is in the files.

    def _save_pretrained(self, save_directory: Path) -> None:
        data, text = contents(self.state_dict(), self.description())
        files.write(save_directory / WEIGHTS, data)
        files.write(save_directory / HUB_DESCRIPTION, text)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, precision: str | None = None, device: str | None = None, **options: Any
    ) -> "Model":
        if Path(model_id).is_dir():
            return load(model_id, precision, device)
        wanted = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        folder = hub.fetch(model_id, (WEIGHTS, HUB_DESCRIPTION), **{name: options[name] for name in wanted})
        return load(folder, precision, device)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card that `save_pretrained` writes; `model_card_kwargs` are the arguments of `hub.model_card`."""
        return hub.model_card(self.description(), **kwargs)

    def network(self) -> nn.Sequential:
        """Pixels (or features) to the raw embedding, ready for use: batch norm folded, eval mode, a copy.

        It is made anew when the weights have changed since.
        """
        tensors = [*self.backbone.parameters(), *self.backbone.buffers(), *self.ensemble.parameters()]
        state = tuple((id(tensor), tensor._version, tensor.device, tensor.dtype) for tensor in tensors)
        if self._ready is None or self._ready[0] != state:
            self._ready = (state, nn.Sequential(folded(self.backbone), self.ensemble))
            self._compiled.clear()
        return self._ready[1]

    def _network_in(self, backend: Backend) -> Callable[[Tensor], Tensor]:
        """The folded backbone in an engine, compiled the first time and whenever the weights have changed."""
        check_backend(backend, self.device)
        backbone, crop = self.network()[0], self.backbone.crop
        if backend == "torch" or not crop:
            return backbone
        key = (backend, self.precision, crop, torch.get_num_threads())
        if key not in self._compiled:
            self._compiled[key] = compiled(backbone, crop, backend, self.precision)
        return self._compiled[key]

    def _raw_batches(
        self, images: Images, batch_size: int, workers: int | None, progress: Progress | None, backend: Backend
    ) -> Iterator[Tensor]:
        batches, total = batches_for(self.backbone, images, batch_size, workers)
        embed = self.embedding_of(self._looking(self._network_in(backend)))
        outputs = run_network(embed, batches, self.device, progress=progress, total=total or 0)
        return (z.float().cpu() for z in outputs)

    def embedding_of(self, network: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Inputs to the raw embedding, by the backbone or by what follows its frozen stages.

        The network runs in the precision of the model, the embedding in that of its weights.
        """

        def embed(inputs: Tensor) -> Tensor:
            with autocast(self.precision, self.device):
                features = network(inputs)
            z: Tensor = self.ensemble(features.to(self.ensemble.weight.dtype))
            return z

        return embed


@contextmanager
def _following(progress: bool | Progress | None) -> Iterator[Progress | None]:
    """What is called with (images done, images in all): a function as it is, a progress bar for True."""
    if not isinstance(progress, bool):
        yield progress
    elif progress:
        columns = (*RichProgress.get_default_columns(), MofNCompleteColumn())
        with RichProgress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("images", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total or None)
    else:
        yield None


@dataclass(frozen=True)
class Untrained:
    """A pretrained backbone with plain normalised features, named where otherwise the folder of a model is.

    weights: the file of its weights, None for those that belong to the name.
    """

    backbone: str
    weights: Path | None = None

    def __str__(self) -> str:
        return f"{self.backbone} (untrained)"

    def __post_init__(self) -> None:
        if self.backbone in FROM_SCRATCH:
            raise ModelError(f"The backbone {self.backbone!r} has no pretrained weights; it must be trained first.")

    def fingerprint(self, fast: bool = False) -> str:
        """A digest of the name, the weights as they were read, and the look."""
        side, mirror = (0, False) if fast else encoding_look(self.backbone)
        backbone = build_backbone(self.backbone, weights=self.weights).seen_at(side)
        look = f"{backbone.resize} {backbone.crop}{' mirrored' * mirror}"
        digest = sha256(f"{self.backbone} {look}".encode())
        for name, tensor in backbone.state_dict().items():
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def local_folder(path: str | Path) -> Path:
    """The folder itself, or the one that `hf:owner/name` was downloaded to."""
    return hub.fetch(str(path), (WEIGHTS, HUB_DESCRIPTION)) if hub.is_on_hub(path) else Path(path)


def load(
    path: str | Path | Untrained,
    precision: str | None = None,
    device: str | torch.device | None = None,
    *,
    backbone: nn.Module | None = None,
    fast: bool = False,
) -> Model:
    """Load a model that `Model.save` or `bier.train` has written. No code from its folder is run.

    Args:
        path: a model folder, a run folder, `hf:owner/name` for a model of the Hugging Face Hub (with `@revision`
            for a version), or the name of a backbone, which gives `pretrained(NAME)`.
        precision: `auto`, `float32` or `bfloat16`; by default that of the model.
        device: by default the GPU of this process, or the CPU where there is none.
        backbone: the network of a model whose backbone is one's own, for its weights to be loaded into: a `Backbone`
            with the same stages, or, where it was saved as a single stage, the module itself.
        fast: with one look at each picture, at the resolution of training: `Model.fast`.

    Returns:
        The model, in eval mode.

    Raises:
        ModelError: there is no model, or it is damaged, or its backbone is neither known nor given.

    Example:
        >>> import bier, numpy as np
        >>> from bier.models.backbones import build_backbone
        >>> bier.Model(build_backbone("conv4"), bier.EmbeddingEnsemble(512, (8, 16))).save("small-model")
        >>> bier.load("small-model").encode(np.zeros((2, 60, 40, 3), np.uint8)).shape
        (2, 24)
    """
    if fast:
        return load(path, precision, device, backbone=backbone).fast()
    if isinstance(path, Untrained):
        return pretrained(path.backbone, path.weights, precision or "auto", device)
    if isinstance(path, str) and not hub.is_on_hub(path) and not Path(path).exists() and is_backbone(path):
        return pretrained(path, None, precision or "auto", device)
    path = local_folder(path)
    weights, description = read_folder(path)
    try:
        known = Description(**description)
        if backbone is None and not is_backbone(known.backbone):
            raise ModelError(
                f"Its backbone {known.backbone!r} is its owner's own, and no code is in the folder. "
                "Pass the network: bier.load(PATH, backbone=MODULE)."
            )
        if backbone is None:
            _check_sizes(known, weights)
        model = _described(known, precision, backbone)
        _check_numbers(weights, model.state_dict())
        model.load_state_dict(weights)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        found = repr(first["input"])[:80]
        raise ModelError(f"The model {str(path)!r} cannot be used: {name!r}: {first['msg']}. Got {found}.") from error
    except BierError as error:
        raise ModelError(f"The model {str(path)!r} cannot be used. {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"The model {str(path)!r} cannot be used: {type(error).__name__}: {reason[:300]}") from error
    return model.eval().to(system.device(device))


def _check_sizes(known: Description, weights: Mapping[str, Tensor]) -> None:
    """ModelError if the weights are not of the described network, before memory is taken for it."""
    if known.crop and not len(known.mean) == len(known.std) == 3:
        raise ModelError(f"'mean' and 'std' must have a value per colour. Got {known.mean} and {known.std} instead.")
    expected = (sum(known.groups), known.features)
    found = tuple(weights["ensemble.weight"].shape) if "ensemble.weight" in weights else None
    if found != expected:
        raise ModelError(f"The weight of the ensemble must have the shape {expected}. Got {found} instead.")
    if known.backbone in NAMES:
        return  # ours are small, and building one twice would take longer than the mistake
    try:
        with torch.device("meta"):  # shapes without memory
            described = _described(known, None).state_dict()
    except (RuntimeError, NotImplementedError):  # some networks of timm compute with values while they are built
        return
    for name, tensor in described.items():
        if name in weights and weights[name].shape != tensor.shape:
            found = tuple(weights[name].shape)
            raise ModelError(f"The weight {name} must have the shape {tuple(tensor.shape)}. Got {found} instead.")
    given, needed = (sum(tensor.numel() for tensor in state.values()) for state in (weights, described))
    if needed > 2 * given + 2**20:
        raise ModelError(f"The network has {needed:,} weights. The file holds {given:,}.")


def _check_numbers(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """ModelError unless every weight is of the kind that the network has, and finite."""
    for name, tensor in weights.items():
        if name in expected and tensor.is_floating_point() != expected[name].is_floating_point():
            raise ModelError(f"The weight {name} must have a type like {expected[name].dtype}. Got {tensor.dtype}.")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(f"The weight {name} must be finite. It has NaN or infinite values.")


def _described(known: Description, precision: str | None, own: nn.Module | None = None) -> Model:
    """The model without its weights. own: the network of a backbone that is neither ours nor timm's."""
    if own is None:
        backbone = empty_backbone(known.backbone, known.features, known.crop, known.pool)
    elif isinstance(own, Backbone):
        backbone = own
    else:
        backbone = Backbone(known.backbone, {"all": own}, features=known.features, crop=known.crop, resize=known.resize)
    if known.folded and not backbone.folded:
        fold_batch_norm(backbone)
        backbone.folded = True
    backbone.resize, backbone.crop = known.resize, known.crop
    if backbone.crop:
        backbone.scale = Scale(known.mean, known.std)
    ensemble = EmbeddingEnsemble(backbone.features, known.groups, bias=known.bias)
    chosen = precision or known.precision
    return Model(backbone, ensemble, known.weighting, chosen, known.metadata, known.mirror, known.trained_at)


def pretrained(
    name: str,
    weights: str | Path | None = None,
    precision: str = "auto",
    device: str | torch.device | None = None,
    resolution: int = 0,
    pool: str = "",
    *,
    test_resolution: int | None = None,
    mirror: bool | None = None,
) -> Model:
    """A model that has not been trained here: a pretrained backbone with its features normalised.

    Training has to beat it. The embedding layer is the identity, so that it is a model like any other.

    Args:
        name: the backbone; `bier backbones` lists them.
        weights: a file of its weights, in place of those that belong to the name.
        precision: `auto`, `float32` or `bfloat16`.
        device: by default the GPU of this process, or the CPU where there is none.
        resolution: the side of the pictures that training would show the network; 0 for the backbone's own.
        pool: how maps or tokens become features; empty for the backbone's own way.
        test_resolution, mirror: the side at which `encode` looks, 0 for `resolution`, and whether with the mirror
            image; by default as `bier train` would have a run with this backbone do.

    Returns:
        The model, in eval mode.

    Raises:
        ModelError: there is no such backbone, or its weights cannot be read or fetched.

    Example:
        >>> import bier
        >>> bier.pretrained("efficientnet_lite0").dimension
        1280
    """
    file = Path(weights) if weights is not None else None
    backbone = build_backbone(name, weights=file, resolution=resolution, pool=pool)
    side, both = encoding_look(name, resolution)
    side = side if test_resolution is None else test_resolution
    both = both if mirror is None else mirror
    return _plain_features(backbone.seen_at(side), precision, both, backbone.crop).to(system.device(device))


def starting_point(settings: ModelConfig, features: int | None = None, precision: str = "auto") -> Model | None:
    """The untrained model of a run: the backbone that it starts from, with its features normalised.

    None for a network that starts from random weights. features: the width of pre-computed features.
    """
    if not is_pretrained(settings):
        return None
    if settings.backbone == "features":
        return _plain_features(build_backbone("features", features=features), precision).to(system.device())
    return pretrained(
        settings.backbone,
        settings.weights or None,
        precision,
        resolution=settings.resolution,
        pool=settings.pool,
        test_resolution=settings.test_resolution,
        mirror=settings.mirror,
    )


def is_pretrained(settings: ModelConfig) -> bool:
    """Whether a run with these settings starts from pretrained weights (or pre-computed features)."""
    return settings.backbone not in FROM_SCRATCH and (settings.pretrained or bool(settings.weights))


def _plain_features(backbone: Backbone, precision: str, mirror: bool = False, trained_at: int = 0) -> Model:
    ensemble = EmbeddingEnsemble(backbone.features, (backbone.features,))
    with torch.no_grad():
        ensemble.weight.copy_(torch.eye(backbone.features))
    told = {"method": "untrained"}
    model = Model(folded(backbone), ensemble, precision=precision, metadata=told, mirror=mirror, trained_at=trained_at)
    return model.eval()
