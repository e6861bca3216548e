"""Files and folders that are complete or as they were (written aside, flushed, renamed), their checksums and locks.

Every format of ours takes its checksum from here:

- `with_checksum` and `check_record`: a JSON record that covers itself (model.json, the manifest of an index).
- `write_tensors` and `read_tensors`: a safetensors file with the checksum of all it holds (embeddings, shards).
- `write_checksums` and `check_files`: a folder of files with a `SHA256SUMS`, as the program sha256sum reads it.
"""

import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from bier.errors import BusyError, WriteError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHECKSUM = "checksum"  # the key of a record that covers the others
SUMS = "SHA256SUMS"
LOCK = ".lock"
_DIGITS = 64  # of a SHA-256
_LONGEST_HEADER = 100_000_000  # bytes, as the library of safetensors has it
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# Reading


def open_file(path: str | os.PathLike[str], most: int = -1) -> io.BufferedReader:
    """Open a regular file, to read it. O_NONBLOCK, because opening a pipe would wait until another process writes.

    most: bytes; a larger file is an OSError.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status, name = os.fstat(handle), os.fspath(path)
    if stat.S_ISREG(status.st_mode) and not 0 <= most < status.st_size:
        return open(handle, "rb")  # noqa: PTH123 - a handle, which the caller closes
    os.close(handle)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a file", name)
    raise OSError(errno.EFBIG, f"the file must have at most {most:,} bytes", name)


def read_file(path: str | os.PathLike[str], most: int = 2**26) -> bytes:
    """The whole of a regular file, such as a manifest or settings, that may be anybody's: see `open_file`."""
    with open_file(path, most) as file:
        return file.read()


def place_of(place: str | os.PathLike[str]) -> Path | str:
    """What an argument names: a path, also of `file:///...`, or a URL as text, which fsspec opens."""
    text = os.fspath(place)
    if not is_url(text):
        return Path(place)
    scheme, _, rest = text.partition("://")
    return Path(rest) if scheme in ("file", "local") and rest.startswith("/") and "::" not in rest else text


def is_url(place: object) -> bool:
    """Whether this is the text of a URL, such as s3://bucket/a.jpg, which fsspec opens. A Path never is one."""
    return isinstance(place, str) and "://" in place


def read_url(url: str, most: int = -1) -> bytes:
    """The whole file behind a URL: pictures and tables are small, and their readers would ask for many pieces.

    most: bytes; a larger file is an OSError. Of chained URLs such as `zip://a.jpg::http://host/b.zip` each part could
    be larger, or a reference to yet another place; they are refused.
    """
    import fsspec

    if "::" in url:
        raise OSError("a URL must not have '::' in it")
    local = url.partition("://")[0] in ("file", "local")
    opened = open_file(fsspec.core.strip_protocol(url)) if local else fsspec.open(url, "rb")
    with opened as file:
        content: bytes = file.read(-1 if most < 0 else most + 1)
    if 0 <= most < len(content):
        raise OSError(f"the file must have at most {most:,} bytes")
    return content


# Stamps and digests


def stamp(path: str | os.PathLike[str]) -> tuple[int, int, int]:
    """(size, modification time in nanoseconds, inode): a file that keeps them is taken to be unchanged.

    (0, 0, 0): no file.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path for each of a million names would cost more than the call
    except (OSError, ValueError):  # a NUL in the name
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino & (2**63 - 1)


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
            digest.update(f"{os.fspath(image)!r} {stamp(image)}".encode())
        else:
            digest.update(image if isinstance(image, bytes) else np.asarray(image).tobytes())
    return digest.hexdigest()


# Checksums


def checksum(content: Path | bytes) -> str:
    """SHA-256 of a file or of bytes, for content that matters more than the time to read it."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON record with the checksum of its values, however the file is indented."""
    rest = {key: value for key, value in record.items() if key != CHECKSUM}
    return {**rest, CHECKSUM: checksum(json.dumps(rest, sort_keys=True, default=dict).encode())}


