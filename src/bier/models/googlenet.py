"""The paper's network: BVLC GoogLeNet as Caffe runs it, and its weight files."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bier.errors import ModelError
from bier.files import open_file
from bier.models.backbone import Backbone

# The fields of Caffe's messages that hold the weights: NetParameter has layers, an older (2) and a newer (100) kind;
# a layer has its name (4 or 1) and blobs (6 or 7); a blob has its sides (1 to 4) or its shape (7) and its numbers (5).
_LAYERS = {2: (4, 6), 100: (1, 7)}
_Fields = dict[int, list[int | memoryview]]


def read_caffemodel(path: Path) -> dict[str, tuple[NDArray[np.float32], ...]]:
    """Layer name -> its blobs, for the layers that have any, in files of the newer and the older layer format."""
    layers = {}
    try:
        with open_file(path) as file:
            network = _fields(memoryview(file.read()))
        for kind, (name, blobs) in _LAYERS.items():
            for layer in (_fields(message) for message in network.get(kind, ())):
                if blobs in layer:
                    title = bytes(layer[name][-1]).decode()
                    layers[title] = tuple(_array(_fields(blob), title, path) for blob in layer[blobs])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"The weights {str(path)!r} must be a readable Caffe model ({error}).") from error
    if not layers:
        raise ModelError(f"The weights {str(path)!r} must be a Caffe model with weights. Found no layer that has any.")
    return layers


def _fields(message: int | memoryview) -> _Fields:
    """The fields of a protobuf message by their numbers: integers, and the bytes of everything else."""
    if isinstance(message, int):
        raise ValueError("a number stands where a message must be")
    fields: _Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, value = key & 7, 0
        if kind == 0:
            value, at = _varint(message, at)
            fields.setdefault(key >> 3, []).append(value)
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of kind {kind}")
        length, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + length > len(message):
            raise ValueError("it ends too early")
        fields.setdefault(key >> 3, []).append(message[at : at + length])
        at += length
    return fields


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("it ends too early")
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _array(blob: _Fields, layer: str, path: Path) -> NDArray[np.float32]:
    if 7 in blob:
        packed, at, shape = blob[7][-1], 0, []
        dimensions = _fields(packed)[1][-1]
        while isinstance(dimensions, memoryview) and at < len(dimensions):
            side, at = _varint(dimensions, at)
            shape.append(side)
    else:
        shape = [int(blob[side][-1]) if side in blob else 0 for side in (1, 2, 3, 4)]
    values = np.frombuffer(b"".join(bytes(part) for part in blob.get(5, ())), "<f4")
    if int(np.prod(shape)) != values.size:
        raise ModelError(f"The layer {layer!r} of {str(path)!r} must hold {shape} numbers. Got {values.size} instead.")
    return values.reshape(shape)


NAME = "googlenet-bvlc"
MEAN_RGB = (123.0, 117.0, 104.0)  # Caffe's 104, 117, 123 in BGR

# Inputs, 1x1, 3x3 after its 1x1, 5x5 after its 1x1, 1x1 after pooling: the table of the GoogLeNet paper.
INCEPTIONS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2), nn.ReLU(inplace=True))


def _halving_pool() -> nn.Module:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


class ResponseNorm(nn.Module):
    """`nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)`, as in Caffe, in half of the time.

    The sum over neighbouring channels is a 1x1 convolution, which is fast in every layout and precision; torch pads and
    pools in three dimensions. `x ** -0.75` is taken from two square roots.
    """

    band: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        at = torch.arange(channels)
        near = (at[:, None] - at).abs() <= 2
        self.register_buffer("band", near.float()[:, :, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        sums = nn.functional.conv2d(x * x, self.band).float()
        inverse = sums.mul_(1e-4 / 5).add_(1).rsqrt_()
        return x * (inverse * inverse.sqrt())


class Inception(nn.Module):
    """Four paths over the same maps, concatenated: (B, inputs, H, W) -> (B, sum of the four, H, W).

    `halve` pools the result to half its side. Caffe lists that pool before the next block; here it ends the
    block before, so that maps cached between the two are a quarter of the size.
    """

    def __init__(
        self,
        inputs: int,
        one: int,
        reduce3: int,
        three: int,
        reduce5: int,
        five: int,
        pool: int,
        *,
        halve: bool = False,
    ) -> None:
        super().__init__()
        self.paths = nn.ModuleDict(
            {
                "1x1": _convolution(inputs, one, 1),
                "3x3": nn.Sequential(_convolution(inputs, reduce3, 1), _convolution(reduce3, three, 3)),
                "5x5": nn.Sequential(_convolution(inputs, reduce5, 1), _convolution(reduce5, five, 5)),
                "pool": nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _convolution(inputs, pool, 1)),
            }
        )

        self.halve = _halving_pool() if halve else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        one, three, five, pool = self.paths.values()
        # Three paths begin with a 1x1 convolution of the same maps: as one it reads them once, and a step of training
        # takes an eighth less time.
        first = [one[0], three[0][0], five[0][0]]  # type: ignore[index]
        weight, bias = (torch.cat([getattr(layer, name) for layer in first]) for name in ("weight", "bias"))
        begun = nn.functional.conv2d(x, weight, bias).relu_()
        sizes = [layer.out_channels for layer in first]
        a, b, c = (y.contiguous(memory_format=torch.channels_last) for y in begun.split(sizes, dim=1))
        maps: Tensor = self.halve(torch.cat([a, three[1](b), five[1](c), pool(x)], dim=1))  # type: ignore[index]
        return maps


def googlenet(*, pretrained: bool, weights: Path | None) -> Backbone:
    """(B, 3, 224, 224) RGB pixels -> (B, 1024). `weights`: `bvlc_googlenet.caffemodel`."""
    if pretrained and weights is None:
        raise ModelError(
            f"The weights of {NAME!r} do not come with bier. Pass weights=FILE: bvlc_googlenet.caffemodel"
            " (from the BVLC model zoo)."
        )
    backbone = Backbone(NAME, _stages(), features=1024, crop=224, resize=256, mean=MEAN_RGB, std=(1.0,) * 3)
    if weights is None:
        _initialise(backbone)
    else:
        load_layers(backbone, read_caffemodel(weights), weights)
    return backbone


def _stages() -> dict[str, nn.Module]:
    stem = nn.Sequential(
        OrderedDict(
            conv1=_convolution(3, 64, 7, 2),
            pool1=_halving_pool(),
            norm1=ResponseNorm(64),
            reduce2=_convolution(64, 64, 1),
            conv2=_convolution(64, 192, 3),
            norm2=ResponseNorm(192),
            pool2=_halving_pool(),
        )
    )
    stages: dict[str, nn.Module] = {"stem": stem}
    for name, widths in INCEPTIONS.items():
        stages[f"inception_{name}"] = Inception(*widths, halve=name in ("3b", "4e"))
    stages["head"] = nn.Sequential(nn.AvgPool2d(7, 1), nn.Flatten())
    return stages


def _initialise(backbone: Backbone) -> None:
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]


# Where the convolutions lie in an Inception block, under the names that Caffe gives them.
_PARTS = {
    "1x1": "paths.1x1.0",
    "3x3_reduce": "paths.3x3.0.0",
    "3x3": "paths.3x3.1.0",
    "5x5_reduce": "paths.5x5.0.0",
    "5x5": "paths.5x5.1.0",
    "pool_proj": "paths.pool.1.0",
}


def convolutions(backbone: Backbone) -> dict[str, nn.Conv2d]:
    """The convolutions under Caffe's names."""
    layers = dict(zip(backbone.stages, backbone.body.layers, strict=True))
    named = {"conv1/7x7_s2": "conv1.0", "conv2/3x3_reduce": "reduce2.0", "conv2/3x3": "conv2.0"}
    found = {name: layers["stem"].get_submodule(path) for name, path in named.items()}
    for name in INCEPTIONS:
        block = layers[f"inception_{name}"]
        found |= {f"inception_{name}/{part}": block.get_submodule(path) for part, path in _PARTS.items()}
    return {name: module for name, module in found.items() if isinstance(module, nn.Conv2d)}


def load_layers(backbone: Backbone, layers: Mapping[str, tuple[NDArray[np.float32], ...]], path: Path) -> None:
    """Set weights (out, in, k, k) and biases from Caffe's layers; the classifiers among them are not used."""
    for name, convolution in convolutions(backbone).items():
        shape = tuple(convolution.weight.shape)
        blobs = layers.get(name)
        if blobs is None:
            raise ModelError(f"The weights {str(path)!r} must hold the layer {name!r}. Found {len(layers)} others.")
        if len(blobs) != 2 or blobs[0].shape != shape or blobs[1].size != shape[0]:
            found = [blob.shape for blob in blobs]
            raise ModelError(
                f"The layer {name!r} of {str(path)!r} must have the shapes {[shape, shape[:1]]}. Got {found} instead."
            )
        weight = torch.from_numpy(np.array(blobs[0], np.float32))
        if name == "conv1/7x7_s2":
            weight = weight.flip(1)  # Caffe's pictures are BGR: the filters are turned round once, not every picture
        with torch.no_grad():
            convolution.weight.copy_(weight)
            convolution.bias.copy_(torch.from_numpy(np.array(blobs[1], np.float32).reshape(-1)))  # type: ignore[union-attr]
