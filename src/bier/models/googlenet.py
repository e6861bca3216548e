"""The paper's network: BVLC GoogLeNet as Caffe runs it, and its two kinds of weight files."""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from torch import Tensor, nn

from bier.errors import ModelError
from bier.files import open_file
from bier.models.backbone import Backbone

_Field = descriptor_pb2.FieldDescriptorProto
_ONE, _MANY = _Field.LABEL_OPTIONAL, _Field.LABEL_REPEATED

# message: {field: (number, label, type or name of a message, packed)}
_MESSAGES: dict[str, dict[str, tuple[int, Any, Any, bool]]] = {
    "BlobShape": {"dim": (1, _MANY, _Field.TYPE_INT64, True)},
    "BlobProto": {
        "num": (1, _ONE, _Field.TYPE_INT32, False),
        "channels": (2, _ONE, _Field.TYPE_INT32, False),
        "height": (3, _ONE, _Field.TYPE_INT32, False),
        "width": (4, _ONE, _Field.TYPE_INT32, False),
        "data": (5, _MANY, _Field.TYPE_FLOAT, True),
        "shape": (7, _ONE, "BlobShape", False),
    },
    "LayerParameter": {
        "name": (1, _ONE, _Field.TYPE_STRING, False),
        "type": (2, _ONE, _Field.TYPE_STRING, False),
        "bottom": (3, _MANY, _Field.TYPE_STRING, False),
        "top": (4, _MANY, _Field.TYPE_STRING, False),
        "blobs": (7, _MANY, "BlobProto", False),
    },
    "V1LayerParameter": {
        "name": (4, _ONE, _Field.TYPE_STRING, False),
        "blobs": (6, _MANY, "BlobProto", False),
    },
    "NetParameter": {
        "name": (1, _ONE, _Field.TYPE_STRING, False),
        "layers": (2, _MANY, "V1LayerParameter", False),
        "layer": (100, _MANY, "LayerParameter", False),
    },
}


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="bier_caffe.proto", package="caffe", syntax="proto2")
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for name, (number, label, kind, packed) in fields.items():
            field = message.field.add(name=name, number=number, label=label)
            if isinstance(kind, str):
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".caffe.{kind}"
            else:
                field.type = kind
            if packed:
                field.options.packed = True
    pool = descriptor_pool.DescriptorPool()  # one of our own: another library may have declared Caffe's messages too
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"caffe.{name}")) for name in _MESSAGES}


def net_parameter() -> Any:
    """An empty NetParameter message."""
    return _message_classes()["NetParameter"]()


def read_caffemodel(path: Path) -> dict[str, tuple[NDArray[np.float32], ...]]:
    """Layer name -> its blobs, for the layers that have any, in files of the newer and the older layer format."""
    network = net_parameter()
    try:
        open_file(path).close()
        network.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ModelError(f"The weights {str(path)!r} must be a readable Caffe model ({error}).") from error
    layers = {
        layer.name: tuple(_array(blob, layer.name, path) for blob in layer.blobs)
        for layer in (*network.layers, *network.layer)
        if layer.blobs
    }
    if not layers:
        raise ModelError(f"The weights {str(path)!r} must be a Caffe model with weights. Found no layer that has any.")
    return layers


def _array(blob: Any, layer: str, path: Path) -> NDArray[np.float32]:
    shape = list(blob.shape.dim) if blob.HasField("shape") else [blob.num, blob.channels, blob.height, blob.width]
    values = np.array(blob.data, np.float32)
    if int(np.prod(shape)) != values.size:
        raise ModelError(f"The layer {layer!r} of {str(path)!r} must hold {shape} numbers. Got {values.size} instead.")
    return values.reshape(shape)


_ALLOWED = {
    (module, name)
    for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    for name in ("_reconstruct", "scalar")
} | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only arrays are allowed")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_npy_dump(path: Path) -> dict[str, tuple[NDArray[np.float32], ...]]:
    """Layer name -> (weights as (out, in, k, k), biases). Convolutions stored as (k, k, in, out) are turned."""
    try:
        open_file(path).close()
        layers = _dictionary(path.read_bytes())
        return {str(name): _blobs(layer) for name, layer in layers.items()}
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        raise ModelError(
            f"The weights {str(path)!r} must be a dictionary of arrays in a .npy file: {error}."
        ) from error


def _dictionary(data: bytes) -> Mapping[Any, Any]:
    file = io.BytesIO(data)
    version = npy_format.read_magic(file)
    reader = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    shape, _, dtype = reader(file)
    if not dtype.hasobject:
        raise ValueError(f"found a plain array of {dtype}")
    found = _ArraysOnly(file, encoding="latin1").load()  # older files were written by Python 2
    content = found.item() if isinstance(found, np.ndarray) and shape == () else found
    if not isinstance(content, Mapping):
        raise ValueError(f"found {type(content).__name__} of shape {shape}")
    return content


def _blobs(layer: Any) -> tuple[NDArray[np.float32], ...]:
    values = [layer["weights"], layer["biases"]] if isinstance(layer, Mapping) else list(layer)
    blobs = [np.asarray(value, np.float32) for value in values]
    if blobs[0].ndim == 4:
        blobs[0] = _caffe_order(blobs[0], blobs[1].size)
    return tuple(blobs)


def _caffe_order(weights: NDArray[np.float32], outputs: int) -> NDArray[np.float32]:
    """(k, k, in, out), which TensorFlow uses, to (out, in, k, k)."""
    turned = weights.shape[0] != outputs and weights.shape[3] == outputs
    return weights.transpose(3, 2, 0, 1) if turned else weights


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
    """(B, 3, 224, 224) RGB pixels -> (B, 1024). `weights`: `bvlc_googlenet.caffemodel`, or a `.npy` dump of it."""
    if pretrained and weights is None:
        raise ModelError(
            f"The weights of {NAME!r} do not come with bier. Pass weights=FILE: bvlc_googlenet.caffemodel"
            " (from the BVLC model zoo) or a .npy dump of its layers."
        )
    backbone = Backbone(NAME, _stages(), features=1024, crop=224, resize=256, mean=MEAN_RGB, std=(1.0,) * 3)
    if weights is None:
        _initialise(backbone)
    else:
        read = read_npy_dump if weights.suffix == ".npy" else read_caffemodel
        load_layers(backbone, read(weights), weights)
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
        blobs = layers.get(name) or layers.get(name.replace("/", "_"))  # dumps spell a layer with underscores
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
