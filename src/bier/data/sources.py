"""A user's own data: a folder with one folder per class, a table, or pre-computed features."""

import csv
import math
import os
import posixpath
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bier.data.part import UNLABELLED, Dataset, Part, Protocol, SplitPlan, described, divide, held_out
from bier.errors import DataError, needs
from bier.files import is_url, name_text, printable, read_url

IMAGE_ENDINGS = frozenset(
    (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
)
KS = (1, 2, 4, 8, 16, 32)
DIVISIONS = ({"train", "test"}, {"train", "query", "gallery"})
PARTS = ("train", "validation", "test", "query", "gallery")


def list_images(path: str | Path) -> Part:
    """Every image of a folder or a table (CSV, Parquet), undivided. All commands list images with this function.

    A folder: all images at any depth, the ids are their paths relative to it. The class of an image is the first folder
    on that path (below `train`, `test` and so on, where the folder is divided into these); an image that lies in no
    such folder has no label. Hidden files and folders are left out. Links are followed, but never twice into the same
    folder: links in a circle end, and a link to a folder that is listed under its own name adds nothing.

    A table: every row, whatever its split. Paths start from the table's folder; ids and labels are the text in the
    cells. A row without a label, and every row where there is no column `label`, has none.

    Either may be a URL that fsspec opens (`s3://bucket/photos`), given as text, and so may the paths of a table.
    """
    if is_url(path):
        return _list_url(str(path))
    path = Path(path)
    try:
        if path.is_dir():
            return _list_folder(path)[0]
        if path.is_file() and path.suffix.lower() in TABLE_ENDINGS:
            return _table_part(path, _columns(path))
    except OSError as error:
        raise DataError(f"Cannot read {error.filename or path}: {error.strerror or error}.") from error
    raise DataError(f"Images must be a folder, or a table that ends in .csv or .parquet. Got '{path}' instead.")


def _list_url(url: str) -> Part:
    """As `list_images`. The packages that open URLs raise errors of many types."""
    import fsspec

    try:
        if posixpath.splitext(url)[1].lower() in TABLE_ENDINGS:
            return _table_part(url, _columns(url))
        if "::" in url:
            raise DataError(f"A URL must not have '::' in it. Got {printable(url)} instead.")
        system, place = fsspec.core.url_to_fs(url)
        root = place.rstrip("/") + "/"
        found = sorted(path.removeprefix(root) for path in system.find(place))
        return _list_folder(url.rstrip("/"), filter(_is_listed, found))[0]
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"Cannot read {printable(url)}: {reason[:300].rstrip('.')}.") from error


def _is_listed(path: str) -> bool:
    """Whether a path is that of an image, with no hidden folder on it."""
    hidden = any(name.startswith(".") for name in path.split("/"))
    return not hidden and posixpath.splitext(path)[1].lower() in IMAGE_ENDINGS


def read_folder(root: Path, plan: SplitPlan) -> Dataset:
    """The images below this folder, divided: as its own `train` and `test` say, else as the plan says."""
    if not root.is_dir():
        raise DataError(f"The root of images must be a folder with one folder per class. There is no folder {root}.")
    listed, roles = _list_folder(root)
    labelled = listed.labels >= 0
    if not labelled.any():
        raise DataError(
            f"The folder {root} must hold one folder per class, like {root / 'NAME' / 'image.jpg'}. "
            f"All of its {len(listed)} images lie outside of such folders."
        )
    everything = listed.select(labelled)
    if roles is None:
        return divide("folder", everything, plan, KS)
    role = np.array(roles)[labelled]
    parts = {name: everything.select(role == name).only_present() for name in PARTS[:3] if name in roles}
    protocol: Protocol = "self"
    if "query" in roles:  # query and gallery share their class numbers
        protocol = "query-gallery"
        shared = everything.select(np.isin(role, ("query", "gallery"))).only_present()
        side = role[np.isin(role, ("query", "gallery"))]
        parts |= {name: shared.select(side == name) for name in ("query", "gallery")}
    return held_out(Dataset("folder", parts, KS, protocol, {"kind": "given", "parts": described(parts)}), plan)


