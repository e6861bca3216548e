"""Files and folders that are complete or as they were (written aside, flushed, renamed), and stamps of files."""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from numpy.typing import NDArray


def stamp(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(size, modification time in nanoseconds): a file that keeps both is taken to be unchanged. (0, 0): no file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path for each of a million names would cost more than the call
    except (OSError, ValueError):  # a NUL in the name
        return 0, 0
    return status.st_size, status.st_mtime_ns


def checksum(path: Path) -> str:
    """SHA-256 of a file's content, for files whose content matters more than the time to read them."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(images: Iterable[Any], boxes: "NDArray[Any] | None" = None, about: Iterable[bytes] = ()) -> str:
    """A digest that changes when an image, its box or `about` does; what was made from these images is kept under it.

    images: files by path and stamp; pixels, the bytes of a file and PIL images by their content.
    about: what else the digest covers, such as settings and weights.
    """
    import numpy as np

    digest = hashlib.sha256()
    for more in about:
        digest.update(more)
    if boxes is not None:
        digest.update(np.ascontiguousarray(boxes).tobytes())
    for image in images:
        if isinstance(image, str | os.PathLike):
            size, time = stamp(image)
            digest.update(f"{os.fspath(image)!r} {size} {time}".encode())
        else:
            digest.update(image if isinstance(image, bytes) else np.asarray(image).tobytes())
    return digest.hexdigest()


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


_SURROGATES = re.compile("[\ud800-\udfff]")  # Python stands the byte NN of a name that is not UTF-8 for U+DCNN
_WRITTEN_BYTES = re.compile(r"\\x([89a-f][0-9a-f])")


def name_text(name: str | os.PathLike[str]) -> str:
    r"""A name as text that every file and protocol can hold: bytes that are not UTF-8 are written as \xNN."""

    def written(found: re.Match[str]) -> str:
        code = ord(found[0])
        return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"

    return _SURROGATES.sub(written, os.fspath(name))


def file_named(path: Path) -> Path:
    """The file whose name `name_text` wrote: the path itself if it exists, else with those bytes."""
    if "\\x" not in str(path) or path.exists():
        return path
    return Path(_WRITTEN_BYTES.sub(lambda found: chr(0xDC00 + int(found[1], 16)), str(path)))


def printable(name: str | os.PathLike[str]) -> str:
    """A name or a label that any terminal can print on one line: control characters are escaped too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name_text(name))


def _beside(path: Path) -> Path:
    if path.name in ("", ".."):  # ".", "/" and the like, of which `with_name` makes a ValueError
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}")