def check_record(record: Mapping[str, Any]) -> None:
    """ValueError if a record is not as `with_checksum` left it."""
    if CHECKSUM not in record:
        raise ValueError("it has no checksum")
    if with_checksum(record)[CHECKSUM] != record[CHECKSUM]:
        raise ValueError("its checksum does not match its content")


class Blocks(NamedTuple):
    """A tensor for `write_tensors` that may be larger than memory: its rows, block by block."""

    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    rows: "Iterable[NDArray[Any]]"


def write_tensors(
    path: Path, tensors: "Mapping[str, NDArray[Any] | Blocks]", metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file that holds the checksum of its tensors and metadata, under `sha256` in its metadata.

    The library takes whole tensors in memory, copies them, and writes metadata in random order. Here each tensor is
    read once, block by block, and the same tensors always give the same bytes.
    """
    known = dict(metadata or {})
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # every tensor is aligned
    header, starts = _header(tensors, order, {**known, "sha256": "0" * _DIGITS})
    digest = hashlib.sha256()
    with file_aside(path) as aside, aside.open("wb") as file:
        file.write(header)
        for name in sorted(tensors):  # in the order of the checksum, which is not that of the file
            file.seek(starts[name])
            for piece in _pieces(name, tensors[name], digest):
                file.write(piece)
        digest.update(json.dumps(known, sort_keys=True).encode())
        file.seek(0)
        file.write(_header(tensors, order, {**known, "sha256": digest.hexdigest()})[0])


def _header(
    tensors: "Mapping[str, NDArray[Any] | Blocks]", order: Iterable[str], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and where each tensor starts in the file."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        dtype, shape = tensors[name].dtype, tensors[name].shape
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _dtype_name(dtype), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}
    return len(text).to_bytes(8, "little") + text, starts


def read_tensors(
    path: Path, wanted: Collection[str] | None = None, optional: Collection[str] = (), mmap: bool = False
) -> "tuple[dict[str, NDArray[Any]], dict[str, str]]":
    """(tensors, metadata) of a safetensors file; ValueError where it is damaged.

    wanted: the tensors to return, by default all; an error if one is missing, unlike those of `optional`.
    mmap: leave them on disk until they are touched. They can be changed, which does not change the file.
    All tensors are read for the checksum, one at a time. Metadata without `sha256` are of another program or version.
    """
    import numpy as np

    tensors: dict[str, NDArray[Any]] = {}
    try:
        layout, known = _layout(path)
        expected = known.pop("sha256", None)
        if expected is None and any(len(value) == _DIGITS for value in known.values()):
            raise ValueError("its checksum has lost its name")  # by a flipped bit; there may be others
        digest = hashlib.sha256()
        for name in sorted(layout):
            kept = wanted is None or name in wanted or name in optional
            if not kept and expected is None:
                continue
            tensor = _mapped(path, *layout[name])
            for _ in _pieces(name, tensor, digest):
                pass  # for the checksum alone
            if kept:
                tensors[name] = tensor if mmap else np.array(tensor)
            del tensor  # before the next one is mapped: each may take most of the address space
    except FileNotFoundError:
        raise
    except (OSError, TypeError, KeyError, AttributeError, UnicodeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    digest.update(json.dumps(known, sort_keys=True).encode())
    if expected is not None and digest.hexdigest() != expected:
        raise ValueError("its checksum does not match its content")
    missing = sorted(set(wanted or ()) - set(layout))
    if missing:
        raise ValueError(f"it has no tensor {missing[0]!r}")
    return tensors, known if expected is None else {**known, "sha256": expected}


def read_header(path: Path) -> tuple[list[str], dict[str, str]]:
    """(names of the tensors, metadata) of a safetensors file; ValueError if its header is damaged. Reads no tensor."""
    try:
        layout, metadata = _layout(path)
    except (TypeError, KeyError, AttributeError, UnicodeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return list(layout), metadata


_DTYPES = {  # of safetensors, in numpy's words
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4", "I32": "<i4",
    "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
_Layout = tuple[str, tuple[int, ...], int]  # numpy's dtype, shape, position in the file


def _dtype_name(dtype: "np.dtype[Any]") -> str:
    return next(name for name, known in _DTYPES.items() if known == dtype.str)


def _layout(path: Path) -> tuple[dict[str, _Layout], dict[str, str]]:
    """Where each tensor of a safetensors file is, and its metadata; ValueError unless they fill the file exactly.

    The library maps the whole file for as long as a tensor of it is read. Only the header is read here, so that each
    tensor can be mapped alone.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"its header must be shorter than the file of {size} bytes, found {length}")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata must be texts")
    layout: dict[str, _Layout] = {}
    end = 0
    for name, about in sorted(header.items(), key=lambda item: (*item[1]["data_offsets"], item[0])):
        if about["dtype"] not in _DTYPES or not all(type(count) is int and count >= 0 for count in about["shape"]):
            raise ValueError(f"its tensor {name!r} has an unknown type or shape")
        dtype = _DTYPES[about["dtype"]]
        start, stop = about["data_offsets"]
        if start != end or stop - start != int(dtype[2:]) * math.prod(about["shape"]):
            raise ValueError(f"its tensor {name!r} must be where the one before it ends, and as long as its shape says")
        layout[name] = dtype, tuple(about["shape"]), 8 + length + start
        end = stop
    if 8 + length + end != size:
        raise ValueError(f"it must have {8 + length + end} bytes, found {size}")
    return layout, dict(metadata)