def _list_folder(root: Path | str, listed: Iterable[str] | None = None) -> tuple[Part, list[str] | None]:
    """The images of a folder, by class and then by path; and the part of each if the folder is divided into parts.

    listed: the paths below a URL, from there; a folder is walked through.
    """
    if isinstance(root, Path):
        found = [tuple(path.split(os.sep)) for path in _walk(root)]  # noqa: PTH206 (speed)
    else:
        found = [tuple(path.split("/")) for path in listed or ()]
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
    images = tuple(_below(root, "/".join(path)) for path in found)
    part = _labelled(images, [class_of(path) for path in found], root, ids)
    return part, [path[0] for path in found] if divided else None


def _below(root: Path | str, path: str) -> Path | str:
    """A path below a folder or a URL; a path that is a URL itself is returned as it is."""
    if is_url(path):
        return path
    return root / path if isinstance(root, Path) else f"{root}/{path}"


def _labelled(
    images: tuple[Path | str, ...],
    names: Sequence[str | None],
    root: Path | str,
    ids: Sequence[str],
    boxes: NDArray[np.float32] | None = None,
) -> Part:
    """A part whose classes are the names, sorted by their bytes. Names and ids are text, though files need not be."""
    classes = sorted({name for name in names if name is not None}, key=os.fsencode)
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(classes)} | {None: UNLABELLED}
    labels = np.array([numbers[name] for name in names], dtype=np.int64)
    return Part(images, labels, tuple(map(name_text, classes)), boxes, root, tuple(map(name_text, ids)))


def _walk(root: Path) -> Iterator[str]:
    """The path of every image below the root, from there."""
    seen: set[tuple[int, int]] = set()
    waiting = deque([os.fspath(root)])
    while waiting:
        # Links wait until all that is really here has been listed: a folder is listed under its own name if it has one.
        for here, folders, names in os.walk(waiting.popleft(), onerror=_refuse):
            status = os.stat(here)  # noqa: PTH116 (speed)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            waiting.extend(inner for name in folders if os.path.islink(inner := os.path.join(here, name)))  # noqa: PTH114, PTH118
            below = os.path.relpath(here, root)
            for name in names:
                if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_ENDINGS:  # noqa: PTH122
                    yield name if below == "." else f"{below}{os.sep}{name}"


def _refuse(error: OSError) -> None:
    """A folder that cannot be read is an error, not a folder without images."""
    raise error


CORNERS = ("x1", "y1", "x2", "y2")
FLAGS = ("is_query", "is_gallery")
SPLITS = ("train", "test", "validation")
TABLE_ENDINGS = (".csv", ".parquet")
YES_OR_NO = {"true": True, "1": True, "yes": True, "1.0": True, "false": False, "0": False, "no": False, "0.0": False}
FLOAT32_MAX = float(np.finfo(np.float32).max)
COLUMNS = ("path", "label", "split", *FLAGS, *CORNERS)  # others are not read
Columns = Mapping[str, list[str]]


def read_table(root: Path, plan: SplitPlan) -> Dataset:
    """The images that this table (or the only table in this folder) names."""
    table = _find(root)
    columns = _columns(table)
    everything = _table_part(table, columns)
    if "label" not in columns:
        raise DataError(f"{table} must have a column 'label'. It has {', '.join(columns)}.")
    _check_filled(table, columns, "label")
    roles = _roles(table, columns)
    if roles is None:
        return divide("table", everything, plan, KS)
    parts, protocol = _parts(table, everything, roles, columns)
    return held_out(Dataset("table", parts, KS, protocol, {"kind": "given", "parts": described(parts)}), plan)


