"""The cache serves what the files hold: after a kill, after a change, beside other processes."""

import errno
import multiprocessing
import os
import pickle
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from bier.errors import ConfigError, DataError
from bier.images import ImageDataset, PixelCache, read_prepared

COUNT = 150  # several chunks
SIZE = 16
fork = multiprocessing.get_context("fork")


def write(path: Path, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, (12, SIZE, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "pictures"
    folder.mkdir()
    names = [folder / f"{number}.png" for number in range(COUNT)]
    for number, name in enumerate(names):
        write(name, number)
    return names


class Count:
    """How many images a build had to read."""

    def __init__(self) -> None:
        self.done = self.total = 0

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total


def opened(paths: list[Path], tmp_path: Path, **options: object) -> tuple[ImageDataset, int]:
    count = Count()
    images = ImageDataset(paths, SIZE, workers=0, **options).cached(tmp_path / "cache", count)
    assert count.done == count.total
    return images, count.total


def assert_right(images: ImageDataset, paths: list[Path]) -> None:
    for index in range(len(paths)):
        np.testing.assert_array_equal(images.prepared(index), read_prepared(paths[index], SIZE))


def replace_secretly(path: Path, seed: int) -> None:
    """Other pixels under the same length and time: whoever still sees the old ones has not read the file."""
    before = path.stat()
    write(path, seed)
    content = path.read_bytes()
    path.write_bytes(content[: before.st_size].ljust(before.st_size, b"\0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_it_is_built_once_and_served_from_then_on(paths: list[Path], tmp_path: Path) -> None:
    images, read = opened(paths, tmp_path)
    assert read == COUNT
    assert_right(images, paths)
    old = images.prepared(3).copy()
    replace_secretly(paths[3], 999)
    again, read = opened(paths, tmp_path)
    assert read == 0
    np.testing.assert_array_equal(again.prepared(3), old)


def test_only_a_changed_file_is_read_again(paths: list[Path], tmp_path: Path) -> None:
    opened(paths, tmp_path)
    write(paths[7], 777)
    os.utime(paths[7], ns=(1, 1))
    images, read = opened(paths, tmp_path)
    assert read == 1
    assert_right(images, paths)


def test_size_boxes_and_order_have_caches_of_their_own(paths: list[Path], tmp_path: Path) -> None:
    boxes = np.tile(np.float32([0, 0, 6, 6]), (COUNT, 1))
    opened(paths, tmp_path)
    boxed, read = opened(paths, tmp_path, boxes=boxes)
    assert read == COUNT
    np.testing.assert_array_equal(boxed.prepared(5), read_prepared(paths[5], SIZE, (0, 0, 6, 6)))
    assert opened(paths[::-1], tmp_path)[1] == COUNT
    assert len(list((tmp_path / "cache").iterdir())) == 3


def build_and_die(paths: list[Path], folder: Path) -> None:
    def die(done: int, total: int) -> None:
        if done >= 64:
            os.kill(os.getpid(), signal.SIGKILL)

    ImageDataset(paths, SIZE, workers=0).cached(folder, die)


def test_a_killed_build_goes_on(paths: list[Path], tmp_path: Path) -> None:
    process = fork.Process(target=build_and_die, args=(paths, tmp_path / "cache"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    images, read = opened(paths, tmp_path)
    assert read == COUNT - 64
    assert_right(images, paths)


def test_half_written_rows_are_never_served(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(paths, tmp_path)
    times = [path.stat().st_mtime_ns for path in paths]
    for path in paths[:40]:
        write(path, 5)
        os.utime(path, ns=(5, 5))
    real = PixelCache._write

    def cut_short(self: PixelCache, name: str, rows: dict[int, np.ndarray]) -> None:
        if name == "pixels":
            real(self, name, {index: np.zeros_like(row) for index, row in rows.items()})
            raise KeyboardInterrupt
        real(self, name, rows)

    with monkeypatch.context() as patch:
        patch.setattr(PixelCache, "_write", cut_short)
        with pytest.raises(KeyboardInterrupt):
            opened(paths, tmp_path)
    # The old files come back with their times: were the stamps not cleared, the zeros would now pass for them.
    for number, path in enumerate(paths[:40]):
        write(path, number)
        os.utime(path, ns=(times[number], times[number]))
    images, read = opened(paths, tmp_path)
    assert 0 < read <= 40
    assert_right(images, paths)


def test_a_reader_does_not_see_rows_of_a_later_build(paths: list[Path], tmp_path: Path) -> None:
    first, _ = opened(paths, tmp_path)
    write(paths[2], 222)
    os.utime(paths[2], ns=(7, 7))
    second, read = opened(paths, tmp_path)
    assert read == 1
    np.testing.assert_array_equal(second.prepared(2), read_prepared(paths[2], SIZE))
    np.testing.assert_array_equal(
        first.prepared(2), read_prepared(paths[2], SIZE)
    )  # from the file: the stamp is not its own
    assert first._cache is not None
    assert first._cache.row(2) is None


def build_and_report(paths: list[Path], folder: Path, gate: object, reports: object) -> None:
    count = Count()
    gate.wait()
    images = ImageDataset(paths, SIZE, workers=0).cached(folder, count)
    right = all(np.array_equal(images.prepared(i), read_prepared(path, SIZE)) for i, path in enumerate(paths))
    reports.put((right, count.total))


def test_processes_that_come_together_share_one_build(paths: list[Path], tmp_path: Path) -> None:
    gate, reports = fork.Barrier(4), fork.Queue()
    arguments = (paths, tmp_path / "cache", gate, reports)
    processes = [fork.Process(target=build_and_report, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    answers = [reports.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert all(right for right, _ in answers)
    assert sorted(total for _, total in answers) == [0, 0, 0, COUNT]


@pytest.mark.parametrize("name", ["pixels", "stamps"])
def test_files_of_another_length_are_built_anew(paths: list[Path], tmp_path: Path, name: str) -> None:
    opened(paths, tmp_path)
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    os.truncate(file, file.stat().st_size // 2)
    images, read = opened(paths, tmp_path)
    assert read == COUNT
    assert_right(images, paths)


def test_broken_files(paths: list[Path], tmp_path: Path) -> None:
    paths[40].write_bytes(b"")
    paths[90].unlink()
    with pytest.raises(DataError, match=r"40\.png: the file is empty"):
        opened(paths, tmp_path)
    write(paths[40], 1)
    write(paths[90], 2)
    images, read = opened(paths, tmp_path)
    assert read < COUNT  # the chunk before it was kept
    assert_right(images, paths)


def test_a_small_disk(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"needs 0\.0 GB more and its disk has 0\.0 GB left"):
        opened(paths, tmp_path)


def test_a_full_disk(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"Cannot write the image cache in .*the disk is full"):
        opened(paths, tmp_path)


def test_a_cache_that_is_no_folder(paths: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="Cannot write the image cache"):
        opened(paths, tmp_path)


def test_pictures_in_memory(paths: list[Path], tmp_path: Path) -> None:
    pixels = np.zeros((3, SIZE, SIZE, 3), np.uint8)
    assert len(ImageDataset(pixels, SIZE).cached(tmp_path / "cache")) == 3
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match="some are in memory"):
        ImageDataset([paths[0], pixels[0]], SIZE).cached(tmp_path / "cache")


def test_a_pickled_cache_carries_no_pixels(paths: list[Path], tmp_path: Path) -> None:
    images, _ = opened(paths, tmp_path)
    data = pickle.dumps(images)
    assert len(data) < 40_000 < COUNT * SIZE * SIZE * 3
    np.testing.assert_array_equal(pickle.loads(data).prepared(9), images.prepared(9))


def test_workers_build_the_same_cache(paths: list[Path], tmp_path: Path) -> None:
    images = ImageDataset(paths, SIZE, workers=2).cached(tmp_path / "other")
    assert_right(images, paths)
    assert opened(paths, tmp_path)[0].best_workers == 0
