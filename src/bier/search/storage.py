"""The folder of a saved index.

    FOLDER/manifest.json            format, kind, groups, and the size and checksum of every file; names the data folder
    FOLDER/data-XXXXXXXX/
        bier-index.json             the name of this data folder: only a folder with it is ever removed
        learner-1.npy ...           the float vectors, one matrix per learner, memory-mapped; or else
        int8.faiss                  the vectors with a byte per dimension
        entries.json                ids, labels, metadata, removed rows
        graph.faiss, binary.faiss   the graph or the bits, if the kind has them

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
from bier.search.store import Floats, Kind, Precision, checked_ids, checked_labels, checked_metadata
from bier.search.vectors import BinaryCodes, Graph, Int8Vectors, LearnerVectors

FORMAT = "bier-index"
VERSION = 2  # 1 has float vectors only, and is still written for them
MANIFEST = "manifest.json"
MOST_EFFORT = 2**16  # faiss takes memory in proportion
_DATA = re.compile(r"data-[0-9a-f]{8}")
_MARK = "bier-index.json"
_LARGE = 2**26  # bytes: reading such a file for its checksum at every start would take noticeable time
_BLOCK_ROWS = 2**14
_INT8, _BITS = "int8.faiss", "binary.faiss"
_OURS = re.compile(r"learner-\d+\.npy|(int8|graph|binary)\.faiss|(entries|manifest|bier-index)\.json")


class _FileStamp(BaseModel):
    model_config = ConfigDict(strict=True)
    bytes: int = Field(ge=0)
    sha256: str
    modified: int | None = None  # nanoseconds; an earlier version did not keep it


class _Manifest(BaseModel):
    """What a manifest must hold: types and ranges, checked before anything of that size is read."""

    model_config = ConfigDict(strict=True)
    data: str
    kind: Kind
    precision: Precision = "float32"
    effort: int = Field(ge=64, le=MOST_EFFORT)
    groups: list[Annotated[int, Field(ge=1, le=2**20)]] = Field(min_length=1, max_length=4096)
    rows: int = Field(ge=0, le=2**40)
    about: dict[str, Any]
    files: dict[str, _FileStamp]


_KEYS = {*_Manifest.model_fields, "format", "version"}  # of a manifest without a checksum of its own


class Parts(NamedTuple):
    """What an index consists of. `vectors` has no rows where only the bits are kept."""

    vectors: LearnerVectors | Int8Vectors
    entries: Entries
    graph: Graph | None
    bits: BinaryCodes | None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Change an index. `folder` must be new, empty or an index already; a BusyError if another process changes it."""
    _old_data(folder)
    with files.locked(folder, "saving the index"):
        yield


def save(folder: Path, parts: Parts, kind: str, effort: int, about: Mapping[str, Any], precision: str) -> None:
    """Write the index into a folder that is locked."""
    old = _old_data(folder)
    data = folder / f"data-{secrets.token_hex(4)}"
    try:
        data.mkdir()
        (data / _MARK).write_bytes(_json({"format": FORMAT, "data": data.name}))
        _write_data(data, parts, precision)
        files.flush_files(data)
        stamps = {file.name: _stamp(file) for file in sorted(data.iterdir())}
        manifest = {
            "format": FORMAT,
            "version": VERSION if precision != "float32" or parts.bits is not None else 1,
            "data": data.name,
            "kind": kind,
            "precision": precision,
            "effort": effort,
            "groups": list(parts.vectors.groups),
            "rows": parts.entries.rows,
            "about": about,
            "files": stamps,
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


def load(folder: Path, mmap: bool = True, verify: bool | None = None) -> tuple[Parts, _Manifest]:
    """Read what `save` wrote; any damage is a SearchError."""
    try:
        return _load(folder, mmap, verify)
    except FileNotFoundError:
        try:  # another process may have saved between the two reads
            return _load(folder, mmap, verify)
        except FileNotFoundError as error:
            raise SearchError(f"The index {folder} is damaged: {error.filename} is missing. Build it again.") from error
    except OSError as error:
        raise SearchError(f"The index {folder} could not be read: {files.reason(error)}.") from error


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
    if form != FORMAT or not isinstance(version, int) or version > VERSION:
        raise SearchError(
            f"The index {folder} must be of format {FORMAT} {VERSION}. "
            f"Found {form!r} {version!r}; a newer bier may read it."
        )
    return dict(manifest)


def _load(folder: Path, mmap: bool, verify: bool | None) -> tuple[Parts, _Manifest]:
    manifest = read_manifest(folder)
    try:
        files.check_record(manifest, old=_KEYS)
        known = _Manifest(**manifest)
        data, groups, rows = folder / Path(known.data).name, known.groups, known.rows
        for name, stamp in known.files.items():
            _check(data / Path(name).name, stamp, verify)
        vectors = _vectors(data, known, mmap)
        entries = _entries(_read_json(data / "entries.json"), rows)
        graph = Graph.read(data / "graph.faiss", sum(groups), rows, mmap) if "graph.faiss" in known.files else None
        bits = BinaryCodes.read(data / _BITS, sum(groups), rows, mmap) if _BITS in known.files else None
        if known.precision == "binary" and bits is None:
            raise ValueError(f"it has no {_BITS}")
    except ValidationError as error:
        first = error.errors()[0]
        name, found = ".".join(map(str, first["loc"])), repr(first["input"])[:80]
        raise SearchError(
            f"The index {folder} is damaged ({name!r}: {first['msg']}. Got {found}). Build it again."
        ) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise SearchError(f"The index {folder} is damaged ({error}). Build it again.") from error
    return Parts(vectors, entries, graph, bits), known


def _vectors(data: Path, known: _Manifest, mmap: bool) -> LearnerVectors | Int8Vectors:
    if known.precision == "float32":
        shapes = [(known.rows, size) for size in known.groups]
        return LearnerVectors(
            known.groups, [_matrix(data / f"learner-{m}.npy", shape, mmap) for m, shape in enumerate(shapes, 1)]
        )
    if known.precision == "binary":
        return LearnerVectors(known.groups)
    codes = Int8Vectors.read(data / _INT8, sum(known.groups), known.rows, mmap)
    codes.groups = tuple(known.groups)
    return codes


def _write_data(data: Path, parts: Parts, precision: str) -> None:
    entries = parts.entries
    if isinstance(parts.vectors, Int8Vectors):
        parts.vectors.write(data / _INT8)
    elif precision == "float32":
        _write_floats(data, parts.vectors)
    columns = {
        "ids": entries.ids,
        "labels": entries.labels if any(one is not None for one in entries.labels) else None,
        "metadata": entries.metadata if any(one is not None for one in entries.metadata) else None,
        "removed": np.flatnonzero(~entries.alive).tolist(),
    }
    (data / "entries.json").write_bytes(_json(columns))
    if parts.graph is not None:
        parts.graph.write(data / "graph.faiss")
    if parts.bits is not None:
        parts.bits.write(data / _BITS)


def _write_floats(data: Path, vectors: LearnerVectors) -> None:
    for learner, size in enumerate(vectors.groups):
        with (data / f"learner-{learner + 1}.npy").open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(vectors), size)}
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in vectors.part(learner):
                for start in range(0, len(chunk), _BLOCK_ROWS):  # a chunk may be mapped and larger than memory
                    file.write(np.ascontiguousarray(chunk[start : start + _BLOCK_ROWS], "<f4").data)


