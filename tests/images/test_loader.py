"""A Dataset of images and its batches: the same tensors for every number of workers, in our loader and a plain one."""

import itertools
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from bier.errors import ConfigError, DataError
from bier.images import (
    AUGMENTATIONS,
    ImageDataset,
    augment,
    default_workers,
    find_broken,
    in_order,
    load_batches,
    read_prepared,
)

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
    dataset = ImageDataset(paths, SIZE, crop=CROP, augment=name)
    expected = [np.stack([augment(read_prepared(paths[i], SIZE), CROP, name, seed) for i, seed in b]) for b in plan()]
    for workers in (0, 2):
        found = list(dataset.batches(plan(), workers))
        assert len(found) == len(expected)
        for (pixels, indices), right, batch in zip(found, expected, plan(), strict=True):
            assert pixels.shape == (5, 3, CROP, CROP)
            assert pixels.dtype == torch.uint8
            assert pixels.is_contiguous(memory_format=torch.channels_last)
            assert indices.dtype == torch.int64
            assert indices.tolist() == [index for index, _ in batch]
            np.testing.assert_array_equal(pixels.permute(0, 2, 3, 1).numpy(), right)


def test_an_endless_plan(paths: list[Path]) -> None:
    batches = ImageDataset(paths, SIZE, crop=CROP).batches(itertools.cycle(plan(2)), workers=1)
    seen = [next(batches)[1].tolist() for _ in range(5)]
    assert seen == [[i for i, _ in plan(2)[number % 2]] for number in range(5)]


def test_the_dataset_and_its_indices_go_into_a_plain_data_loader(paths: list[Path]) -> None:
    """Items are (index, seed) as a batch sampler gives them, or indices; torch's own collation works too."""
    labels = np.arange(70) % 7
    dataset = ImageDataset(paths, SIZE, crop=CROP, augment="paper", labels=labels)
    found = list(DataLoader(dataset, batch_sampler=plan(), num_workers=2))
    ours = list(dataset.batches(plan(), workers=0))
    for (pixels, classes), (expected, _), batch in zip(found, ours, plan(), strict=True):
        assert torch.equal(pixels, expected)
        assert classes.tolist() == [labels[index] for index, _ in batch]
    plain = list(DataLoader(ImageDataset(paths[:5], SIZE), batch_size=2))
    assert [tuple(pixels.shape) for pixels in plain] == [(2, 3, SIZE, SIZE), (2, 3, SIZE, SIZE), (1, 3, SIZE, SIZE)]
    np.testing.assert_array_equal(plain[1][0].permute(1, 2, 0).numpy(), read_prepared(paths[2], SIZE))


def test_a_view_reads_nothing_again(paths: list[Path]) -> None:
    dataset = ImageDataset(paths[:4], SIZE)
    view = dataset.view(8, "paper", [0, 1, 2, 3])
    pixels, label = view[2, 9]
    assert (tuple(pixels.shape), label) == ((3, 8, 8), 2)
    assert dataset[2].shape == (3, SIZE, SIZE)


def test_workers_by_default(paths: list[Path], tmp_path: Path) -> None:
    assert ImageDataset(paths, SIZE).best_workers == default_workers()
    assert ImageDataset(paths, SIZE, workers=1).best_workers == 1
    assert ImageDataset(paths[:10], SIZE).best_workers == 0
    assert ImageDataset(paths, SIZE).cached(tmp_path).best_workers == 0
    assert ImageDataset(np.zeros((99, 8, 8, 3), np.uint8), 8).best_workers == 0


def test_one_array_of_pixels_is_used_as_it_is() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 12, 3), dtype=np.uint8)
    source = ImageDataset(pixels, 12)
    assert source.prepared(4).base is pixels
    source[4].zero_()  # a tensor is a copy
    (batch,) = load_batches(source, in_order(9, 9))
    np.testing.assert_array_equal(batch.permute(0, 2, 3, 1).numpy(), pixels)
    batch += 1  # a batch is a copy
    assert not np.array_equal(batch.permute(0, 2, 3, 1).numpy(), pixels)
    np.testing.assert_array_equal(ImageDataset(pixels, 24).prepared(3), read_prepared(pixels[3], 24))


def test_read_only_pixels_are_fine() -> None:
    pixels = np.zeros((4, 8, 8, 3), np.uint8)
    pixels.setflags(write=False)
    for name in AUGMENTATIONS:
        assert len(list(ImageDataset(pixels, 8, augment=name).batches(in_order(4, 2)))) == 2


def test_paths_pictures_and_arrays_together(paths: list[Path]) -> None:
    array = np.full((5, 9, 3), 7, np.uint8)
    source = ImageDataset([paths[0], str(paths[1]), Image.fromarray(array), array], SIZE)
    np.testing.assert_array_equal(source.prepared(1), read_prepared(paths[1], SIZE))
    np.testing.assert_array_equal(source.prepared(2), source.prepared(3))


