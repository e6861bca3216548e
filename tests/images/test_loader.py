"""Prepared images and batches: the same tensors for every number of workers."""

import itertools
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bier.errors import ConfigError, DataError
from bier.images import AUGMENTATIONS, Batches, PreparedImages, augment, default_workers, in_order, read_prepared

SIZE, CROP = 40, 32


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    names = []
    for number in range(70):
        shape = (int(rng.integers(20, 90)), int(rng.integers(20, 90)), 3)
        name = folder / os.fsdecode(b"caf\xe9 %d.jpg" % number)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(name)
        names.append(name)
    return names


def plan(batches: int = 6, size: int = 5, images: int = 70) -> list[list[tuple[int, int]]]:
    rng = np.random.default_rng(3)
    return [[(int(i), int(i) * 7) for i in rng.integers(0, images, size)] for _ in range(batches)]


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_batches_do_not_depend_on_workers(paths: list[Path], name: str) -> None:
    source = PreparedImages(paths, SIZE)
    expected = [np.stack([augment(read_prepared(paths[i], SIZE), CROP, name, seed) for i, seed in b]) for b in plan()]
    for workers in (0, 2):
        found = list(Batches(source, plan(), CROP, name, workers=workers))
        assert len(found) == len(expected)
        for (pixels, indices), right, batch in zip(found, expected, plan(), strict=True):
            assert pixels.shape == (5, 3, CROP, CROP)
            assert pixels.dtype == torch.uint8
            assert pixels.is_contiguous(memory_format=torch.channels_last)
            assert indices.dtype == torch.int64
            assert indices.tolist() == [index for index, _ in batch]
            np.testing.assert_array_equal(pixels.permute(0, 2, 3, 1).numpy(), right)


def test_an_endless_plan(paths: list[Path]) -> None:
    batches = iter(Batches(PreparedImages(paths, SIZE), itertools.cycle(plan(2)), CROP, workers=1))
    seen = [next(batches)[1].tolist() for _ in range(5)]
    assert seen == [[i for i, _ in plan(2)[number % 2]] for number in range(5)]


def test_workers_by_default(paths: list[Path], tmp_path: Path) -> None:
    files = PreparedImages(paths, SIZE)
    assert Batches(files, [], CROP).workers == default_workers()
    assert Batches(files, [], CROP, workers=3).workers == 3
    assert Batches(PreparedImages(paths, SIZE, workers=1), [], CROP).workers == 1
    assert Batches(PreparedImages(paths[:10], SIZE), [], CROP).workers == 0
    assert Batches(PreparedImages(paths, SIZE, cache=tmp_path), [], CROP).workers == 0
    assert Batches(PreparedImages(np.zeros((99, 8, 8, 3), np.uint8), 8), [], 8).workers == 0


def test_one_array_of_pixels_is_used_as_it_is() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 12, 3), dtype=np.uint8)
    source = PreparedImages(pixels, 12)
    assert source[4].base is pixels
    ((batch, _),) = Batches(source, in_order(9, 9), 12)
    np.testing.assert_array_equal(batch.permute(0, 2, 3, 1).numpy(), pixels)
    batch += 1  # a batch is a copy
    assert not np.array_equal(batch.permute(0, 2, 3, 1).numpy(), pixels)
    np.testing.assert_array_equal(PreparedImages(pixels, 24)[3], read_prepared(pixels[3], 24))


def test_read_only_pixels_are_fine() -> None:
    pixels = np.zeros((4, 8, 8, 3), np.uint8)
    pixels.setflags(write=False)
    for name in AUGMENTATIONS:
        assert len(list(Batches(PreparedImages(pixels, 8), in_order(4, 2), 8, name))) == 2


def test_paths_pictures_and_arrays_together(paths: list[Path]) -> None:
    array = np.full((5, 9, 3), 7, np.uint8)
    source = PreparedImages([paths[0], str(paths[1]), Image.fromarray(array), array], SIZE)
    np.testing.assert_array_equal(source[1], read_prepared(paths[1], SIZE))
    np.testing.assert_array_equal(source[2], source[3])


