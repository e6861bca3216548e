"""The embeddings file: `OUT.safetensors`, complete in itself, and `OUT.json`, a part of it for people and programs.

OUT.safetensors     `vectors`, the test-time vectors, and `raw`, the raw embeddings, both float32 (N, d); `about`, the
                    bytes of OUT.json; the checksum of all three in its metadata
OUT.json            paths, labels, groups, weighting, model, and the folder that the paths start from
OUT.parts/          shards of a file that is not complete yet, and the lock of the process that writes them

A file without `about` (of an earlier version or another program) is read together with the JSON file beside it.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bier import files
from bier.errors import SearchError
from bier.search.store import (
    Floats,
    Id,
    Label,
    Metadata,
    checked_groups,
    checked_ids,
    checked_labels,
    checked_metadata,
    checked_vectors,
)

LARGEST_WORDS = 2**34  # bytes of OUT.json
SHARD = 512  # rows of a shard: what an interruption may cost, and what a process of a cluster takes at once


class EmbeddingsWriter:
    """Writes an embeddings file shard by shard: interrupted work can be resumed.

    Args:
        out: the file, which ends in `.safetensors`.
        count: the number of rows.
        fingerprint: a text that changes with everything the vectors depend on (model, files, boxes). Shards with
            another fingerprint are removed.
    """

    def __init__(self, out: Path, count: int, fingerprint: str) -> None:
        self.out, self.fingerprint = out, fingerprint
        self.parts = out.with_suffix(".parts")
        self.shards = [range(start, min(start + SHARD, count)) for start in range(0, count, SHARD)]

    def locked(self) -> AbstractContextManager[None]:
        """Held from `begin` to `finish`; a BusyError where another process holds it."""
        return files.locked(self.parts, "writing embeddings through")

    def begin(self) -> int:
        """Remove shards of other vectors; the number of rows that are already done."""
        mark = self.parts / "pass.json"
        self._refuse_others()
        with files.writing(self.parts):
            for path in (self.out, self.out.with_suffix(".json")):
                files.remove_leftovers(path)
            self.parts.mkdir(parents=True, exist_ok=True)
            if not mark.is_file() or mark.read_bytes() != self.fingerprint.encode():
                for path in self.parts.iterdir():
                    if path.name != files.LOCK:
                        path.unlink()
                files.write(mark, self.fingerprint.encode())
        for number in range(len(self.shards)):
            self._drop_damaged(number)
        return sum(len(rows) for number, rows in enumerate(self.shards) if self._is_done(number))

    def _refuse_others(self) -> None:
        """A SearchError if something else has a name that is about to be replaced, such as the weights of a model."""
        words, begun = self.out.with_suffix(".json"), ("shard-", ".shard-", "pass.json", ".pass.json", files.LOCK)
        with suppress(OSError, ValueError):  # a damaged file may be replaced
            if "vectors" not in files.read_header(self.out)[0]:
                raise SearchError(f"The file {self.out} must be new or an embeddings file. It holds other tensors.")
        if words.exists() and not self.out.exists():
            raise SearchError(f"The file {words} belongs to {self.out}, which is not there. Choose another --out.")
        there = self.parts.iterdir() if self.parts.is_dir() else ()
        others = [path.name for path in there if not path.name.startswith(begun)]
        if others:
            raise SearchError(
                f"The folder {self.parts} must be new or left by `bier embed`. It holds {others[0]!r}; "
                "choose another --out."
            )

    def missing(self) -> Iterator[tuple[int, range]]:
        """(number, rows) of every shard that is not done."""
        return ((number, rows) for number, rows in enumerate(self.shards) if not self._is_done(number))

    def write(self, number: int, vectors: Floats, raw: Floats, broken: Sequence[tuple[int, str, str]] = ()) -> None:
        """Write a shard. `broken` are rows without a vector: (row, file, why it cannot be read)."""
        metadata = {"broken": json.dumps([list(one) for one in broken])} if broken else None
        files.write_tensors(self._shard(number), {"vectors": vectors, "raw": raw}, metadata)

    def broken(self) -> list[tuple[int, str, str]]:
        """The rows of all shards that have no vector."""
        try:
            found = [files.read_header(self._shard(number))[1] for number in range(len(self.shards))]
        except (OSError, ValueError) as error:
            raise self._incomplete(error) from error
        return [(row, path, reason) for metadata in found for row, path, reason in _broken(metadata)]

    def finish(self, about: Mapping[str, Any]) -> None:
        """Merge the shards and remove them, when all are written.

        `about` describes the rows that have a vector and must have `paths`, `groups` and `weighting`.
        """
        shape = len(about["paths"]), sum(about["groups"])
        metadata = {name: json.dumps(about[name]) for name in ("groups", "weighting")}
        text = json.dumps(dict(about), indent=1).encode() + b"\n"
        tensors: dict[str, files.Blocks | NDArray[Any]] = {
            name: files.Blocks(np.dtype(np.float32), shape, self._rows(name, shape[1])) for name in ("vectors", "raw")
        }
        try:
            files.write_tensors(self.out, {**tensors, "about": np.frombuffer(text, np.uint8)}, metadata)
        except ValueError as error:
            raise self._incomplete(error) from error
        files.write(self.out.with_suffix(".json"), text)
        shutil.rmtree(self.parts, ignore_errors=True)

    def _incomplete(self, error: Exception) -> SearchError:
        return SearchError(f"The shards in {self.parts} must all be there and complete: {error}.")

    def _rows(self, name: str, width: int) -> Iterator[Floats]:
        """A tensor of all shards, one shard after the other: never more than one of them in memory."""
        for number, rows in enumerate(self.shards):
            try:
                tensors, metadata = files.read_tensors(self._shard(number), (name,), mmap=True)
            except OSError as error:
                raise ValueError(f"{self._shard(number).name}: {files.reason(error)}") from error
            block, expected = tensors[name], (len(rows) - len(_broken(metadata)), width)
            if block.shape != expected:
                raise ValueError(f"{self._shard(number).name} must be {expected}, found {block.shape}")
            yield block

    def _shard(self, number: int) -> Path:
        return self.parts / f"shard-{number:06d}.safetensors"

    def _is_done(self, number: int) -> bool:
        return self._shard(number).is_file()  # shards are renamed into place: one that exists is complete

    def _drop_damaged(self, number: int) -> None:
        """Remove a shard that is not as it was written: it will be computed again."""
        try:
            if self._is_done(number):
                shard, metadata = files.read_tensors(self._shard(number), ("vectors", "raw"), mmap=True)
                if len(shard["vectors"]) + len(_broken(metadata)) != len(self.shards[number]):
                    raise ValueError("it has another number of rows")
        except (OSError, ValueError):
            self._shard(number).unlink(missing_ok=True)


def _broken(metadata: Mapping[str, str]) -> list[Any]:
    found: list[Any] = json.loads(metadata.get("broken", "[]"))
    return found


class Embeddings(NamedTuple):
    """The content of an embeddings file.

    vectors: test-time vectors (N, d). raw: raw embeddings (N, d), if they were asked for. Both are memory-mapped.
    paths, ids, labels: of each image; ids are the paths, and with a box where a table has several of one file; labels
    are None if no image has one. metadata: of each image, or None. groups: the learners' sizes.
    model: path and fingerprint of the model that computed the vectors, or empty. root: the folder that the paths start
    from, or None. weighting: how the model weighs its learners, or None.
    """

    vectors: Floats
    paths: list[Id]
    ids: list[Id]
    labels: list[Label] | None
    groups: tuple[int, ...]
    model: dict[str, Any]
    root: str | None
    weighting: Literal["alpha", "sqrt"] | None = None
    raw: Floats | None = None
    metadata: list[Metadata] | None = None


def read_embeddings(path: str | Path, raw: bool = False) -> Embeddings:
    """Read an embeddings file. With `raw`, the raw embeddings too, which a file that others wrote may lack."""
    file = Path(path)
    try:
        tensors, known = _read(file, raw)
        vectors = checked_vectors(tensors["vectors"])
        embedding = checked_vectors(tensors["raw"], vectors.shape[1], "raw") if raw else None
        paths, labels, groups = known["paths"], known.get("labels"), known.get("groups")
        weighting = known["weighting"] if raw else known.get("weighting")
        if embedding is not None and len(embedding) != len(vectors):
            raise ValueError(f"there are {len(vectors)} vectors and {len(embedding)} raw embeddings")
        return Embeddings(
            vectors,
            checked_ids(paths, len(vectors), unique=False),  # a table may have several boxes in one file
            checked_ids(known.get("ids") or paths, len(vectors), unique=False),
            None if labels is None else checked_labels(labels, len(vectors)),
            checked_groups(groups, vectors.shape[1]),
            dict(known.get("model") or {}),
            known.get("root"),
            weighting,
            embedding,
            checked_metadata(known["metadata"], len(vectors)) if known.get("metadata") else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SearchError(f"The embeddings {file} are damaged or not of `bier embed`: {error}.") from error
    except OSError as error:
        raise SearchError(f"The embeddings {file} could not be read: {files.reason(error)}.") from error


def _read(file: Path, raw: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, what OUT.json holds)."""
    beside = file.with_suffix(".json")
    if not file.is_file():
        raise SearchError(f"Embeddings must be a file of `bier embed`. {file} is missing.")
    wanted = ("vectors", "raw") if raw else ("vectors",)
    tensors, metadata = files.read_tensors(file, wanted, optional=("about",), mmap=True)
    if "about" in tensors:
        text = tensors.pop("about").tobytes()
        if "sha256" not in metadata:
            raise ValueError("it has no checksum")
        _check_unchanged(file, beside, text)
        return tensors, json.loads(text)
    if not beside.is_file():
        raise SearchError(f"Embeddings must be a file of `bier embed` with a JSON file beside it. {beside} is missing.")
    return tensors, json.loads(files.read_file(beside, LARGEST_WORDS))


def _check_unchanged(file: Path, beside: Path, text: bytes) -> None:
    """SearchError if OUT.json was changed by hand, which would be ignored. One that is older than OUT is outdated."""
    if not beside.is_file() or beside.stat().st_mtime_ns < file.stat().st_mtime_ns:
        return
    if files.read_file(beside, LARGEST_WORDS) != text:
        raise SearchError(
            f"{beside} must be what {file} holds, and it was changed since. Remove it, or embed the images again."
        )
