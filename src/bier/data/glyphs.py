"""`glyphs`: characters drawn with matplotlib's fonts, so that a first run needs no download."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from bier.data.records import Dataset, Part, RandomStream
from bier.errors import DataError

TRAINING = {
    "latin": ("ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijkmnpqrtuyÆßæŊŒɐɕɗɚɝɠɣɤɧɬɭɮɱɲɳɸɹɺɻɽɾɿʂʃʆʇʈʊʍʎʐʑʓʔʕʖʗʛʝʞʣʤʥʦʧʨʩʪʫʬʭʮ"),
    "cyrillic": ("ЂЄЉЊЋЏБДЖЗЛЦЧШЩЪЫЬЮЯбвгджлмнфцшщъыьюђљњѣѤѦѨѪѬѮѰѱѴѸѹѺѼѾҊҍҐґҔҖҘҚҠҤҥҦҨҬҲҴҵҶҼҾӃӅӇӉӌӍӠӶӺӽԀԂԄԆԈԎԒԔԖԗԘԠԥ"),
    "armenian": "ԱԲԳԴԵԶԷԸԹԺԻԽԾԿՀՁՂՃՄՅՆՇՈՉՊՎՏՐՒՔՖբեէըթիլխծկձճմնշչպջվտփֆ",
    "canadian": "ᐂᐅᐆᐊᐋᐫᐮᐲᑉᑏᑑᑖᑧᑮᑰᑱᒅᒐᒑᒦᒧᒨᒩᒫᒼᓀᓂᓃᓄᓅᓇᓈᓓᓕᓖᓗᓙᓚᓬᓭᓯᓰᓳᓵᔅᔐᔑᔓᔕᔦᔨᔩᔪᔫᔬᔭᔮ",
}

TEST = {
    "greek": "ΓΔΞΣΦΨΩαβγδεζηθικλμνξπςστυφχωϏͰͲͳͶͻϗϘϙϚϛϝϞϟϠϡϢϣϤϦϧϨϪϬϮϷϸϺϻϼϿ",
    "georgian": ("აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰჱჲჳჴჵჶჸჹჺႠႡႢႣႤႥႦႧႨႩႪႫႬႭႮႯႰႱႲႳႴႵႶႷႸႹႺႻႼႽႾႿჀჁჂჃჄჅ"),
    "hebrew": "אבגדהזטיךלםמנעףפץצקרשת",
    "arabic": "ءبةتثجخدذرزسشصضطعغفقكلمنهوىيٹپڈڑژکگںھۇېڭ",
    "lao": "ກຂຄງຈຊຍດຕຖທນບປຜຝພມຢຣລວສຫອຮຯະາຽເແໂໃໄ",
    "nko": "ߌߍߎߏߐߑߒߓߔߕߖߗߘߙߚߜߝߞߟߡߢߣߤߥ",
}

# Held out in this order, whole alphabets at a time, when a share of the training classes is to be validation:
# a validation alphabet is then as different from the training alphabets as a test alphabet is.
VALIDATION_ORDER = ("armenian", "canadian", "cyrillic")


Ints = NDArray[np.int64]
Shorts = NDArray[np.int16]
Bytes = NDArray[np.uint8]

FONTS = (
    *(f"DejaVu{family}" for family in ("Sans", "Sans-Bold", "Sans-Oblique", "Sans-BoldOblique")),
    *(f"DejaVuSans{family}" for family in ("Mono", "Mono-Bold", "Mono-Oblique", "Mono-BoldOblique")),
    *(f"DejaVu{family}" for family in ("Serif", "Serif-Bold", "Serif-Italic", "Serif-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)


@dataclass(frozen=True)
class Drawing:
    """How the images are made; (low, high) are drawn evenly, both ends included. The place to change hardness."""

    images: int = 20  # per class
    size: int = 48
    turn: int = 10  # degrees, either way
    scale: tuple[int, int] = (80, 115)  # percent
    stretch: int = 12  # percent, of width against height, either way
    shear: int = 12  # percent, either way
    shift: int = 3  # pixels, either way
    weight: tuple[int, int] = (-1, 1)  # strokes: thinner once to thicker once
    contrast: tuple[int, int] = (90, 200)  # grey levels between character and background
    inverted: int = 0  # percent of images with light ink on dark paper
    tint: int = 25  # grey levels by which each colour channel may differ
    texture: tuple[int, int] = (0, 30)  # grey levels of unevenness of the background
    clutter: tuple[int, int] = (0, 1)  # neighbouring characters that reach into the picture
    clutter_distance: tuple[int, int] = (30, 38)  # pixels from centre to centre
    erased: tuple[int, int] = (0, 1)  # patches that hide something
    erased_size: tuple[int, int] = (6, 15)  # pixels
    blur: tuple[int, int] = (0, 1)  # passes of a 3x3 binomial filter
    noise: tuple[int, int] = (0, 20)  # grey levels


DRAWING = Drawing()
_CELL = 96  # a character is rasterised and turned at twice the resolution, then averaged down
_UNIT = 4096  # fixed-point one


@cache
def _fonts() -> dict[str, tuple[ImageFont.FreeTypeFont, frozenset[int]]]:
    """Every font with the code points that it really has."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = {}
    for name in FONTS:
        path = folder / f"{name}.ttf"
        if not path.is_file():
            raise DataError(
                f"The data set 'glyphs' needs matplotlib's own fonts. There is no {path}: reinstall matplotlib."
            )
        font = ImageFont.truetype(str(path), 64, layout_engine=ImageFont.Layout.BASIC)
        fonts[name] = (font, frozenset(FT2Font(str(path)).get_charmap()))
    return fonts