def _mapped(path: Path, dtype: str, shape: tuple[int, ...], offset: int) -> "NDArray[Any]":
    import numpy as np

    if 0 in shape:  # an empty range cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "c", offset, shape).view(np.ndarray)


def _pieces(name: str, tensor: "NDArray[Any] | Blocks", digest: Any) -> Iterator[memoryview]:
    """The bytes of a tensor in order, each added to the digest of the file, which also covers name, type and shape."""
    import numpy as np

    digest.update(f"{name} {tensor.dtype.str} {tensor.shape}\n".encode())
    for block in tensor.rows if isinstance(tensor, Blocks) else (tensor,):
        piece = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        digest.update(piece)
        yield piece


def write_checksums(folder: Path) -> None:
    """Add `SHA256SUMS` with a line for each file of a folder."""
    names = sorted(file.name for file in folder.iterdir())
    (folder / SUMS).write_text("".join(f"{checksum(folder / name)}  {name}\n" for name in names), encoding="utf-8")


def check_files(folder: Path, needed: str) -> None:
    """ValueError if a file is not as `SHA256SUMS` says, or `needed` is not listed."""
    lines = (folder / SUMS).read_bytes().decode("utf-8", "replace").splitlines()
    sums = {name: expected for expected, _, name in (line.partition("  ") for line in lines)}
    if needed not in sums:
        raise ValueError(f"{SUMS} does not list {needed}")
    for name, expected in sums.items():
        if checksum(folder / Path(name).name) != expected:
            raise ValueError(f"the checksum of {name} does not match {SUMS}")


# Locks


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of a folder, which is created for it; a BusyError where another process holds it.

    what: what the other process is doing, for the message. Folders that were created and are still empty at the end are
    removed.
    """
    from filelock import FileLock, Timeout

    created = [one for one in (folder, *folder.parents) if not one.exists()]
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise BusyError(f"Another process is {what} {folder}. Wait until it has ended, or choose another.") from error
    except OSError as error:
        raise _write_error(folder, error) from error
    try:
        yield
    finally:
        # While it is held: a process that has just opened the file sees that it was removed, and takes no lock.
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):
            for one in created:
                one.rmdir()


# Writing


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while `path` is written, such as a full disk, into a WriteError of one line."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> WriteError:
    return WriteError(error.errno or errno.EIO, f"Could not write {path}: {reason(error)}.")


def reason(error: OSError) -> str:
    """Why something could not be written, in a few words."""
    if isinstance(error, WriteError) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    return "the disk is full" if error.errno in _FULL else error.strerror or str(error) or type(error).__name__


def write(path: Path, content: bytes) -> None:
    """Write a whole file, in place of one that is there."""
    with file_aside(path) as aside:
        aside.write_bytes(content)


@contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place at the end of the block. A failure leaves nothing of it."""
    path = linked(path)
    remove_leftovers(path)
    aside = _beside(path, "new")
    try:
        with writing(path):
            yield aside
            flush(aside)
            aside.replace(path)
            flush_folder(path.parent)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


