"""Longest side to the size, white around it, centred."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bier.errors import ConfigError, DataError
from bier.images import prepare, read_prepared


def black(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), "black")


def test_padding_is_white_and_centred() -> None:
    square = prepare(black(40, 20), 40)
    assert square.shape == (40, 40, 3)
    assert square.dtype == np.uint8
    assert (square[:10] == 255).all()
    assert (square[10:30] == 0).all()
    assert (square[30:] == 255).all()
    tall = prepare(black(11, 40), 40)
    assert (tall[:, :14] == 255).all()
    assert (tall[:, 14:25] == 0).all()
    assert (tall[:, 25:] == 255).all()


def test_a_picture_of_the_right_length_is_only_padded() -> None:
    values = np.random.default_rng(0).integers(0, 256, (30, 64, 3), dtype=np.uint8)
    square = prepare(Image.fromarray(values), 64)
    np.testing.assert_array_equal(square[17:47], values)


@given(width=st.integers(1, 120), height=st.integers(1, 120), size=st.integers(1, 96))
@settings(max_examples=60, deadline=None)
def test_the_picture_keeps_its_proportions(width: int, height: int, size: int) -> None:
    dark = (prepare(black(width, height), size) < 128).all(axis=2)
    rows, columns = np.flatnonzero(dark.any(axis=1)), np.flatnonzero(dark.any(axis=0))
    longest = max(width, height)
    assert len(columns) == max(1, round(width * size / longest))
    assert len(rows) == max(1, round(height * size / longest))
    assert columns[0] == (size - len(columns)) // 2
    assert rows[0] == (size - len(rows)) // 2


def test_scaling_down_averages() -> None:
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 255
    scaled = prepare(Image.fromarray(stripes), 64)
    assert np.abs(scaled[:, 2:-2].astype(int) - 127).max() <= 2


def test_a_box_is_cut_before_scaling() -> None:
    values = np.zeros((50, 100, 3), np.uint8)
    values[10:30, 20:60] = 200
    square = prepare(Image.fromarray(values), 80, (20, 10, 60, 30))
    assert (square[:20] == 255).all()
    assert (square[20:60] == 200).all()


def test_reading_a_reduced_jpeg_is_close_to_reading_all_of_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    small = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    image = small.resize((1600, 1200), Image.Resampling.BICUBIC)
    image.save(tmp_path / "a.jpg", quality=92)
    reduced = read_prepared(tmp_path / "a.jpg", 128).astype(int)
    whole = prepare(Image.open(tmp_path / "a.jpg"), 128).astype(int)
    assert np.abs(reduced - whole).mean() < 1.0
    box = (400.0, 300.0, 1200.0, 900.0)
    reduced = read_prepared(tmp_path / "a.jpg", 128, box).astype(int)
    whole = prepare(Image.open(tmp_path / "a.jpg"), 128, box).astype(int)
    assert np.abs(reduced - whole).mean() < 1.0


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="Got 0 instead"):
        prepare(black(3, 3), 0)
    with pytest.raises(DataError, match="does not touch"):
        prepare(black(3, 3), 8, (5, 5, 9, 9))


def test_real_pictures_are_only_padded(shared_data: Path) -> None:
    paths = sorted((shared_data / "CUB_200_2011" / "images").glob("*/*.jpg"))[::400]
    assert paths
    for path in paths:
        values = np.asarray(Image.open(path).convert("RGB"))
        top, left = (256 - values.shape[0]) // 2, (256 - values.shape[1]) // 2
        square = read_prepared(path, 256)
        np.testing.assert_array_equal(square[top : top + values.shape[0], left : left + values.shape[1]], values)
