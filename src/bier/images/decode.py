"""Any picture to RGB: the one place where a file of unknown origin is opened."""

import io
import math
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, UnidentifiedImageError

from bier.errors import DataError
from bier.files import is_url, open_file, printable, read_url

Source = str | os.PathLike[str] | bytes | Image.Image | NDArray[Any]
Box = tuple[float, float, float, float]

MAX_PIXELS = 89_478_485
"""Pictures with more pixels are refused: 256 MB in RGB, the size at which Pillow begins to warn of bombs."""

MOST_BYTES = 2**30  # of a file behind a URL; the largest picture that is read takes 716 MB in the longest format

# Formats that are decoded inside this process. Left out on purpose: EPS, which starts Ghostscript on the file.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA", "ICO", "ICNS"),
    *("PCX", "SGI", "DDS", "QOI", "DIB"),
)
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# The DCT already averages; twice the size that is needed leaves the final resize to do the visible work.
_DRAFT_MARGIN = 2


def open_image(
    source: Source, *, at_least: int | None = None, box: Box | None = None, most_pixels: int | None = None
) -> Image.Image:
    """The picture as an RGB image, upright, as a viewer would show it.

    `source` is a path, the bytes of a file, a PIL image, or an array (H, W), (H, W, 1), (H, W, 3) or
    (H, W, 4) of uint8 or uint16. EXIF orientation is applied; greyscale, palette, CMYK, LAB and 16-bit pictures are
    converted; transparency is laid on white; of an animation the first frame is taken.

    `box` (x1, y1, x2, y2) cuts the picture; it counts pixels of the upright original, is widened to
    whole pixels and clipped to the picture. A box that misses the picture is a DataError.

    `at_least` allows a JPEG to be decoded at a half, a quarter or an eighth of its size, as long as the longest
    side of the result (after the cut) stays at `at_least` or more. Pictures that are smaller to begin
    with are not enlarged.

    Missing, empty, broken, truncated and oversized files (more than `most_pixels`, by default and never more than
    `MAX_PIXELS`) are a DataError that names the file.
    """
    if not isinstance(source, str | os.PathLike | bytes | Image.Image | np.ndarray):
        raise DataError(
            "A picture must be a path, the bytes of a file, a PIL image or an array. "
            f"Got {type(source).__name__} instead."
        )
    limit = MAX_PIXELS if most_pixels is None else min(most_pixels, MAX_PIXELS)
    try:
        with _without_pillow_warnings():
            if isinstance(source, np.ndarray):
                return _finish(_from_array(source), box)
            if isinstance(source, Image.Image):
                _refuse_bombs(source, source, limit)
                return _finish(source, box)
            with _opened(source) as image:
                _refuse_bombs(image, source, limit)
                scale = _draft(image, at_least, box)
                return _finish(image, box, scale)
    except _BadBoxError as error:
        raise DataError(
            f"The box {error} does not touch {_name(source)}; boxes are x1, y1, x2, y2 in pixels."
        ) from None
    except DataError:
        raise
    # A damaged file makes Pillow's readers fail in every way there is, not only with OSError.
    except Exception as error:
        raise DataError(f"Cannot read {_name(source)}: {_reason(error)}.") from error


def box_of(boxes: NDArray[np.float32] | None, row: int) -> Box | None:
    """The box in a row of boxes (N, 4); None for the whole picture: where there are no boxes, or the row is NaN."""
    if boxes is None or np.isnan(boxes[row]).all():
        return None
    x1, y1, x2, y2 = boxes[row].tolist()
    return x1, y1, x2, y2


class _BadBoxError(Exception):
    """A box without a pixel in common with its picture."""


def _name(source: Source) -> str:
    if isinstance(source, bytes):
        return f"the picture given as {len(source)} bytes"
    if isinstance(source, Image.Image):
        filename = getattr(source, "filename", "")
        return f"the picture {printable(filename)}" if filename else "the given PIL image"
    if isinstance(source, np.ndarray):
        return f"the array of shape {source.shape} and type {source.dtype}"
    return f"the picture {printable(source)}"


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it is not in a picture format that is known here, or its beginning is damaged"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@contextmanager
def _opened(source: str | os.PathLike[str] | bytes) -> Iterator[Image.Image]:
    with _data(source) as data:
        if data.seek(0, os.SEEK_END) == 0:
            raise ValueError("the file is empty")
        data.seek(0)
        yield Image.open(data, formats=_known_formats())


def _data(source: str | os.PathLike[str] | bytes) -> IO[bytes]:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    return io.BytesIO(read_url(str(source), MOST_BYTES)) if is_url(source) else open_file(source)


@cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _refuse_bombs(image: Image.Image, source: Source, limit: int) -> None:
    if image.width * image.height > limit:
        raise DataError(
            f"Refused {_name(source)}: {image.width} x {image.height} pixels, more than the limit of {limit:,}. "
            "Scale it down first."
        )


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged notes beside the picture do not make the picture unreadable
        return 1


def _draft(image: Image.Image, at_least: int | None, box: Box | None) -> float:
    """Ask the JPEG decoder for a smaller picture; returns new size / old size (1 where it cannot)."""
    if at_least is None or image.format not in ("JPEG", "MPO"):
        return 1.0
    width, height = image.size
    if box is None:
        needed_of = max(width, height)
    else:
        turned = _orientation(image) >= 5
        x1, y1, x2, y2 = _clip(box, (height, width) if turned else (width, height))
        needed_of = max(x2 - x1, y2 - y1)
    ratio = _DRAFT_MARGIN * at_least / needed_of
    if ratio >= 1:
        return 1.0
    image.draft(None, (math.ceil(width * ratio), math.ceil(height * ratio)))
    return max(image.size) / max(width, height)


def _finish(image: Image.Image, box: Box | None, scale: float = 1.0) -> Image.Image:
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    if turn is not None:
        image = image.transpose(turn)
        for name in set(image.info) - {"transparency"}:  # the note that it must be turned is in one of them
            del image.info[name]
    if box is not None:
        x1, y1, x2, y2 = box
        image = image.crop(_clip((x1 * scale, y1 * scale, x2 * scale, y2 * scale), image.size))
    return to_rgb(image)


def _clip(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box widened to whole pixels and clipped to the picture; never empty."""
    x1, y1, x2, y2 = (float(value) for value in box)
    width, height = size
    if not (x1 < x2 and y1 < y2 and x1 < width and y1 < height and x2 > 0 and y2 > 0):
        raise _BadBoxError(f"({x1:g}, {y1:g}, {x2:g}, {y2:g})")
    left, top = max(0, math.floor(x1)), max(0, math.floor(y1))
    # A small tolerance, so that a whole number that float32 has rounded up does not add a column.
    right, bottom = min(width, math.ceil(x2 - 1e-3)), min(height, math.ceil(y2 - 1e-3))
    return left, top, max(right, left + 1), max(bottom, top + 1)


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB: transparency on white, 16-bit and float values brought to 0..255."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_to_eight_bits(np.asarray(image))).convert("RGB")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), colours).convert("RGB")
    if image.mode == "LAB":
        return _from_lab(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_lab(image: Image.Image) -> Image.Image:
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    transform = ImageCms.buildTransform(lab, srgb, "LAB", "RGB")
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # it is None only when asked to convert in place
    return converted


def _to_eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Integers are taken as 0..65535; beyond that, and for floats, the largest value is white.

    Floats between 0 and 1 keep their meaning (1 is white), and so do floats up to 255.
    """
    exact = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    top = float(exact.max(initial=0.0))
    steps = (65535.0,) if np.issubdtype(values.dtype, np.integer) else (1.0, 255.0, 65535.0)
    white = next((step for step in steps if top <= step), top)
    return np.clip(np.rint(exact * (255.0 / white)), 0, 255).astype(np.uint8)


def _from_array(values: NDArray[Any]) -> Image.Image:
    if values.dtype == np.uint16:
        values = _to_eight_bits(values)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    colour = values.ndim == 3 and values.shape[2] in (3, 4)
    if values.dtype != np.uint8 or values.size == 0 or not (values.ndim == 2 or colour):
        raise DataError(
            "A picture given as an array must have the shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) and "
            f"the type uint8 or uint16. Got shape {values.shape} and type {values.dtype} instead."
        )
    return Image.fromarray(np.ascontiguousarray(values))


_quiet_lock = threading.Lock()
_quiet_depth = 0
_quiet_filters: "warnings.catch_warnings[None] | None" = None


@contextmanager
def _without_pillow_warnings() -> Iterator[None]:
    """Silence what Pillow says about files; what matters becomes a DataError.

    The filters of `warnings` belong to the whole process, so threads that decode at the same time
    share one change: the first sets it and the last takes it back.
    """
    global _quiet_depth, _quiet_filters
    with _quiet_lock:
        if _quiet_depth == 0:
            _quiet_filters = warnings.catch_warnings()
            _quiet_filters.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\.")
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        _quiet_depth += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0 and _quiet_filters is not None:
                _quiet_filters.__exit__(None, None, None)
                _quiet_filters = None


def _forget_other_threads() -> None:
    """For a forked child, which has one thread: a lock that another thread held would never be released there."""
    global _quiet_lock, _quiet_depth, _quiet_filters
    _quiet_lock, _quiet_depth, _quiet_filters = threading.Lock(), 0, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
