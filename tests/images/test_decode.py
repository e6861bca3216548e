"""Every kind of picture becomes upright RGB."""

import io
import os
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bier.errors import DataError
from bier.files import printable
from bier.images import open_image


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, so that scaling and compression behave as on photographs."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = smooth + rng.integers(-6, 7, smooth.shape, dtype=np.int16)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def pixel(source: object, **options: object) -> tuple[int, ...]:
    image = open_image(source, **options)
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


RED = Image.new("RGB", (4, 4), (255, 0, 0))


def test_a_plain_picture_keeps_its_pixels() -> None:
    image = photograph(20, 10)
    np.testing.assert_array_equal(np.asarray(open_image(encoded(image))), np.asarray(image))


def test_greyscale_and_black_and_white() -> None:
    assert pixel(encoded(Image.new("L", (3, 3), 77))) == (77, 77, 77)
    assert pixel(encoded(Image.new("1", (3, 3), 1))) == (255, 255, 255)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGBA", (3, 3), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (3, 3), (255, 0, 0, 255)), (255, 0, 0)),
        (Image.new("RGBA", (3, 3), (0, 0, 0, 51)), (204, 204, 204)),
        (Image.new("LA", (3, 3), (0, 0)), (255, 255, 255)),
        (Image.new("LA", (3, 3), (100, 255)), (100, 100, 100)),
    ],
)
def test_transparency_is_laid_on_white(image: Image.Image, expected: tuple[int, ...]) -> None:
    assert pixel(encoded(image)) == expected
    assert pixel(image) == expected


def test_palette_with_and_without_transparency() -> None:
    palette = RED.convert("P", palette=Image.Palette.ADAPTIVE)
    assert pixel(encoded(palette)) == (255, 0, 0)
    index = palette.getpixel((0, 0))
    assert pixel(encoded(palette, transparency=index)) == (255, 255, 255)
    alphas = bytes([0] * 256)  # an alpha for each colour, which Pillow warns about when it is dropped
    assert pixel(encoded(palette, transparency=alphas)) == (255, 255, 255)


def test_a_transparent_colour_of_an_rgb_picture() -> None:
    assert pixel(encoded(RED, transparency=(255, 0, 0))) == (255, 255, 255)


def test_cmyk() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red, green, blue = pixel(encoded(image, "JPEG", quality=95))
    assert red > 245
    assert max(green, blue) < 10
    assert pixel(encoded(image, "TIFF")) == (255, 0, 0)


def test_lab() -> None:
    assert min(pixel(encoded(Image.new("LAB", (3, 3), (255, 128, 128)), "TIFF"))) >= 254


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_greyscale(form: str) -> None:
    values = np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16)
    opened = np.asarray(open_image(encoded(Image.fromarray(values), form)))
    np.testing.assert_array_equal(opened[:, :, 0], [[0, 100], [200, 255]])
    np.testing.assert_array_equal(opened[:, :, 0], opened[:, :, 2])


def test_sixteen_bit_big_endian() -> None:
    values = np.array([[0, 257 * 100]], ">u2")
    image = Image.frombytes("I;16B", (2, 1), values.tobytes())
    assert np.asarray(open_image(image))[0, :, 0].tolist() == [0, 100]


def test_floats_keep_their_range() -> None:
    for scale in (1.0, 255.0, 65535.0, 1e9):
        values = np.array([[0.0, 0.5, 1.0]], np.float32) * np.float32(scale)
        assert np.asarray(open_image(Image.fromarray(values)))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=40)
    red, green, blue = pixel(data)
    assert red > 240
    assert max(green, blue) < 20


def upright() -> Image.Image:
    """Dark left half with a white top left corner; all eight turns of it are different."""
    values = np.zeros((32, 48, 3), np.uint8)
    values[:, :24] = (200, 30, 30)
    values[:8, :8] = 255
    return Image.fromarray(values)


