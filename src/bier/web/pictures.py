"""Small pictures for the page, made once and remembered."""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from PIL import Image

SIZES = (256, 640)  # longest side in pixels: a tile, and the query
_SMALL = 128  # pictures no larger are sent without loss
_MEMORY = 64 * 2**20


class Thumbnail(NamedTuple):
    data: bytes
    media_type: str


def thumbnail(image: Image.Image, size: int) -> Thumbnail:
    """An RGB picture scaled down to `size` (never up), as a file that every browser shows."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    if max(small.size) <= _SMALL:
        small.save(file, "PNG", optimize=True)
        return Thumbnail(file.getvalue(), "image/png")
    small.save(file, "JPEG", quality=85)
    return Thumbnail(file.getvalue(), "image/jpeg")


class Memory:
    """The thumbnails used last, up to 64 MB of them. Safe to use from several threads."""

    def __init__(self, most: int = _MEMORY) -> None:
        self._most, self._bytes = most, 0
        self._known: OrderedDict[tuple[str, int], Thumbnail] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, size: int, make: Callable[[], Thumbnail]) -> Thumbnail:
        key = (name, size)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        made = make()
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self._bytes += len(made.data)
            while self._bytes > self._most and self._known:
                self._bytes -= len(self._known.popitem(last=False)[1].data)
        return made
