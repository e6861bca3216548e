"""Copies of a picture are told from other pictures."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps

from bier.evaluate.audit import COPY, likeness, thumbnail


def drawn(seed: int) -> Image.Image:
    rough = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((240, 180), Image.Resampling.BICUBIC)


def saved(image: Image.Image) -> Image.Image:
    file = BytesIO()
    image.save(file, "JPEG", quality=40)
    return Image.open(file)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "re-saved": saved,
    "resized": lambda image: image.resize((90, 70)),
    "stretched": lambda image: image.resize((200, 200)),
    "brightened": lambda image: image.point(lambda value: min(255, 1.2 * value)),
    "grey": lambda image: image.convert("L"),
    "cropped on all sides": lambda image: image.crop((9, 7, 230, 173)),
    "cropped on one side": lambda image: image.crop((40, 0, 240, 180)),
    "a tenth cropped on all sides": lambda image: image.crop((24, 18, 216, 162)),
    "mirrored and cropped": lambda image: ImageOps.mirror(image.crop((0, 8, 225, 180))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_picture_is_a_copy_from_either_side(change: str) -> None:
    originals = np.stack([thumbnail(drawn(seed)) for seed in range(10)])
    changed = np.stack([thumbnail(CHANGES[change](drawn(seed))) for seed in range(10)])
    for pair in ((originals, changed), (changed, originals)):
        alike, mirrored = likeness(*pair)
        assert (alike >= COPY).all(), alike
        assert mirrored.tolist() == ["mirrored" in change] * 10


def test_other_pictures_are_no_copies() -> None:
    thumbnails = np.stack([thumbnail(drawn(seed)) for seed in range(40)])
    one, other = np.triu_indices(40, 1)
    alike, _ = likeness(thumbnails[one], thumbnails[other])
    assert alike.max() < 0.8


def test_one_colour_is_like_nothing() -> None:
    plain = np.full((2, 32, 32), 200, np.uint8)
    plain[1] = 201
    assert likeness(plain[:1], plain[1:])[0].tolist() == [0.0]
    assert likeness(plain[:0], plain[:0])[0].shape == (0,)
