"""Reads the layers of a `.caffemodel`, which is one protobuf message.

Only the fields that hold names and weights are declared, with the numbers of Caffe's own `caffe.proto`; protobuf skips
the others.
"""

from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from bier.errors import ModelError

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
