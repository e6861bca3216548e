"""CIFAR-10 in its binary layout."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bier.data import expected, load
from bier.errors import DataError

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def content(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    return random.integers(0, 256, (3 + number, 3072), dtype=np.uint8), random.integers(0, 10, 3 + number)


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    home = tmp_path / "cifar-10-batches-bin"
    home.mkdir()
    for i, name in enumerate(BATCHES):
        pixels, labels = content(i)
        records = np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1)
        (home / f"{name}.bin").write_bytes(records.tobytes())
    return tmp_path


def check(root: Path) -> None:
    dataset = load("cifar10", root)
    assert dataset.protocol == "accuracy"
    assert {name: len(part) for name, part in dataset.parts.items()} == {"train": 18, "validation": 7, "test": 8}
    pixels, labels = content(4)
    validation = dataset["validation"]
    assert isinstance(validation.images, np.ndarray)
    assert validation.images.shape == (7, 32, 32, 3)
    assert validation.labels.tolist() == labels.tolist()
    for channel, row, column in ((0, 0, 1), (1, 3, 0), (2, 31, 31)):
        assert (validation.images[:, row, column, channel] == pixels[:, channel * 1024 + row * 32 + column]).all()
    assert dataset["test"].classes[3] == "cat"


def test_the_binary_layout(binary: Path) -> None:
    check(binary)
    check(binary / "cifar-10-batches-bin")


def test_a_label_that_cannot_be_is_refused(binary: Path) -> None:
    path = binary / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"data_batch_2\.bin: a label must be from 0 to 9. Got 10"):
        load("cifar10", binary)


def test_a_binary_batch_that_is_cut_off_is_refused(binary: Path) -> None:
    path = binary / "cifar-10-batches-bin" / "data_batch_5.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="records of 3073 bytes"):
        load("cifar10", binary)
    path.unlink()
    with pytest.raises(DataError, match=r"no .*data_batch_5\.bin"):
        load("cifar10", binary)


@pytest.mark.slow
def test_the_whole_of_cifar10_has_the_official_counts(shared_data: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(shared_data / "make_cifar10.py"), str(tmp_path)], check=True)
    dataset = load("cifar10", tmp_path)
    assert dataset.counts() == expected("cifar10")
    assert np.bincount(dataset["test"].labels).tolist() == [1000] * 10
