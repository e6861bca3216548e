"""Images as a torch Dataset, with its cache of prepared pixels, and the DataLoader that runs it."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from bier import files
from bier.errors import BierError, ConfigError, DataError
from bier.files import printable
from bier.images.cache import PixelCache
from bier.images.decode import Box, Source, box_of, open_image
from bier.images.transforms import augment as augmented
from bier.images.transforms import check_augmentation, read_prepared

Job = TypeVar("Job")
Answer = TypeVar("Answer")
Progress = Callable[[int, int], None]
Item = int | tuple[int, int]  # the index of an image, or (index, seed of its augmentation)

MOST_WORKERS = 256
_FEW = 64  # up to so many images, starting worker processes takes longer than they save
_CHUNK = 32  # images in a batch while the cache is filled


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """One process for each core that this process may use, four at most."""
    return min(usable_cores(), 4)


def check_workers(workers: int | None) -> int | None:
    """The number itself, or a ConfigError where it cannot be; None leaves the choice to the loader."""
    if workers is not None and not 0 <= workers <= MOST_WORKERS:
        raise ConfigError(
            f"The 'workers' parameter must be a number of processes from 0 to {MOST_WORKERS}. Got {workers} instead."
        )
    return workers


class Broken(NamedTuple):
    """An image that cannot be read: its number, its file and why."""

    number: int
    path: str
    reason: str

    def named(self) -> dict[str, str]:
        """As `--json` has it."""
        return {"path": self.path, "reason": self.reason}


class ImageDataset(Dataset[Any]):
    """A torch Dataset of images as uint8 tensors (3, crop, crop). Files are opened when an item is read, not before.

    `dataset[index]` is the image without a random augmentation (seed 0), `dataset[index, seed]` the image that this
    seed draws; it depends on index and seed alone, never on the process or the order. `BalancedBatches` yields such
    pairs, so that both go into a plain `DataLoader(dataset, batch_sampler=sampler)`. With `labels` (N,) an item is the
    pair (pixels, label). A list of items gives a whole batch, channels-last in memory. An image that cannot be read is
    a DataError that names it; `find_broken` finds them all before.

    Args:
        images: paths, bytes of files, PIL images and arrays in a sequence, or one uint8 array (N, H, W, 3).
        size: images are prepared as squares (size, size, 3): scaled by the longer side and padded.
        boxes: (N, 4), x1, y1, x2, y2 of each image in pixels of the upright original, to which it is cropped before; a
            row of NaN stands for the whole picture.
        workers: processes that read; None: several where files are decoded, none where pixels are cached or in memory.
        crop, augment: the side of the tensors, by default `size`, and how they are cut out of the square.
    """

    def __init__(
        self,
        images: Sequence[Source] | NDArray[np.uint8],
        size: int,
        boxes: ArrayLike | None = None,
        workers: int | None = None,
        *,
        crop: int | None = None,
        augment: str = "none",
        labels: ArrayLike | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"The 'size' of prepared images must be a positive number of pixels. Got {size} instead.")
        self.images = _checked(images)
        self.size = size
        self.boxes = _checked_boxes(boxes, len(self.images))
        self.workers = check_workers(workers)
        self._cache: PixelCache | None = None
        self._set_view(size if crop is None else crop, augment, labels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, item: Item | list[Item]) -> Any:
        if isinstance(item, list):
            return self._batch(item)
        if self.labels is None:
            return self._batch([item])[0]
        pixels, labels = self._batch([item])
        return pixels[0], int(labels[0])

    def _batch(self, items: Sequence[Item]) -> Any:
        pairs = [item if isinstance(item, tuple) else (item, 0) for item in items]
        pixels = np.empty((len(items), self.crop, self.crop, 3), np.uint8)
        for row, (index, seed) in zip(pixels, pairs, strict=True):
            row[:] = augmented(self.prepared(index), self.crop, self.augment, seed)
        batch = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        return batch if self.labels is None else (batch, torch.from_numpy(self.labels[[index for index, _ in pairs]]))

    def prepared(self, index: int) -> NDArray[np.uint8]:
        """Image `index` as uint8 (size, size, 3), neither cropped nor augmented; a DataError where it is broken."""
        if self._cache is not None and (row := self._cache.row(index)) is not None:
            return row
        image = self.images[index]
        box = box_of(self.boxes, index)
        square = (self.size, self.size, 3)
        if isinstance(image, np.ndarray) and image.shape == square and image.dtype == np.uint8 and box is None:
            return image
        return read_prepared(image, self.size, box)

    def batches(self, plan: Iterable[Sequence[Item]], workers: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """(pixels (B, 3, crop, crop), indices (B,)) for each batch of (index, seed); see `load_batches`."""
        return load_batches(self.view(self.crop, self.augment, np.arange(len(self))), plan, workers)

    def view(self, crop: int, augment: str = "none", labels: ArrayLike | None = None) -> Self:
        """The same images cropped and augmented in another way; nothing is read again."""
        other = copy(self)
        other._set_view(crop, augment, labels)
        return other

    def cached(self, folder: str | os.PathLike[str], progress: Progress | None = None) -> Self:
        """The same images from a memory-mapped cache of their prepared pixels, which is filled first.

        It serves every later run on the same files; only files that have changed are read again. Images in memory need
        none. progress: called with (done, total) while files are read.
        """
        if not self.on_disk:
            return self
        paths = [image for image in self.images if isinstance(image, str | os.PathLike)]
        if len(paths) < len(self.images):
            raise ConfigError("The 'cache' of prepared images needs every image to be a file; some are in memory.")
        cache = PixelCache(Path(folder), paths, self.boxes, self.size)
        with cache.building() as stale:
            chunks = list(BatchSampler(stale, _CHUNK, drop_last=False))
            batches = load_batches(self.view(self.size), chunks, self._workers_for(len(stale)))
            done = 0
            for chunk, pixels in zip(chunks, batches, strict=True):
                cache.store(dict(zip(chunk, pixels.permute(0, 2, 3, 1).numpy(), strict=True)))
                done += len(chunk)
                if progress is not None:
                    progress(done, len(stale))
        other = copy(self)
        other._cache = cache
        return other

    @property
    def on_disk(self) -> bool:
        """Whether any image is a file."""
        if isinstance(self.images, np.ndarray):
            return False
        return any(isinstance(image, str | os.PathLike) for image in self.images)

    @property
    def best_workers(self) -> int:
        """What `workers=None` means: processes where files are decoded, none where pixels are cached or in memory."""
        decoded = self._cache is not None or not self.on_disk
        return 0 if self.workers is None and decoded else self._workers_for(len(self))

    def _set_view(self, crop: int, augment: str, labels: ArrayLike | None) -> None:
        if crop < 1:
            raise ConfigError(f"The 'crop' of images must be a positive number of pixels. Got {crop} instead.")
        self.crop, self.augment = crop, check_augmentation(augment)
        self.labels = None if labels is None else np.asarray(labels, np.int64)
        if self.labels is not None and self.labels.shape != (len(self),):
            raise DataError(
                f"The labels of images must be one number per image, {len(self)}. Got {self.labels.shape} instead."
            )

    def _workers_for(self, images: int) -> int:
        if self.workers is not None:
            return self.workers
        return 0 if images <= _FEW else default_workers()


def find_broken(
    images: Sequence[Source] | NDArray[Any],
    boxes: ArrayLike | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    remember: str | os.PathLike[str] | None = None,
) -> list[Broken]:
    """The images that cannot be read, or that their box misses.

    Every file is read once, whole but at a small size. One that was good is not read again in this process as long as
    its stamp stays, and with `remember`, a folder, not in later ones either.
    """
    if isinstance(images, np.ndarray):
        return []
    rows = _checked_boxes(boxes, len(images))
    record = None if remember is None else Path(remember) / "readable"
    good = _readable | _read_record(record)
    marks = [_mark(image, box_of(rows, index)) for index, image in enumerate(images)]
    unknown = [index for index, mark in enumerate(marks) if mark not in good]

    def read(index: int) -> str:
        try:
            open_image(images[index], at_least=_CHECKED_SIZE, box=box_of(rows, index))
        except DataError as error:
            return str(error)
        return ""

    chosen = check_workers(workers)
    if chosen is None:
        chosen = 0 if len(unknown) <= _FEW else default_workers()
    broken: list[Broken] = []
    for done, (index, reason) in enumerate(zip(unknown, run_in_threads(read, unknown, chosen), strict=True), 1):
        if reason:
            image = images[index]
            path = printable(image) if isinstance(image, str | os.PathLike) else f"image {index}"
            broken.append(Broken(index, path, reason))
        elif mark := marks[index]:
            good.add(mark)
        if progress is not None:
            progress(done, len(unknown))
    _readable.update(good)
    if record is not None and unknown:
        with suppress(OSError):  # a full disk: the next start reads them again
            record.parent.mkdir(parents=True, exist_ok=True)
            files.write(record, b"".join(sorted(good)))
    return broken


_CHECKED_SIZE = 64  # pixels: small enough that a JPEG is decoded quickly, and all of it is still read
_MARK = 8  # bytes
_readable: set[bytes] = set()  # marks of the files that this process has read


def _mark(image: Source, box: Box | None) -> bytes:
    """A digest of a file's path, stamp and box; empty for what is no file of this machine."""
    if not isinstance(image, str | os.PathLike) or not any(stamp := files.stamp(image)):
        return b""
    return blake2b(os.fsencode(os.path.abspath(image)) + f"{stamp} {box}".encode(), digest_size=_MARK).digest()  # noqa: PTH100 - speed


