"""A user's own data: a folder with one folder per class, a table, or pre-computed features; listed and divided."""

import csv
import json
import logging
import math
import os
import posixpath
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bier.config import DataConfig
from bier.data.records import UNLABELLED, Dataset, Part, Protocol, described, divide, held_out
from bier.errors import DataError, needs
from bier.files import is_url, name_text, open_file, place_of, printable, read_url
from bier.folders import written_by_us

IMAGE_ENDINGS = frozenset(
    (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
)
KS = (1, 2, 4, 8, 16, 32)
DIVISIONS = ({"train", "test"}, {"train", "query", "gallery"})
PARTS = ("train", "validation", "test", "query", "gallery")
Place = Path | str  # a file or a folder; text is a URL that fsspec opens
T = TypeVar("T")
_log = logging.getLogger("bier")


def list_images(path: Place) -> Part:
    """Every image of a folder or a table (CSV, Parquet), undivided. All commands list images with this function.

    A folder: all images at any depth, the ids are their paths relative to it. The class of an image is the first folder
    on that path (below `train`, `test` and so on, where the folder is divided into these); an image that lies in no
    such folder has no label. Hidden files and folders are left out, and so are runs, indexes, models and reports of
    ours, with a line that names them. Links are followed, but never twice into the same folder: links in a circle end,
    and a link to a folder that is listed under its own name adds nothing.

    A table: every row, whatever its split. Paths start from the table's folder; ids and labels are the text in the
    cells. A row without a label, and every row where there is no column `label`, has none. Other columns become the
    metadata of the images.

    Either may be a URL that fsspec opens (`s3://bucket/photos`), given as text, and so may the paths of a table.
    """
    return list_with_parts(place_of(path))[0]


def list_with_parts(place: Place) -> tuple[Part, list[str] | None]:
    """As `list_images`; and the part of each image of a folder that is divided into parts, else None."""
    if isinstance(place, str):
        return _list_url(place)
    try:
        if place.is_dir():
            return _list_folder(place, _walk(place))
        if place.is_file() and place.suffix.lower() in TABLE_ENDINGS:
            return _table_part(_read(place)), None
    except OSError as error:
        raise DataError(f"Cannot read {error.filename or place}: {error.strerror or error}.") from error
    raise DataError(f"Images must be a folder, or a table that ends in .csv or .parquet. Got '{place}' instead.")


def _list_url(url: str) -> tuple[Part, list[str] | None]:
    """As `list_with_parts`. The packages that open URLs raise errors of many types."""
    import fsspec

    try:
        if _is_table(url):
            return _table_part(_read(url)), None
        if "::" in url:
            raise DataError(f"A URL must not have '::' in it. Got {printable(url)} instead.")
        system, place = fsspec.core.url_to_fs(url)
        root = place.rstrip("/") + "/"
        found = sorted(path.removeprefix(root) for path in system.find(place))
        return _list_folder(url.rstrip("/"), filter(_is_listed, found))
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"Cannot read {printable(url)}: {reason[:300].rstrip('.')}.") from error


def _is_listed(path: str) -> bool:
    """Whether a path is that of an image, with no hidden folder on it."""
    hidden = any(name.startswith(".") for name in path.split("/"))
    return not hidden and posixpath.splitext(path)[1].lower() in IMAGE_ENDINGS


