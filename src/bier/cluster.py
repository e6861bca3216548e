"""Encoding on a Ray cluster, for `bier embed --ray`.

The driver lists the images, cuts the list into blocks and gives them to Ray Data as one row per block. Actors, one for
each GPU (for each CPU where there is none), hold the model and encode a block at a time. The driver receives blocks in
whatever order they are finished and writes shards of an embeddings file, or adds to a store. Ray starts a killed actor
again and repeats its blocks; a driver that was killed and is run again asks only for what is missing.
"""

import json
import logging
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bier import distributed
from bier.collection import about_model, fingerprint, no_image_readable, root_text
from bier.data import Part
from bier.errors import BierError, DataError, needs
from bier.images import Broken, ImageDataset
from bier.models.backends import Backend, check_backend
from bier.models.model import Model, Untrained, load
from bier.search import Id, Label
from bier.search.embeddings import SHARD, EmbeddingsWriter
from bier.search.sources import Progress

Floats = NDArray[np.float32]
LOCAL = "local"  # the address that starts a cluster on this machine


class Encoder:
    """The actor: a model that encodes blocks of images.

    model: a list with the reference of the model. By itself Ray would not keep it for restarts of the actor.
    """

    def __init__(
        self, model: list[Any], batch_size: int, workers: int | None, skip_broken: bool, backend: Backend
    ) -> None:
        import ray

        device = distributed.device() if backend == "torch" else "cpu"
        self.model: Model = ray.get(model[0]).to(device).eval()
        self.batch_size, self.workers, self.skip_broken, self.backend = batch_size, workers, skip_broken, backend

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """A block, as `RaySource` packs it, to its raw embeddings and what could not be read, or an error."""
        answers = [self._encode(*pickle.loads(block)) for block in batch["block"]]
        return {
            "number": list(batch["number"]),
            "raw": [raw.tobytes() for raw, _, _ in answers],
            "broken": [json.dumps(broken) for _, broken, _ in answers],
            "error": [error for _, _, error in answers],
        }

    def _encode(self, images: list[Path | str], boxes: Floats | None) -> tuple[Floats, list[tuple[int, str, str]], str]:
        try:
            size = self.model.backbone.resize
            some = ImageDataset(images, size, boxes, skip_broken=self.skip_broken, workers=self.workers)
            raw = self.model.embed_raw(some, self.batch_size, self.workers, backend=self.backend)
            return raw, [(one.number, one.path, one.reason) for one in some.broken], ""
        except DataError as error:  # as text: Ray would add the traceback of the actor
            return np.empty((0, 0), np.float32), [], str(error)


class Block(NamedTuple):
    """What an actor has computed: raw embeddings (n, d) of the images that can be read, and the others."""

    number: int
    raw: Floats
    broken: list[Broken]


