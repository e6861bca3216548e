"""From a picture to what the network sees: the paper's square, then a crop. Every random choice comes from one seed."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bier.errors import ConfigError
from bier.images.decode import Box, Source, open_image

WHITE = 255


def prepare(image: Image.Image, size: int, box: Box | None = None) -> NDArray[np.uint8]:
    """A square of uint8 pixels, shape (size, size, 3).

    The picture (or its `box`, see `open_image`) is scaled up or down until its longest side is `size`, keeping its
    proportions, and set in the middle of a white square; with an odd remainder the larger margin is
    on the right and at the bottom. A picture whose longest side is `size` already is only padded.
    Scaling is bilinear with antialiasing. The shorter side is never less than one pixel.
    """
    return _square(open_image(image, box=box), size)


def read_prepared(source: Source, size: int, box: Box | None = None) -> NDArray[np.uint8]:
    """`prepare` straight from a file, bytes, PIL image or array; large JPEGs are decoded at a reduced size."""
    return _square(open_image(source, at_least=size, box=box), size)


def _square(picture: Image.Image, size: int) -> NDArray[np.uint8]:
    if size < 1:
        raise ConfigError(f"The 'size' of a prepared image must be a positive number of pixels. Got {size} instead.")
    longest = max(picture.size)
    if longest != size:
        width, height = (max(1, round(side * size / longest)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=3.0)
    left, top = (size - picture.width) // 2, (size - picture.height) // 2
    square = np.full((size, size, 3), WHITE, np.uint8)
    square[top : top + picture.height, left : left + picture.width] = np.asarray(picture)
    return square


Pixels = NDArray[np.uint8]

AUGMENTATIONS = ("none", "paper", "shift", "strong")

# `strong`: share of the area, proportions, and how far each colour property may move.
_AREA = (0.2, 1.0)
_PROPORTIONS = (3 / 4, 4 / 3)
_BRIGHTNESS = _CONTRAST = _SATURATION = 0.3
_HUE_RADIANS = 0.05 * 2 * np.pi
_GREY = np.array([0.299, 0.587, 0.114])
_RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_YIQ_TO_RGB = np.linalg.inv(_RGB_TO_YIQ)


def check_augmentation(name: str) -> str:
    """The name itself, or a ConfigError that lists the names there are."""
    if name not in AUGMENTATIONS:
        known = ", ".join(repr(one) for one in AUGMENTATIONS)
        raise ConfigError(f"The 'augment' parameter must be one of {known}. Got {name!r} instead.")
    return name


def augment(prepared: Pixels, crop: int, name: str, seed: int) -> Pixels:
    """A (crop, crop, 3) view of a prepared (S, S, 3) square, both uint8.

    - `none`: the centre crop; `seed` plays no part.
    - `paper`: a random crop, mirrored half of the time.
    - `shift`: a random crop that is never mirrored, for characters and other things that have a left and a right.
    - `strong`: a random part (20 to 100% of the area, proportions 3:4 to 4:3) scaled to the crop, mirrored half of the
      time, with small random changes of brightness, contrast, saturation and hue.

    The result depends on the pixels, `crop`, `name` and `seed` alone, never on the process, the order of calls or a
    global generator. `seed` is any integer from 0 to 2^64 - 1.

    Where the square is not larger than the crop there is nothing to move within: the square is then widened
    by repeating its border, for `none` just to the crop, for `paper` and `shift` by a further twelfth of the
    crop on every side (4 pixels for 48), so that the picture still moves. `strong` scales and needs no margin.
    """
    if name == "none":
        return _cut(_widened(prepared, crop), crop, None)
    generator = np.random.Generator(np.random.PCG64(seed))
    if name in ("paper", "shift"):
        margin = 0 if prepared.shape[0] > crop else max(1, crop // 12)
        chosen = _cut(_widened(prepared, crop + 2 * margin), crop, generator)
        return _mirrored(chosen) if name == "paper" and generator.random() < 0.5 else chosen
    check_augmentation(name)
    return _strong(prepared, crop, generator)


def _widened(square: Pixels, least: int) -> Pixels:
    missing = least - square.shape[0]
    if missing <= 0:
        return square
    before, after = missing // 2, missing - missing // 2
    return np.pad(square, ((before, after), (before, after), (0, 0)), mode="edge")


def _cut(square: Pixels, crop: int, generator: np.random.Generator | None) -> Pixels:
    room = square.shape[0] - crop
    top, left = (room // 2, room // 2) if generator is None else generator.integers(0, room + 1, 2)
    return square[top : top + crop, left : left + crop]


def _mirrored(pixels: Pixels) -> Pixels:
    # One channel at a time: five times faster than a reversed copy of three-byte pixels.
    mirrored = np.empty(pixels.shape, np.uint8)
    for channel in range(3):
        mirrored[:, :, channel] = pixels[:, ::-1, channel]
    return mirrored


def _strong(square: Pixels, crop: int, generator: np.random.Generator) -> Pixels:
    box = _random_part(square.shape[0], generator)
    image = Image.fromarray(np.ascontiguousarray(square))
    image = image.resize((crop, crop), Image.Resampling.BILINEAR, box=box)
    if generator.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    mean = float(np.asarray(image.convert("L")).mean())
    return np.asarray(image.convert("RGB", _colour_change(mean, generator)))


def _random_part(size: int, generator: np.random.Generator) -> tuple[float, float, float, float]:
    """A part that fits into the square; proportions that do not fit at the drawn area are cut to the square."""
    area = size * size * generator.uniform(*_AREA)
    proportion = np.exp(generator.uniform(*np.log(_PROPORTIONS)))
    width, height = min(size, np.sqrt(area * proportion)), min(size, np.sqrt(area / proportion))
    left, top = generator.uniform(0, size - width), generator.uniform(0, size - height)
    return float(left), float(top), float(min(size, left + width)), float(min(size, top + height))


def _colour_change(mean: float, generator: np.random.Generator) -> tuple[float, ...]:
    """Hue, saturation, contrast and brightness as one affine map of (R, G, B): the 3x4 matrix, row by row.

    All four are linear in the pixel (contrast moves it towards the picture's mean grey), so one
    pass over the pixels does what four would.
    """
    angle = generator.uniform(-_HUE_RADIANS, _HUE_RADIANS)
    saturation = generator.uniform(1 - _SATURATION, 1 + _SATURATION)
    contrast = generator.uniform(1 - _CONTRAST, 1 + _CONTRAST)
    brightness = generator.uniform(1 - _BRIGHTNESS, 1 + _BRIGHTNESS)
    turn = np.array([[1, 0, 0], [0, np.cos(angle), -np.sin(angle)], [0, np.sin(angle), np.cos(angle)]])
    hue = _YIQ_TO_RGB @ turn @ _RGB_TO_YIQ
    saturate = saturation * np.eye(3) + (1 - saturation) * np.outer(np.ones(3), _GREY)
    matrix = brightness * contrast * (saturate @ hue)
    offset = brightness * (1 - contrast) * mean
    return tuple(float(value) for row in matrix for value in (*row, offset))
