"""CIFAR-10 in both layouts, and pickles that try to run something."""

import pickle
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


@pytest.fixture(params=[0, 2, 4])
def pickled(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """As Python 2 wrote it (keys of bytes), in several protocols."""
    home = tmp_path / "cifar-10-batches-py"
    home.mkdir()
    for i, name in enumerate(BATCHES):
        pixels, labels = content(i)
        batch = {b"data": pixels, b"labels": labels.tolist(), b"filenames": [b"a.png"], b"batch_label": b"x"}
        (home / name).write_bytes(pickle.dumps(batch, protocol=request.param))
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


def test_the_python_layout(pickled: Path) -> None:
    check(pickled)


def test_arrays_with_columns_first(pickled: Path) -> None:
    pixels, labels = content(4)
    batch = {"data": np.asfortranarray(pixels), "labels": labels.tolist()}
    (pickled / "cifar-10-batches-py" / "data_batch_5").write_bytes(pickle.dumps(batch, protocol=2))
    check(pickled)


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


class Evaluated:
    def __reduce__(self) -> tuple[object, ...]:
        return eval, ("1/0",)


def test_a_malicious_pickle_is_refused_and_runs_nothing(pickled: Path) -> None:
    mark = pickled / "mark"
    bait = {b"data": Malicious(mark), b"labels": []}
    (pickled / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(bait))
    with pytest.raises(DataError, match=r"data_batch_3: refused .* asks for"):
        load("cifar10", pickled)
    assert not mark.exists()
    (pickled / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(Evaluated()))
    with pytest.raises(DataError, match=r"builtins\.eval"):
        load("cifar10", pickled)


@pytest.mark.parametrize(
    "bait",
    [
        b"cos\nsystem\n(S'exit 1'\ntR.",
        b"cnumpy.core.multiarray\nscalar\n(S'x'\ntR.",
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x06\x00\x00\x00base64tR.",
        b"cnumpy\nndarray.__class__\n.",
        b"not a pickle",
        b"",
    ],
)
def test_other_pickles_are_refused(pickled: Path, bait: bytes) -> None:
    (pickled / "cifar-10-batches-py" / "test_batch").write_bytes(bait)
    with pytest.raises(DataError, match="test_batch"):
        load("cifar10", pickled)


@pytest.mark.parametrize(
    "batch",
    [
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0.5, 1]},
        {b"data": b"bytes", b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3000), np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]},
        {b"data": np.zeros((2, 3072), np.uint8)},
        [1, 2],
    ],
)
def test_a_batch_of_the_wrong_shape_is_refused(pickled: Path, batch: object) -> None:
    (pickled / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError, match="data_batch_2"):
        load("cifar10", pickled)


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
