"""Rows of images with names as one picture; the contact sheet has a row for each of some classes."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from bier.data.records import Part
from bier.errors import ConfigError, DataError
from bier.files import name_text
from bier.images.decode import box_of
from bier.images.transforms import read_prepared

TILE, GAP, MARGIN, NAMES, TITLE = 112, 6, 16, 176, 44  # pixels
INK, PALE, PAPER = (28, 28, 32), (120, 120, 128), (255, 255, 255)


class SheetRow(NamedTuple):
    """A name, a note below it, and the images of a row by their numbers."""

    name: str
    note: str
    images: Sequence[int]


def contact_sheet(part: Part, title: str, classes: int = 12, images: int = 8) -> Image.Image:
    """The sheet of a part. Classes are taken evenly from first to last, and so are the images of each class.

    A class with fewer images than columns leaves the rest of its row empty. Broken images are a DataError.
    """
    if part.width is not None:
        raise DataError("A contact sheet needs images. These are vectors that were computed before.")
    if classes < 1 or images < 1:
        raise ConfigError(
            f"A contact sheet needs at least one class and one image. Got {classes} and {images} instead."
        )
    rows = []
    for label in _evenly(np.unique(part.labels), classes):
        members = np.flatnonzero(part.labels == label)
        note = f"{len(members)} image{'s' if len(members) != 1 else ''}"
        rows.append(SheetRow(part.classes[label], note, _evenly(members, images).tolist()))
    return draw_rows(part, title, rows, images)


def draw_rows(part: Part, title: str, rows: Sequence[SheetRow], columns: int) -> Image.Image:
    """A sheet with room for `columns` images in each row."""
    sheet = Image.new("RGB", (_left(columns) + MARGIN - GAP, _top(len(rows)) + MARGIN - GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, fill=INK, font=_font(18, bold=True))
    for number, row in enumerate(rows):
        _name(draw, row.name, row.note, _top(number))
        for column, index in enumerate(row.images):
            sheet.paste(Image.fromarray(_tile(part, index)), (_left(column), _top(number)))
    return sheet


def _left(column: int) -> int:
    return MARGIN + NAMES + column * (TILE + GAP)


def _top(row: int) -> int:
    return MARGIN + TITLE + row * (TILE + GAP)


def _evenly(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """At most `count` of the values, evenly spaced, both ends among them."""
    if len(values) <= count:
        return values
    return values[np.arange(count) * (len(values) - 1) // max(count - 1, 1)]


def _tile(part: Part, index: int) -> NDArray[np.uint8]:
    return read_prepared(part.images[index], TILE, box_of(part.boxes, index))


def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans from matplotlib, which has the letters of every alphabet of `glyphs`."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"DejaVuSans{'-Bold' if bold else ''}.ttf")
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def _name(draw: ImageDraw.ImageDraw, name: str, note: str, top: int) -> None:
    """The name in up to four lines and the note below it, in the middle of a row."""
    shown = name_text(name).replace("_", " ")
    lines = textwrap.wrap(shown, width=20, max_lines=4, placeholder=" …") or ["?"]
    lines.append(note)
    y = top + (TILE - 19 * len(lines)) // 2
    for line in lines[:-1]:
        draw.text((MARGIN, y), line, fill=INK, font=_font(14))
        y += 19
    draw.text((MARGIN, y + 1), lines[-1], fill=PALE, font=_font(12))
