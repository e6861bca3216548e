"""Backbones by name, and the small ones that are trained from scratch.

timm is imported where one of its models is built: importing it takes longer than importing torch.
"""

from difflib import get_close_matches
from pathlib import Path

from torch import nn

from bier.errors import ModelError
from bier.models.backbone import Backbone
from bier.models.googlenet import NAME as GOOGLENET
from bier.models.googlenet import googlenet

# Mean and deviation of the training pixels of CIFAR-10, in RGB.
CIFAR_MEAN = (125.3, 123.0, 113.9)
CIFAR_STD = (63.0, 62.1, 66.7)


def conv4() -> Backbone:
    """Four convolutions for 48x48 pictures, trained from scratch: (B, 3, 48, 48) -> (B, 512)."""

    def block(inputs: int, outputs: int, pool: nn.Module) -> nn.Module:
        # Pooling before norm and ReLU: the same shape of network, a quarter of the memory traffic.
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, pool, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    stages = {
        "conv1": block(3, 24, nn.MaxPool2d(2)),
        "conv2": block(24, 48, nn.MaxPool2d(2)),
        "conv3": block(48, 96, nn.MaxPool2d(2)),
        "conv4": nn.Sequential(block(96, 128, nn.Identity()), nn.AvgPool2d(3), nn.Flatten()),
    }
    grey = (127.5,) * 3
    return Backbone("conv4", stages, features=512, crop=48, resize=48, mean=grey, std=grey, frozen_norm=False)


def _cifar_convolution(inputs: int, outputs: int, pool: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU(inplace=True), pool)


def _cifar(name: str, widths: tuple[int, int, int], last: nn.Module, features: int) -> Backbone:
    # Caffe rounds the size of a pooled map up: 32 -> 16 -> 8 -> 4.
    maximum = nn.MaxPool2d(3, 2, ceil_mode=True)
    average = nn.AvgPool2d(3, 2, ceil_mode=True)
    first, second, third = widths
    stages = {
        "conv1": _cifar_convolution(3, first, maximum),
        "conv2": _cifar_convolution(first, second, average),
        "conv3": nn.Sequential(_cifar_convolution(second, third, average), nn.Flatten()),
        "hidden": last,
    }
    return Backbone(name, stages, features=features, crop=32, resize=32, mean=CIFAR_MEAN, std=CIFAR_STD)


def cifar10_quick() -> Backbone:
    """Up to the input of its last fully connected layer, which is the ensemble: (B, 3, 32, 32) -> (B, 1024)."""
    return _cifar("cifar10-quick", (32, 32, 64), nn.Identity(), features=64 * 4 * 4)


def cifar10_quick_wider() -> Backbone:
    """As `cifar10_quick` with twice the channels and one more hidden layer: (B, 3, 32, 32) -> (B, 128)."""
    hidden = nn.Sequential(nn.Linear(128 * 4 * 4, 128), nn.ReLU(inplace=True))
    return _cifar("cifar10-quick-wider", (64, 64, 128), hidden, features=128)


def identity(features: int) -> Backbone:
    """Hands on pre-computed features: (B, features) -> (B, features)."""
    return Backbone("features", {}, features=features, crop=0, resize=0)


LITE = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
# Those that timm does not have; every model of timm is a name too.
NAMES = ("conv4", *LITE, GOOGLENET, "cifar10-quick", "cifar10-quick-wider", "features")

FROM_SCRATCH = {
    "conv4": conv4,
    "cifar10-quick": cifar10_quick,
    "cifar10-quick-wider": cifar10_quick_wider,
}


def is_backbone(name: str) -> bool:
    """Whether this is the name of a backbone, ours or timm's."""
    if name in NAMES:
        return True
    import timm

    return timm.is_model(name)


def build_backbone(
    name: str,
    *,
    pretrained: bool = True,
    weights: Path | None = None,
    features: int | None = None,
    resolution: int = 0,
    pool: str = "",
) -> Backbone:
    """The backbone called `name`, with pretrained weights where it has any.

    Args:
        name: one of `NAMES`, or a model of timm.
        pretrained: load the weights that belong to the name. `conv4` and the CIFAR-10 networks have none.
        weights: a file to read instead: safetensors, or a `.pth` of torch, which is read without running code from it;
            for `googlenet-bvlc` its Caffe model.
        features: the width of the identity called `features`, which needs it.
        resolution: the side of the pictures that the network sees; 0 for its own.
        pool: for models of timm, how maps or tokens become one feature vector, such as `token` (the class token) or
            `avg`; empty for the network's own way.
    """
    if pool and (name in FROM_SCRATCH or name in ("features", GOOGLENET)):
        raise ModelError(f"The features of backbone {name!r} are pooled in one way only. Got {pool!r}.")
    backbone = _named(name, pretrained, weights, features, resolution, pool)
    if resolution:
        backbone.set_input_size(resolution)
    return backbone


def empty_backbone(name: str, features: int, resolution: int, pool: str) -> Backbone:
    """The backbone called `name` without its weights, for those of a model file; nothing is computed with it yet."""
    return _named(name, False, None, features, resolution, pool)


def _named(
    name: str, pretrained: bool, weights: Path | None, features: int | None, resolution: int, pool: str
) -> Backbone:
    if name in FROM_SCRATCH:
        if weights is not None:
            raise ModelError(
                f"The backbone {name!r} is trained from scratch and takes no weights. Got {str(weights)!r}."
            )
        return FROM_SCRATCH[name]()
    if name == "features":
        if features is None or features < 1:
            raise ModelError(f"The 'features' parameter must be the width of the features. Got {features!r} instead.")
        return identity(features)
    if name == GOOGLENET:
        return googlenet(pretrained=pretrained, weights=weights)

    from bier.models.timm_models import from_timm, lite

    if name in LITE:
        return lite(name, pretrained=pretrained, weights=weights, pool=pool)
    if not is_backbone(name):
        raise ModelError(f"The backbone must be one that bier or timm knows. Got {name!r} instead.{_nearest(name)}")
    return from_timm(name, pretrained=pretrained, weights=weights, resolution=resolution, pool=pool)


def _nearest(name: str) -> str:
    import timm

    known = sorted({*NAMES, *timm.list_models()})
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else f" bier's own are {', '.join(NAMES)}."
