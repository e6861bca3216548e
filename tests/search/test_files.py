"""The saved folder: round trips, damage, and a process killed in the middle of a save."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bier.errors import BusyError, SearchError
from bier.files import locked, with_checksum
from bier.search import Entry, Index

GROUPS = (4, 12)


@pytest.fixture(autouse=True, params=[pytest.param(50_000, id="exact"), pytest.param(30, id="bits")])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each test runs with an index in memory, and with one of bits whose vectors stay in their file."""
    monkeypatch.setattr("bier.search.index.EXACT_ROWS", request.param)
    return int(request.param)


def make(count: int = 400) -> tuple[Index, np.ndarray]:
    vectors = np.random.default_rng(0).normal(size=(count, 16)).astype(np.float32)
    ids = [f"ordner/bild „{row}“.jpg" for row in range(count)]
    metadata = [{"year": row} if row % 2 else None for row in range(count)]
    index = Index.build(vectors, ids, GROUPS, [row % 5 for row in range(count)], metadata, about={"root": "x"})
    return index, vectors


def test_a_loaded_index_answers_as_before(tmp_path: Path, size: int) -> None:
    index, vectors = make()
    index.remove(index.ids[:7])
    index.save(tmp_path / "deep" / "index")
    loaded = Index.load(tmp_path / "deep" / "index")
    assert (len(loaded), loaded.groups, loaded.dimension, loaded.method) == (393, GROUPS, 16, index.method)
    assert loaded.about == {"root": "x"}
    assert loaded.ids == index.ids
    assert loaded.entries(index.ids[2:3]) == [Entry("ordner/bild „9“.jpg", 4, {"year": 9})]
    for question in ({}, {"learners": 1}, {"where": {"label": "3"}}, {"where": {"year": [11, 13]}}):
        before, after = index.search(vectors[:20], 5, **question), loaded.search(vectors[:20], 5, **question)
        np.testing.assert_array_equal(before.ids, after.ids)
        np.testing.assert_array_equal(before.scores, after.scores)
    np.testing.assert_array_equal(index.vectors(index.ids[::-7]), loaded.vectors(index.ids[::-7]))


def test_a_loaded_index_can_grow_and_shrink(tmp_path: Path) -> None:
    index, vectors = make()
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    loaded.save(tmp_path / "index")  # the file that it reads goes away
    loaded.add(-vectors[:1], ["new"])
    assert loaded.search(-vectors[0], 1).ids.tolist() == ["new"]
    loaded.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    loaded.remove(loaded.ids[:200])
    assert loaded._entries.rows == 201
    for row, expected in ((300, index.ids[300]), (0, None)):
        [best] = loaded.search(vectors[row], 1).ids.tolist()
        assert (best == expected) is (expected is not None)
    loaded.save(tmp_path / "index")
    assert Index.load(tmp_path / "index").search(-vectors[0], 1).ids.tolist() == ["new"]


def test_an_empty_index_can_be_kept(tmp_path: Path) -> None:
    Index.build(np.empty((0, 16)), [], GROUPS).save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    assert len(loaded) == 0
    assert loaded.search(np.zeros(16), 3).ids.shape == (0,)


def test_whole_numbers_stay_whole_numbers(tmp_path: Path) -> None:
    Index.build(np.eye(4), [2**40, 1, 2, 3]).save(tmp_path / "index")
    assert Index.load(tmp_path / "index").search(np.eye(4)[0], 1).ids.tolist() == [2**40]


def test_saving_onto_itself_leaves_one_copy(tmp_path: Path) -> None:
    index, vectors = make()
    index.save(tmp_path / "index")
    for _ in range(3):
        loaded = Index.load(tmp_path / "index")
        loaded.save(tmp_path / "index")
    assert len(list((tmp_path / "index").iterdir())) == 2
    np.testing.assert_array_equal(loaded.search(vectors[:9], 3).ids, index.search(vectors[:9], 3).ids)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_every_kind_of_damage_is_one_line(tmp_path: Path, number: int, damage: str) -> None:
    make()[0].save(tmp_path / "index")
    path = [*files(tmp_path / "index"), tmp_path / "index" / "manifest.json"][number]
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        half = len(whole) // 2
        flipped = whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1 :]
        path.write_bytes({"cut": whole[:half], "flip": flipped, "empty": b""}[damage])
    if path.name == "manifest.json" and damage == "flip":
        path.write_bytes(whole.replace(b'"bier-index"', b'"beer-index"'))
    with pytest.raises(SearchError) as error:
        Index.load(tmp_path / "index")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_sizes_are_checked_even_when_checksums_are_not(tmp_path: Path) -> None:
    make()[0].save(tmp_path / "index")
    path = next(path for path in files(tmp_path / "index") if path.name == "vectors.f32")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SearchError, match="expected 25600 bytes, found 25596"):
        Index.load(tmp_path / "index", verify=False)


