"""Reads a network's layers from a `.npy` file that holds a pickled dictionary, allowing arrays and nothing else.

Tools that convert Caffe models save `{layer: {"weights": array, "biases": array}}` this way. A pickle can run any code
when it is read; this reader looks up only what numpy needs to rebuild an array and refuses the file on any other name.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from bier.errors import ModelError

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