def test_boxes(paths: list[Path]) -> None:
    boxes = np.full((3, 4), np.nan)
    boxes[1] = (2, 3, 15, 18)
    source = ImageDataset(paths[:3], SIZE, boxes=boxes)
    np.testing.assert_array_equal(source.prepared(0), read_prepared(paths[0], SIZE))
    np.testing.assert_array_equal(source.prepared(1), read_prepared(paths[1], SIZE, (2, 3, 15, 18)))
    with pytest.raises(DataError, match=r"\(3, 4\).* Got \(2, 4\) instead"):
        ImageDataset(paths[:3], SIZE, boxes=boxes[:2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_is_one_clean_line(paths: list[Path], tmp_path: Path, workers: int) -> None:
    broken = tmp_path / os.fsdecode(b"d\xe9funt.jpg")
    broken.write_bytes(paths[0].read_bytes()[:300])
    source = ImageDataset([*paths[:8], broken], SIZE)
    batches = source.batches(in_order(9, 3), workers)
    next(batches)
    next(batches)
    with pytest.raises(DataError) as caught:
        next(batches)
    message = str(caught.value)
    assert message.startswith("Cannot read the picture ")
    assert r"d\xe9funt.jpg" in message
    assert message.isprintable()


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_files_are_found(
    paths: list[Path], tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty.png"
    empty.touch()
    files = [*paths[:40], empty, *paths[40:], tmp_path / "gone.png"]
    monkeypatch.setattr("bier.images.dataset._readable", set())
    seen: list[tuple[int, int]] = []
    broken = find_broken(files, None, workers, lambda *step: seen.append(step), tmp_path / "cache")
    assert [(number, Path(path).name) for number, path, _ in broken] == [(40, "empty.png"), (71, "gone.png")]
    assert "empty" in broken[0].reason
    assert seen[-1] == (72, 72)


def test_each_file_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its stamp: in this process, and with a folder to remember in, in the next one too. A box that misses is not
    what was checked before."""
    paths = [tmp_path / f"{number}.png" for number in range(9)]
    for path in paths:
        Image.new("RGB", (30, 20)).save(path)
    seen: list[tuple[int, int]] = []

    def checked(boxes: object = None) -> list[int]:
        seen.clear()
        found = find_broken(paths, boxes, 0, lambda *step: seen.append(step), tmp_path / "cache")
        return [image.number for image in found]

    assert (checked(), len(seen)) == ([], len(paths))
    assert (checked(), len(seen)) == ([], 0)
    monkeypatch.setattr("bier.images.dataset._readable", set())  # the next process
    assert (checked(), len(seen)) == ([], 0)
    paths[3].write_bytes(b"no picture")
    assert (checked(), len(seen)) == ([3], 1)
    boxes = np.full((len(paths), 4), np.nan)
    boxes[5] = (900, 900, 950, 950)
    assert (checked(boxes), len(seen)) == ([3, 5], 2)


def test_in_order() -> None:
    assert list(in_order(5, 2)) == [[(0, 0), (1, 0)], [(2, 0), (3, 0)], [(4, 0)]]
    assert list(in_order(np.array([4, 2]), 8)) == [[(4, 0), (2, 0)]]
    assert list(in_order(0, 3)) == []
    with pytest.raises(ConfigError, match="Got 0 instead"):
        in_order(5, 0)


def test_a_source_can_be_sent_to_another_process(paths: list[Path]) -> None:
    dataset = ImageDataset(paths, SIZE)
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[3], dataset[3])


def test_no_images_at_all() -> None:
    source = ImageDataset([], SIZE)
    assert len(source) == 0
    assert find_broken([]) == []
    assert list(source.batches(in_order(0, 4))) == []


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: ImageDataset(np.zeros((2, 4, 4, 3), np.float32), 8), DataError, "Got float32"),
        (lambda: ImageDataset(np.zeros((2, 4, 4), np.uint8), 8), DataError, r"Got uint8 of shape \(2, 4, 4\)"),
        (lambda: ImageDataset("picture.jpg", 8), DataError, "Got 'picture.jpg' instead"),
        (lambda: ImageDataset([], 0), ConfigError, "Got 0 instead"),
        (lambda: ImageDataset([], 8, workers=-2), ConfigError, "Got -2 instead"),
        (lambda: ImageDataset([], 8, crop=0), ConfigError, "Got 0 instead"),
        (lambda: ImageDataset([], 8, augment="loud"), ConfigError, "Got 'loud' instead"),
        (lambda: ImageDataset([], 8, labels=[1]), DataError, r"one number per image, 0\. Got \(1,\)"),
    ],
)
def test_bad_settings(build: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()  # type: ignore[operator]
