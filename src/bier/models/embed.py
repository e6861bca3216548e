"""Images to vectors: the one set-up of images for a network, and the one loop that runs a network over them."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, islice
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from bier.errors import ConfigError, DataError
from bier.images import ImageDataset, Source, default_workers, in_order
from bier.images.dataset import Item, check_workers, run_in_threads
from bier.models.backbone import Backbone, autocast
from bier.system import reuse_memory

Progress = Callable[[int, int], None]
_FEW = 64  # up to so many files, starting threads takes longer than they save


def run_network(
    network: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    device: torch.device,
    precision: str = "float32",
    progress: Progress | None = None,
    total: int = 0,
) -> Iterator[Tensor]:
    """The outputs of a network for one batch after the other, computed on its `device`, where they stay.

    progress: called with (rows done, `total`) after each batch.
    """
    reuse_memory()
    done = 0
    for batch in batches:
        with torch.inference_mode(), autocast(precision, device):
            output = network(batch.to(device))
        yield output
        done += len(batch)
        if progress is not None:
            progress(done, total)


def to_array(outputs: Iterable[Tensor], width: int = 0) -> NDArray[np.float32]:
    """The outputs of `run_network` as one float32 array (N, width)."""
    rows = [output.float().cpu().numpy() for output in outputs]
    return np.concatenate(rows) if rows else np.empty((0, width), np.float32)


def device_of(module: nn.Module) -> torch.device:
    """Where the weights of a module are; the CPU if it has none."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


