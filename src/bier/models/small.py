"""The small backbones: `conv4` for glyphs and tests, the paper's two CIFAR-10 networks, and `features`."""

from torch import nn

from bier.models.backbone import Backbone

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