def read_folder(root: Place, settings: DataConfig) -> Dataset:
    """The images below this folder, divided: as its own `train` and `test` say, else as the settings say."""
    if isinstance(root, Path) and not root.is_dir():
        raise DataError(f"The root of images must be a folder with one folder per class. There is no folder {root}.")
    listed, roles = list_with_parts(root)
    labelled = listed.labels >= 0
    if not labelled.any():
        raise DataError(
            f"The folder {root} must hold one folder per class, like {_below(root, 'NAME/image.jpg')}. "
            f"All of its {len(listed)} images lie outside of such folders."
        )
    everything = listed.select(labelled)
    if roles is None:
        return divide("folder", everything, settings, KS)
    role = np.array(roles)[labelled]
    parts = {name: everything.select(role == name).only_present() for name in PARTS[:3] if name in roles}
    protocol: Protocol = "self"
    if "query" in roles:  # query and gallery share their class numbers
        protocol = "query-gallery"
        shared = everything.select(np.isin(role, ("query", "gallery"))).only_present()
        side = role[np.isin(role, ("query", "gallery"))]
        parts |= {name: shared.select(side == name) for name in ("query", "gallery")}
    return held_out(Dataset("folder", parts, KS, protocol, {"kind": "given", "parts": described(parts)}), settings)


def _list_folder(root: Place, paths: Iterable[str]) -> tuple[Part, list[str] | None]:
    """The images of a folder, by class and then by path; and the part of each if the folder is divided into parts.

    paths: those of the images, from the folder and with "/".
    """
    found = [tuple(path.split("/")) for path in paths]
    if not found:
        raise DataError(f"The folder {root} must hold images ({' '.join(sorted(IMAGE_ENDINGS))}). It holds none.")
    # Divided where the top folders are parts, each with class folders inside; otherwise they are classes themselves.
    top, with_folders = ({path[0] for path in found if len(path) > depth} for depth in (1, 2))
    divided = top - {"validation"} in DIVISIONS and top == with_folders
    level = 1 if divided else 0

    def class_of(path: tuple[str, ...]) -> str | None:
        return path[level] if len(path) > level + 1 else None

    found.sort(key=lambda path: (os.fsencode(class_of(path) or ""), os.fsencode("/".join(path))))
    ids = ["/".join(path) for path in found]
    images = tuple(_below(root, path) for path in ids)
    part = replace(_labelled(images, [class_of(path) for path in found], root, ids), by_folder=True)
    return part, [path[0] for path in found] if divided else None


def _below(root: Place, path: str) -> Place:
    """A path below a folder or a URL; a path that is a URL itself stays one."""
    if is_url(path):
        return place_of(path)
    return root / path if isinstance(root, Path) else f"{root}/{path}"


def _labelled(
    images: tuple[Place, ...],
    names: Sequence[str | None],
    root: Place,
    ids: Sequence[str],
    boxes: NDArray[np.float32] | None = None,
    metadata: Sequence[dict[str, Any]] | None = None,
) -> Part:
    """A part whose classes are the names, sorted by their bytes. Names and ids are text, though files need not be."""
    classes = sorted({name for name in names if name is not None}, key=os.fsencode)
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(classes)} | {None: UNLABELLED}
    labels = np.array([numbers[name] for name in names], dtype=np.int64)
    told = None if metadata is None else tuple(metadata)
    return Part(images, labels, tuple(map(name_text, classes)), boxes, root, tuple(map(name_text, ids)), told)


def _walk(root: Path) -> Iterator[str]:
    """The path of every image below the root, from there and with "/"."""
    seen: set[tuple[int, int]] = set()
    waiting = deque([os.fspath(root)])
    left_out: list[str] = []
    while waiting:
        # Links wait until all that is really here has been listed: a folder is listed under its own name if it has one.
        for here, folders, names in os.walk(waiting.popleft(), onerror=_refuse):
            status = os.stat(here)  # noqa: PTH116 (speed)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            below = os.path.relpath(here, root)
            if below != "." and (kind := written_by_us(here, names)):
                left_out.append(f"{name_text(below)} ({kind})")
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            waiting.extend(inner for name in folders if os.path.islink(inner := os.path.join(here, name)))  # noqa: PTH114, PTH118
            start = "" if below == "." else below.replace(os.sep, "/") + "/"
            for name in names:
                if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_ENDINGS:  # noqa: PTH122
                    yield start + name
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        _log.warning("left out of %s, as bier has written it: %s%s", root, ", ".join(left_out[:3]), more)