def test_a_large_file_is_read_at_opening_only_if_it_was_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bier.search.files._LARGE", 1_000)
    make()[0].save(tmp_path / "index")
    path = next(path for path in files(tmp_path / "index") if path.name == "vectors.f32")
    status, whole = path.stat(), path.read_bytes()
    path.write_bytes(whole[:-1] + b"\x07")
    with pytest.raises(SearchError, match="its checksum does not match"):
        Index.load(tmp_path / "index")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # what no copy and no program does
    Index.load(tmp_path / "index")
    with pytest.raises(SearchError, match="its checksum does not match"):
        Index.load(tmp_path / "index", verify=True)


@pytest.mark.parametrize("version", [2, 4, "3", None])
def test_another_format_is_named(tmp_path: Path, version: object) -> None:
    make()[0].save(tmp_path / "index")
    path = tmp_path / "index" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    with pytest.raises(SearchError, match=rf"format bier-index 3. Found 'bier-index' {version!r}; build it again"):
        Index.load(tmp_path / "index")


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    make()[0].save(tmp_path / "index")
    make()[0].save(tmp_path / "other")
    path = tmp_path / "index" / "manifest.json"
    elsewhere = json.loads((tmp_path / "other" / "manifest.json").read_text())["data"]
    forged = {**json.loads(path.read_text()), "data": f"../other/{elsewhere}"}
    path.write_text(json.dumps(with_checksum(forged)))
    with pytest.raises(SearchError, match="missing"):
        Index.load(tmp_path / "index")


def test_places_that_are_no_index(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"must be a folder with a manifest.json"):
        Index.load(tmp_path / "nowhere")
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(SearchError, match=r"It holds 'holiday.jpg'"):
        make()[0].save(tmp_path)
    with pytest.raises(SearchError, match="is a file"):
        make()[0].save(tmp_path / "holiday.jpg")
    assert (tmp_path / "holiday.jpg").read_bytes() == b"x"


def test_metadata_that_json_cannot_hold(tmp_path: Path) -> None:
    index = Index.build(np.eye(2), ["a", "b"], metadata=[{"when": object()}, None])
    with pytest.raises(SearchError, match="Metadata must be what JSON can hold"):
        index.save(tmp_path / "index")
    with pytest.raises(SearchError, match="must be a folder with"):
        Index.load(tmp_path / "index")


def test_a_failed_save_leaves_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make()[0].save(tmp_path / "index")
    before = {path: path.read_bytes() for path in files(tmp_path / "index")}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("bier.search.files._json", "os.fsync", "bier.files.flush_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(broken, full)
            with pytest.raises(SearchError, match="the disk is full"):
                make(count=50)[0].save(tmp_path / "index")
        assert {path: path.read_bytes() for path in files(tmp_path / "index")} == before
    assert len(Index.load(tmp_path / "index")) == 400


SAVER = """
import sys
import numpy as np
from bier.search import Index
index = Index.build(np.random.default_rng(1).normal(size=(int(sys.argv[2]), 64)), groups=(16, 48))
print("ready", flush=True)
while True:
    index.save(sys.argv[1])
"""


def test_a_save_that_was_killed_at_its_mark_is_cleared_away(tmp_path: Path) -> None:
    make()[0].save(tmp_path / "index")
    left = tmp_path / "index" / "data-0123abcd"
    left.mkdir()
    (left / "bier-index.json").write_text('{"for')
    make()[0].save(tmp_path / "index")
    assert not left.exists()


def test_a_killed_save_leaves_a_whole_index(tmp_path: Path) -> None:
    """Kill a process that saves over and over; whatever is there opens, checksums and all."""
    folder = tmp_path / "index"
    make()[0].save(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for moment in (0.0, 0.01, 0.03, 0.07):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, folder, "20000"], stdout=subprocess.PIPE, env=environment
        )
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(moment)
            process.kill()
        assert len(Index.load(folder)) in (400, 20_000)
    make()[0].save(folder)
    assert len(list(folder.iterdir())) == 2, "the next save clears away what the killed ones left"
    assert len(Index.load(folder)) == 400


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def test_a_manifest_covers_itself(tmp_path: Path) -> None:
    make()[0].save(tmp_path / "index")
    path, manifest = tmp_path / "index" / "manifest.json", manifest_of(tmp_path / "index")
    for forged in ({**manifest, "groups": [8, 8]}, {key: manifest[key] for key in manifest if key != "checksum"}):
        path.write_text(json.dumps(forged))
        with pytest.raises(SearchError, match="checksum"):
            Index.load(tmp_path / "index")


