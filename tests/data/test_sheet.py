"""Contact sheets."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bier.data import Part
from bier.data.sheet import GAP, MARGIN, NAMES, TILE, TITLE, contact_sheet
from bier.errors import ConfigError, DataError


def corner(row: int, column: int) -> tuple[int, int]:
    return MARGIN + NAMES + column * (TILE + GAP), MARGIN + TITLE + row * (TILE + GAP)


def test_rows_are_classes_and_columns_their_images() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2])
    pixels = np.zeros((6, 8, 8, 3), np.uint8) + (np.arange(6, dtype=np.uint8) * 40)[:, None, None, None]
    sheet = contact_sheet(Part(pixels, labels, ("a", "b", "c")), "title", classes=2, images=2)
    assert sheet.size == (corner(2, 2)[0] + MARGIN - GAP, corner(2, 2)[1] + MARGIN - GAP)

    def middle(row: int, column: int) -> tuple[int, ...]:
        x, y = corner(row, column)
        return sheet.getpixel((x + TILE // 2, y + TILE // 2))  # type: ignore[return-value]

    assert [middle(0, 0)[0], middle(0, 1)[0]] == [0, 80]  # first and last image of the first class
    assert [middle(1, 0)[0], middle(1, 1)[0]] == [160, 200]  # of the last class


def test_a_class_with_few_images_leaves_its_row_white_and_boxes_are_cut(tmp_path: Path) -> None:
    picture = np.full((20, 40, 3), 255, np.uint8)
    picture[:, :20] = (255, 0, 0)
    Image.fromarray(picture).save(tmp_path / "half.png")
    boxes = np.array([[0, 0, 20, 20], [np.nan] * 4], np.float32)
    part = Part((tmp_path / "half.png",) * 2, np.array([0, 1]), ("x" * 200, "caf\udce9"), boxes)
    sheet = np.asarray(contact_sheet(part, "title", classes=5, images=3))
    (x, y), (_, below) = corner(0, 0), corner(1, 0)
    assert (sheet[y + 2 : y + TILE - 2, x + 2 : x + TILE - 2] == (255, 0, 0)).all()
    assert (sheet[below + TILE // 2, x + TILE - 4] == 255).all()  # the right half of the whole picture
    assert (sheet[y : y + TILE, x + TILE + GAP :] == 255).all()


def test_what_has_no_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vectors"):
        contact_sheet(Part(np.zeros((2, 5), np.float32), np.array([0, 1]), ("a", "b")), "t")
    part = Part((tmp_path / "absent.jpg",), np.array([0]), ("a",))
    with pytest.raises(DataError, match=r"absent\.jpg"):
        contact_sheet(part, "t")
    with pytest.raises(ConfigError, match="Got 0"):
        contact_sheet(part, "t", classes=0)