def _refuse(error: OSError) -> None:
    """A folder that cannot be read is an error, not a folder without images."""
    raise error


CORNERS = ("x1", "y1", "x2", "y2")
FLAGS = ("is_query", "is_gallery")
SPLITS = ("train", "test", "validation")
TABLE_ENDINGS = (".csv", ".parquet")
YES_OR_NO = {"true": True, "1": True, "yes": True, "1.0": True, "false": False, "0": False, "no": False, "0.0": False}
FLOAT32_MAX = float(np.finfo(np.float32).max)
COLUMNS = ("path", "label", "split", *FLAGS, *CORNERS)  # the others are metadata
RESERVED = ("_path", "_box", "_stamp")  # names of our own in the metadata of a collection
LARGEST_TABLE = 2**32  # bytes; it is read into memory


@dataclass(frozen=True)
class _Table:
    """The columns of a table. Cells of `COLUMNS` are text; others are text, numbers or None.

    rows: the number of each row for people: the line of a CSV, from 1, and the row of a Parquet file, from 1.
    """

    place: Place
    columns: dict[str, list[Any]]
    rows: Sequence[int]
    unit: str

    def error(self, row: int, message: str) -> DataError:
        return DataError(f"{self.place}, {self.unit} {self.rows[row]}: {message}")

    def parsed(self, name: str, parse: Callable[[str], T], rule: str) -> list[T]:
        """The cells of a column, each parsed; a ValueError of `parse` becomes an error that names row and rule."""
        values = []
        for row, cell in enumerate(self.columns[name]):
            try:
                values.append(parse(cell))
            except ValueError:
                got = f" Got '{printable(cell)}' instead." if cell else ""
                raise self.error(row, f"the column '{name}' must {rule}.{got}") from None
        return values


def read_table(root: Place, settings: DataConfig) -> Dataset:
    """The images that this table (or the only table in this folder) names."""
    table = _read(_find(root))
    everything = _table_part(table)
    if "label" not in table.columns:
        raise DataError(f"{table.place} must have a column 'label'. It has {', '.join(table.columns)}.")
    table.parsed("label", _filled, "not be empty")
    roles = _roles(table)
    if roles is None:
        return divide("table", everything, settings, KS)
    parts, protocol = _parts(table, everything, roles)
    return held_out(Dataset("table", parts, KS, protocol, {"kind": "given", "parts": described(parts)}), settings)


def _is_table(place: Place) -> bool:
    return posixpath.splitext(str(place))[1].lower() in TABLE_ENDINGS


def _find(root: Place) -> Place:
    if isinstance(root, str):
        if not _is_table(root):
            raise DataError(f"The URL of a table must end in .csv or .parquet. Got {printable(root)} instead.")
        return root
    if root.is_file() and _is_table(root):
        return root
    found = sorted(path for path in root.glob("*") if _is_table(path)) if root.is_dir() else []
    if len(found) != 1:
        raise DataError(
            f"The root of a table must be a .csv or .parquet file. Got {root}, which holds {len(found)} such files."
        )
    return found[0]


def _read(place: Place) -> _Table:
    table = _csv(place) if str(place).lower().endswith(".csv") else _parquet(place)
    if taken := [name for name in table.columns if name in RESERVED]:
        raise DataError(f"{place} must not have a column '{taken[0]}', a name that collections use. Rename it.")
    return table


def _opened(table: Place) -> IO[bytes]:
    if isinstance(table, Path):
        return open_file(table, LARGEST_TABLE)
    return BytesIO(read_url(table, LARGEST_TABLE))


