"""CIFAR-10 for classification: batches 1 to 4 train, batch 5 is validation, the test batch is test.

The binary and the Python layout are read. The Python files are pickles; they are opened by an unpickler that knows the
few names an array of numbers needs and refuses every other, so that nothing in them can run.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bier.data.layout import Benchmark, Layout
from bier.data.records import Dataset, Part
from bier.errors import DataError

LAYOUT = Layout(
    title="CIFAR-10",
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    shape="cifar-10-batches-bin/{data_batch_1.bin ... data_batch_5.bin, test_batch.bin}, or cifar-10-batches-py with "
    "the same names without .bin",
)
EXPECTED = {
    "train": {"images": 40000, "classes": 10},
    "validation": {"images": 10000, "classes": 10},
    "test": {"images": 10000, "classes": 10},
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PARTS = {
    "train": tuple(f"data_batch_{i}" for i in (1, 2, 3, 4)),
    "validation": ("data_batch_5",),
    "test": ("test_batch",),
}
PIXELS = 3 * 32 * 32
Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]  # (n, 3072) with all red, all green, all blue; (n,)


def _read(root: Path, _: str) -> Dataset:
    home, marker = LAYOUT.locate(root, "data_batch_1.bin", "data_batch_1")
    read, ending = (_binary, ".bin") if marker.suffix == ".bin" else (_pickled, "")
    parts = {}
    for which, names in PARTS.items():
        batches = [read(LAYOUT.need(home / f"{name}{ending}")) for name in names]
        planes = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([labels for _, labels in batches])
        parts[which] = Part(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels, CLASSES)
    return Dataset("cifar10", parts, (1,), "accuracy", {"kind": "official", "validation": "data_batch_5"})


def _binary(path: Path) -> Batch:
    """One byte of label, then 3,072 bytes of pixels, again and again."""
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if not len(content) or len(content) % (1 + PIXELS):
        raise DataError(f"{path} must be records of {1 + PIXELS} bytes. Got {len(content)} bytes instead.")
    records = content.reshape(-1, 1 + PIXELS)
    return _checked(records[:, 1:], records[:, 0].astype(np.int64), path)


def _pickled(path: Path) -> Batch:
    """A dictionary with the arrays `data` (n, 3072) and `labels`."""
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels = np.asarray(content[b"data"] if b"data" in content else content["data"])
        labels = np.asarray(content[b"labels"] if b"labels" in content else content["labels"])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} must be a batch of CIFAR-10's Python version. Got: {error!r}.") from error
    if pixels.dtype != np.uint8 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: pixels must be uint8 and labels whole. Got {pixels.dtype} and {labels.dtype} instead."
        )
    return _checked(pixels, labels.astype(np.int64), path)


def _checked(pixels: NDArray[np.uint8], labels: NDArray[np.int64], path: Path) -> Batch:
    if pixels.ndim != 2 or pixels.shape[1] != PIXELS or labels.shape != (len(pixels),):
        raise DataError(
            f"{path}: expected n x {PIXELS} pixels and n labels. Got {pixels.shape} and {labels.shape} instead."
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) <= 9:
        raise DataError(f"{path}: a label must be from 0 to 9. Got {int(labels.min())} to {int(labels.max())} instead.")
    return pixels, labels


class _Unpickler(pickle.Unpickler):
    """Builds numbers, texts, lists, dictionaries and arrays of numbers; every other name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return _empty_array
        if (module, name) == ("_codecs", "encode"):
            return _latin_bytes
        raise DataError(f"refused to open it, for it asks for '{module}.{name}', which no array needs.")


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes) -> NDArray[Any]:
    """What an array is before its content is set; only plain arrays are made."""
    if kind is not np.ndarray:
        raise DataError("refused to open it, for it asks for an array of another kind.")
    return np.ndarray((0,), dtype=np.int8)


def _latin_bytes(text: str, encoding: str) -> bytes:
    """Python 3 writes the bytes of an old pickle as Latin-1 text."""
    if encoding not in {"latin1", "latin-1", b"latin1"}:
        raise DataError(f"refused to open it, for it asks for the encoding '{encoding}'.")
    return text.encode("latin-1")


CIFAR10 = Benchmark(_read, {"": EXPECTED})
