"""The folder of a saved index.

    FOLDER/manifest.json            format, groups, and the size and checksum of every file; names the data folder
    FOLDER/data-XXXXXXXX/
        bier-index.json             the name of this data folder: only a folder with it is ever removed
        vectors.f32                 the vectors, row by row: little-endian float32
        bits.faiss                  the bits that select candidates, if there are many rows
        entries.json                ids, labels, metadata, removed rows

A save writes a new data folder and then replaces the manifest: a reader sees the old index or the new one. Of two
processes that save at once, one is told to wait.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bier import files
from bier.errors import SearchError
from bier.search.entries import Entries
from bier.search.store import Floats, checked_about, checked_ids, checked_labels, checked_metadata, checked_vectors
from bier.search.vectors import Bits, VectorFile, Vectors

FORMAT = "bier-index"
VERSION = 3
MANIFEST = "manifest.json"
_DATA = re.compile(r"data-[0-9a-f]{8}")
_MARK = "bier-index.json"
_VECTORS, _BITS, _ENTRIES = "vectors.f32", "bits.faiss", "entries.json"
_OURS = {_VECTORS, _BITS, _ENTRIES, _MARK, MANIFEST}
_LARGE = 2**26  # bytes: reading such a file for its checksum at every start would take noticeable time
_BLOCK_ROWS = 2**14
_TRIES = 1_000  # loads while other processes save without a pause


class _FileStamp(BaseModel):
    model_config = ConfigDict(strict=True)
    bytes: int = Field(ge=0)
    sha256: str
    modified: int  # nanoseconds


class _Manifest(BaseModel):
    """What a manifest must hold: types and ranges, checked before anything of that size is read."""

    model_config = ConfigDict(strict=True)
    data: str
    groups: list[Annotated[int, Field(ge=1, le=2**20)]] = Field(min_length=1, max_length=4096)
    rows: int = Field(ge=0, le=2**40)
    about: dict[str, Any]
    files: dict[str, _FileStamp]


class Content(NamedTuple):
    """What an index consists of."""

    vectors: Vectors
    entries: Entries
    bits: Bits | None
    about: dict[str, Any]


class Saved(NamedTuple):
    """Which of the indexes that a folder has held: the folder, and the stamp of its manifest."""

    folder: Path
    stamp: tuple[int, int, int] | None

    @classmethod
    def now(cls, folder: Path) -> "Saved":
        try:
            status = (folder / MANIFEST).stat()
        except OSError:
            return cls(folder, None)
        return cls(folder, (status.st_ino, status.st_size, status.st_mtime_ns))

    def is_replaced(self) -> bool:
        """Whether the folder holds another index now. One that was removed is not replaced."""
        now = Saved.now(self.folder).stamp
        return now is not None and now != self.stamp


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Change an index. `folder` must be new, empty or an index already; a BusyError if another process changes it."""
    _old_data(folder)
    with files.locked(folder, "saving the index"):
        yield


def save(folder: Path, content: Content) -> Saved:
    """Write the index into a folder that is locked."""
    old = _old_data(folder)
    data = folder / f"data-{secrets.token_hex(4)}"
    try:
        data.mkdir()
        (data / _MARK).write_bytes(_json({"format": FORMAT, "data": data.name}))
        _write_data(data, content)
        files.flush_files(data)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "data": data.name,
            "groups": list(content.vectors.groups),
            "rows": content.entries.rows,
            "about": content.about,
            "files": {file.name: _stamp(file) for file in sorted(data.iterdir())},
        }
        aside = data / MANIFEST
        aside.write_bytes(_json(files.with_checksum(manifest), indent=2))
        files.flush(aside)
        aside.replace(folder / MANIFEST)
        files.flush_folder(folder)
    except OSError as error:
        raise SearchError(f"The index could not be written to {folder}: {files.reason(error)}.") from error
    finally:
        if not _names(folder, data):
            _remove(data)
    for left in old:
        _remove(left)
    return Saved.now(folder)


