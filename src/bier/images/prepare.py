"""The paper's preprocessing: longest side to `size`, the shorter side padded with white."""

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
