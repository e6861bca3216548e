"""The vectors of many images in one file, made in shards: interrupted work goes on, and processes can share it."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from bier import files
from bier.errors import ModelError
from bier.images import ImageDataset
from bier.models.model import Model

SHARD = 2_048  # images in a shard: what an interruption may cost


class EmbeddingFile:
    """Writes `OUT.safetensors` (`vectors` and `raw`, float32 (N, d)) and, beside it, `OUT.json` with `about`.

    Shards lie in the folder `OUT.parts` until the file is complete. Those of another model or other images are removed.

    Args:
        model: what encodes.
        source: the images; those that it found broken are left out.
        out: the file.
        about: what else the JSON file says; together with the size and time of every file it tells whether
            shards that are there belong to this pass.
    """

    def __init__(self, model: Model, source: ImageDataset, out: Path, about: Mapping[str, Any]) -> None:
        self.model, self.source, self.out, self.about = model, source, out, dict(about)
        self.parts = out.with_suffix(".parts")
        kept = source.kept.tolist()
        self.shards = [kept[start : start + SHARD] for start in range(0, len(kept), SHARD)]

    def begin(self) -> int:
        """Make room, or find what an earlier pass has left; how many images are done. One process calls this."""
        mark = self.parts / "pass.json"
        fingerprint = self._fingerprint()
        if not mark.is_file() or mark.read_text() != fingerprint:
            shutil.rmtree(self.parts, ignore_errors=True)
            self.parts.mkdir(parents=True)
            files.write(mark, fingerprint.encode())
        return sum(len(shard) for number, shard in enumerate(self.shards) if self._is_done(number))

    def fill(
        self,
        rank: int = 0,
        world: int = 1,
        batch_size: int = 64,
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Encode those of every `world`-th shard, beginning with `rank`, that are not there yet."""
        mine = range(rank, len(self.shards), world)
        total, done = sum(len(self.shards[number]) for number in mine), 0
        for number in mine:
            shard = self.shards[number]
            if not self._is_done(number):
                part = self.source.only(shard)
                follow = None if progress is None else _shifted(progress, done, total)
                raw = self.model.embed_raw(part, batch_size, workers, follow)
                files.write(self._shard(number), save({"raw": raw}))
            done += len(shard)
            if progress is not None:
                progress(done, total)

    def finish(self) -> None:
        """Merge the shards, then remove them. One process calls this, when all have filled theirs."""
        try:
            pieces = [load_file(self._shard(number))["raw"] for number in range(len(self.shards))]
        except (OSError, SafetensorError, KeyError) as error:
            raise ModelError(f"The shards in {str(self.parts)!r} must all be there and whole: {error}.") from error
        raw = np.concatenate([np.empty((0, self.model.dimension), np.float32), *pieces])
        known = {"groups": list(self.model.groups), "weighting": self.model.weighting}
        metadata = {name: json.dumps(value) for name, value in known.items()}
        files.write(self.out.with_suffix(".json"), json.dumps(self.about | known, indent=1).encode() + b"\n")
        files.write(self.out, save({"vectors": self.model.vectors(raw), "raw": raw}, metadata))
        shutil.rmtree(self.parts)

    def _shard(self, number: int) -> Path:
        return self.parts / f"shard-{number:06d}.safetensors"

    def _is_done(self, number: int) -> bool:
        return self._shard(number).is_file()  # shards are renamed into place, so one that is there is whole

    def _fingerprint(self) -> str:
        digest = sha256(json.dumps(self.about, sort_keys=True).encode())
        digest.update(self.model.ensemble.weight.detach().cpu().numpy().tobytes())
        for index in self.source.kept.tolist():
            image = self.source.images[index]
            if isinstance(image, str | os.PathLike):
                status = Path(image).stat()
                digest.update(f"{os.fspath(image)!r} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()


def _shifted(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(before + done, total)
