"""Complete or as it was: at the end of the block, after an error inside it, and when flushing fails."""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

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