def _read_record(record: Path | None) -> set[bytes]:
    try:
        data = b"" if record is None else record.read_bytes()
    except OSError:
        return set()
    return {data[start : start + _MARK] for start in range(0, len(data) - _MARK + 1, _MARK)}


def in_order(images: int | ArrayLike, batch_size: int) -> BatchSampler:
    """Batches of all images in order, seed 0, the last one as short as it must be.

    `images` is how many there are, or their indices.
    """
    if batch_size < 1:
        raise ConfigError(f"The 'batch_size' parameter must be at least 1. Got {batch_size} instead.")
    indices = range(images) if isinstance(images, int) else np.asarray(images, np.int64).tolist()
    size = min(batch_size, len(indices) or 1)  # a batch may be larger than what Python can count
    return BatchSampler([(index, 0) for index in indices], size, drop_last=False)  # type: ignore[misc]


def load_batches(dataset: Dataset[Any], batches: Iterable[Sequence[Item]], workers: int | None = None) -> Iterator[Any]:
    """`dataset[list(batch)]` for each batch, by a DataLoader: in order, read ahead by workers. Batches may be endless.

    What it adds to `DataLoader(dataset, batch_sampler=batches)`: a data set that gives a whole batch at once writes it
    into one array, with half of the copying and channels-last as networks like it; an error in a worker is raised as
    it is in this process, in one line without the worker's traceback; a worker that dies is a DataError; the global
    generator of torch is left alone. As there, a sampler is ahead of the batches that have come out.

    workers: None chooses as `ImageDataset` describes.
    """
    if workers is None:
        workers = dataset.best_workers if isinstance(dataset, ImageDataset) else 0
    with warnings.catch_warnings():
        # torch warns where there are more workers than cores, newer Pythons where a process with threads forks.
        warnings.simplefilter("ignore")
        loaded = iter(
            DataLoader(
                dataset,
                sampler=(list(batch) for batch in batches),
                batch_size=None,
                num_workers=check_workers(workers) or 0,
                collate_fn=_unchanged,
                generator=torch.Generator(),
            )
        )
    while (batch := _next_batch(loaded)) is not _DONE:
        yield batch