def _csv(place: Place) -> _Table:
    """The columns of a CSV with a heading, as text. Empty lines are passed over."""
    lines: list[list[str]] = []
    numbers: list[int] = []
    with TextIOWrapper(_opened(place), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader, number = csv.reader(file), 1
        try:
            for line in reader:
                if line:
                    lines.append(line)
                    numbers.append(number)
                number = reader.line_num + 1  # a quoted cell may have several lines
        except csv.Error as error:
            raise DataError(f"{place} must be a CSV file with commas. Got: {error}.") from error
    if not lines:
        raise DataError(f"{place} must have a heading with 'path' and 'label'. It is empty.")
    heading = [name.strip() for name in lines[0]]
    for number, line in zip(numbers[1:], lines[1:], strict=True):
        if len(line) != len(heading):
            raise DataError(f"{place}, line {number}: expected {len(heading)} columns. Got {len(line)} instead.")
    _check_heading(place, heading)
    columns = {name: [line[at].strip() for line in lines[1:]] for at, name in enumerate(heading)}
    return _Table(
        place, {k: v if k in COLUMNS else list(map(_value, v)) for k, v in columns.items()}, numbers[1:], "line"
    )


def _value(text: str) -> Any:
    """What a cell of a CSV says: a number, true or false where JSON would read one ("007" is text), None if empty."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return name_text(text) or None
    return value if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)) else text


def _parquet(place: Place) -> _Table:
    needs("pyarrow", "tables")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Not read_table, which makes a column of a folder called `year=2024`.
        with _opened(place) as data, pq.ParquetFile(data) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            _check_heading(place, schema.names)
            content = file.read([field.name for field in schema if field.name in COLUMNS or _is_plain(field.type)])
        content.validate(full=True)  # text that is not UTF-8
        cells = {
            name: [_cell(value) if name in COLUMNS else _plain(value) for value in content.column(name).to_pylist()]
            for name in content.column_names
        }
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # a column name may not be UTF-8
        raise DataError(f"{place} must be a Parquet file. Got: {error}.") from error
    return _Table(place, {name: cells[name] for name in schema.names if name in cells}, range(1, rows + 1), "row")


def _is_plain(kind: Any) -> bool:
    """Whether a column of this type becomes metadata: not pictures as bytes, lists or records."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(test(kind) for test in (*tests, types.is_temporal, types.is_decimal))


def _plain(value: Any) -> Any:
    """A value that JSON can hold; None for NaN too."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _cell(value: object) -> str:
    return "" if value is None else os.fsdecode(value) if isinstance(value, bytes) else str(value)


def _check_heading(table: Place, heading: Sequence[str]) -> None:
    twice = [name for name in dict.fromkeys(heading) if heading.count(name) > 1]
    if twice:
        raise DataError(f"{table} must have each column once. It has '{twice[0]}' {heading.count(twice[0])} times.")


def _table_part(table: _Table) -> Part:
    columns = table.columns
    if "path" not in columns:
        raise DataError(f"{table.place} must have a column 'path'. It has {', '.join(columns)}.")
    if not table.rows:
        raise DataError(f"{table.place} must have a row for each image. It has none.")
    table.parsed("path", _filled, "not be empty")
    paths = table.parsed("path", _named, "be a path")
    names = [name or None for name in columns["label"]] if "label" in columns else [None] * len(paths)
    root = table.place.parent if isinstance(table.place, Path) else posixpath.dirname(table.place)
    boxes = _boxes(table)
    ids, metadata = _described(table, paths, boxes)
    return _labelled(tuple(_below(root, path) for path in paths), names, root, ids, boxes, metadata)


def _described(
    table: _Table, paths: list[str], boxes: NDArray[np.float32] | None
) -> tuple[list[str], list[dict[str, Any]] | None]:
    """The id of each row, and its metadata: the other columns, and path and box where the id does not say them."""
    ids, more = list(paths), [name for name in table.columns if name and name not in COLUMNS]
    if boxes is None and not more:
        return ids, None
    metadata = [
        {key: table.columns[key][row] for key in more if table.columns[key][row] is not None} for row in range(len(ids))
    ]
    if boxes is not None:
        again = len(set(paths)) < len(paths)
        count = dict.fromkeys(paths, 0)
        for path in paths:
            count[path] += 1
        for row, box in enumerate(boxes.tolist()):
            if not math.isnan(box[0]):
                metadata[row]["_box"] = box
            if again and count[paths[row]] > 1 and "_box" in metadata[row]:
                ids[row] = f"{paths[row]}#{','.join(f'{corner:g}' for corner in box)}"
                metadata[row]["_path"] = name_text(paths[row])
    return ids, metadata


def _filled(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _named(path: str) -> str:
    if "\0" in path:  # which no system has in the name of a file
        raise ValueError
    return path


def _boxes(table: _Table) -> NDArray[np.float32] | None:
    given = [name for name in CORNERS if name in table.columns]
    if not given:
        return None
    if len(given) != 4:
        missing = ", ".join(name for name in CORNERS if name not in table.columns)
        raise DataError(f"{table.place} must have all of x1, y1, x2, y2 or none. It lacks {missing}.")
    corners = np.array([table.parsed(name, _number, "be a number") for name in CORNERS])
    boxes = corners.T.reshape(-1, 4)
    whole = np.isnan(boxes).all(axis=1)
    flat = np.flatnonzero(~whole & ~((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])))
    if len(flat):
        box = ", ".join(f"{value:g}" for value in boxes[flat[0]])
        raise table.error(flat[0], f"the box must have x1 < x2 and y1 < y2. Got {box} instead.")
    return boxes.astype(np.float32)


def _number(text: str) -> float:
    """The number in a cell; NaN in an empty one, which stands for the whole picture."""
    if text.lower() in ("", "nan"):
        return math.nan
    value = float(text)
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError
    return value


def _roles(table: _Table) -> list[str] | None:
    """The part of each row: train, test or validation; None where the table does not say."""
    if "split" in table.columns:
        return table.parsed("split", _split, f"be {', '.join(SPLITS)}")
    flags = [_flags(table, name) for name in FLAGS if name in table.columns]
    if not flags:
        return None
    return ["test" if any(row) else "train" for row in zip(*flags, strict=True)]


def _split(text: str) -> str:
    if text not in SPLITS:
        raise ValueError
    return text


def _flags(table: _Table, name: str) -> list[bool]:
    """A column of yes and no; all no where there is no such column. An empty cell is no."""
    if name not in table.columns:
        return [False] * len(table.rows)
    return table.parsed(name, _yes_or_no, "be true or false")


def _yes_or_no(text: str) -> bool:
    if text and text.lower() not in YES_OR_NO:
        raise ValueError
    return YES_OR_NO.get(text.lower(), False)


def _parts(table: _Table, everything: Part, roles: list[str]) -> tuple[dict[str, Part], Protocol]:
    role = np.array(roles)
    for which in ("train", "test"):
        if which not in roles:
            raise DataError(f"{table.place} must have rows for training and for test. It has none for {which}.")
    parts: dict[str, Part] = {
        which: everything.select(role == which).only_present() for which in ("train", "validation") if which in roles
    }
    test = role == "test"
    query, gallery = (np.array(_flags(table, name)) for name in FLAGS)
    if (query == gallery)[test].all() and len(np.unique(query[test])) == 1:
        return {**parts, "test": everything.select(test).only_present()}, "self"
    unclear = np.flatnonzero(test & (query == gallery))
    if len(unclear):
        both = "both" if query[unclear[0]] else "neither"
        raise table.error(
            unclear[0], f"a test row must be either is_query or is_gallery. It is {both}, while others are one of them."
        )
    shown = everything.select(test).only_present()
    parts |= {"query": shown.select(query[test]), "gallery": shown.select(gallery[test])}
    for which in ("query", "gallery"):
        if not len(parts[which]):
            raise DataError(f"{table.place} must have test rows for query and for gallery. It has none for {which}.")
    return parts, "query-gallery"


EXPECTS = (
    "Expected a .safetensors file with 'features' (N, h) and 'labels' (N,), or a folder with features.npy and "
    "labels.npy"
)


def read_features(root: Path, settings: DataConfig) -> Dataset:
    """The vectors, divided as their own `split` says, else as the settings say."""
    arrays = _arrays(root)
    everything = _features_part(arrays, root)
    if "split" not in arrays:
        return divide("features", everything, settings, KS)
    split = arrays["split"]
    if split.shape != (len(everything),) or not np.isin(split, (0, 1)).all():
        raise DataError(
            f"{root}: 'split' must be one 0 (training) or 1 (test) per vector. Got {split.dtype} {split.shape}."
        )
    parts = {"train": everything.select(split == 0), "test": everything.select(split == 1)}
    for which, part in parts.items():
        if not len(part):
            raise DataError(
                f"{root}: 'split' must put vectors into training (0) and test (1). There are none in {which}."
            )
    parts = {which: part.only_present() for which, part in parts.items()}
    return held_out(Dataset("features", parts, KS, "self", {"kind": "given", "parts": described(parts)}), settings)


def _arrays(root: Path) -> dict[str, NDArray[Any]]:
    folder = root.parent if root.suffix == ".npy" else root
    if folder.is_dir():
        files = {name: folder / f"{name}.npy" for name in ("features", "labels", "split")}
        missing = [path for name, path in files.items() if name != "split" and not path.is_file()]
        if missing:
            raise DataError(f"There is no {missing[0]}. {EXPECTS}.")
        return {name: _npy(path) for name, path in files.items() if path.is_file()}
    if not root.is_file():
        raise DataError(f"There is no {root}. {EXPECTS}.")
    return _safetensors(root)


def _npy(path: Path) -> NDArray[Any]:
    try:  # numpy parses the header as Python, so a damaged one can raise errors of the parser
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # a type that numpy never writes
            return np.asarray(np.load(path, allow_pickle=False))
    except (ValueError, OSError, EOFError, TokenError, SyntaxError, DeprecationWarning) as error:
        raise DataError(f"{path} must be an array of numbers or texts saved by numpy. Got: {error}.") from error


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} must be a safetensors file. Got: {error}. {EXPECTS}.") from error
    for name in ("features", "labels"):
        if name not in tensors:
            raise DataError(
                f"{path} has no tensor '{name}', only {', '.join(sorted(tensors)) or 'nothing'}. {EXPECTS}."
            )
    wide = {name: t.float() if t.dtype is torch.bfloat16 else t for name, t in tensors.items()}
    return {name: wide[name].numpy() for name in ("features", "labels", "split") if name in wide}


def _features_part(arrays: dict[str, NDArray[Any]], root: Path) -> Part:
    features, labels = arrays["features"], arrays["labels"]
    if features.ndim != 2 or features.dtype.kind != "f" or 0 in features.shape:
        raise DataError(
            f"{root}: 'features' must be floats of shape (N, h). Got {features.dtype} {features.shape} instead."
        )
    if labels.shape != (len(features),) or labels.dtype.kind not in "iuUS":
        raise DataError(
            f"{root}: 'labels' must be {len(features)} whole numbers or names. Got {labels.dtype} {labels.shape}."
        )
    features = features.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
    if len(bad):
        raise DataError(f"{root}: 'features' must be finite. {len(bad)} rows are not, the first is row {bad[0]}.")
    names, numbers = _classes_of(labels, root)
    return Part(features, numbers, names)


def _classes_of(labels: NDArray[Any], root: Path) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The classes by name, and the class of each label."""
    if labels.dtype.kind == "S":
        try:
            labels = np.char.decode(labels, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{root}: 'labels' must be UTF-8 text or whole numbers. Got other bytes.") from error
    names, numbers = np.unique(labels, return_inverse=True)
    return tuple(str(name) for name in names.tolist()), numbers.astype(np.int64).reshape(-1)
