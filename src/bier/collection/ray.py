"""Encoding on a Ray cluster, for `bier embed --ray`.

The driver lists the images, cuts the list into blocks and gives them to Ray Data as one row per block. Actors, one for
each GPU (for each CPU where there is none), hold the model and encode a block at a time. The driver receives blocks in
whatever order they are finished and writes shards of an embeddings file. Ray starts a killed actor
again and repeats its blocks; a driver that was killed and is run again asks only for what is missing.
"""

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bier import system
from bier.collection.encoding import Block, ModelSource
from bier.data.records import UNLABELLED, Part
from bier.errors import BierError, DataError, needs
from bier.images import Broken
from bier.models.backends import Backend
from bier.models.embed import inputs_for
from bier.models.model import Model
from bier.search.sources import Progress
from bier.search.store import Floats

LOCAL = "local"  # the address that starts a cluster on this machine


class Encoder:
    """The actor: a model that encodes blocks of images.

    model: a list with the reference of the model. By itself Ray would not keep it for restarts of the actor.
    """

    def __init__(
        self, model: list[Any], batch_size: int, workers: int | None, skip_broken: bool, backend: Backend
    ) -> None:
        import ray

        device = system.device() if backend == "torch" else "cpu"
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
            part = Part(tuple(images), np.full(len(images), UNLABELLED), (), boxes)
            part, broken = part.readable(workers=self.workers) if self.skip_broken else (part, [])
            inputs = inputs_for(part, self.model.backbone, workers=self.workers)
            raw = self.model.embed_raw(inputs, self.batch_size, self.workers, backend=self.backend)
            return raw, [(image.number, image.path, image.reason) for image in broken], ""
        except DataError as error:  # as text: Ray would add the traceback of the actor
            return np.empty((0, 0), np.float32), [], str(error)


class RaySource(ModelSource):
    """Images that the actors of a cluster encode, with the arguments of `ModelSource`.

    Only the driver reads the model and sends it to the actors, which must be able to read the images: from a shared
    disk, or by their URLs. Which images cannot be read is known when all have been encoded.
    """

    device = "cpu"

    @property
    def fingerprint(self) -> str:
        return super().fingerprint + " skip-broken" * self.skip_broken

    def vectors(self, rows: Sequence[int], progress: Progress | None = None) -> Floats:
        raise NotImplementedError("a cluster encodes blocks, for an embeddings file")

    def blocks(
        self, wanted: Mapping[int, Sequence[int]], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[Block]:
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
                fn_constructor_kwargs={
                    "model": [model],
                    "batch_size": self.batch_size,
                    "workers": self.workers,
                    "skip_broken": self.skip_broken,
                    "backend": self.backend,
                },
                num_cpus=max(1, cpus // gpus) if gpus else 1,
                num_gpus=1 if gpus else 0,
            )
            for row in encoded.iter_rows():
                yield self._unpacked(row, wanted)
        except RayError as error:
            raise BierError(f"Ray could not encode the images: {_reason(error)}.") from error

    def _packed(self, rows: Sequence[int]) -> bytes:
        images = [self.part.images[row] for row in rows]
        return pickle.dumps((images, None if self.part.boxes is None else self.part.boxes[list(rows)]))

    def _unpacked(self, answer: Mapping[str, Any], wanted: Mapping[int, Sequence[int]]) -> Block:
        if answer["error"]:
            raise DataError(answer["error"])
        number, raw = int(answer["number"]), np.frombuffer(answer["raw"], np.float32)
        rows = wanted[number]
        broken = [Broken(rows[place], path, reason) for place, path, reason in json.loads(answer["broken"])]
        return Block(number, raw.reshape(-1, self.model.dimension).copy(), broken)


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
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics
        os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's niceness of 15 they hardly run beside other work
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