def test_boxes(paths: list[Path]) -> None:
    boxes = np.full((3, 4), np.nan)
    boxes[1] = (2, 3, 15, 18)
    source = PreparedImages(paths[:3], SIZE, boxes=boxes)
    np.testing.assert_array_equal(source[0], read_prepared(paths[0], SIZE))
    np.testing.assert_array_equal(source[1], read_prepared(paths[1], SIZE, (2, 3, 15, 18)))
    with pytest.raises(DataError, match=r"\(3, 4\).* Got \(2, 4\) instead"):
        PreparedImages(paths[:3], SIZE, boxes=boxes[:2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_is_one_clean_line(paths: list[Path], tmp_path: Path, workers: int) -> None:
    broken = tmp_path / os.fsdecode(b"d\xe9funt.jpg")
    broken.write_bytes(paths[0].read_bytes()[:300])
    source = PreparedImages([*paths[:8], broken], SIZE)
    assert source.kept.tolist() == list(range(9))
    batches = iter(Batches(source, in_order(9, 3), CROP, workers=workers))
    next(batches)
    next(batches)
    with pytest.raises(DataError) as caught:
        next(batches)
    message = str(caught.value)
    assert message.startswith("Cannot read the picture ")
    assert r"d\xe9funt.jpg" in message
    assert message.isprintable()


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_files_are_skipped_on_request(paths: list[Path], tmp_path: Path, workers: int) -> None:
    empty = tmp_path / "empty.png"
    empty.touch()
    files = [*paths[:40], empty, *paths[40:], tmp_path / "gone.png"]
    seen = []
    source = PreparedImages(files, SIZE, skip_broken=True, workers=workers, progress=lambda *step: seen.append(step))
    assert [(number, Path(path).name) for number, path, _ in source.broken] == [(40, "empty.png"), (71, "gone.png")]
    assert "empty" in source.broken[0].reason
    assert source.kept.dtype == np.int64
    assert source.kept.tolist() == [*range(40), *range(41, 71)]
    assert len(source) == 72
    assert seen[-1] == (72, 72)
    assert sum(len(indices) for _, indices in Batches(source, in_order(source.kept, 16), CROP, workers=0)) == 70


def test_in_order() -> None:
    assert in_order(5, 2) == [[(0, 0), (1, 0)], [(2, 0), (3, 0)], [(4, 0)]]
    assert in_order(np.array([4, 2]), 8) == [[(4, 0), (2, 0)]]
    assert in_order(0, 3) == []
    with pytest.raises(ConfigError, match="Got 0 instead"):
        in_order(5, 0)


def test_a_source_can_be_sent_to_another_process(paths: list[Path]) -> None:
    batches = Batches(PreparedImages(paths, SIZE), (batch for batch in plan()), CROP)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(batches)).source[3], batches.source[3])


def test_no_images_at_all() -> None:
    source = PreparedImages([], SIZE, skip_broken=True)
    assert len(source) == 0
    assert source.kept.tolist() == []
    assert list(Batches(source, in_order(0, 4), CROP)) == []


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: PreparedImages(np.zeros((2, 4, 4, 3), np.float32), 8), DataError, "Got float32"),
        (lambda: PreparedImages(np.zeros((2, 4, 4), np.uint8), 8), DataError, r"Got uint8 of shape \(2, 4, 4\)"),
        (lambda: PreparedImages("picture.jpg", 8), DataError, "Got 'picture.jpg' instead"),
        (lambda: PreparedImages([], 0), ConfigError, "Got 0 instead"),
        (lambda: PreparedImages([], 8, workers=-2), ConfigError, "Got -2 instead"),
        (lambda: Batches(PreparedImages([], 8), [], 0), ConfigError, "Got 0 instead"),
        (lambda: Batches(PreparedImages([], 8), [], 8, "loud"), ConfigError, "Got 'loud' instead"),
    ],
)
def test_bad_settings(build: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()  # type: ignore[operator]