class RaySource:
    """Images that the actors of a cluster encode.

    Args:
        run: a run, the folder of a model or an untrained backbone. Only the driver reads it; actors are sent the model.
        part: the images. Each machine of the cluster must be able to read them: a shared disk, or URLs.
        batch_size, workers: images per batch, and threads that decode images in each actor.
        skip_broken: leave out images that cannot be read. Otherwise the first that is found is a DataError.
        backend: what runs the network, see `Model.encode`.
    """

    def __init__(
        self,
        run: Path | Untrained,
        part: Part,
        *,
        batch_size: int = 64,
        workers: int | None = None,
        skip_broken: bool = False,
        backend: Backend = "torch",
    ) -> None:
        self.model: Model = load(run, device="cpu")
        check_backend(backend, self.model.device)
        self.part, self.skip_broken, self.backend = part, skip_broken, backend
        self.about: Mapping[str, Any] = {"model": about_model(run), "root": root_text(part)}
        self.ids: Sequence[Id] = part.ids or range(len(part))
        self.labels: Sequence[Label] | None = part.label_names()
        self.groups = self.model.groups
        self.skipped: list[Broken] = []  # those that were found so far
        self._settings = {
            "batch_size": batch_size,
            "workers": workers,
            "skip_broken": skip_broken,
            "backend": backend,
        }

    def stream(self, blocks: Iterable[Sequence[int]]) -> Iterator[tuple[Sequence[int], Floats]]:
        """The vectors of blocks of rows, as they are finished; in smaller blocks, so that all actors have work."""
        smaller = (rows[start : start + SHARD] for rows in blocks for start in range(0, len(rows), SHARD))
        wanted = dict(enumerate(smaller))
        for block in self.blocks(wanted):
            rows = wanted[block.number]
            broken = {one.number for one in block.broken}
            self.skipped += [one._replace(number=rows[one.number]) for one in block.broken]
            kept = [row for place, row in enumerate(rows) if place not in broken]
            if kept:
                yield kept, self.model.vectors(block.raw)
        self.skipped.sort()

    def blocks(self, wanted: Mapping[int, Sequence[int]]) -> Iterator[Block]:
        """The blocks `wanted`, rows of images by a number, as they are finished."""
        if not wanted:
            return
        import ray
        from ray.data import ActorPoolStrategy, DataContext
        from ray.exceptions import RayError

        DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised as well
        rows = [{"number": number, "block": self._packed(some)} for number, some in wanted.items()]
        found = ray.cluster_resources()
        gpus, cpus = int(found.get("GPU", 0)), max(1, int(found.get("CPU", 1)))
        actors = min(gpus or cpus, len(rows))
        model = ray.put(self.model)  # lives as long as this function
        try:
            listed = ray.data.from_items(rows, override_num_blocks=len(rows))
            encoded = listed.map_batches(
                Encoder,
                batch_size=1,
                compute=ActorPoolStrategy(min_size=1, max_size=actors, initial_size=actors),
                fn_constructor_kwargs={"model": [model], **self._settings},
                num_cpus=max(1, cpus // gpus) if gpus else 1,
                num_gpus=1 if gpus else 0,
            )
            for row in encoded.iter_rows():
                yield self._unpacked(row)
        except RayError as error:
            raise BierError(f"Ray could not encode the images: {_reason(error)}.") from error

    def _packed(self, rows: Sequence[int]) -> bytes:
        images = [self.part.images[row] for row in rows]
        return pickle.dumps((images, None if self.part.boxes is None else self.part.boxes[list(rows)]))

    def _unpacked(self, row: Mapping[str, Any]) -> Block:
        if row["error"]:
            raise DataError(row["error"])
        raw = np.frombuffer(row["raw"], np.float32).reshape(-1, self.model.dimension).copy()
        return Block(int(row["number"]), raw, [Broken(*one) for one in json.loads(row["broken"])])


def write_embeddings(source: RaySource, out: Path, progress: Progress | None = None) -> int:
    """As `collection.write_embeddings`: the number of images that an interrupted pass had done before.

    Which images are broken is known only at the end, so shards count all images, and say which they leave out.
    """
    part, count = source.part, len(source.part)
    made_from = fingerprint(source.about["model"], part, source.backend) + " skip-broken" * source.skip_broken
    writer = EmbeddingsWriter(out, count, made_from)
    with writer.locked():
        done = resumed = writer.begin()
        wanted = {number: rows for number, rows, is_done in writer.share() if not is_done}
        if progress is not None:
            progress("encoding images", done, count)
        for block in source.blocks(wanted):
            rows = wanted[block.number]
            broken = [one._replace(number=rows[one.number]) for one in block.broken]
            writer.write(block.number, source.model.vectors(block.raw), block.raw, broken)
            done += len(rows)
            if progress is not None:
                progress("encoding images", done, count)
        source.skipped = [Broken(*one) for one in writer.broken()]
        kept = part.select(np.delete(np.arange(count), [one.number for one in source.skipped]))
        if not len(kept):
            raise no_image_readable(count)
        known = {"groups": list(source.groups), "weighting": source.model.weighting}
        writer.finish({**source.about, "paths": list(kept.ids or ()), "labels": kept.label_names(), **known})
    return resumed


def check_installed() -> None:
    """MissingExtraError where Ray is missing."""
    needs("ray", "ray")


@contextmanager
def cluster(address: str = LOCAL) -> Iterator[None]:
    """Join the cluster at an address; `local` starts one on this machine and ends it with the block."""
    ray = needs("ray", "ray")
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Ray would print warnings about Ray Data's own arguments, and errors of the statistics that Ray Data keeps.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
        os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15 they hardly run beside other work
        options["include_dashboard"] = False
    try:
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise BierError(
            f"The '--ray' option must be the address of a Ray cluster that runs, or be given without one. "
            f"Got {address!r}: {_reason(error)}."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _reason(error: BaseException) -> str:
    """The last line of an error: before it, Ray writes the traceback of the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".")[:300] if lines else type(error).__name__
