"""Every kind of damage is a line that names the file."""

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bier.errors import DataError
from bier.images import MAX_PIXELS, open_image

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 200, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_truncated_files_name_the_file(tmp_path: Path, form: str) -> None:
    data = encoded(NOISE, form)
    path = tmp_path / f"cut.{form.lower()}"
    path.write_bytes(data[: len(data) // 2])
    for at_least in (None, 32):
        with pytest.raises(DataError, match="cut") as caught:
            open_image(path, at_least=at_least)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "reason"), [(b"", "empty"), (b"hello", "format"), (b"\xff\xd8\xff", "")])
def test_files_that_are_no_pictures(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"x.jpg.*{reason}"):
        open_image(path)
    with pytest.raises(DataError, match=f"{len(content)} bytes.*{reason}"):
        open_image(content)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jpg: no such file"):
        open_image(tmp_path / "nowhere.jpg")
    with pytest.raises(DataError, match="is a directory"):
        open_image(str(tmp_path))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_a_picture_or_a_data_error(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "BMP"]))
    content = bytearray(encoded(NOISE.resize((40, 30)), form))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        opened = open_image(bytes(content), at_least=16)
    except DataError as error:
        message = str(error)
    else:
        assert opened.mode == "RGB"
        return
    assert "\n" not in message


def bomb() -> bytes:
    side = int(MAX_PIXELS**0.5) + 1
    return encoded(Image.new("1", (side, side)), "PNG")


def test_decompression_bombs_are_refused() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(DataError, match="9460 x 9460 pixels, more than the limit of 89,478,485"):
            open_image(bomb())
    assert seen == []


def test_a_huge_claim_is_refused() -> None:
    header = bytearray(encoded(Image.new("L", (1, 1)), "BMP"))
    header[18:26] = (60_000).to_bytes(4, "little") * 2
    with pytest.raises(DataError, match=r"^(Refused|Cannot read) the picture given as"):
        open_image(bytes(header))


def test_postscript_is_not_run() -> None:
    with pytest.raises(DataError, match="format"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
