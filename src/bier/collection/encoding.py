"""Images to vectors: a model encodes the images of a part, for an embeddings file, an index or a store."""

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch.utils.data import Subset

from bier import files
from bier.data import Part
from bier.errors import DataError, ModelError
from bier.images import Broken
from bier.models.backends import Backend, check_backend
from bier.models.embed import inputs_for
from bier.models.folder import Description, description_file
from bier.models.model import Model, Untrained, load
from bier.search.embeddings import EmbeddingsWriter
from bier.search.sources import STAMP as STAMP
from bier.search.sources import Progress, Source, stamp_of
from bier.search.sources import is_same_file as is_same_file
from bier.search.store import Floats, Id, Label, Metadata


def model_folder(path: Path) -> Path:
    """The folder with model.json: the given one, or `model` inside a run."""
    for folder in (path / "model", path):
        if description_file(folder).is_file():
            return folder
    raise ModelError(f"A model must be a folder with model.json, or a run that has one. Found none at {path}.")


def folder_fingerprint(folder: Path, fast: bool = False) -> str:
    """A checksum of all that decides what a model computes: equal for equal vectors, whatever its metadata say."""
    try:
        description = dict(json.loads(description_file(folder).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"The model {str(folder)!r} is damaged: {' '.join(str(error).split())}.") from error
    decisive = {name: description.get(name) for name in (*Description.model_fields, "sha256") if name != "metadata"}
    mirror, trained_at = decisive.pop("mirror"), decisive.pop("trained_at")  # which older models do not have
    if fast:
        decisive["crop"] = trained_at or decisive["crop"]
    elif mirror:
        decisive["mirror"] = True
    return files.checksum(json.dumps(decisive, sort_keys=True).encode())


def about_model(path: Path | Untrained, fast: bool = False) -> dict[str, str]:
    """Where a model is, and a checksum of what it computes, or of what it computes by its fast look.

    Of an untrained backbone: its name, the file of its weights if it was given, and a digest of these weights.
    """
    if isinstance(path, Untrained):
        file = {} if path.weights is None else {"weights": str(path.weights.resolve())}
        return {"backbone": path.backbone, **file, "fingerprint": _untrained_fingerprint(path, fast)}
    return {"path": str(path.resolve()), "fingerprint": folder_fingerprint(model_folder(path), fast)}


_untrained_fingerprint = lru_cache(Untrained.fingerprint)  # it builds the network


def fingerprint(model: Mapping[str, str], part: Part, backend: Backend = "torch") -> str:
    """A digest of all that vectors and what is stored with them depend on: model, images, boxes, ids and labels."""
    # model.json, whose checksum `about_model` gives, has the checksum of the weights and the size of prepared images.
    known = [model["fingerprint"], None if part.ids is None else list(part.ids), part.label_names()]
    known += [backend] if backend != "torch" else []  # so that one file holds the vectors of one engine
    return files.digest_of(part.images, part.boxes, [json.dumps(known).encode()])


def no_image_readable(count: int) -> DataError:
    return DataError(f"At least one of the {count} images must be readable. Found none.")


class Block(NamedTuple):
    """Some rows of a source: raw embeddings (n, d) of the images that can be read, and the others by their row."""

    number: int
    raw: Floats
    broken: Sequence[Broken] = ()


class ModelSource(Source):
    """Images that a model encodes: in this process (`ImageSource`) or on a cluster (`bier.collection.ray`).

    Args:
        run: a run, the folder of a model or an untrained backbone.
        part: the images, as `list_images` returns them or as a part of a data set.
        batch_size, workers: images per batch, and threads that decode images; None chooses.
        skip_broken: leave out images that cannot be read. Otherwise the first that is found is a DataError.
        backend: what runs the network, see `Model.encode`.
        fast: one look at each picture, at the resolution of training.
    """

    device: ClassVar[str | None] = None  # where the model is loaded; None for that of this process

    def __init__(
        self,
        run: Path | Untrained,
        part: Part,
        *,
        batch_size: int = 64,
        workers: int | None = None,
        skip_broken: bool = False,
        backend: Backend = "torch",
        fast: bool = False,
    ) -> None:
        root = files.name_text(part.root.resolve()) if isinstance(part.root, Path) else part.root
        self.about: Mapping[str, Any] = {"model": about_model(run, fast), "root": root}
        self.place = Path(os.path.abspath(part.root)) if isinstance(part.root, Path) else None  # noqa: PTH100 - links
        self.by_folder = part.by_folder
        self.model: Model = load(run, device=self.device, fast=fast)
        check_backend(backend, self.model.device)
        self.groups = self.model.groups
        self.skipped: list[Broken] = []  # the images that cannot be read, those that were found so far
        self.batch_size, self.workers, self.skip_broken, self.backend = batch_size, workers, skip_broken, backend
        self._take(part, range(len(part)))

    def _take(self, part: Part, numbers: Sequence[int]) -> None:
        self.part = part
        self.ids: Sequence[Id] = numbers if part.ids is None else part.ids
        self.labels: Sequence[Label] | None = part.label_names()
        self.metadata = part.metadata
        # Before anything is encoded: a file that changes meanwhile is known to have changed.
        self.stamps = [stamp_of(image) if isinstance(image, Path | str) else "" for image in part.images]

    @property
    def fingerprint(self) -> str:
        """A digest of all that the vectors and what is stored with them depend on."""
        return fingerprint(self.about["model"], self.part, self.backend)

    @abstractmethod
    def blocks(
        self, wanted: Mapping[int, Sequence[int]], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[Block]:
        """The blocks `wanted`, rows of images by a number, as they are finished.

        progress: may be called with (images done, images) of the block that is encoded.
        """

    def described(self, rows: Sequence[int]) -> list[Metadata]:
        return [self._described(row, self.stamps[row]) for row in rows]

    def _described(self, row: int, stamp: str) -> Metadata:
        known = {} if self.metadata is None else dict(self.metadata[row] or {})
        return {**known, STAMP: stamp} if stamp else known or None


class ImageSource(ModelSource):
    """Images that this process encodes. Those that cannot be read are known from the start.

    Args:
        run, part, batch_size, workers, skip_broken, backend, fast: as in `ModelSource`.
        cache: a folder for prepared images.
        progress: called with (step, done, total) while images are read.
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
        fast: bool = False,
        cache: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        options: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "backend": backend, "fast": fast}
        super().__init__(run, part, skip_broken=skip_broken, **options)
        reading = progress and partial(progress, "reading images")
        if skip_broken:
            readable, self.skipped = part.readable(cache=cache, workers=workers, progress=reading)
            broken = {image.number for image in self.skipped}
            if broken:  # without ids, images are known by their numbers among those that were given
                self._take(readable, [number for number in range(len(part)) if number not in broken])
        if not len(self.part):
            raise no_image_readable(len(part))
        self._inputs = inputs_for(self.part, self.model.backbone, cache=cache, workers=workers, progress=reading)

    def raw(self, rows: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Floats:
        """The raw embeddings (n, d) of some rows."""
        some = Subset(self._inputs, list(rows))  # type: ignore[arg-type]
        return self.model.embed_raw(some, self.batch_size, self.workers, progress, backend=self.backend)

    def vectors(self, rows: Sequence[int], progress: Progress | None = None) -> Floats:
        """The test-time vectors (n, d) of some rows."""
        return self.model.vectors(self.raw(rows, progress and partial(progress, "encoding images")))

    def readable(self, rows: Sequence[int], progress: Progress | None = None) -> list[int]:
        """Those of some rows whose images can be read; the others are listed in `skipped`."""
        _, broken = self.part.select(rows).readable(
            workers=self.workers, progress=progress and partial(progress, "reading images")
        )
        self.skipped += [Broken(rows[image.number], image.path, image.reason) for image in broken]
        left_out = {rows[image.number] for image in broken}
        return [row for row in rows if row not in left_out]

    def described(self, rows: Sequence[int]) -> list[Metadata]:
        """With a digest of each file, unless it has changed since it was listed."""
        return [self._described(row, self._digested(row)) for row in rows]

    def _digested(self, row: int) -> str:
        stamp, image = self.stamps[row], self.part.images[row]
        if not stamp or not isinstance(image, Path):
            return stamp
        now = stamp_of(image, digest=True)
        return now if now.startswith(f"{stamp} ") else stamp

    def is_unchanged(self, row: int, recorded: str | None) -> bool:
        image = self.part.images[row]
        return is_same_file(recorded, image) if isinstance(image, Path | str) else True

    def blocks(
        self, wanted: Mapping[int, Sequence[int]], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[Block]:
        return (Block(number, self.raw(rows, progress)) for number, rows in wanted.items())


def write_embeddings(source: ModelSource, out: Path, progress: Progress | None = None) -> tuple[int, int]:
    """Write an embeddings file; (images in it, images that an interrupted pass had encoded before).

    Which images are broken may be known only at the end, so shards count all rows, and say which they leave out.
    """
    writer = EmbeddingsWriter(out, len(source.part), source.fingerprint)
    with writer.locked():
        done = resumed = writer.begin()
        wanted = dict(writer.missing())
        total = len(source.part)

        def report(inside: int = 0, _: int = 0) -> None:
            if progress is not None:
                progress("encoding images", done + inside, total)

        report()
        for block in source.blocks(wanted, report):
            writer.write(block.number, source.model.vectors(block.raw), block.raw, block.broken)
            done += len(wanted[block.number])
            report()
        return _finish(writer, source), resumed


def _finish(writer: EmbeddingsWriter, source: ModelSource) -> int:
    """Merge the shards, with what is known about the rows that have a vector; how many these are."""
    broken = [Broken(*one) for one in writer.broken()]
    kept = np.delete(np.arange(len(source.part)), [one.number for one in broken])
    if not len(kept):
        raise no_image_readable(len(source.part))
    source.skipped += broken
    writer.finish(
        {
            **source.about,
            **_described(source, kept.tolist()),
            "labels": source.part.select(kept).label_names(),
            "groups": list(source.groups),
            "weighting": source.model.weighting,
        }
    )
    return len(kept)


def _described(source: ModelSource, rows: Sequence[int]) -> dict[str, Any]:
    """Paths of the rows, what is known about them, and their ids where these are not the paths."""
    metadata = ModelSource.described(source, rows)  # without digests, which would read every file once more
    ids = [source.ids[row] for row in rows]
    paths = [(told or {}).get("_path", one) for told, one in zip(metadata, ids, strict=True)]
    return {"paths": paths, **({"ids": ids} if ids != paths else {}), "metadata": metadata}
