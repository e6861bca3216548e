"""Complete or as it was: at the end of the block, after an error inside it, when flushing fails. Stamps of files."""

import errno
import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bier import files

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
    with pytest.raises(OSError, match="No space left"), aside(target) as other:
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


def test_a_stamp_is_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "a"
    assert files.stamp(file) == (0, 0)
    file.write_bytes(b"abc")
    os.utime(file, ns=(5, 7))
    assert files.stamp(file) == files.stamp(str(file)) == (3, 7)
    assert files.checksum(file) == hashlib.sha256(b"abc").hexdigest()


def test_a_digest_covers_files_pixels_boxes_and_what_else_matters(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(b"abc")
    os.utime(file, ns=(5, 7))
    pixels = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    boxes = np.array([[0, 1, 2, 3]], np.float32)
    # Written out, because caches and maps of earlier versions lie on disks under it.
    expected = hashlib.sha256(b"settings" + boxes.tobytes() + f"{str(file)!r} 3 7".encode()).hexdigest()
    assert files.digest_of([file], boxes, [b"settings"]) == expected
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
