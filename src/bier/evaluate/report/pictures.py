"""The paper's two pictures: a query with each learner's nearest image, and a query with its five nearest."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from bier.evaluate.ensemble import EnsembleResult
from bier.evaluate.recall import nearest, unit_parts
from bier.method.equations import ensemble_vector

ImageOf = Callable[[int], "Image.Image | NDArray[np.uint8]"]

# bluish green and vermillion of Okabe and Ito, which colour-blind people can tell apart; a mark shows the same
RIGHT, WRONG, NEUTRAL = (0, 158, 115), (213, 94, 0), (140, 149, 159)
SIDE, FRAME, GAP, MARK, HEAD = 128, 6, 12, 34, 30
SCALE = 2  # drawn twice as large: sharp on dense screens


class Cell(NamedTuple):
    """One image of a row: its index in the caller's arrays, and whether it is right (None: the query itself)."""

    image: int
    right: bool | None
    score: float | None


class Picture(NamedTuple):
    """A grid of images and the sentence that says by which rule its rows were chosen."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def choose_pictures(result: EnsembleResult, count: int = 4, seed: int = 0) -> list[Picture]:
    """Choose queries by rule, never by hand, and find the images to show. A rule that fits no query gives no picture.

    `count` rows per picture, from different classes where there are enough. Needs classes with more than one image.
    """
    right = np.stack([result.ranks[f"learner-{m + 1}"] == 0 for m in range(len(result.groups))])[:, : result.queries]
    ensemble = result.ranks["ensemble"][: result.queries]
    has_positive = ensemble >= 0
    hit, votes = ensemble == 0, right.sum(0)
    shuffled = np.random.default_rng(seed).permutation(result.queries)
    pictures = []
    if len(right) > 1:
        split = has_positive & (votes > 0) & (votes < len(right))
        pictures.append(_learner_picture(result, _one_per_class(shuffled[split[shuffled]], result, count)))
    typical = _one_per_class(shuffled[has_positive[shuffled]], result, count)
    pictures.append(_nearest_picture(result, typical, "typical", TYPICAL))
    if len(right) > 1:
        saved = shuffled[(hit & (votes < len(right)))[shuffled]]
        hard = _one_per_class(saved[np.argsort(votes[saved], kind="stable")], result, count)
        pictures.append(_nearest_picture(result, hard, "hard", HARD))
    failed = np.flatnonzero(has_positive & ~hit)
    confidence = result.scan.rival_score.numpy()[failed]
    surest = _one_per_class(failed[np.argsort(-confidence, kind="stable")], result, count)
    pictures.append(_nearest_picture(result, surest, "failed", FAILED))
    return [picture for picture in pictures if picture.rows]


DISAGREE = "The query and the nearest image by each learner alone. Rule: random queries on which the learners disagree."
HARD = "Hard cases. Rule: the ensemble is right where the fewest of its learners are."
TYPICAL = "Typical cases. Rule: queries drawn at random."
FAILED = "Failed cases. Rule: the nearest image is wrong, and of all such queries these have the highest similarity."


def _one_per_class(candidates: NDArray[np.int64], result: EnsembleResult, count: int) -> NDArray[np.int64]:
    classes = result.test.classes.numpy()[candidates]
    first = np.sort(np.unique(classes, return_index=True)[1])
    others = np.setdiff1d(np.arange(len(candidates)), first)
    return candidates[np.concatenate([first, others])[:count].astype(np.int64)]


def _vectors(result: EnsembleResult, z: torch.Tensor) -> torch.Tensor:
    longest = ensemble_vector([torch.ones(1, 1) for _ in result.groups], result.weighting).norm()
    vectors = ensemble_vector(z.split(list(result.groups), dim=1), result.weighting)
    return vectors / float(longest)  # so that scores lie in [-1, 1]


def _gallery(result: EnsembleResult) -> torch.Tensor | None:
    return None if result.test.gallery is None else _vectors(result, result.test.gallery)


def _nearest_picture(result: EnsembleResult, queries: NDArray[np.int64], name: str, caption: str) -> Picture:
    found = nearest(_vectors(result, result.test.z), queries, 5, _gallery(result))
    rows = [
        (_query_cell(result, int(q)), *(_cell(result, int(q), int(i), float(s)) for i, s in zip(*pair, strict=True)))
        for q, *pair in zip(queries, found.indices, found.scores, strict=True)
    ]
    return Picture(name, caption, ("query", *(str(k + 1) for k in range(found.indices.shape[1]))), tuple(rows))


def _learner_picture(result: EnsembleResult, queries: NDArray[np.int64]) -> Picture:
    parts = unit_parts(result.test.z, result.groups)
    others = None if result.test.gallery is None else unit_parts(result.test.gallery, result.groups)
    found = [nearest(part, queries, 1, None if others is None else others[m]) for m, part in enumerate(parts)]
    rows = [
        (
            _query_cell(result, int(q)),
            *(_cell(result, int(q), int(f.indices[row, 0]), float(f.scores[row, 0])) for f in found),
        )
        for row, q in enumerate(queries)
    ]
    return Picture("learners", DISAGREE, ("query", *(f"learner {m + 1}" for m in range(len(parts)))), tuple(rows))


def _query_cell(result: EnsembleResult, query: int) -> Cell:
    return Cell(int(result.test.ids[query]), None, None)


def _cell(result: EnsembleResult, query: int, found: int, score: float) -> Cell:
    test = result.test
    classes = test.classes if test.gallery_classes is None else test.gallery_classes
    ids = test.ids if test.gallery_ids is None else test.gallery_ids
    return Cell(int(ids[found]), bool(classes[found] == test.classes[query]), score)


def draw_picture(picture: Picture, images: ImageOf, gallery_images: ImageOf | None = None) -> Image.Image:
    """Draw the grid. `images` gives query images by index, `gallery_images` those found (default: the same)."""
    found = gallery_images or images
    cell = (SIDE + 2 * FRAME) * SCALE
    row_height = cell + (MARK + GAP) * SCALE
    width = len(picture.columns) * (cell + GAP * SCALE) + 2 * GAP * SCALE
    sheet = Image.new("RGB", (width, HEAD * SCALE + len(picture.rows) * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(picture.columns):
        left = _left(column)
        draw.text((left + cell / 2, HEAD * SCALE / 2), title, fill=(31, 35, 40), font=_font(15), anchor="mm")
        for row, cells in enumerate(picture.rows):
            image = (found if column else images)(cells[column].image)
            _draw_cell(sheet, draw, image, cells[column], left, HEAD * SCALE + row * row_height)
    return sheet


def _left(column: int) -> int:
    # the query stands a little apart from what was found
    return (GAP + column * (SIDE + 2 * FRAME + GAP) + (GAP if column else 0)) * SCALE


def _draw_cell(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, image: "Image.Image | NDArray[np.uint8]", cell: Cell, x: int, y: int
) -> None:
    colour = NEUTRAL if cell.right is None else RIGHT if cell.right else WRONG
    outer, frame = (SIDE + 2 * FRAME) * SCALE, FRAME * SCALE
    draw.rounded_rectangle((x, y, x + outer - 1, y + outer - 1), radius=4 * SCALE, fill=colour)
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    side = SIDE * SCALE
    fitted = ImageOps.pad(picture.convert("RGB"), (side, side), Image.Resampling.LANCZOS, color="white")
    sheet.paste(fitted, (x + frame, y + frame))
    if cell.right is None or cell.score is None:
        return
    middle = y + outer + MARK * SCALE // 2
    _draw_mark(draw, (x + outer // 2 - 22 * SCALE, middle), cell.right)
    draw.text((x + outer // 2 - 8 * SCALE, middle), f"{cell.score:.2f}", fill=(31, 35, 40), font=_font(14), anchor="lm")


def _draw_mark(draw: ImageDraw.ImageDraw, centre: tuple[int, int], right: bool) -> None:
    """A tick or a cross, drawn as lines because not every font has them."""
    x, y = centre
    radius, pen = 9 * SCALE, round(2.4 * SCALE)
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=RIGHT if right else WRONG)

    def line(points: Sequence[tuple[float, float]]) -> None:
        draw.line([(x + a * SCALE, y + b * SCALE) for a, b in points], fill="white", width=pen, joint="curve")

    if right:
        line([(-4.5, 0.3), (-1.2, 3.8), (4.8, -3.6)])
    else:
        line([(-3.6, -3.6), (3.6, 3.6)])
        line([(-3.6, 3.6), (3.6, -3.6)])


@lru_cache
def _font(size: int) -> "ImageFont.FreeTypeFont | ImageFont.ImageFont":
    return ImageFont.load_default(size * SCALE)
