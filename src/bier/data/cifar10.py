"""CIFAR-10 for classification: batches 1 to 4 train, batch 5 is validation, the test batch is test.

The binary and the Python layout are read. The Python files are pickles; they are opened by an unpickler that knows the
few names an array of bytes needs, puts classes of ours in their place and refuses every other name, so that nothing in
them can run: neither their code nor NumPy's own way of restoring arrays.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bier.data.benchmarks import Benchmark, Layout
from bier.data.part import Dataset, Part
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
        pixels = (content[b"data"] if b"data" in content else content["data"]).array
        labels = np.array(content[b"labels"] if b"labels" in content else content["labels"])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} must be a batch of CIFAR-10's Python version. Got: {error!r}.") from error
    if labels.dtype.kind != "i":
        raise DataError(f"{path}: labels must be whole numbers. Got {labels.dtype} instead.")
    return _checked(pixels, labels.astype(np.int64), path)


def _checked(pixels: NDArray[np.uint8], labels: NDArray[np.int64], path: Path) -> Batch:
    if pixels.ndim != 2 or pixels.shape[1] != PIXELS or labels.shape != (len(pixels),):
        raise DataError(
            f"{path}: expected n x {PIXELS} pixels and n labels. Got {pixels.shape} and {labels.shape} instead."
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) <= 9:
        raise DataError(f"{path}: a label must be from 0 to 9. Got {int(labels.min())} to {int(labels.max())} instead.")
    return pixels, labels


class _Kind:
    """Stands for a dtype; only its code is kept."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, _: object) -> None:
        """Byte order and the like mean nothing for single bytes."""


class _Pixels:
    """Stands for an array of bytes."""

    def __init__(self, *_: object) -> None:
        self.array = np.zeros(0, dtype=np.uint8)

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Kind, bool, bytes]) -> None:
        _, shape, kind, columns_first, raw = state
        if kind.code != "u1":
            raise DataError(f"an array must be of bytes ('u1'). Got '{kind.code}' instead.")
        self.array = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if columns_first else "C")


class _Unpickler(pickle.Unpickler):
    """Builds numbers, texts, lists, dictionaries and arrays of bytes; every other name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("numpy", "dtype"): _Kind,
            ("numpy", "ndarray"): _Pixels,
            ("numpy.core.multiarray", "_reconstruct"): _Pixels,
            ("numpy._core.multiarray", "_reconstruct"): _Pixels,
            ("_codecs", "encode"): _latin_bytes,
        }
        if (module, name) not in known:
            raise DataError(f"refused to open it, for it asks for '{module}.{name}', which no array needs.")
        return known[module, name]


def _latin_bytes(text: str, encoding: str | bytes) -> bytes:
    """Python 3 writes the bytes of an old pickle as Latin-1 text."""
    if encoding not in ("latin1", b"latin1"):
        raise DataError(f"refused to open it, for it asks for the encoding {encoding!r}.")
    return text.encode("latin-1")


CIFAR10 = Benchmark(_read, {"": EXPECTED})
