"""Complete or as it was: at the end of the block, after an error inside it, when flushing fails. Stamps of files."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from bier import files, folders
from bier.errors import BusyError, WriteError

Aside = Callable[[Path], AbstractContextManager[Path]]


def put_file(aside: Path) -> None:
    aside.write_bytes(b"new")


def put_folder(aside: Path) -> None:
    (aside / "part").write_bytes(b"new")


def content(path: Path) -> bytes:
    return (path / "part" if path.is_dir() else path).read_bytes()


BOTH = pytest.mark.parametrize(
    ("aside", "put"),
    [(files.file_aside, put_file), (files.folder_aside, put_folder)],
    ids=["file", "folder"],
)


@BOTH
def test_it_has_its_name_at_the_end_and_takes_the_place_of_an_old_one(
    aside: Aside, put: Callable[[Path], None], tmp_path: Path
) -> None:
    target = tmp_path / "here"
    for _ in range(2):
        with aside(target) as other:
            put(other)
            assert other.parent == tmp_path
            assert other != target
        assert content(target) == b"new"
        assert list(tmp_path.iterdir()) == [target]


@BOTH
def test_a_failure_leaves_the_old_one_and_nothing_else(
    aside: Aside, put: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "here"
    with aside(target) as other:
        put(other)

    def put_and_fail(other: Path) -> None:
        put(other)
        raise KeyError

    with pytest.raises(KeyError), aside(target) as other:
        put_and_fail(other)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=r"Could not write .*here: the disk is full\."), aside(target) as other:
        put(other)
    assert content(target) == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    flush = os.fsync

    def watched(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        assert (tmp_path / "here").exists() == (flushed[-1] == tmp_path.name)
        flush(handle)

    monkeypatch.setattr(os, "fsync", watched)
    files.write(tmp_path / "here", b"new")
    assert len(flushed) == 2
    assert flushed[-1] == tmp_path.name
    assert (tmp_path / "here").read_bytes() == b"new"


def test_a_stamp_is_size_time_and_inode(tmp_path: Path) -> None:
    file = tmp_path / "a"
    assert files.stamp(file) == (0, 0, 0)
    file.write_bytes(b"abc")
    os.utime(file, ns=(5, 7))
    assert files.stamp(file) == files.stamp(str(file)) == (3, 7, file.stat().st_ino)
    assert files.checksum(file) == hashlib.sha256(b"abc").hexdigest()


def test_a_digest_covers_files_pixels_boxes_and_what_else_matters(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(b"abc")
    os.utime(file, ns=(5, 7))
    pixels = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    boxes = np.array([[0, 1, 2, 3]], np.float32)
    assert files.digest_of([file], boxes, [b"settings"]) == files.digest_of([str(file)], boxes.copy(), [b"settings"])
    boxes_moved = boxes + np.float32(1)
    digests = {
        files.digest_of([file], boxes),
        files.digest_of([file], boxes_moved),
        files.digest_of([file]),
        files.digest_of([str(file), file]),
        files.digest_of(pixels),
        files.digest_of([pixels[0]], boxes),
        files.digest_of([b"a file"]),
        files.digest_of([file], about=[b"other"]),
    }
    assert len(digests) == 8
    assert files.digest_of(pixels) == files.digest_of([Image.fromarray(pixels[0])])
    os.utime(file, ns=(5, 8))
    assert files.digest_of([file], boxes) not in digests


def test_a_record_covers_itself() -> None:
    record = files.with_checksum({"mean": [127.5], "root": "a\udcff", "size": 3})
    files.check_record(json.loads(json.dumps(record)))
    assert files.with_checksum(record) == record
    for change in ({"mean": [107.5]}, {"size": 3.5}, {"more": 1}, {"checksum": "0" * 64}):
        with pytest.raises(ValueError, match="checksum does not match"):
            files.check_record({**record, **change})
    bare = {key: value for key, value in record.items() if key != "checksum"}
    for unsigned in (bare, {**bare, "chacksum": record["checksum"]}):
        with pytest.raises(ValueError, match="it has no checksum"):
            files.check_record(unsigned)


def test_tensors_come_back_and_every_flipped_byte_is_found(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "none": np.empty((0, 4), np.int64)}
    path = tmp_path / "x.safetensors"
    files.write_tensors(path, tensors, {"groups": "[1, 2]", "name": "ü"})
    whole = path.read_bytes()
    for _ in range(9):
        files.write_tensors(path, tensors, {"name": "ü", "groups": "[1, 2]"})
        assert path.read_bytes() == whole
    again, metadata = files.read_tensors(path)
    assert metadata.pop("sha256")
    assert metadata == {"groups": "[1, 2]", "name": "ü"}
    assert {name: tensor.tolist() for name, tensor in load_file(path).items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor)
        assert (again[name].dtype, again[name].shape) == (tensor.dtype, tensor.shape)
    assert files.read_tensors(path, ["a"])[0].keys() == {"a"}
    with pytest.raises(ValueError, match="no tensor 'b'"):
        files.read_tensors(path, ["b"])
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            found, metadata = files.read_tensors(path)
        except ValueError:
            continue
        # In spaces, or in the word that names the checksum: the content is the same.
        assert metadata.get("groups") == "[1, 2]"
        np.testing.assert_array_equal(found["a"], tensors["a"])


def test_a_tensor_in_blocks_is_read_once_and_written_as_the_whole_of_it(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    about, shape = np.arange(5, dtype=np.uint8), whole.shape  # smaller numbers: last in the file, first in the checksum
    files.write_tensors(tmp_path / "whole", {"z": whole, "a": 2 * whole, "about": about})
    z, a = (files.Blocks(whole.dtype, shape, iter([rows[:4], rows[4:]])) for rows in (whole, 2 * whole))
    files.write_tensors(tmp_path / "blocks", {"z": z, "a": a, "about": about})
    assert (tmp_path / "blocks").read_bytes() == (tmp_path / "whole").read_bytes()
    np.testing.assert_array_equal(files.read_tensors(tmp_path / "blocks")[0]["z"], whole)


def test_a_file_of_another_program_has_no_checksum(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    tensors, metadata = files.read_tensors(tmp_path / "x.safetensors")
    assert (tensors["a"].tolist(), metadata) == ([1, 1, 1], {})
    with pytest.raises(FileNotFoundError):
        files.read_tensors(tmp_path / "y.safetensors")


def test_a_folder_with_checksums(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    files.write_checksums(tmp_path)
    files.check_files(tmp_path, "a")
    assert (tmp_path / "SHA256SUMS").read_text() == f"{hashlib.sha256(b'abc').hexdigest()}  a\n"
    with pytest.raises(ValueError, match="does not list b"):
        files.check_files(tmp_path, "b")
    (tmp_path / "a").write_bytes(b"abd")
    with pytest.raises(ValueError, match="checksum of a does not match"):
        files.check_files(tmp_path, "a")
    (tmp_path / "SHA256SUMS").write_bytes(b"")
    with pytest.raises(ValueError, match="does not list a"):
        files.check_files(tmp_path, "a")


def test_one_holds_the_lock_and_the_other_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with files.locked(folder, "training"):
        with pytest.raises(BusyError, match=r"Another process is training .*run"), files.locked(folder, "training"):
            pass
        with pytest.raises(BusyError), files.locked(folder, "training"):  # the first one still holds it
            pass
        (folder / "result").touch()
    with files.locked(folder, "training"):
        pass
    assert [path.name for path in folder.iterdir()] == ["result"]
    with files.locked(tmp_path / "new", "training"):
        pass
    assert not (tmp_path / "new").exists()
    with pytest.raises(WriteError, match="Could not write"), files.locked(folder / "result", "training"):
        pass


DIES = """
import os, sys
from pathlib import Path
from bier import files, folders
target, moment = Path(sys.argv[1]), sys.argv[2]
rename = Path.rename
def renamed(path, to):
    if moment == "between" and Path(to) == target:
        os._exit(9)
    return rename(path, to)
