"""Augmentations: what each may and may not do, and that a seed says it all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bier.errors import ConfigError
from bier.images import AUGMENTATIONS, augment


def square(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def positions(picture: np.ndarray, crop: int) -> dict[bytes, tuple[int, int]]:
    room = range(picture.shape[0] - crop + 1)
    return {picture[y : y + crop, x : x + crop].tobytes(): (y, x) for y in room for x in room}


@given(
    size=st.integers(4, 40),
    crop=st.integers(4, 40),
    name=st.sampled_from(AUGMENTATIONS),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=150, deadline=None)
def test_shape_type_and_repeatability(size: int, crop: int, name: str, seed: int) -> None:
    picture = square(size)
    before = picture.copy()
    first = augment(picture, crop, name, seed)
    assert first.shape == (crop, crop, 3)
    assert first.dtype == np.uint8
    np.random.default_rng(5).random()
    np.testing.assert_array_equal(first, augment(picture.copy(), crop, name, seed))
    np.testing.assert_array_equal(picture, before)


def test_none_is_the_centre() -> None:
    picture = square(256)
    for seed in (0, 7):
        np.testing.assert_array_equal(augment(picture, 224, "none", seed), picture[16:240, 16:240])


def test_shift_visits_every_position_and_never_mirrors() -> None:
    picture = square(12)
    where = positions(picture, 9)
    seen = {where[augment(picture, 9, "shift", seed).tobytes()] for seed in range(300)}
    assert seen == {(y, x) for y in range(4) for x in range(4)}


def test_paper_mirrors_half_of_the_time() -> None:
    picture = square(12)
    where, mirrored = positions(picture, 9), positions(picture[:, ::-1], 9)
    cut = [augment(picture, 9, "paper", seed).tobytes() for seed in range(600)]
    assert all(one in where or one in mirrored for one in cut)
    assert 240 < sum(one in mirrored for one in cut) < 360
    assert len({where[one] for one in cut if one in where}) == 16


@pytest.mark.parametrize("name", ["paper", "shift"])
def test_a_square_no_larger_than_the_crop_still_moves(name: str) -> None:
    picture = square(48)
    wide = np.pad(picture, ((4, 4), (4, 4), (0, 0)), mode="edge")
    allowed = positions(wide, 48) | (positions(wide[:, ::-1], 48) if name == "paper" else {})
    cut = [augment(picture, 48, name, seed).tobytes() for seed in range(200)]
    assert all(one in allowed for one in cut)
    assert len(set(cut)) > 60


def test_none_on_a_small_square_repeats_the_border() -> None:
    picture = square(10)
    result = augment(picture, 14, "none", 0)
    np.testing.assert_array_equal(result[2:12, 2:12], picture)
    np.testing.assert_array_equal(result[0, 2:12], picture[0])


def test_strong_changes_colours_within_bounds() -> None:
    grey = np.full((32, 32, 3), 120, np.uint8)
    results = np.stack([augment(grey, 24, "strong", seed) for seed in range(200)]).astype(int)
    assert (results == results[:, :1, :1]).all()  # a flat picture stays flat
    assert np.abs(results - results.mean(axis=3, keepdims=True)).max() <= 1  # and grey stays grey
    levels = results[:, 0, 0, 0]
    assert levels.min() < 95
    assert levels.max() > 145
    assert levels.min() >= 120 * 0.7 - 1
    assert levels.max() <= 120 * 1.3 + 1


def test_strong_turns_hue_and_saturation_a_little() -> None:
    red = np.full((16, 16, 3), (180, 60, 60), np.uint8)
    results = np.stack([augment(red, 16, "strong", seed)[0, 0] for seed in range(200)]).astype(int)
    assert (results[:, 0] > results[:, 1]).all()
    assert (results[:, 0] > results[:, 2]).all()
    assert (results[:, 1] > results[:, 2] + 4).any()
    assert (results[:, 2] > results[:, 1] + 4).any()


def test_strong_takes_parts_of_many_sizes() -> None:
    ramp = np.broadcast_to(np.arange(0, 256, 2, dtype=np.uint8)[None, :, None], (128, 128, 3))
    spans = [int(np.ptp(augment(ramp, 64, "strong", seed)[32, :, 0].astype(int))) for seed in range(200)]
    assert min(spans) < 120
    assert max(spans) > 200


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"'none', 'paper', 'shift', 'strong'. Got 'papper' instead"):
        augment(square(8), 4, "papper", 0)