@contextmanager
def folder_aside(path: Path, put: Callable[[Path, Path], None] | None = None) -> Iterator[Path]:
    """As `file_aside` for a new folder of files. A folder that is there is removed when the new one has its name.

    What is in it and not written again, such as a user's notes, is in the new one too. A kill between the two renames
    leaves the old one under another name; `restore` brings it back.
    put: called with the folder aside and `path` to do this in another way.
    """
    path = linked(path)
    restore(path)
    remove_leftovers(path)
    aside = _beside(path, "new")
    try:
        with writing(path):
            aside.mkdir(parents=True)
            yield aside
            flush_files(aside)
            (put or _exchange_ours)(aside, path)
            flush_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def linked(path: Path) -> Path:
    """Where a link leads: it may be there because this disk has no room, and must not be replaced by a file."""
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError):  # a link to itself
        return path


def _exchange_ours(aside: Path, path: Path) -> None:
    """Links, so that whichever folder a kill leaves has the files of others."""
    for other in path.iterdir() if path.exists() else ():
        target = aside / other.name
        if os.path.lexists(target):
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.copytree(other, target, symlinks=True, copy_function=_link)
        else:
            _link(other, target)
    exchange(aside, path)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def exchange(aside: Path, path: Path) -> None:
    if not path.exists():
        aside.rename(path)
        return
    old = path.rename(_beside(path, "old"))
    try:
        aside.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def restore(path: Path) -> None:
    """Give a folder its name back, if a process was killed just before it put a new one in its place."""
    if path.exists():
        return
    for old in _leftovers(path, "old"):
        with suppress(OSError):
            old.rename(path)
            return


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed have left beside `path`."""
    for left in (*_leftovers(path, "new"), *(_leftovers(path, "old") if path.exists() else ())):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with suppress(OSError):
                left.unlink()


def _beside(path: Path, kind: str) -> Path:
    if path.name in ("", ".."):  # ".", "/" and the like, of which `with_name` makes a ValueError
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.name}.{kind}-{_host()}-{os.getpid()}-{uuid4().hex[:8]}")


def _leftovers(path: Path, kind: str) -> list[Path]:
    """The files and folders that processes of this machine, which have ended, have named by `_beside`."""
    start = f".{path.name}.{kind}-{_host()}-"
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(start)]
    except OSError:
        return []
    return [path.with_name(name) for name in sorted(names) if not _is_alive(name[len(start) :].partition("-")[0])]


def _host() -> str:
    """Identifies this machine on a shared disk, where the process numbers of other machines mean nothing."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _is_alive(process: str) -> bool:
    if os.name != "posix" or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def reserve(path: Path, size: int) -> None:
    """Allocate the whole of a file: a full disk is an error now, and not a bus error when a map of it is written."""
    with path.open("ab") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)


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


_SURROGATES = re.compile("[\ud800-\udfff]")  # Python decodes a byte NN that is not UTF-8 as U+DCNN
_WRITTEN_BYTES = re.compile(r"\\x([89a-f][0-9a-f])")


def name_text(name: str | os.PathLike[str]) -> str:
    r"""A name as text that every file and protocol can hold: bytes that are not UTF-8 are written as \xNN."""

    def written(found: re.Match[str]) -> str:
        code = ord(found[0])
        return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"

    return _SURROGATES.sub(written, os.fspath(name))


def file_named(path: Path) -> Path:
    """The file whose name `name_text` wrote: each part of the path as it is if that exists, else with those bytes."""
    if "\\x" not in str(path) or path.exists():
        return path
    place = Path()
    for name in path.parts:
        literal = place / name
        place = literal if literal.exists() else place / _WRITTEN_BYTES.sub(_written_byte, name)
    return place


def _written_byte(match: re.Match[str]) -> str:
    return chr(0xDC00 + int(match[1], 16))


def printable(name: str | os.PathLike[str]) -> str:
    """A name or a label that any terminal can print on one line: control characters are escaped too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name_text(name))
