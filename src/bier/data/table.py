"""`table`: a CSV or Parquet file with a row for each image.

    path     the image; a relative path starts at the table's own folder
    label    its class
    split    optional: train, test or validation
    is_query, is_gallery     optional, yes or no: who searches and who is found among the test rows
    x1 y1 x2 y2              optional, all four: the box to cut out, in pixels of the file; empty for no box

Without `split`, rows that are query or gallery are the test rows and all others train; without these columns too,
classes are divided as the plan says. Test rows that are all query and gallery at once, or say neither, search among
themselves; else each test row must be one of the two.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bier.data.records import Dataset, Part, Protocol
from bier.data.splits import SplitPlan, described, divide, held_out
from bier.errors import DataError

KS = (1, 2, 4, 8, 16, 32)
CORNERS = ("x1", "y1", "x2", "y2")
FLAGS = ("is_query", "is_gallery")
SPLITS = ("train", "test", "validation")
ENDINGS = (".csv", ".parquet")
YES_OR_NO = {"true": True, "1": True, "yes": True, "1.0": True, "false": False, "0": False, "no": False, "0.0": False}
Columns = Mapping[str, list[str]]


def read(root: Path, plan: SplitPlan) -> Dataset:
    """The images that this table (or the only table in this folder) names."""
    table = _find(root)
    columns = _csv(table) if table.suffix.lower() == ".csv" else _parquet(table)
    everything = _everything(table, columns)
    roles = _roles(table, columns)
    if roles is None:
        return divide("table", everything, plan, KS)
    parts, protocol = _parts(table, everything, roles, columns)
    return held_out(Dataset("table", parts, KS, protocol, {"kind": "given", "parts": described(parts)}), plan)


def _find(root: Path) -> Path:
    if root.is_file() and root.suffix.lower() in ENDINGS:
        return root
    found = sorted(path for path in root.glob("*") if path.suffix.lower() in ENDINGS) if root.is_dir() else []
    if len(found) != 1:
        raise DataError(
            f"The root of a table must be a .csv or .parquet file. Got {root}, which holds {len(found)} such files."
        )
    return found[0]


def _csv(table: Path) -> Columns:
    """The columns of a CSV with a heading, as text. Row 1 is the heading, as in a spreadsheet."""
    with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
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
    return {name: [line[i].strip() for line in lines[1:]] for i, name in enumerate(heading)}


def _parquet(table: Path) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = pq.read_table(table)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{table} must be a Parquet file. Got: {error}.") from error
    return {
        name: ["" if value is None else str(value) for value in content.column(name).to_pylist()]
        for name in content.column_names
    }


def _everything(table: Path, columns: Columns) -> Part:
    for name in ("path", "label"):
        if name not in columns:
            raise DataError(f"{table} must have a column '{name}'. It has {', '.join(columns)}.")
        for number, value in _numbered(columns[name]):
            if not value:
                raise DataError(f"{table}, row {number}: the column '{name}' must not be empty.")
    if not columns["path"]:
        raise DataError(f"{table} must have a row for each image. It has none.")
    classes = sorted(set(columns["label"]))
    numbers = {name: i for i, name in enumerate(classes)}
    labels = np.array([numbers[name] for name in columns["label"]], dtype=np.int64)
    images = tuple(table.parent / path for path in columns["path"])
    return Part(images, labels, tuple(classes), _boxes(table, columns))


def _numbered(values: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Values with the number of their row; the heading is row 1."""
    return enumerate(values, start=2)


def _boxes(table: Path, columns: Columns) -> NDArray[np.float32] | None:
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


def _number(table: Path, name: str, row: int, text: str) -> float:
    """The number in a cell; NaN in an empty one, which stands for the whole picture."""
    if text.lower() in ("", "nan"):
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
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