class Inputs(Protocol):
    """Images as a network takes them: an ImageDataset, the maps of a TrunkCache or FeatureRows."""

    def __len__(self) -> int: ...

    def batches(self, plan: Iterable[Sequence[Item]]) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs (B, ...), indices (B,)) for each batch of (index, seed)."""
        ...


class FeatureRows:
    """Features (N, h) computed before, as inputs; there is nothing to augment, and no worker is needed."""

    def __init__(self, features: ArrayLike) -> None:
        self.rows = torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, plan: Iterable[Sequence[Item]]) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in plan:
            indices = torch.tensor([item[0] if isinstance(item, tuple) else item for item in batch])
            yield self.rows[indices], indices


Images: TypeAlias = (
    Source | Tensor | Iterable[Source | Tensor] | NDArray[np.uint8] | ImageDataset | FeatureRows | Dataset[Any]
)


class Pictures(Protocol):
    """What a `bier.data.Part` holds."""

    @property
    def images(self) -> Any: ...

    @property
    def boxes(self) -> NDArray[np.float32] | None: ...

    @property
    def width(self) -> int | None: ...


def inputs_for(
    pictures: Pictures,
    backbone: Backbone,
    *,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    augment: str = "none",
    progress: Progress | None = None,
) -> ImageDataset | FeatureRows:
    """Images as a backbone takes them, for training, validation, evaluation and encoding alike; or their features.

    cache: a folder for prepared pixels, which is filled first; progress: called with (done, total) meanwhile.
    augment: `none` is how images are seen at test time.
    """
    if pictures.width is not None:
        return FeatureRows(pictures.images)
    images = ImageDataset(
        pictures.images, backbone.resize, pictures.boxes, workers, crop=backbone.crop, augment=augment
    )
    return images if cache is None else images.cached(cache, progress)


def inputs_in_order(inputs: Inputs, batch_size: int, indices: ArrayLike | None = None) -> Iterator[Tensor]:
    """The inputs in order, or those of `indices`, seed 0."""
    rows = len(inputs) if indices is None else indices
    return (batch for batch, _ in inputs.batches(in_order(rows, batch_size)))


def batches_for(
    backbone: Backbone, images: Any, batch_size: int, workers: int | None
) -> tuple[Iterator[Tensor], int | None]:
    """Batches of images (of rows, for the backbone `features`), and how many images there are if that is known."""
    if not backbone.crop:
        images = _feature_rows(images)
        total = len(images) if isinstance(images, Sized) else None
        return feature_batches(images, backbone.features, batch_size), total
    dataset, _ = _rows_of(images)
    if isinstance(dataset, ImageDataset) and dataset.size != backbone.resize:
        raise DataError(
            f"An ImageDataset for this model must hold images of {backbone.resize} x {backbone.resize} pixels, as its "
            f"network takes them. Got {dataset.size} x {dataset.size} instead."
        )
    return pixel_batches(images, backbone.resize, backbone.crop, batch_size, workers), _count(images)


def pixel_batches(images: Images, size: int, crop: int, batch_size: int, workers: int | None) -> Iterator[Tensor]:
    """Centre crops, uint8 (B, 3, crop, crop), of one image or of any iterable of them, never all in memory at once.

    An image is a path, the bytes of a file, a PIL image or an array (H, W, 3); an array (N, H, W, 3) is N of them.
    """
    if batch_size < 1:
        raise ConfigError(f"The 'batch_size' parameter must be at least 1. Got {batch_size} instead.")
    chosen = check_workers(workers)
    whole, rows = _rows_of(images)
    if isinstance(whole, ImageDataset):
        dataset = whole.view(crop)
        threads = dataset.best_workers if chosen is None else chosen
        return run_in_threads(lambda batch: dataset[list(batch)], in_order(rows, batch_size), threads)
    sources = _each(images)
    first = list(islice(sources, _FEW + 1))
    if chosen is None:
        many_files = len(first) > _FEW and isinstance(first[0], str | os.PathLike | bytes)
        chosen = default_workers() if many_files else 0

    def read(group: list[Source]) -> Tensor:
        pixels: Tensor = ImageDataset(group, size, crop=crop)[list(range(len(group)))]
        return pixels

    return run_in_threads(read, _grouped(chain(first, sources), batch_size), chosen)


def _rows_of(images: Images) -> tuple[Any, NDArray[np.int64]]:
    """A data set and the rows of it that are meant: all, or those of a torch `Subset`."""
    if isinstance(images, Subset):
        return images.dataset, np.asarray(images.indices, np.int64)
    return images, np.arange(len(images) if isinstance(images, Sized) else 0)


def _feature_rows(images: Any) -> Any:
    dataset, rows = _rows_of(images)
    return dataset.rows.numpy()[rows] if isinstance(dataset, FeatureRows) else images


def feature_batches(features: Any, width: int, batch_size: int) -> Iterator[Tensor]:
    """The rows of an array (N, width), or of any iterable of rows, as float32 (B, width)."""
    for rows in _grouped(iter(features), batch_size):
        batch = torch.from_numpy(np.asarray(rows, np.float32))
        if batch.ndim != 2 or batch.shape[1] != width:
            raise DataError(f"Features must have the shape (N, {width}). Got rows of {tuple(batch.shape[1:])} instead.")
        yield batch


def _count(images: Images) -> int | None:
    """How many images there are; None where only reading them all would tell."""
    if _is_one(images):
        return 1
    countable = isinstance(images, Sequence | np.ndarray | Tensor | Dataset)
    return len(images) if countable and isinstance(images, Sized) else None


def _is_one(images: Images) -> bool:
    single = isinstance(images, str | os.PathLike | bytes | Image)
    if isinstance(images, Tensor):
        return images.ndim == 3
    return single or (isinstance(images, np.ndarray) and images.ndim in (2, 3) and images.shape[-1] != 0)


def _each(images: Images) -> Iterator[Source]:
    if _is_one(images):
        return iter([_plain(images)])
    if isinstance(images, Dataset) and isinstance(images, Sized):
        items = (images[index] for index in range(len(images)))
        return (_plain(item[0] if isinstance(item, tuple | list) else item) for item in items)
    if not isinstance(images, Iterable):
        raise DataError(f"Images must be paths, PIL images, arrays or tensors. Got {type(images).__name__} instead.")
    return map(_plain, images)


def _plain(image: Any) -> Source:
    """An image as it is, a tensor (C, H, W) as the array (H, W, C) of uint8 that it stands for."""
    if not isinstance(image, Tensor):
        return image  # type: ignore[no-any-return]
    pixels = image.detach().cpu()
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3):
        raise DataError(f"A picture given as a tensor must have the shape (3, H, W). Got {tuple(image.shape)} instead.")
    if pixels.is_floating_point():
        low, high = (float(edge) for edge in pixels.aminmax()) if pixels.numel() else (0.0, 0.0)
        if not 0 <= low <= high <= 1:
            raise DataError(
                "A picture of floats must have values from 0 to 1, not normalised. "
                f"Got {low:.3g} to {high:.3g} instead."
            )
        pixels = (pixels.float() * 255).round().to(torch.uint8)
    if pixels.dtype != torch.uint8:
        raise DataError(f"A picture given as a tensor must be uint8 or floats from 0 to 1. Got {image.dtype} instead.")
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := list(islice(items, size)):
        yield group