@cache
def fonts_of(character: str) -> tuple[str, ...]:
    """The names of the fonts that have this character."""
    return tuple(name for name, (_, points) in _fonts().items() if ord(character) in points)


@lru_cache(maxsize=2048)
def rasterise(character: str, font: str) -> Bytes:
    """The character alone, centred, as ink from 0 to 255 in a cell of (96, 96)."""
    face = _fonts()[font][0]
    left, top, right, bottom = face.getbbox(character)
    width, height = int(right - left), int(bottom - top)
    ink = Image.new("L", (max(width, 1), max(height, 1)))
    ImageDraw.Draw(ink).text((-left, -top), character, font=face, fill=255)
    longest = max(ink.size)
    if longest > 80:
        ink = ink.resize((max(1, ink.width * 80 // longest), max(1, ink.height * 80 // longest)), Image.Resampling.BOX)
    cell = Image.new("L", (_CELL, _CELL))
    cell.paste(ink, ((_CELL - ink.width) // 2, (_CELL - ink.height) // 2))
    return np.asarray(cell)


def _thicker(cells: Bytes) -> Bytes:
    """Every point takes the most ink of itself and its four neighbours."""
    out = cells.copy()
    np.maximum(out[:, 1:], cells[:, :-1], out=out[:, 1:])
    np.maximum(out[:, :-1], cells[:, 1:], out=out[:, :-1])
    np.maximum(out[:, :, 1:], cells[:, :, :-1], out=out[:, :, 1:])
    np.maximum(out[:, :, :-1], cells[:, :, 1:], out=out[:, :, :-1])
    return out


def _weighted(cells: Bytes, weight: Ints) -> Bytes:
    """Strokes made thinner (negative weight) or thicker, as many times as the weight of each cell says."""
    cells = cells.copy()
    while weight.any():
        bolder, thinner = weight > 0, weight < 0
        cells[bolder] = _thicker(cells[bolder])
        cells[thinner] = 255 - _thicker(255 - cells[thinner])
        weight = weight - np.sign(weight)
    return cells


def _placed(cells: Bytes, moves: Ints, how: Drawing, stream: RandomStream) -> Bytes:
    """Cells (n, 96, 96) turned, scaled, sheared and then moved by (n, 2) pixels: ink (n, size, size), 0 to 255.

    Every coefficient is a multiple of 1/4096, and Pillow takes nearest points in fixed point: no rounding differs.
    """
    n, step = len(cells), _CELL // how.size
    quarters = stream.between(-4 * how.turn, 4 * how.turn, n).tolist()
    scale = stream.between(*how.scale, n)
    wide = (_UNIT * 10000 // (scale * (100 + stream.between(-how.stretch, how.stretch, n)))).tolist()
    high = (_UNIT * 100 // scale).tolist()
    shear = stream.between(-how.shear, how.shear, n).tolist()
    out = np.empty((n, how.size, how.size), np.uint8)
    for i, cell in enumerate(cells):
        cosine, sine = (round(_UNIT * f(math.radians(quarters[i] / 4))) for f in (math.cos, math.sin))
        c, d = -sine * high[i] // _UNIT, cosine * high[i] // _UNIT
        a, b = cosine * wide[i] // _UNIT + c * shear[i] // 100, sine * wide[i] // _UNIT + d * shear[i] // 100
        x, y = (_CELL // 2 + step * int(move) for move in moves[i])
        inverse = (a, b, _CELL // 2 * _UNIT - a * x - b * y, c, d, _CELL // 2 * _UNIT - c * x - d * y)
        turned = Image.fromarray(cell).transform(
            (_CELL, _CELL), Image.Transform.AFFINE, [k / _UNIT for k in inverse], Image.Resampling.NEAREST
        )
        out[i] = np.asarray(turned.reduce(step))
    return out


def _colours(how: Drawing, stream: RandomStream, n: int) -> tuple[Ints, Ints]:
    """Background and ink, (n, 3) each, apart by the contrast in grey and tinted each on its own."""
    gap = stream.between(*how.contrast, n)
    dark = stream.between(0, 255, n) * (255 - gap) // 255
    inverted = stream.between(1, 100, n) <= how.inverted
    paper, ink = np.where(inverted, dark, dark + gap), np.where(inverted, dark + gap, dark)
    tints = stream.between(-how.tint, how.tint, n * 6).reshape(2, n, 3)
    return paper[:, None] + tints[0], ink[:, None] + tints[1]


def _texture(how: Drawing, stream: RandomStream, n: int) -> Ints:
    """Smooth unevenness (n, size, size): random values on a grid of 12 pixels, interpolated in between."""
    cell, knots = 12, how.size // 12 + 1
    height = stream.between(*how.texture, n)
    grid = (stream.bytes((n, knots, knots)).astype(np.int64) - 128) * height[:, None, None] >> 7
    at, part = np.divmod(np.arange(how.size), cell)
    rows = grid[:, at] * (cell - part)[:, None] + grid[:, at + 1] * part[:, None]
    smooth: Ints = (rows[:, :, at] * (cell - part) + rows[:, :, at + 1] * part) // cell**2
    return smooth


def _inked(paper: Ints, ink: Bytes, colour: Ints) -> Shorts:
    """Paper (n, s, s, 3) with colour (n, 3) laid on where there is ink (n, s, s)."""
    below, above, share = (array.astype(np.int32) for array in (paper, colour, ink))
    share += share >> 7  # 0 to 256, so that full ink covers fully
    return (below + ((above[:, None, None, :] - below) * share[..., None] >> 8)).astype(np.int16)


def _erased(pictures: Shorts, how: Drawing, stream: RandomStream) -> Shorts:
    """Up to so many patches of one colour over every picture."""
    n, most = len(pictures), how.erased[1]
    wanted = stream.between(*how.erased, n)
    sizes = stream.between(*how.erased_size, n * most * 2).reshape(n, most, 2)
    corners = stream.between(0, how.size - how.erased_size[0], n * most * 2).reshape(n, most, 2)
    colours = stream.bytes((n, most, 3))
    for i in range(n):
        for (x, y), (w, h), colour in zip(corners[i], sizes[i], colours[i, : wanted[i]], strict=False):
            pictures[i, y : y + h, x : x + w] = colour
    return pictures


def _blurred(pictures: Shorts, passes: Ints) -> Shorts:
    """The 3x3 binomial filter, as many times as `passes` says for each picture; edges repeat."""
    while passes.any():
        some = passes > 0
        padded = np.pad(pictures[some], ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
        across = padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]
        pictures[some] = (across[:, :-2] + 2 * across[:, 1:-1] + across[:, 2:] + 8) >> 4
        passes = passes - some
    return pictures


def _cells(characters: Sequence[str], stream: RandomStream) -> Bytes:
    """One cell for each of these characters, each in a font picked at random among those that have it."""
    picks = stream.between(0, 2**31, len(characters))
    choices = [fonts_of(character) for character in characters]
    return np.stack(
        [rasterise(c, fonts[p % len(fonts)]) for c, fonts, p in zip(characters, choices, picks, strict=True)]
    )


def draw(character: str, neighbours: str, seed: int, how: Drawing = DRAWING) -> Bytes:
    """All images of one class, uint8 (how.images, size, size, 3); they depend on these four values alone.

    neighbours: the characters from which the clutter at the rim is picked.
    """
    stream, n = RandomStream(seed, ord(character)), how.images
    paper, colour = _colours(how, stream, n)
    cells = _weighted(_cells([character] * n, stream), stream.between(*how.weight, n))
    ink = _placed(cells, stream.between(-how.shift, how.shift, 2 * n).reshape(n, 2), how, stream)
    wanted = stream.between(*how.clutter, n)
    for already in range(how.clutter[1]):
        some = np.flatnonzero(wanted > already)
        others = [neighbours[i] for i in stream.between(0, len(neighbours) - 1, len(some))]
        if others:
            clutter = _placed(_cells(others, stream), _beside(how, stream, len(some)), how, stream)
            ink[some] = np.maximum(ink[some], clutter)
    pictures = _inked(paper[:, None, None, :] + _texture(how, stream, n)[..., None], ink, colour)
    pictures = _blurred(_erased(pictures, how, stream), stream.between(*how.blur, n))
    grain = stream.bytes((n, how.size, how.size, 3)).astype(np.int16) - 128
    pictures += grain * stream.between(*how.noise, n).astype(np.int16)[:, None, None, None] >> 7
    return np.clip(pictures, 0, 255).astype(np.uint8)


def _beside(how: Drawing, stream: RandomStream, n: int) -> Ints:
    """Moves (n, 2) that put a character beside the one in the middle, in any of 64 directions."""
    way = [2 * math.pi * w / 64 for w in stream.between(0, 63, n).tolist()]
    far = stream.between(*how.clutter_distance, n).tolist()
    return np.array([(round(f * math.cos(w)), round(f * math.sin(w))) for w, f in zip(way, far, strict=True)], np.int32)


def _part(alphabets: Mapping[str, str], seed: int, how: Drawing) -> Part:
    names, pictures = [], []
    for name, characters in alphabets.items():
        for character in characters:
            names.append(f"{name} {character}")
            pictures.append(draw(character, characters, seed, how))
    labels = np.repeat(np.arange(len(names), dtype=np.int64), how.images)
    return Part(np.concatenate(pictures), labels, tuple(names))


def read(seed: int = 0, validation: float = 0.0, how: Drawing = DRAWING) -> Dataset:
    """The glyphs; with `validation`, whole training alphabets are held out until they make up that share of classes."""
    training: dict[str, str] = dict(TRAINING)
    held: dict[str, str] = {}
    wanted = validation * sum(len(characters) for characters in TRAINING.values())
    for name in VALIDATION_ORDER:
        if sum(len(characters) for characters in held.values()) < wanted:
            held[name] = training.pop(name)
    alphabets = {"train": training, "validation": held, "test": TEST}
    parts = {name: _part(some, seed, how) for name, some in alphabets.items() if some}
    rasterise.cache_clear()
    split = {"kind": "alphabets", "seed": seed, **{name: list(some) for name, some in alphabets.items() if some}}
    return Dataset("glyphs", parts, ks=(1, 2, 4, 8, 16, 32), protocol="self", split=split)
