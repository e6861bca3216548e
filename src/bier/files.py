"""Files and folders that are complete or as they were: written aside, flushed to the disk, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


def write(path: Path, content: bytes) -> None:
    """The whole file, in place of one that is there."""
    with file_aside(path) as aside:
        aside.write_bytes(content)


@contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place at the end of the block. A failure leaves nothing of it."""
    aside = _beside(path)
    try:
        yield aside
        flush(aside)
        aside.replace(path)
        flush_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """As `file_aside` for a new folder of files. One that is there is gone only when the new one has its name."""
    aside = _beside(path)
    try:
        aside.mkdir(parents=True)
        yield aside
        flush_files(aside)
        if path.exists():
            old = path.rename(_beside(path))
            aside.rename(path)
            shutil.rmtree(old)
        else:
            aside.rename(path)
        flush_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def flush_files(folder: Path) -> None:
    """Make the files of a folder durable, and that they are there."""
    for file in folder.iterdir():
        flush(file)
    flush_folder(folder)


def flush(file: Path) -> None:
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())


def flush_folder(folder: Path) -> None:
    """Make renames inside a folder durable, where the system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}")
