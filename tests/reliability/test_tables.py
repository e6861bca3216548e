"""Tables and data set folders that are not what they should be: one line that says where, never a guess."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bier.data import list_images, load
from bier.errors import BierError, DataError
from bier.search import read_embeddings

Attack = Callable[..., Any]
HowMany = Callable[[int, int], int]
GOOD = "photos/class 0/0.png"
BOXED = "path,label,x1,y1,x2,y2\n"
TABLES: dict[str, tuple[str | bytes, str]] = {
    "empty file": ("", "It is empty"),
    "only a heading": ("path,label\n", "must have a row"),
    "no path": ("file,label\na.png,b\n", "must have a column 'path'"),
    "semicolons": (f"path;label\n{GOOD};a\n", "must have a column 'path'"),
    "ragged row, short": (f"path,label\n{GOOD}\n", "line 2: expected 2 columns"),
    "ragged row, long": (f"path,label\n{GOOD},a,b\n", "line 2: expected 2 columns"),
    "column twice": (f"path,label,label\n{GOOD},a,b\n", "must have each column once. It has 'label' 2 times"),
    "path twice": (f"path,path\n{GOOD},{GOOD}\n", "must have each column once"),
    "empty path": (f"path,label\n{GOOD},a\n,b\n", "line 3: the column 'path' must not be empty"),
    "missing file": ("path,label\nnope.png,a\n", "nope.png"),
    "dangling link": ("path,label\ndangling.png,a\n", "dangling.png"),
    "absolute path": ("path,label\n/etc/passwd,a\n", "/etc/passwd"),
    "path upwards": (f"path,label\n{'../' * 30}etc/passwd,a\n", "passwd"),
    "device": ("path,label\n/dev/zero,a\n", "/dev/zero"),
    "folder": ("path,label\nphotos,a\n", "is a directory"),
    "NUL": ("path,label\na\0b.png,a\n", r"line 2: the column 'path' must be a path. Got 'a\x00b.png'"),
    "long path": (f"path,label\n{'x' * 5000},a\n", "too long"),
    "markup": ("path,label\n[/red].png,[/x]\n", "[/red].png"),
    "Latin-1 path": (b"path,label\n\xe9.png,a\n", r"\xe9.png"),
    "UTF-16": ("path,label\nx,a\n".encode("utf-16"), "expected"),
    "open quote": ('path,label\n"abc', "line 2: expected 2 columns"),
    "huge cell": (f'path,label\n"{"x" * 200_000}",a\n', "must be a CSV file"),
    "binary": (bytes(range(256)) * 4, "expected"),
    "text as a box": (f"{BOXED}{GOOD},a,left,0,5,5\n", "line 2: the column 'x1' must be a number. Got 'left'"),
    "infinite box": (f"{BOXED}{GOOD},a,0,0,inf,5\n", "must be a number"),
    "box beyond float32": (f"{BOXED}{GOOD},a,0,0,1e300,5\n", "must be a number"),
    "box of 5,000 digits": (f"{BOXED}{GOOD},a,0,0,{'9' * 5000},5\n", "must be a number"),
    "box turned over": (f"{BOXED}{GOOD},a,5,5,1,1\n", "x1 < x2"),
    "box without a side": (f"{BOXED}{GOOD},a,5,5,5,9\n", "x1 < x2"),
    "half a box": (f"{BOXED}{GOOD},a,0,0,,\n", "x1 < x2"),
    "three of four columns": (f"path,label,x1,y1,x2\n{GOOD},a,0,0,5\n", "It lacks y2"),
    "box outside": (f"{BOXED}{GOOD},a,500,500,600,600\n", "does not touch"),
    "negative box": (f"{BOXED}{GOOD},a,-9,-9,-1,-1\n", "does not touch"),
}


@pytest.mark.parametrize("name", TABLES)
def test_malformed_tables(attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path, name: str) -> None:
    text, wanted = TABLES[name]
    table = tmp_path / "images.csv"
    table.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "dangling.png").symlink_to(tmp_path / "gone.png")
    ended = attack("embed", small_run, table, "--out", tmp_path / "v.safetensors")
    tally.case("malformed tables", ended.refused and wanted.lower() in ended.said.lower(), note=f"{name}: {ended}")
    assert not (tmp_path / "v.safetensors").exists()
    ended = attack("data", "check", "--data", "table", "--root", table)
    lines = ended.said.splitlines()
    one = [line for line in lines if line.startswith("bier: ")] == lines[-1:] and lines[-1].isprintable()
    tally.case("malformed tables", ended.code == 2 and one, note=f"{name}: {ended}")


def test_parquet(attack: Attack, tally: Any, how_many: HowMany, small_run: Path, photos: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "images.parquet", tmp_path / "v.safetensors"

    def refused(name: str) -> None:
        ended = attack("embed", small_run, table, "--out", out)
        tally.case("malformed Parquet tables", ended.refused, note=f"{name}: {ended}")

    offsets = pa.array(["abcd", "efgh"]).buffers()[1]
    not_text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"\xff\xfe\xfdxabcd")])
    for name, columns in {
        "not UTF-8": (["path", "label"], [not_text, pa.array(["a", "b"])]),
        "path twice": (["path", "path"], [pa.array([GOOD]), pa.array([GOOD])]),
        "no path": (["file"], [pa.array([GOOD])]),
        "null path": (["path"], [pa.array([None, GOOD])]),
        "lists": (["path"], [pa.array([[GOOD]])]),
        "no rows": (["path"], [pa.array([], pa.string())]),
    }.items():
        pq.write_table(pa.Table.from_arrays(columns[1], names=columns[0]), table)
        refused(name)
    for content in (b"", b"PAR1", b"PAR1" + b"\xff" * 60 + b"PAR1", b"path,label\n"):
        table.write_bytes(content)
        refused(repr(content))
    # Columns of other kinds beside ours do no harm, and bytes are text.
    odd = pa.array([{"a": [1]}], pa.struct([("a", pa.list_(pa.int64()))]))
    arrays = [pa.array([GOOD.encode()]), pa.array([b"k1"]), odd]
    pq.write_table(pa.Table.from_arrays(arrays, names=["path", "label", "more"]), table)
    listed = list_images(table)
    assert (listed.ids, listed.label_names()) == ((GOOD,), ["k1"])
    table.write_bytes(table.read_bytes().replace(b"more", b"mo\xe2e"))
    refused("a heading that is not UTF-8")
    pq.write_table(pa.Table.from_arrays(arrays, names=["path", "label", "more"]), table)
    whole, random = table.read_bytes(), np.random.default_rng(0)
    for number in range(how_many(40, 400)):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 1 + number % 4):
            data[place] ^= 1 << int(random.integers(0, 8))
        table.write_bytes(data[: random.integers(0, len(data))] if number % 3 == 0 else data)
        try:
            list_images(table)
            good = True
        except DataError as error:
            good = bool(str(error))
        tally.case("mutated Parquet tables", good)


def test_labels_are_kept_as_they_are_written(attack: Attack, small_run: Path, photos: Path, tmp_path: Path) -> None:
    """Fault 5: a reader that guesses types makes one class of several."""
    labels = [str(10**30), str(10**30 + 1), "0x10", "16", "1.10", "1.1", "true", "True", "1", "007", "7", "NaN", "nan"]
    labels += ["None", "null", "1e3", "1000", "🦜", "é", "[red]", "a b", "-0", "0"]
    table = tmp_path / "images.csv"
    table.write_text("path,label\n" + "".join(f'{GOOD},"{label}"\n' for label in labels) + f"{GOOD},\n")
    ended = attack("embed", small_run, table, "--out", tmp_path / "v.safetensors")
    assert ended.done, ended.said
    assert read_embeddings(tmp_path / "v.safetensors").labels == [*labels, None]
    table.write_bytes(b"path,label\n" + GOOD.encode() + b",k1\n" + GOOD.encode() + b",caf\xe9\n")
    assert attack("embed", small_run, table, "--out", tmp_path / "v.safetensors").done
    assert read_embeddings(tmp_path / "v.safetensors").labels == ["k1", r"caf\xe9"]
    pq.write_table(pa.table({"path": [GOOD] * 3, "label": [10**15, 10**15 + 1, None]}), tmp_path / "t.parquet")
    assert list_images(tmp_path / "t.parquet").label_names() == [str(10**15), str(10**15 + 1), None]


CELL = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "a.png", "../b.png", "train", "test", "validation", "true", "0", "1", "nan", "-1", "5.5", "é"]
    ),
)
HEAD = st.sampled_from(["path", "label", "split", "is_query", "is_gallery", "x1", "y1", "x2", "y2", "more", ""])


def test_any_table_is_read_or_refused(tmp_path: Path, tally: Any, drawn: Callable[[int, int], Any]) -> None:
    @drawn(120, 2000)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        width = data.draw(st.integers(1, 8))
        rows = [data.draw(st.lists(HEAD, min_size=width, max_size=width))]
        rows += data.draw(st.lists(st.lists(CELL, min_size=width, max_size=width), max_size=5))
        text = "\n".join(",".join(row) for row in rows)
        content = data.draw(st.one_of(st.just(text.encode()), st.binary(max_size=200)))
        (tmp_path / "t.csv").write_bytes(content)
        for read in (list_images, lambda path: load("table", path)):
            with suppress(BierError):  # any other exception would be a traceback
                read(tmp_path / "t.csv")
            tally.case("any table")

    holds()


def test_malformed_folders(attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.png").write_bytes((photos / "class 0" / "0.png").read_bytes())
    (tmp_path / "one" / "class").mkdir(parents=True)
    (tmp_path / "one" / "class" / "a.png").write_bytes((photos / "class 0" / "0.png").read_bytes())
    (tmp_path / "texts" / "class").mkdir(parents=True)
    (tmp_path / "texts" / "class" / "a.txt").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe.csv")
    places = ("empty", "flat", "one", "texts", "loop", "pipe.csv", "nothing", "photos/class 0/0.png", "x" * 300)
    for place in (*(tmp_path / one for one in places), Path("/dev/null"), Path("/proc/self/mem")):
        for name in ("folder", "table", "features", "cub", "sop", "inshop", "vehicleid", "cars", "cifar10"):
            ended = attack("data", "check", "--data", name, "--root", place, limit=20)
            tally.case("malformed data sets", ended.refused, note=f"{name} {place}: {ended}")
        if place.name in ("empty", "texts", "loop", "pipe.csv", "nothing", "null", "mem"):
            ended = attack("embed", small_run, place, "--out", tmp_path / "v.safetensors", limit=20)
            tally.case("malformed data sets", ended.refused, note=f"embed {place}: {ended}")


def test_a_class_folder_that_cannot_be_read(
    attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, whom no permission stops: the system's refusal is played."""
    listing = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("class 2"):
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for command in (
        ("embed", small_run, photos, "--out", tmp_path / "v.safetensors"),
        ("data", "check", "--data", "folder", "--root", photos),
        ("data", "check", "--data", "folder", "--root", photos, "--quick"),
        ("evaluate", small_run / "model", "--data", "folder", "--root", photos),
        ("train", "--data", "folder", "--root", photos, "--steps", 1, "--out", tmp_path / "run"),
    ):
        ended = attack(*command)
        named = "class 2: Permission denied" in ended.said
        tally.case("unreadable files", ended.refused and named, note=f"{command}: {ended}")


