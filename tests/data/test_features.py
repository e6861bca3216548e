"""Vectors in place of images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bier.data import load
from bier.errors import DataError

FEATURES = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
LABELS = np.array([3, 3, 5, 5, 7, 7, 9, 9, 3, 5, 7, 9])


def save(folder: Path, **arrays: np.ndarray) -> Path:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "half", "folder", "file", "names"])
def test_every_layout_gives_the_same_vectors(tmp_path: Path, kind: str) -> None:
    root, features = tmp_path, FEATURES
    if kind in ("safetensors", "half"):
        root = tmp_path / "f.safetensors"
        tensor = torch.from_numpy(FEATURES)
        tensor = tensor.bfloat16() if kind == "half" else tensor
        features = tensor.float().numpy()
        save_file({"features": tensor, "labels": torch.from_numpy(LABELS)}, root)
    else:
        names = np.array([f"class {label}" for label in LABELS])
        save(tmp_path, features=FEATURES.astype(np.float64), labels=names if kind == "names" else LABELS)
        root = tmp_path / "features.npy" if kind == "file" else tmp_path
    dataset = load("features", root, seed=2)
    assert {name: part.present for name, part in dataset.parts.items()} == {"train": 2, "test": 2}
    seen = 0
    for part in dataset.parts.values():
        assert isinstance(part.images, np.ndarray)
        assert part.images.dtype == np.float32
        for vector, label in zip(part.images, part.labels, strict=True):
            row = int(np.flatnonzero((features == vector).all(axis=1))[0])
            assert part.classes[label].removeprefix("class ") == str(LABELS[row])
            seen += 1
    assert seen == 12


def test_a_given_split_is_followed(tmp_path: Path) -> None:
    split = np.array([0] * 8 + [1] * 4)
    dataset = load("features", save(tmp_path, features=FEATURES, labels=LABELS, split=split))
    assert (np.asarray(dataset["train"].images) == FEATURES[:8]).all()
    assert (np.asarray(dataset["test"].images) == FEATURES[8:]).all()
    assert dataset.split["kind"] == "given"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": FEATURES[0]}, r"shape \(N, h\)"),
        ({"features": FEATURES.astype(np.int64)}, "floats"),
        ({"features": np.where(np.arange(12)[:, None] == 4, np.nan, FEATURES)}, "finite.*first is row 4"),
        ({"labels": LABELS[:5]}, "12 whole numbers"),
        ({"labels": LABELS.astype(np.float32)}, "12 whole numbers"),
        ({"split": np.full(12, 2)}, "0 .training. or 1"),
        ({"split": np.zeros(12, np.int64)}, "none in test"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    save(tmp_path, **{"features": FEATURES, "labels": LABELS, **change})
    with pytest.raises(DataError, match=message):
        load("features", tmp_path)


def test_missing_and_dangerous_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no .*features\.npy"):
        load("features", tmp_path)
    with pytest.raises(DataError, match=r"no .*absent\.safetensors"):
        load("features", tmp_path / "absent.safetensors")
    save(tmp_path, labels=LABELS)
    np.save(tmp_path / "features.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"features\.npy must be an array"):
        load("features", tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"junk")
    with pytest.raises(DataError, match="must be a safetensors file"):
        load("features", tmp_path / "x.safetensors")
    save_file({"features": torch.zeros(2, 2)}, tmp_path / "y.safetensors")
    with pytest.raises(DataError, match="no tensor 'labels', only features"):
        load("features", tmp_path / "y.safetensors")


@pytest.mark.parametrize("wrong", [b"'a'", b"',i'", b"'|a'", b"','"])
def test_a_damaged_header_is_refused(tmp_path: Path, wrong: bytes) -> None:
    """Numpy warns about some types and reads the text of others as Python."""
    save(tmp_path, features=FEATURES, labels=LABELS)
    content = (tmp_path / "labels.npy").read_bytes()
    assert content.count(b"'<i8'") == 1
    (tmp_path / "labels.npy").write_bytes(content.replace(b"'<i8'", wrong.ljust(5)))
    with pytest.raises(DataError, match=r"labels\.npy must be an array|12 whole numbers"):
        load("features", tmp_path)