_DONE = object()


def _unchanged(batch: Any) -> Any:
    return batch


def _next_batch(loaded: Iterator[Any]) -> Any:
    try:
        return next(loaded, _DONE)
    except BierError as error:
        # torch puts the traceback of a worker into the message; its last line has the type and the message itself.
        mark = f"\n{type(error).__module__}.{type(error).__qualname__}: "
        _, found, message = str(error).rpartition(mark)
        if not found:
            raise
        raise type(error)(message.strip()) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        reason = str(error).split(". ")[0].rstrip(".")
        raise DataError(
            f"A worker process that reads images died ({reason}), most likely because memory or shared memory ran out; "
            "try fewer workers, or 0."
        ) from error


def run_in_threads(task: Callable[[Job], Answer], jobs: Iterable[Job], workers: int) -> Iterator[Answer]:
    """`task(job)` for every job, in the order of the jobs, computed ahead by threads.

    Better than a DataLoader for encoding: threads need no time to start, which counts for few images, and copy
    nothing between processes; decoding releases Python's lock, and so does the network that computes meanwhile. The
    jobs may come from an iterator whose images cannot be indexed. A loop that is busy in Python itself, as training
    is, is better served by the processes of `load_batches`.
    """
    if workers == 0:
        yield from map(task, jobs)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[Answer]] = deque()
        for job in jobs:
            waiting.append(pool.submit(task, job))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _checked(images: Sequence[Source] | NDArray[np.uint8]) -> Sequence[Source] | NDArray[np.uint8]:
    if isinstance(images, np.ndarray):
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise DataError(
                "Images given as one array must be uint8 of shape (N, H, W, 3). "
                f"Got {images.dtype} of shape {images.shape} instead."
            )
        return images
    if isinstance(images, str | bytes | os.PathLike):
        raise DataError(f"Images must be given as a sequence of paths, PIL images or arrays. Got {images!r} instead.")
    return images


def _checked_boxes(boxes: ArrayLike | None, count: int) -> NDArray[np.float32] | None:
    if boxes is None:
        return None
    rows = np.asarray(boxes, np.float32)
    if rows.shape != (count, 4):
        raise DataError(f"Boxes must have the shape ({count}, 4), a row for each image. Got {rows.shape} instead.")
    return rows
