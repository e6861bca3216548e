"""A query and its results as one picture: a frame says right or wrong, score and name stand beneath."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from bier.errors import SearchError
from bier.files import file_aside, printable, writing
from bier.images import Box, Source
from bier.images.decode import open_image

SIDE, FRAME, GAP, TEXT = 200, 6, 14, 44
RIGHT, WRONG, NEUTRAL = "#1a7f37", "#cf222e", "#d0d7de"
_PER_ROW = 6


class Tile(NamedTuple):
    """An image, the two lines beneath it, and whether it is right (None: not known)."""

    picture: tuple[Source, Box | None]
    title: str
    name: str
    right: bool | None


def draw_row(tiles: Sequence[Tile], out: Path) -> None:
    """The query (the first tile) on the left, its results in rows of at most six beside it."""
    if out.suffix.lower() not in Image.registered_extensions():
        raise SearchError(f"The '--picture' option must be a picture file like row.png. Got {str(out)!r} instead.")
    results = tiles[1:]
    columns = max(1, min(_PER_ROW, len(results)))
    rows = max(1, -(-len(results) // columns))
    wide, high = SIDE + 2 * FRAME + GAP, SIDE + 2 * FRAME + TEXT + GAP
    canvas = Image.new("RGB", (GAP + (columns + 1) * wide + GAP, GAP + rows * high), "white")
    _place(canvas, tiles[0], GAP, GAP)
    for number, tile in enumerate(results):
        _place(canvas, tile, 2 * GAP + (1 + number % columns) * wide, GAP + (number // columns) * high)
    line = GAP + wide
    ImageDraw.Draw(canvas).line([(line, GAP), (line, canvas.height - GAP)], fill=NEUTRAL, width=2)
    _save(canvas, out)


def _place(canvas: Image.Image, tile: Tile, left: int, top: int) -> None:
    draw = ImageDraw.Draw(canvas)
    colour = NEUTRAL if tile.right is None else RIGHT if tile.right else WRONG
    outer = SIDE + 2 * FRAME
    draw.rectangle([left, top, left + outer - 1, top + outer - 1], fill=colour)
    draw.rectangle([left + FRAME, top + FRAME, left + FRAME + SIDE - 1, top + FRAME + SIDE - 1], fill="white")
    image = open_image(tile.picture[0], at_least=SIDE, box=tile.picture[1])
    image.thumbnail((SIDE, SIDE))
    canvas.paste(image, (left + FRAME + (SIDE - image.width) // 2, top + FRAME + (SIDE - image.height) // 2))
    title, small = ImageFont.load_default(17), ImageFont.load_default(14)
    # Colour alone would not tell everybody which is which.
    mark = "" if tile.right is None else "right, " if tile.right else "wrong, "
    draw.text((left, top + outer + 3), mark + tile.title, fill="#1f2328" if not mark else colour, font=title)
    draw.text((left, top + outer + 24), _fitting(draw, printable(tile.name), small, outer), fill="#59636e", font=small)


def _fitting(
    draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> str:
    """The text, cut with dots where it is too wide."""
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(f"{text}...", font=font) > width:
        text = text[:-1]
    return f"{text}..."


def _save(canvas: Image.Image, out: Path) -> None:
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with file_aside(out) as aside:
            canvas.save(aside, format=Image.registered_extensions()[out.suffix.lower()])
