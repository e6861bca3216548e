"""Backbones by name."""

from difflib import get_close_matches
from pathlib import Path

import timm

from bier.errors import ModelError
from bier.models import small
from bier.models.backbone import Backbone
from bier.models.googlenet import NAME as GOOGLENET
from bier.models.googlenet import googlenet
from bier.models.lite import LITE, lite
from bier.models.timm_models import from_timm

__all__ = ["NAMES", "Backbone", "build_backbone"]

# Those that timm does not have; every model of timm is a name too.
NAMES = ("conv4", *LITE, GOOGLENET, "cifar10-quick", "cifar10-quick-wider", "features")

_FROM_SCRATCH = {
    "conv4": small.conv4,
    "cifar10-quick": small.cifar10_quick,
    "cifar10-quick-wider": small.cifar10_quick_wider,
}


def build_backbone(
    name: str, *, pretrained: bool = True, weights: Path | None = None, features: int | None = None
) -> Backbone:
    """The backbone called `name`, with pretrained weights where it has any.

    `weights` is a file to read instead: safetensors for models of timm and EfficientNet-Lite, a Caffe model or its
    `.npy` dump for `googlenet-bvlc`. `conv4` and the
    CIFAR-10 networks start from scratch and ignore `pretrained`. `features` (the identity) needs its width.
    """
    if name in _FROM_SCRATCH:
        if weights is not None:
            raise ModelError(
                f"The backbone {name!r} is trained from scratch and takes no weights. Got {str(weights)!r}."
            )
        return _FROM_SCRATCH[name]()
    if name == "features":
        if features is None or features < 1:
            raise ModelError(f"The 'features' parameter must be the width of the features. Got {features!r} instead.")
        return small.identity(features)
    if name == GOOGLENET:
        return googlenet(pretrained=pretrained, weights=weights)
    if name in LITE:
        return lite(name, pretrained=pretrained, weights=weights)
    if not timm.is_model(name):
        raise ModelError(f"The backbone must be one that bier or timm knows. Got {name!r} instead.{_nearest(name)}")
    return from_timm(name, pretrained=pretrained, weights=weights)


def _nearest(name: str) -> str:
    known = sorted({*NAMES, *timm.list_models()})
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else f" bier's own are {', '.join(NAMES)}."
