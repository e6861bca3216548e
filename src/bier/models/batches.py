"""Any kind of images to batches of pixels, streamed."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from bier.errors import ConfigError, DataError
from bier.images import Batches, PreparedImages, Source, augment, default_workers, in_order, read_prepared
from bier.images.workers import check_workers, run_in_threads

Images: TypeAlias = Source | Iterable[Source] | NDArray[np.uint8] | PreparedImages
_FEW = 64  # up to so many files, starting worker processes takes longer than they save


def pixel_batches(images: Images, size: int, crop: int, batch_size: int, workers: int | None) -> Iterator[Tensor]:
    """Centre crops, uint8 (B, 3, crop, crop), of one image or of any iterable of them, never all in memory at once.

    An image is a path, the bytes of a file, a PIL image or an array (H, W, 3); an array (N, H, W, 3) is N of them.
    """
    if batch_size < 1:
        raise ConfigError(f"The 'batch_size' parameter must be at least 1. Got {batch_size} instead.")
    if isinstance(images, PreparedImages):
        batches = Batches(images, in_order(images.kept, batch_size), crop, workers=workers, threads=True)
        yield from (pixels for pixels, _ in batches)
        return
    sources = _each(images)
    first = list(islice(sources, _FEW + 1))
    chosen = check_workers(workers)
    if chosen is None:
        many_files = len(first) > _FEW and isinstance(first[0], str | os.PathLike | bytes)
        chosen = default_workers() if many_files else 0
    task = partial(_centre_crops, size=size, crop=crop)
    for pixels in run_in_threads(task, _grouped(chain(first, sources), batch_size), chosen):
        yield pixels.permute(0, 3, 1, 2)


def feature_batches(features: Any, width: int, batch_size: int) -> Iterator[Tensor]:
    """The rows of an array (N, width), or of any iterable of rows, as float32 (B, width)."""
    for rows in _grouped(iter(features), batch_size):
        batch = torch.from_numpy(np.asarray(rows, np.float32))
        if batch.ndim != 2 or batch.shape[1] != width:
            raise DataError(f"Features must have the shape (N, {width}). Got rows of {tuple(batch.shape[1:])} instead.")
        yield batch


def count(images: Images) -> int | None:
    """How many images there are; None where only reading them all would tell."""
    if isinstance(images, PreparedImages):
        return len(images.kept)
    if _is_one(images):
        return 1
    return len(images) if isinstance(images, Sequence | np.ndarray) else None


def _is_one(images: Images) -> bool:
    single = isinstance(images, str | os.PathLike | bytes | Image)
    return single or (isinstance(images, np.ndarray) and images.ndim in (2, 3) and images.shape[-1] != 0)


def _each(images: Images) -> Iterator[Source]:
    if _is_one(images):
        return iter([images])  # type: ignore[list-item]
    if not isinstance(images, Iterable):
        raise DataError(f"Images must be paths, PIL images or arrays. Got {type(images).__name__} instead.")
    return iter(images)  # type: ignore[arg-type]


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := list(islice(items, size)):
        yield group


def _centre_crops(sources: list[Source], *, size: int, crop: int) -> Tensor:
    rows = [augment(read_prepared(source, size), crop, "none", 0) for source in sources]
    return torch.from_numpy(np.stack(rows))
