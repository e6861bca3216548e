"""The embeddings file: vectors in `OUT.safetensors`, and in `OUT.json` what is known about each of them.

OUT.safetensors     `vectors`, the test-time vectors, and `raw`, the raw embeddings; both float32 (N, d)
OUT.json            paths, labels, groups, weighting, model, and the folder that the paths start from
OUT.parts/          shards of a file that is not complete yet
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from bier import files
from bier.errors import SearchError
from bier.search.store import Floats, Id, Label, checked_groups, checked_ids, checked_labels, checked_vectors

SHARD = 2_048  # rows of a shard: what an interruption may cost


class EmbeddingsWriter:
    """Writes an embeddings file shard by shard: interrupted work can be resumed, and processes can share it.

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

    def begin(self) -> int:
        """Remove shards of other vectors; the number of rows that are already done. One process calls this."""
        mark = self.parts / "pass.json"
        if not mark.is_file() or mark.read_text() != self.fingerprint:
            shutil.rmtree(self.parts, ignore_errors=True)
            self.parts.mkdir(parents=True)
            files.write(mark, self.fingerprint.encode())
        return sum(len(rows) for number, rows in enumerate(self.shards) if self._is_done(number))

    def share(self, rank: int = 0, world: int = 1) -> Iterator[tuple[int, range, bool]]:
        """(number, rows, whether it is done) of every `world`-th shard, beginning with shard `rank`."""
        return ((number, self.shards[number], self._is_done(number)) for number in range(rank, len(self.shards), world))

    def write(self, number: int, vectors: Floats, raw: Floats) -> None:
        files.write(self._shard(number), save({"vectors": vectors, "raw": raw}))

    def finish(self, about: Mapping[str, Any]) -> None:
        """Merge the shards and remove them. One process calls this when all shards are written.

        `about` must have `paths`, `groups` and `weighting`.
        """
        width = sum(about["groups"])
        merged = [np.empty((0, width), np.float32)], [np.empty((0, width), np.float32)]
        try:
            for number in range(len(self.shards)):
                shard = load_file(self._shard(number))
                merged[0].append(shard["vectors"])
                merged[1].append(shard["raw"])
        except (OSError, SafetensorError, KeyError) as error:
            raise SearchError(f"The shards in {self.parts} must all be there and complete: {error}.") from error
        vectors, raw = (np.concatenate(pieces) for pieces in merged)
        metadata = {name: json.dumps(about[name]) for name in ("groups", "weighting")}
        files.write(self.out.with_suffix(".json"), json.dumps(dict(about), indent=1).encode() + b"\n")
        files.write(self.out, save({"vectors": vectors, "raw": raw}, metadata))
        shutil.rmtree(self.parts)

    def _shard(self, number: int) -> Path:
        return self.parts / f"shard-{number:06d}.safetensors"

    def _is_done(self, number: int) -> bool:
        return self._shard(number).is_file()  # shards are renamed into place: one that exists is complete


class Embeddings(NamedTuple):
    """The content of an embeddings file.

    vectors: test-time vectors (N, d). raw: raw embeddings (N, d), if they were asked for.
    paths, labels: of each image; labels are None if no image has one. groups: the learners' sizes.
    model: path and fingerprint of the model that computed the vectors, or empty. root: the folder that the paths start
    from, or None. weighting: how the model weighs its learners, or None.
    """

    vectors: Floats
    paths: list[Id]
    labels: list[Label] | None
    groups: tuple[int, ...]
    model: dict[str, Any]
    root: str | None
    weighting: Literal["alpha", "sqrt"] | None = None
    raw: Floats | None = None


def read_embeddings(path: str | Path, raw: bool = False) -> Embeddings:
    """Read an embeddings file. With `raw`, the raw embeddings too, which a file that others wrote may lack."""
    file, beside = Path(path), Path(path).with_suffix(".json")
    for one in (file, beside):
        if not one.is_file():
            raise SearchError(
                f"Embeddings must be a file of `bier embed` with a JSON file beside it. {one} is missing."
            )
    try:
        with safe_open(file, framework="np") as tensors:
            vectors = checked_vectors(tensors.get_tensor("vectors"))
            embedding = checked_vectors(tensors.get_tensor("raw"), vectors.shape[1], "raw") if raw else None
        known = json.loads(beside.read_bytes())
        paths, labels, groups = known["paths"], known.get("labels"), known.get("groups")
        weighting = known["weighting"] if raw else known.get("weighting")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SearchError(f"The embeddings {file} are damaged or not of `bier embed`: {error}.") from error
    return Embeddings(
        vectors,
        checked_ids(paths, len(vectors), unique=False),  # a table may have several boxes in one file
        None if labels is None else checked_labels(labels, len(vectors)),
        checked_groups(groups, vectors.shape[1]),
        dict(known.get("model") or {}),
        known.get("root"),
        weighting,
        embedding,
    )
