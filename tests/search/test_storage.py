"""The saved folder: round trips, damage, and a process killed in the middle of a save."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bier.errors import SearchError
from bier.search import Entry, Index

GROUPS = (4, 12)


def make(kind: str = "hnsw", count: int = 400) -> tuple[Index, np.ndarray]:
    vectors = np.random.default_rng(0).normal(size=(count, 16)).astype(np.float32)
    ids = [f"ordner/bild „{row}“.jpg" for row in range(count)]
    metadata = [{"year": row} if row % 2 else None for row in range(count)]
    index = Index.build(vectors, ids, GROUPS, [row % 5 for row in range(count)], metadata, kind, about={"model": "x"})
    return index, vectors


@pytest.mark.parametrize("kind", ["auto", "flat", "hnsw", "funnel"])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_loaded_index_answers_as_before(tmp_path: Path, kind: str, mmap: bool) -> None:
    index, vectors = make(kind)
    index.remove(index.ids[:7])
    index.save(tmp_path / "deep" / "index")
    loaded = Index.load(tmp_path / "deep" / "index", mmap=mmap)
    assert (len(loaded), loaded.groups, loaded.dimension, loaded.kind) == (393, GROUPS, 16, kind)
    assert loaded.about == {"model": "x"}
    assert loaded.ids == index.ids
    assert loaded.entries(index.ids[2:3]) == [Entry("ordner/bild „9“.jpg", 4, {"year": 9})]
    for question in ({}, {"shortlist": 50}, {"where": {"label": "3"}}, {"where": {"year": [11, 13]}}):
        before, after = index.search(vectors[:20], 5, **question), loaded.search(vectors[:20], 5, **question)
        np.testing.assert_array_equal(before.ids, after.ids)
        np.testing.assert_array_equal(before.scores, after.scores)


def test_vectors_stay_on_disk(tmp_path: Path) -> None:
    make()[0].save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    assert all(isinstance(part.base, np.memmap) for learner in (0, 1) for part in loaded._vectors.part(learner))


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
    path = files(tmp_path / "index")[number]
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
    path = next(path for path in files(tmp_path / "index") if path.name == "learner-2.npy")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SearchError, match="expected 19328 bytes, found 19324"):
        Index.load(tmp_path / "index", verify=False)


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    make()[0].save(tmp_path / "index")
    path = tmp_path / "index" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(SearchError, match=r"format bier-index 1. Found 'bier-index' 2"):
        Index.load(tmp_path / "index")


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    make()[0].save(tmp_path / "index")
    make()[0].save(tmp_path / "other")
    path = tmp_path / "index" / "manifest.json"
    elsewhere = json.loads((tmp_path / "other" / "manifest.json").read_text())["data"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "data": f"../other/{elsewhere}"}))
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

    writing = "bier.search.storage.np.lib.format.write_array_header_1_0"
    for broken in (writing, "os.fsync", "bier.files.flush_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(broken, full)
            with pytest.raises(SearchError, match="No space left on device"):
                make(count=50)[0].save(tmp_path / "index")
        assert {path: path.read_bytes() for path in files(tmp_path / "index")} == before
    assert len(Index.load(tmp_path / "index")) == 400


SAVER = """
import sys
import numpy as np
from bier.search import Index
index = Index.build(np.random.default_rng(1).normal(size=(int(sys.argv[2]), 64)), groups=(16, 48), kind="flat")
print("ready", flush=True)
while True:
    index.save(sys.argv[1])
"""


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