def load(folder: Path, most: int, verify: bool | None = None) -> tuple[Content, Saved]:
    """Read what `save` wrote; any damage is a SearchError. The vectors of more than `most` rows stay in their file.

    Another process may save meanwhile and remove what is being read: then it is read again.
    """
    for _ in range(_TRIES):
        saved = Saved.now(folder)
        try:
            return _load(folder, most, verify), saved
        except SearchError:
            if not saved.is_replaced():
                raise
    raise SearchError(f"The index {folder} is replaced too often to be read. Try again.")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a saved index."""
    path = folder / MANIFEST
    if not path.is_file():
        raise SearchError(f"An index must be a folder with a {MANIFEST}. Found none at {folder}.")
    try:
        manifest = _read_json(path)
        form, version = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SearchError(f"The index's {path} is damaged or of another program. Build the index again.") from error
    if form != FORMAT or version != VERSION:
        raise SearchError(
            f"The index {folder} must be of format {FORMAT} {VERSION}. Found {form!r} {version!r}; build it again."
        )
    return dict(manifest)


def _load(folder: Path, most: int, verify: bool | None) -> Content:
    try:
        manifest = read_manifest(folder)
        files.check_record(manifest)
        record = _Manifest(**manifest)
        data, dimension = folder / Path(record.data).name, sum(record.groups)
        for name, stamp in record.files.items():
            _check(data / Path(name).name, stamp, verify)
        try:
            about = checked_about(record.about)
            vectors = Vectors(record.groups, _vectors(data / _VECTORS, record.rows, dimension, most))
            entries = _entries(_read_json(data / _ENTRIES), record.rows)
        except SearchError as error:
            raise ValueError(str(error).rstrip(".")) from error
        bits = Bits.read(data / _BITS, dimension, record.rows) if _BITS in record.files else None
        return Content(vectors, entries, bits, about)
    except FileNotFoundError as error:
        raise SearchError(f"The index {folder} is damaged: {error.filename} is missing. Build it again.") from error
    except OSError as error:
        raise SearchError(f"The index {folder} could not be read: {files.reason(error)}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        name, value = ".".join(map(str, first["loc"])), repr(first["input"])[:80]
        raise SearchError(
            f"The index {folder} is damaged ({name!r}: {first['msg']}. Got {value}). Build it again."
        ) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise SearchError(f"The index {folder} is damaged ({error}). Build it again.") from error


def _vectors(path: Path, rows: int, dimension: int, most: int) -> Floats | VectorFile:
    size, expected = path.stat().st_size, 4 * rows * dimension
    if size != expected:  # before memory is taken for what the manifest claims
        raise ValueError(f"{path.name} must have {expected} bytes for {rows} rows of {dimension}, found {size}")
    if rows > most:
        return VectorFile(path, rows, dimension)
    return checked_vectors(np.fromfile(path, "<f4").reshape(rows, dimension))


def _write_data(data: Path, content: Content) -> None:
    entries = content.entries
    with (data / _VECTORS).open("wb") as file:
        for block in content.vectors.blocks():
            for start in range(0, len(block), _BLOCK_ROWS):  # a block may be mapped and larger than memory
                file.write(np.ascontiguousarray(block[start : start + _BLOCK_ROWS], "<f4").data)
    columns = {
        "ids": entries.ids,
        "labels": entries.labels if any(label is not None for label in entries.labels) else None,
        "metadata": entries.metadata if any(metadata is not None for metadata in entries.metadata) else None,
        "removed": np.flatnonzero(~entries.alive).tolist(),
    }
    (data / _ENTRIES).write_bytes(_json(columns))
    if content.bits is not None:
        content.bits.write(data / _BITS)


def _json(value: Any, indent: int | None = None) -> bytes:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, default=dict).encode("utf-8", "surrogateescape")
    except (TypeError, ValueError) as error:
        raise SearchError(f"Metadata must be what JSON can hold. Got a value that it cannot: {error}.") from error


def _read_json(path: Path) -> Any:
    with files.open_file(path) as file:
        return json.loads(file.read().decode("utf-8", "surrogateescape"))


def _entries(columns: Mapping[str, Any], rows: int) -> Entries:
    ids, removed = columns["ids"], columns["removed"]
    if len(ids) != rows:
        raise ValueError(f"entries.json must hold {rows} rows, found {len(ids)}")
    if not all(type(row) is int and 0 <= row < rows for row in removed):
        raise ValueError(f"removed rows must be numbers below {rows}")
    gone = set(removed)
    checked_ids([ids[row] for row in range(rows) if row not in gone] if gone else ids)  # those removed may be double
    entries = Entries()
    entries.append(ids, checked_labels(columns["labels"], rows), checked_metadata(columns["metadata"], rows), removed)
    return entries


def _stamp(path: Path) -> dict[str, Any]:
    size, modified, _ = files.stamp(path)
    return {"bytes": size, "sha256": files.checksum(path), "modified": modified}


def _check(path: Path, stamp: _FileStamp, verify: bool | None) -> None:
    status = path.stat()
    size = status.st_size
    if verify is None:
        verify = size < _LARGE or status.st_mtime_ns != stamp.modified
    if size != stamp.bytes:
        raise SearchError(
            f"The index file {path} is damaged: expected {stamp.bytes} bytes, found {size}. Build the index again."
        )
    if verify and files.checksum(path) != stamp.sha256:
        raise SearchError(f"The index file {path} is damaged: its checksum does not match. Build the index again.")


def _old_data(folder: Path) -> list[Path]:
    """The data folders of an index that is about to be replaced; an error if the folder is not ours to write to."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise SearchError(f"An index is a folder. {folder} is a file; choose another place.")
    inside = sorted(folder.iterdir())
    try:
        manifest = read_manifest(folder)
        files.check_record(manifest)
        named = Path(_Manifest(**manifest).data).name
    except (SearchError, ValueError):  # none, or damaged; pydantic's error is a ValueError
        named = None
    ours = [path for path in inside if _DATA.fullmatch(path.name) and (path.name == named or _is_marked(path))]
    others = [path.name for path in inside if path.name not in (MANIFEST, files.LOCK) and path not in ours]
    if others and named is None:
        raise SearchError(f"The folder {folder} must be new, empty or an index. It holds {others[0]!r}.")
    return ours


def _is_marked(data: Path) -> bool:
    """Whether a save has made this folder under this name, or was killed before it wrote anything into it."""
    try:
        if {file.name for file in data.iterdir()} <= {_MARK}:  # which may be half written
            return True
        return bool(_read_json(data / _MARK)["data"] == data.name)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _remove(data: Path) -> None:
    """Remove a data folder, unless it holds something that is not of an index."""
    with suppress(OSError):
        for file in data.iterdir():
            if file.name in _OURS:
                file.unlink()
        data.rmdir()


def _names(folder: Path, data: Path) -> bool:
    """Whether the manifest points at this data folder."""
    try:
        return bool(_read_json(folder / MANIFEST)["data"] == data.name)
    except (OSError, ValueError, KeyError, TypeError):
        return False