Path.rename = renamed
with files.folder_aside(target) as aside:
    (aside / "part").write_bytes(b"newer")
    if moment == "inside":
        os._exit(9)
"""


@pytest.mark.parametrize("moment", ["inside", "between"])
def test_what_a_killed_process_leaves_is_found(tmp_path: Path, moment: str) -> None:
    target = tmp_path / "model"
    with files.folder_aside(target) as aside:
        put_folder(aside)
    died = subprocess.run([sys.executable, "-c", DIES, str(target), moment], check=False)
    assert died.returncode == 9
    assert target.exists() == (moment == "inside")
    assert len(list(tmp_path.iterdir())) == 2
    files.restore(target)
    assert content(target) == b"new"
    with files.folder_aside(target) as aside:
        put_folder(aside)
        assert sorted(tmp_path.iterdir()) == sorted([target, aside])  # what the other left is gone, ours is not
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_is_replaced_keeps_the_files_of_others(tmp_path: Path) -> None:
    """`train --resume` deleted the notes in RUN/model."""
    target = tmp_path / "model"
    for text in ("first", "second"):
        with files.folder_aside(target) as aside:
            (aside / "part").write_text(text)
        if text == "first":
            (target / "mine").mkdir()
            (target / "mine" / "thesis.txt").write_text("mine")
            (target / "notes.txt").write_text("mine")
    assert held(target) == {"part": "second", "mine/thesis.txt": "mine", "notes.txt": "mine"}
    assert list(tmp_path.iterdir()) == [target]


def fill(folder: Path, **content: str) -> None:
    """Write a folder of ours with these files."""
    with folders.own_folder(folder, "report") as aside:
        for name, text in content.items():
            (aside / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    return {name: text for name, text in found.items() if name != folders.RECORD}


def test_a_folder_of_ours_leaves_the_files_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    fill(folder, page="first", old="first")
    fill(folder, page="second", old="second")
    assert held(folder) == {"page": "second", "old": "second"}
    assert folders.folder_kind(folder) == "report"
    (folder / "notes.txt").write_text("mine")
    (folder / "mine").mkdir()
    (folder / "mine" / "1.jpg").write_text("mine")
    theirs = {"notes.txt": "mine", "mine/1.jpg": "mine"}
    fill(folder, page="third", new="third")
    assert held(folder) == {**theirs, "page": "third", "new": "third"}
    (folder / "new").unlink()
    fill(folder, page="fourth")
    assert held(folder) == {**theirs, "page": "fourth"}
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "report"

    def refused(words: str, **content: str) -> None:
        before = held(tmp_path)
        with pytest.raises(WriteError, match=words) as error:
            fill(folder, **(content or {"page": "new"}))
        assert "\n" not in str(error.value)
        assert held(tmp_path) == before
        assert not [path for path in tmp_path.iterdir() if path != folder]

    folder.write_text("a file")
    refused("must be a folder. Got .*report, which is a file")
    folder.unlink()
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    refused("must be new, empty or an earlier report. It holds 'thesis.txt'")
    (folder / folders.RECORD).write_text("no record")
    refused("must be new, empty or an earlier report")
    for name in ("thesis.txt", folders.RECORD):
        (folder / name).unlink()
    fill(folder, page="first")
    (folder / "picture").write_text("mine")
    refused("picture must be a file that bier wrote", page="new", picture="new")
    (folder / "page").write_text("corrected by hand")
    refused("page was changed since it was written")
    with pytest.raises(WriteError, match=r"an earlier audit\. It holds a report"):
        folders.check_own_folder(folder, "audit")
    assert folders.folder_kind(tmp_path) is None


def test_a_record_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    fill(tmp_path / "report", page="first")
    (tmp_path / "thesis").write_text("mine")
    record = json.loads((tmp_path / "report" / folders.RECORD).read_text())
    record["files"]["../thesis"] = [files.checksum(tmp_path / "thesis")]
    (tmp_path / "report" / folders.RECORD).write_text(json.dumps(record))
    with pytest.raises(WriteError, match="must be new, empty"):
        fill(tmp_path / "report", page="second")
    assert (tmp_path / "thesis").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_folder_of_ours_can_be_written_again_after_any_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Stopped at each rename in turn, beside a file of another's: all files are complete, and all are replaced next."""
    folder = tmp_path / "report"
    moves = [Path.replace, Path.rename]
    for stop in range(1, 8):
        fill(folder, page="old", gone="old")
        (folder / "notes.txt").write_text("mine")
        with monkeypatch.context() as patch:
            left = [stop]

            def stopped(move: Callable[[Path, Path], Path], path: Path, to: Path, left: list[int] = left) -> Path:
                left[0] -= 1
                if left[0] == 0:
                    raise error
                return move(path, to)

            for move in moves:
                patch.setattr(Path, move.__name__, lambda path, to, move=move: stopped(move, path, to))
            try:
                fill(folder, page="new", more="new")
            except (WriteError, KeyboardInterrupt):
                assert left[0] == 0
        assert set(held(folder).values()) <= {"old", "new", "mine"}
        assert held(folder)["page"] in ("old", "new")
        fill(folder, page="newest")
        assert held(folder) == {"page": "newest", "notes.txt": "mine"}
        assert list(tmp_path.iterdir()) == [folder]


def test_what_another_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    with files.file_aside(tmp_path / "here") as one, files.file_aside(tmp_path / "here") as other:
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert content(tmp_path / "here") == b"one"


def test_a_file_is_reserved_or_refused(tmp_path: Path) -> None:
    files.reserve(tmp_path / "x", 10_000)
    assert (tmp_path / "x").read_bytes() == bytes(10_000)
    (tmp_path / "x").write_bytes(b"a" * 20_000)
    files.reserve(tmp_path / "x", 10_000)
    assert (tmp_path / "x").read_bytes() == b"a" * 10_000
    with pytest.raises(OSError, match=r"No space left|File too large"):
        files.reserve(tmp_path / "x", 2**60)