def _json(value: Any, indent: int | None = None) -> bytes:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, default=dict).encode("utf-8", "surrogateescape")
    except (TypeError, ValueError) as error:
        raise SearchError(f"Metadata must be what JSON can hold. Got a value that it cannot: {error}.") from error


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))


def _entries(columns: Mapping[str, Any], rows: int) -> Entries:
    ids, removed = columns["ids"], columns["removed"]
    if len(ids) != rows:
        raise ValueError(f"entries.json must hold {rows} rows, found {len(ids)}")
    if not all(type(row) is int and 0 <= row < rows for row in removed):
        raise ValueError(f"removed rows must be numbers below {rows}")
    gone = set(removed)
    try:  # a removed row may have the id of another
        checked_ids([one for row, one in enumerate(ids) if row not in gone] if gone else ids)
        labels, metadata = checked_labels(columns["labels"], rows), checked_metadata(columns["metadata"], rows)
    except SearchError as error:
        raise ValueError(str(error)) from error
    entries = Entries()
    entries.append(ids, labels, metadata, removed)
    return entries


def _matrix(path: Path, shape: tuple[int, int], mmap: bool) -> Floats:
    if path.stat().st_size < 4 * shape[0] * shape[1]:  # before memory is taken for what a header claims
        raise ValueError(f"{path.name} must be float32 {shape}, found {path.stat().st_size} bytes")
    matrix = np.load(path, mmap_mode="r" if mmap and shape[0] else None, allow_pickle=False)
    if matrix.shape != shape or matrix.dtype != np.float32:
        raise ValueError(f"{path.name} must be float32 {shape}, found {matrix.dtype} {matrix.shape}")
    floats: Floats = matrix.view(np.ndarray)  # still mapped, without the overhead of numpy's memmap class
    return floats


def _stamp(path: Path) -> dict[str, Any]:
    size, modified = files.stamp(path)
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
        files.check_record(manifest, old=_KEYS)
        named = Path(_Manifest(**manifest).data).name
    except (SearchError, ValueError):  # none, or damaged; pydantic's error is a ValueError
        named = None
    ours = [one for one in inside if _DATA.fullmatch(one.name) and (one.name == named or _is_marked(one))]
    others = [one.name for one in inside if one.name not in (MANIFEST, files.LOCK) and one not in ours]
    if others and named is None:
        raise SearchError(f"The folder {folder} must be new, empty or an index. It holds {others[0]!r}.")
    return ours


def _is_marked(data: Path) -> bool:
    """Whether a save has made this folder under this name, or was killed before it wrote anything into it."""
    try:
        if not any(data.iterdir()):
            return True
        return bool(_read_json(data / _MARK)["data"] == data.name)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _remove(data: Path) -> None:
    """Remove a data folder, unless it holds something that is not of an index."""
    with suppress(OSError):
        for file in data.iterdir():
            if _OURS.fullmatch(file.name):
                file.unlink()
        data.rmdir()


def _names(folder: Path, data: Path) -> bool:
    """Whether the manifest points at this data folder."""
    try:
        return bool(_read_json(folder / MANIFEST)["data"] == data.name)
    except (OSError, ValueError, KeyError, TypeError):
        return False