@pytest.mark.parametrize(
    "change",
    [
        {"rows": -1}, {"rows": 10**11},
        {"rows": "400"}, {"groups": []}, {"groups": [4, "12"]}, {"groups": [4, 2**50]}, {"groups": 16},
        {"groups": [15]}, {"about": []}, {"about": None}, {"files": []},
        {"files": {"a": 3}}, {"data": 5}, {"files": {"entries.json": {"bytes": "9", "sha256": ""}}}, {"version": "1"},
        {"version": True, "rows": None}, {"about": {"root": 7}}, {"about": {"model": "x"}},
        {"about": {"model": {"path": 7}}}, {"about": {"model": {"backbone": ["x"]}}}, {"about": {"recall": 3}},
        {"about": {"model": {"fingerprint": {}}}}, {"about": {"source": []}},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_manifest_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    make(count=40)[0].save(tmp_path / "index")
    forged = with_checksum({**manifest_of(tmp_path / "index"), **change})
    (tmp_path / "index" / "manifest.json").write_text(json.dumps(forged))
    with pytest.raises(SearchError) as error:
        Index.load(tmp_path / "index")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"ids": [1.5] * 40}, {"ids": [["a"]] * 40}, {"ids": ["a"] * 40}, {"ids": None}, {"ids": {}}, {"labels": [1]},
        {"labels": [[]] * 40}, {"metadata": ["a"] * 40}, {"removed": [40]}, {"removed": [-1]}, {"removed": ["a"]},
        {"removed": None},
    ],
    ids=str,
)  # fmt: skip
def test_forged_entries_are_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    make(count=40)[0].save(tmp_path / "index")
    manifest = manifest_of(tmp_path / "index")
    path = tmp_path / "index" / manifest["data"] / "entries.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    size, digest = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["files"]["entries.json"] = {"bytes": size, "sha256": digest, "modified": 0}
    (tmp_path / "index" / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(SearchError, match="is damaged") as error:
        Index.load(tmp_path / "index")
    assert "\n" not in str(error.value)


def test_an_array_that_claims_more_than_its_file_takes_no_memory(tmp_path: Path) -> None:
    make(40)[0].save(tmp_path / "index")
    manifest = manifest_of(tmp_path / "index") | {"rows": 10**10}
    (tmp_path / "index" / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(SearchError, match=r"vectors\.f32 must have 640000000000 bytes for 10000000000 rows"):
        Index.load(tmp_path / "index")


def test_two_processes_that_save_at_once(tmp_path: Path) -> None:
    index, _ = make(40)
    index.save(tmp_path / "index")
    before = {path: path.read_bytes() for path in files(tmp_path / "index")}
    with locked(tmp_path / "index", "saving the index"):
        with pytest.raises(BusyError, match=r"Another process is saving the index .*index\. Wait"):
            index.save(tmp_path / "index")
        assert len(Index.load(tmp_path / "index")) == 40  # readers need no lock
    assert before == {path: path.read_bytes() for path in files(tmp_path / "index")}
    index.save(tmp_path / "index")


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    about = {"root": "bilder-\udcff"}
    Index.build(np.eye(2), ["a-\udcfe", "b"], about=about).save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert (again.about, again.ids) == (about, ["a-\udcfe", "b"])


def test_vectors_whose_products_are_not_finite_are_refused() -> None:
    index = Index.build(np.eye(2), ["a", "b"])
    for refused in (lambda: Index.build(np.eye(2) * 1e20), lambda: index.search(np.ones(2) * 1e20, 1)):
        with pytest.raises(SearchError, match=r"must hold numbers of up to 1e\+15"):
            refused()


@pytest.mark.parametrize("manifest", [None, b"{}", b"not JSON"])
def test_folders_of_the_user_beside_an_index_are_kept(tmp_path: Path, manifest: bytes | None) -> None:
    """Issue 34, 1.4: every folder named `data-...` was taken for the index's own and deleted."""
    photos = tmp_path / "out" / "data-20240101"
    photos.mkdir(parents=True)
    (photos / "1.jpg").write_bytes(b"a picture")
    if manifest is not None:
        (tmp_path / "out" / "manifest.json").write_bytes(manifest)
    with pytest.raises(SearchError, match="It holds 'data-20240101'"):
        make()[0].save(tmp_path / "out")
    assert (photos / "1.jpg").read_bytes() == b"a picture"
    make()[0].save(tmp_path / "index")
    photos.rename(tmp_path / "index" / "data-20240101")
    for _ in range(2):
        Index.load(tmp_path / "index").save(tmp_path / "index")
    assert (tmp_path / "index" / "data-20240101" / "1.jpg").read_bytes() == b"a picture"
    assert len(list((tmp_path / "index").iterdir())) == 3


def test_a_file_of_the_user_inside_the_data_folder_is_kept(tmp_path: Path) -> None:
    make()[0].save(tmp_path / "index")
    note = tmp_path / "index" / manifest_of(tmp_path / "index")["data"] / "notes.txt"
    note.write_text("mine")
    make()[0].save(tmp_path / "index")
    assert note.read_text() == "mine"
    assert [path.name for path in note.parent.iterdir()] == ["notes.txt"]


def write_rows(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Another program writes the vectors of an index, with the right checksums."""
    manifest = manifest_of(folder)
    path = folder / manifest["data"] / "vectors.f32"
    path.write_bytes(change(np.fromfile(path, "<f4").reshape(-1, 16)).tobytes())
    stamp = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "modified": 0}
    manifest["files"]["vectors.f32"] = stamp
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest)))


def test_rows_on_disk_that_are_no_numbers_are_no_answers(tmp_path: Path) -> None:
    index, vectors = make()
    index.save(tmp_path / "index")

    def with_nan(rows: np.ndarray) -> np.ndarray:
        rows[3] = np.nan
        return rows

    write_rows(tmp_path / "index", with_nan)
    for question in ({}, {"learners": 1}, {"where": {"label": 3}}):
        with pytest.raises(SearchError, match=r"has NaN"):
            Index.load(tmp_path / "index").search(vectors[3], 200, **question)


SHORTENED = """
import sys
import numpy as np
from bier.errors import SearchError
from bier.search import Index, index
index.EXACT_ROWS = int(sys.argv[2])
opened = Index.load(sys.argv[1])
query = np.ones(16)
opened.search(query, 3)
for path in sorted(index.Path(sys.argv[1]).rglob("*")):
    if path.is_file():
        with path.open("r+b") as file:
            file.truncate(100)
for question in ({}, {"learners": 1}, {"where": {"label": 1}}):
    try:
        opened.search(query, 3, **question)
    except SearchError as error:
        print(error)
"""


def test_files_that_are_shortened_in_place_end_no_process(tmp_path: Path, size: int) -> None:
    """A memory map of them did, by SIGBUS."""
    make()[0].save(tmp_path / "index")
    done = subprocess.run(
        [sys.executable, "-c", SHORTENED, tmp_path / "index", str(size)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == (3 if size < 400 else 0)  # what is in memory is whole
    assert all("vectors.f32 was shortened since it was opened" in line for line in lines)


def test_an_index_knows_when_it_was_replaced(tmp_path: Path) -> None:
    index, _ = make(40)
    assert not index.is_replaced()
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    assert (index.is_replaced(), loaded.is_replaced()) == (False, False)
    index.save(tmp_path / "index")
    assert (index.is_replaced(), loaded.is_replaced()) == (False, True)
    (tmp_path / "index" / "manifest.json").unlink()
    assert not loaded.is_replaced()


def test_an_index_that_is_being_replaced_is_read_again(tmp_path: Path) -> None:
    """Of loads while another process saves without a pause, one in thirty said that the index was damaged."""
    folder = tmp_path / "index"
    make()[0].save(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, folder, "50"], stdout=subprocess.PIPE, env=environment
    ) as saver:
        try:
            assert saver.stdout is not None
            saver.stdout.readline()
            end = time.monotonic() + 2
            while time.monotonic() < end:
                assert len(Index.load(folder)) in (400, 50)
        finally:
            saver.kill()