def _find(root: Path) -> Path:
    if root.is_file() and root.suffix.lower() in TABLE_ENDINGS:
        return root
    found = sorted(path for path in root.glob("*") if path.suffix.lower() in TABLE_ENDINGS) if root.is_dir() else []
    if len(found) != 1:
        raise DataError(
            f"The root of a table must be a .csv or .parquet file. Got {root}, which holds {len(found)} such files."
        )
    return found[0]


def _columns(table: Path | str) -> Columns:
    return _csv(table) if posixpath.splitext(str(table))[1].lower() == ".csv" else _parquet(table)


def _opened(table: Path | str) -> IO[bytes]:
    return table.open("rb") if isinstance(table, Path) else BytesIO(read_url(table))


def _csv(table: Path | str) -> Columns:
    """The columns of a CSV with a heading, as text. Row 1 is the heading, as in a spreadsheet."""
    with TextIOWrapper(_opened(table), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            lines = [line for line in csv.reader(file) if line]
        except csv.Error as error:
            raise DataError(f"{table} must be a CSV file with commas. Got: {error}.") from error
    if not lines:
        raise DataError(f"{table} must have a heading with 'path' and 'label'. It is empty.")
    heading = [name.strip() for name in lines[0]]
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(heading):
            raise DataError(f"{table}, row {number}: expected {len(heading)} columns. Got {len(line)} instead.")
    _check_heading(table, heading)
    return {name: [line[i].strip() for line in lines[1:]] for i, name in enumerate(heading)}


def _parquet(table: Path | str) -> Columns:
    needs("pyarrow", "tables")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Not read_table, which makes a column of a folder called `year=2024`.
        with _opened(table) as data, pq.ParquetFile(data) as file:
            heading = file.schema_arrow.names
            _check_heading(table, heading)
            content = file.read([name for name in heading if name in COLUMNS])
        content.validate(full=True)  # text that is not UTF-8
        cells = {name: [_cell(value) for value in content.column(name).to_pylist()] for name in content.column_names}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # a column name may not be UTF-8
        raise DataError(f"{table} must be a Parquet file. Got: {error}.") from error
    return {name: cells.get(name, []) for name in heading}


def _cell(value: object) -> str:
    return "" if value is None else os.fsdecode(value) if isinstance(value, bytes) else str(value)


def _check_heading(table: Path | str, heading: Sequence[str]) -> None:
    twice = [name for name in dict.fromkeys(heading) if heading.count(name) > 1]
    if twice:
        raise DataError(f"{table} must have each column once. It has '{twice[0]}' {heading.count(twice[0])} times.")


def _table_part(table: Path | str, columns: Columns) -> Part:
    if "path" not in columns:
        raise DataError(f"{table} must have a column 'path'. It has {', '.join(columns)}.")
    _check_filled(table, columns, "path")
    if not columns["path"]:
        raise DataError(f"{table} must have a row for each image. It has none.")
    ids = columns["path"]
    for number, path in _numbered(ids):
        if "\0" in path:  # which no system has in the name of a file
            raise DataError(
                f"{table}, row {number}: the column 'path' must be a path. Got '{printable(path)}' instead."
            )
    names = [name or None for name in columns["label"]] if "label" in columns else [None] * len(ids)
    root = table.parent if isinstance(table, Path) else posixpath.dirname(table)
    return _labelled(tuple(_below(root, path) for path in ids), names, root, ids, _boxes(table, columns))


def _check_filled(table: Path | str, columns: Columns, name: str) -> None:
    for number, value in _numbered(columns[name]):
        if not value:
            raise DataError(f"{table}, row {number}: the column '{name}' must not be empty.")


def _numbered(values: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Values with the number of their row; the heading is row 1."""
    return enumerate(values, start=2)


def _boxes(table: Path | str, columns: Columns) -> NDArray[np.float32] | None:
    given = [name for name in CORNERS if name in columns]
    if not given:
        return None
    if len(given) != 4:
        missing = ", ".join(name for name in CORNERS if name not in columns)
        raise DataError(f"{table} must have all of x1, y1, x2, y2 or none. It lacks {missing}.")
    corners = np.array([[_number(table, name, *row) for row in _numbered(columns[name])] for name in CORNERS])
    boxes = corners.T.reshape(-1, 4)
    whole = np.isnan(boxes).all(axis=1)
    flat = np.flatnonzero(~whole & ~((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])))
    if len(flat):
        box = ", ".join(f"{value:g}" for value in boxes[flat[0]])
        raise DataError(f"{table}, row {flat[0] + 2}: the box must have x1 < x2 and y1 < y2. Got {box} instead.")
    return boxes.astype(np.float32)


def _number(table: Path | str, name: str, row: int, text: str) -> float:
    """The number in a cell; NaN in an empty one, which stands for the whole picture."""
    if text.lower() in ("", "nan"):
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if not abs(value) <= FLOAT32_MAX:
        raise DataError(f"{table}, row {row}: the column '{name}' must be a number. Got '{text}' instead.")
    return value


def _roles(table: Path, columns: Columns) -> list[str] | None:
    """The part of each row: train, test or validation; None where the table does not say."""
    if "split" in columns:
        for number, value in _numbered(columns["split"]):
            if value not in SPLITS:
                raise DataError(
                    f"{table}, row {number}: the column 'split' must be {', '.join(SPLITS)}. Got '{value}' instead."
                )
        return columns["split"]
    flags = [_flags(table, columns, name) for name in FLAGS if name in columns]
    if not flags:
        return None
    return ["test" if any(row) else "train" for row in zip(*flags, strict=True)]


def _flags(table: Path, columns: Columns, name: str) -> list[bool]:
    """A column of yes and no; all no where there is no such column. An empty cell is no."""
    if name not in columns:
        return [False] * len(columns["path"])
    for number, value in _numbered(columns[name]):
        if value and value.lower() not in YES_OR_NO:
            raise DataError(f"{table}, row {number}: the column '{name}' must be true or false. Got '{value}' instead.")
    return [YES_OR_NO.get(value.lower(), False) for value in columns[name]]


def _parts(table: Path, everything: Part, roles: list[str], columns: Columns) -> tuple[dict[str, Part], Protocol]:
    role = np.array(roles)
    for which in ("train", "test"):
        if which not in roles:
            raise DataError(f"{table} must have rows for training and for test. It has none for {which}.")
    parts: dict[str, Part] = {
        which: everything.select(role == which).only_present() for which in ("train", "validation") if which in roles
    }
    test = role == "test"
    query, gallery = (np.array(_flags(table, columns, name)) for name in FLAGS)
    if (query == gallery)[test].all() and len(np.unique(query[test])) == 1:
        return {**parts, "test": everything.select(test).only_present()}, "self"
    unclear = np.flatnonzero(test & (query == gallery))
    if len(unclear):
        raise DataError(
            f"{table}, row {unclear[0] + 2}: a test row must be either is_query or is_gallery. It is "
            f"{'both' if query[unclear[0]] else 'neither'}, while others are one of them."
        )
    shown = everything.select(test).only_present()
    parts |= {"query": shown.select(query[test]), "gallery": shown.select(gallery[test])}
    for which in ("query", "gallery"):
        if not len(parts[which]):
            raise DataError(f"{table} must have test rows for query and for gallery. It has none for {which}.")
    return parts, "query-gallery"


EXPECTS = (
    "Expected a .safetensors file with 'features' (N, h) and 'labels' (N,), or a folder with features.npy and "
    "labels.npy"
)


def read_features(root: Path, plan: SplitPlan) -> Dataset:
    """The vectors, divided as their own `split` says, else as the plan says."""
    arrays = _arrays(root)
    everything = _features_part(arrays, root)
    if "split" not in arrays:
        return divide("features", everything, plan, KS)
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
    return held_out(Dataset("features", parts, KS, "self", {"kind": "given", "parts": described(parts)}), plan)


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
    names, numbers = np.unique(labels, return_inverse=True)
    return Part(features, numbers.astype(np.int64).reshape(-1), tuple(str(name) for name in names.tolist()))