TURN_BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(form: str, orientation: int) -> None:
    stored = upright() if orientation == 1 else upright().transpose(TURN_BACK[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if form == "WEBP" else {"quality": 100, "subsampling": 0} if form == "JPEG" else {}
    opened = open_image(encoded(stored, form, exif=exif, **lossless))
    assert opened.size == (48, 32)
    assert np.abs(np.asarray(opened).astype(int) - np.asarray(upright())).mean() < 3


def test_a_picture_is_turned_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for form in ("JPEG", "PNG", "TIFF"):
        once = open_image(encoded(upright(), form, exif=exif))
        assert once.size == (32, 48)
        assert open_image(once).size == (32, 48)


def test_a_transparent_picture_is_turned_and_laid_on_white() -> None:
    palette = Image.new("P", (4, 6), 0)
    palette.putpalette([255, 0, 0, 0, 255, 0])
    exif = Image.Exif()
    exif[0x0112] = 8
    turned = open_image(encoded(palette, transparency=0, exif=exif))
    assert turned.size == (6, 4)
    assert turned.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("notes", [b"Exif\0\0MM\0*\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_damaged_notes_do_not_matter(notes: bytes) -> None:
    assert open_image(encoded(upright(), "JPEG", exif=notes)).size == (48, 32)


def test_a_phone_picture_with_a_second_one_inside() -> None:
    first, second = photograph(1200, 800), photograph(600, 400, seed=1)
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    opened = open_image(data, at_least=150)
    assert opened.size == (300, 200)
    expected = first.resize((300, 200), Image.Resampling.BOX)
    assert np.abs(np.asarray(opened).astype(int) - np.asarray(expected)).mean() < 6


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_boxes_count_pixels_of_the_upright_original_even_when_drafted(orientation: int) -> None:
    image = photograph(1600, 1000)
    stored = image if orientation == 1 else image.transpose(TURN_BACK[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, "JPEG", quality=95, exif=exif)
    box = (200, 100, 1400, 900)
    drafted = open_image(data, at_least=100, box=box)
    assert 200 <= drafted.width < 600
    expected = image.crop(box).resize(drafted.size, Image.Resampling.BOX)
    assert np.abs(np.asarray(drafted).astype(int) - np.asarray(expected)).mean() < 4


def test_a_box_is_widened_to_whole_pixels_and_clipped() -> None:
    image = photograph(30, 20)
    assert open_image(image, box=(2.6, 3.2, 10.1, 12.0)).size == (9, 9)
    assert open_image(image, box=(-5, -5, 100, 100)).size == (30, 20)
    assert open_image(image, box=(29.5, 19.5, 29.6, 19.6)).size == (1, 1)


@pytest.mark.parametrize("box", [(30, 0, 40, 10), (5, 5, 5, 9), (9, 9, 5, 5), (-9, 0, 0, 5), (0, 0, float("nan"), 5)])
def test_a_box_that_misses_the_picture(box: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match=r"^The box \(.* does not touch the given PIL image"):
        open_image(photograph(30, 20), box=box)


@given(width=st.integers(1, 900), height=st.integers(1, 900), at_least=st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_a_drafted_jpeg_is_never_too_small(width: int, height: int, at_least: int) -> None:
    data = encoded(Image.new("RGB", (width, height), "teal"), "JPEG")
    opened = open_image(data, at_least=at_least)
    assert max(opened.size) >= min(at_least, max(width, height))


def test_draft_mode_is_used() -> None:
    data = encoded(photograph(2048, 1024), "JPEG")
    assert open_image(data).size == (2048, 1024)
    assert open_image(data, at_least=128).size == (256, 128)
    assert open_image(encoded(photograph(2048, 1024).convert("L"), "JPEG"), at_least=128).size == (256, 128)


@pytest.mark.parametrize("name", [b"caf\xe9.png", "猫.png".encode(), b"new\nline.png", b"\x1b[31mred.png"])
def test_file_names_of_any_encoding(tmp_path: Path, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    try:
        path.write_bytes(encoded(RED))
    except OSError:
        pytest.skip("this file system takes no such name")
    assert pixel(path) == (255, 0, 0)
    assert pixel(str(path)) == (255, 0, 0)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty") as caught:
        open_image(path)
    str(caught.value).encode("utf-8")
    assert str(caught.value).isprintable()


def test_printable_names() -> None:
    assert printable("plain ü.jpg") == "plain ü.jpg"
    assert printable(os.fsdecode(b"caf\xe9")) == r"caf\xe9"
    assert printable("a\tb") == r"a\tb"


def test_arrays() -> None:
    grey = np.full((4, 5), 9, np.uint8)
    assert pixel(grey) == pixel(grey[:, :, None]) == (9, 9, 9)
    assert pixel(np.full((4, 5, 4), (0, 0, 0, 0), np.uint8)) == (255, 255, 255)
    assert pixel(np.full((4, 5, 3), 257 * 8, np.uint16)) == (8, 8, 8)
    assert open_image(np.zeros((4, 5, 3), np.uint8)[:, ::-1]).size == (5, 4)


@pytest.mark.parametrize(
    "bad", [np.zeros((4, 5), np.float32), np.zeros((3, 4, 5), np.uint8), np.zeros((0, 4), np.uint8)]
)
def test_arrays_that_are_no_pictures(bad: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"Got shape .* instead"):
        open_image(bad)


def test_other_things_are_no_pictures() -> None:
    with pytest.raises(DataError, match="Got int instead"):
        open_image(7)  # type: ignore[arg-type]


def test_threads_leave_the_warning_filters_as_they_were() -> None:
    before = list(warnings.filters)
    data = encoded(photograph(64, 64))
    threads = [threading.Thread(target=lambda: [open_image(data) for _ in range(30)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before