def test_an_image_that_cannot_be_read(
    attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, refused = os.open, photos / "class 1" / "5.png"

    def refusing(path: Any, *rest: Any, **options: Any) -> int:
        if isinstance(path, str | os.PathLike) and Path(path) == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest, **options)

    monkeypatch.setattr(os, "open", refusing)
    embed = ("embed", small_run, photos, "--out", tmp_path / "v.safetensors", "--workers", 0)
    for command in (embed, ("search", tmp_path / "index", refused)):
        if command[0] == "search":
            assert attack("index", small_run, photos / "class 0", "--out", tmp_path / "index").done
        ended = attack(*command)
        named = "5.png: permission denied" in ended.said
        tally.case("unreadable files", ended.refused and named, note=f"{command}: {ended}")
    ended = attack(*embed, "--skip-broken", "--json")
    found = json.loads(ended.out) if ended.done else {}
    good = found.get("images") == 11 and [one["path"] for one in found["skipped"]] == [str(refused)]
    tally.case("unreadable files", good, note=str(ended))


def test_weights_that_cannot_be_read(
    attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def refusing(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    def read_bytes(self: Path) -> bytes:
        with self.open("rb") as file:
            content: bytes = file.read()
        return content

    monkeypatch.setattr(Path, "open", refusing)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    for command in (
        ("embed", small_run, photos, "--out", tmp_path / "v.safetensors"),
        ("evaluate", small_run, "--data", "folder", "--root", photos),
        ("export", small_run, "--out", tmp_path / "m.onnx"),
    ):
        ended = attack(*command)
        tally.case("unreadable files", ended.refused and "Permission denied" in ended.said, note=str(ended))
    ended = attack("embed", photos, "--backbone", f"efficientnet_lite0={photos}", "--out", tmp_path / "v.safetensors")
    tally.case("unreadable files", ended.refused, note=str(ended))
    assert json.loads(attack("settings", "seed", "--json").out)
