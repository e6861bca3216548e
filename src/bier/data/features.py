"""`features`: vectors that some model computed before, in place of images and backbone.

The root is a `.safetensors` file with the tensors `features` (N, h) and `labels` (N,) and perhaps `split` (N,) of
0 (training) and 1 (test), or a folder with `features.npy`, `labels.npy` and perhaps `split.npy`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bier.data.records import Dataset, Part
from bier.data.splits import SplitPlan, described, divide, held_out
from bier.errors import DataError

KS = (1, 2, 4, 8, 16, 32)
EXPECTS = (
    "Expected a .safetensors file with 'features' (N, h) and 'labels' (N,), or a folder with features.npy and "
    "labels.npy"
)


def read(root: Path, plan: SplitPlan) -> Dataset:
    """The vectors, divided as their own `split` says, else as the plan says."""
    arrays = _arrays(root)
    everything = _everything(arrays, root)
    if "split" not in arrays:
        return divide("features", everything, plan, KS)
    split = arrays["split"]
    if split.shape != (len(everything),) or not np.isin(split, (0, 1)).all():
        raise DataError(
            f"{root}: 'split' must be one 0 (training) or 1 (test) per vector. Got {split.dtype} {split.shape}."
        )
    parts = {"train": everything.select(split == 0), "test": everything.select(split == 1)}
    for which, part in parts.items():
        if not len(part):
            raise DataError(
                f"{root}: 'split' must put vectors into training (0) and test (1). There are none in {which}."
            )
    parts = {which: part.only_present() for which, part in parts.items()}
    return held_out(Dataset("features", parts, KS, "self", {"kind": "given", "parts": described(parts)}), plan)


def _arrays(root: Path) -> dict[str, NDArray[Any]]:
    folder = root.parent if root.suffix == ".npy" else root
    if folder.is_dir():
        files = {name: folder / f"{name}.npy" for name in ("features", "labels", "split")}
        missing = [path for name, path in files.items() if name != "split" and not path.is_file()]
        if missing:
            raise DataError(f"There is no {missing[0]}. {EXPECTS}.")
        return {name: _npy(path) for name, path in files.items() if path.is_file()}
    if not root.is_file():
        raise DataError(f"There is no {root}. {EXPECTS}.")
    return _safetensors(root)


def _npy(path: Path) -> NDArray[Any]:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} must be an array of numbers or texts saved by numpy. Got: {error}.") from error


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} must be a safetensors file. Got: {error}. {EXPECTS}.") from error
    for name in ("features", "labels"):
        if name not in tensors:
            raise DataError(
                f"{path} has no tensor '{name}', only {', '.join(sorted(tensors)) or 'nothing'}. {EXPECTS}."
            )
    wide = {name: t.float() if t.dtype is torch.bfloat16 else t for name, t in tensors.items()}
    return {name: wide[name].numpy() for name in ("features", "labels", "split") if name in wide}


def _everything(arrays: dict[str, NDArray[Any]], root: Path) -> Part:
    features, labels = arrays["features"], arrays["labels"]
    if features.ndim != 2 or features.dtype.kind != "f" or 0 in features.shape:
        raise DataError(
            f"{root}: 'features' must be floats of shape (N, h). Got {features.dtype} {features.shape} instead."
        )
    if labels.shape != (len(features),) or labels.dtype.kind not in "iuUS":
        raise DataError(
            f"{root}: 'labels' must be {len(features)} whole numbers or names. Got {labels.dtype} {labels.shape}."
        )
    features = features.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
    if len(bad):
        raise DataError(f"{root}: 'features' must be finite. {len(bad)} rows are not, the first is row {bad[0]}.")
    names, numbers = np.unique(labels, return_inverse=True)
    return Part(features, numbers.astype(np.int64).reshape(-1), tuple(str(name) for name in names.tolist()))
