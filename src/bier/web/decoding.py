"""Decoding of uploads and of thumbnails, for worker processes, whose time and memory are limited.

Imports no torch: a worker starts in half a second and takes 40 MB.
"""

import io
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from bier.errors import DataError
from bier.images.decode import Box, Source, open_image
from bier.images.transforms import prepare
from bier.system import trim_memory

SIZES = (256, 640)  # longest side in pixels: of a tile, and of the query
FULL = 4_096  # of a picture that is looked at on its own
Refusal = Literal["too_many_pixels", "not_a_picture", "broken_picture", "too_slow"]
_LOSSLESS = 128  # pictures no larger are sent as PNG
_MOST_SCANS = 100  # of a progressive JPEG; encoders write about ten. Each scan decodes the whole picture once more.
_MEMORY = 3 * 2**29  # bytes that decoding may take: 1.5 GB, a transparent picture of `MAX_PIXELS` needs 1.4


class Thumbnail(NamedTuple):
    data: bytes
    media_type: str


class Decoded(NamedTuple):
    """An upload as the network and the page take it: a square of uint8 (size, size, 3), and thumbnails by size."""

    square: NDArray[np.uint8]
    thumbnails: dict[int, Thumbnail]


def decode_upload(data: bytes, size: int, most_pixels: int, seconds: float) -> Decoded | Refusal:
    """An uploaded file, or why it is refused. Exceptions lose their cause on the way between processes."""
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > _MOST_SCANS:
        return "too_slow"
    try:
        with _limited(seconds):
            image = open_image(data, at_least=max(*SIZES, size), most_pixels=most_pixels)
            return Decoded(prepare(image, size), {side: thumbnail(image, side) for side in SIZES})
    except (DataError, MemoryError) as error:
        return _reason(error)


def draw(source: Source, box: Box | None, size: int, seconds: float) -> Thumbnail | Refusal:
    """The thumbnail of an image of the collection."""
    try:
        with _limited(seconds):
            return thumbnail(open_image(source, at_least=size, box=box), size)
    except (DataError, MemoryError) as error:
        return _reason(error)


def thumbnail(image: Image.Image, size: int) -> Thumbnail:
    """An RGB picture scaled down to `size` (never up), in a format that every browser shows."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    if max(small.size) <= _LOSSLESS:
        small.save(file, "PNG", optimize=True)
        return Thumbnail(file.getvalue(), "image/png")
    small.save(file, "JPEG", quality=85)
    return Thumbnail(file.getvalue(), "image/jpeg")


def _reason(error: DataError | MemoryError) -> Refusal:
    """Why a picture cannot be had: by the check of `open_image` (too many pixels), or because of an error of Pillow."""
    if error.__cause__ is None or isinstance(error.__cause__, MemoryError):
        return "too_many_pixels"
    return "not_a_picture" if isinstance(error.__cause__, UnidentifiedImageError) else "broken_picture"


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End this process when the block takes more processor time; return what it freed at the end."""
    _limit_process()
    timed = hasattr(signal, "setitimer")
    try:
        if timed:  # the signal has no handler, so that it ends the process inside a decoder too
            signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
        trim_memory()


@cache
def _limit_process() -> None:
    """Once per worker process: limit its memory, where the system can, and leave Ctrl-C to the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
