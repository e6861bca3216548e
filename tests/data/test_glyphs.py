"""The embedded data set: which characters, and which pixels."""

import hashlib
import unicodedata
from collections import Counter

import numpy as np
import pytest
from PIL import Image, features

from bier.data import Dataset
from bier.data.glyphs import FONTS, TEST, TRAINING, VALIDATION_ORDER, Drawing, draw, fonts_of, rasterise, read
from bier.errors import DataError

CHARACTERS = [(character, name) for name, some in {**TRAINING, **TEST}.items() for character in some]
FEW = Drawing(images=2)


@pytest.fixture(scope="module")
def few() -> Dataset:
    return read(seed=0, how=FEW)


def sample() -> np.ndarray:
    """Two images each of twelve characters of as many looks as possible."""
    return np.stack([draw(character, "ΓΔΞ", 0, FEW) for character in "AgЖщՖᔭΩψႴשټໄ"])


def test_the_pixels_never_change() -> None:
    """The pin holds for FreeType 2.14.3 inside Pillow and the fonts that matplotlib 3.9 to 3.11 ship.

    FreeType's rasteriser is the one step that is not integer arithmetic of ours: another version may move the edges of
    strokes by a grey level or two, and then only the brightness of each class is compared.
    """
    pixels = sample()
    brightness = [147, 159, 163, 117, 203, 152, 200, 225, 150, 194, 169, 151]
    assert abs(pixels.mean(axis=(1, 2, 3, 4)) - brightness).max() < 2
    if features.version("freetype2") == "2.14.3":
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == (
            "93d3b230f1fe154370c7ba34b89939d86366fd3869d5ab0804e7162d985d5232"
        )


def test_seeds_give_other_pixels_of_the_same_characters() -> None:
    one, again, other = (draw("Ж", "Ж", seed, FEW) for seed in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).mean() > 0.5
    assert (one[0] != one[1]).mean() > 0.5


def test_several_hundred_classes_of_48x48(few: Dataset) -> None:
    assert {name: part.present for name, part in few.parts.items()} == {"train": 308, "test": 261}
    for part in few.parts.values():
        assert isinstance(part.images, np.ndarray)
        assert part.images.shape == (2 * len(part.classes), 48, 48, 3)
        assert part.images.dtype == np.uint8
        assert part.images.std(axis=(1, 2, 3)).min() > 5  # something is drawn on every one


def test_a_class_is_drawn_alone(few: Dataset) -> None:
    """Its pixels do not depend on which other classes are drawn."""
    test = few["test"]
    assert (test.images[test.labels == 3] == draw(TEST["greek"][3], TEST["greek"], 0, FEW)).all()


def test_training_and_test_are_different_alphabets() -> None:
    """Unicode's own names of the scripts agree with ours, and no script is on both sides."""
    scripts = [
        {unicodedata.name(character).split()[0] for some in side.values() for character in some}
        for side in (TRAINING, TEST)
    ]
    assert scripts[0] == {"LATIN", "CYRILLIC", "ARMENIAN", "CANADIAN"}
    assert scripts[1] == {"GREEK", "COPTIC", "GEORGIAN", "HEBREW", "ARABIC", "LAO", "NKO"}
    assert max(Counter(character for character, _ in CHARACTERS).values()) == 1


def test_validation_holds_out_whole_alphabets() -> None:
    tiny = Drawing(images=1)
    parts = read(validation=0.1, how=tiny).parts
    assert {name.split()[0] for name in parts["validation"].classes} == {"armenian"}
    assert {name.split()[0] for name in parts["train"].classes} == set(TRAINING) - {"armenian"}
    parts = read(validation=0.3, how=tiny).parts
    assert {name.split()[0] for name in parts["validation"].classes} == {"armenian", "canadian"}
    assert set(VALIDATION_ORDER) < set(TRAINING)  # one alphabet always stays


def test_every_class_is_in_two_fonts_and_none_is_a_box() -> None:
    """A font that lacks a character draws its box for missing ones; none of our pictures is that box."""
    boxes = {font: rasterise("\U0010fffe", font) for font in FONTS}
    for character, _ in CHARACTERS:
        fonts = fonts_of(character)
        assert len(fonts) >= 2, character
        for font in fonts:
            cell = rasterise(character, font)
            assert cell.max() == 255, (character, font)
            assert (cell != boxes[font]).any(), (character, font)


def outline(character: str, font: str) -> np.ndarray:
    """The character scaled to the same longest side whatever its size, so that o is compared with O."""
    image = Image.fromarray(rasterise(character, font))
    image = image.crop(image.getbbox())
    scale = 32 / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    square = Image.new("L", (36, 36))
    square.paste(image, ((36 - image.width) // 2, (36 - image.height) // 2))
    return np.asarray(square, dtype=np.float32).ravel() / 255


def test_no_two_classes_look_the_same() -> None:
    """Overlap of the outlines in the fonts that have both: not the same in any font, not alike in all of them."""
    count = len(CHARACTERS)
    most, total, shared = (np.zeros((count, count)) for _ in range(3))
    for font in FONTS:
        have = [i for i, (character, _) in enumerate(CHARACTERS) if font in fonts_of(character)]
        ink = np.stack([outline(CHARACTERS[i][0], font) for i in have])
        common = ink @ ink.T
        own = (ink * ink).sum(axis=1)
        overlap = common / (own[:, None] + own[None, :] - common)
        at = np.ix_(have, have)
        most[at] = np.maximum(most[at], overlap)
        total[at] += overlap
        shared[at] += 1
    mean = total / np.maximum(shared, 1)
    for matrix in (most, mean):
        np.fill_diagonal(matrix, 0)
    closest = np.unravel_index(most.argmax(), most.shape)
    assert most.max() < 0.95, [CHARACTERS[i] for i in closest]
    assert mean.max() < 0.83, [CHARACTERS[i] for i in np.unravel_index(mean.argmax(), mean.shape)]


def test_a_missing_font_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from bier.data import glyphs

    glyphs._fonts.cache_clear()
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(DataError, match="reinstall matplotlib"):
        glyphs._fonts()
    monkeypatch.undo()
    glyphs._fonts.cache_clear()
