"""Prepared images by number, and batches of them as tensors, read by several processes."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import DataLoader, Dataset

from bier.errors import BierError, ConfigError, DataError
from bier.images.cache import PixelCache
from bier.images.decode import Box, Source, printable
from bier.images.transforms import augment as augmented
from bier.images.transforms import check_augmentation, read_prepared

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def default_workers() -> int:
    """One process a core that this process may use, four at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 4)


def check_workers(workers: int | None) -> int | None:
    """The number itself, or a ConfigError where it is negative; None leaves the choice to the loader."""
    if workers is not None and workers < 0:
        raise ConfigError(f"The 'workers' parameter must be 0 or a number of processes. Got {workers} instead.")
    return workers


def run_in_order(task: Callable[[Job], Answer], jobs: Iterable[Job], workers: int) -> Iterator[Answer]:
    """`task(job)` for every job, in the order of the jobs, whatever the number of processes.

    With `workers` 0 everything happens in this process, one job when its answer is asked for. Otherwise up to two
    jobs a worker are read ahead, `jobs` may be endless, and `task` must be picklable where processes are not forked.
    A BierError in a worker is raised here as it was there. Large answers should be tensors: they come back through
    shared memory. The global generators of torch are left alone.
    """
    if workers == 0:
        for job in jobs:
            yield task(job)
        return
    with warnings.catch_warnings():
        # torch warns where there are more workers than cores, newer Pythons where a process with threads forks.
        warnings.simplefilter("ignore")
        answers = iter(
            DataLoader(
                _Tasks(task),
                sampler=jobs,
                batch_size=None,
                num_workers=workers,
                collate_fn=_as_it_is,
                generator=torch.Generator(),
            )
        )
    while (answer := _next_answer(answers)) is not _DONE:
        if isinstance(answer, _Failure):
            raise answer.error
        yield answer


def run_in_threads(task: Callable[[Job], Answer], jobs: Iterable[Job], workers: int) -> Iterator[Answer]:
    """As `run_in_order`, with threads: no start-up, and nothing to copy. Decoding lets go of Python's lock.

    For a caller that computes outside of Python between two answers, such as a network; a caller that is busy in
    Python itself is better served by processes.
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


_DONE = object()


def _next_answer(answers: Iterator[Any]) -> Any:
    try:
        return next(answers, _DONE)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        reason = str(error).split(". ")[0].rstrip(".")
        raise DataError(
            f"A worker process that reads images died ({reason}), most likely for want of memory or of shared memory; "
            "try fewer workers, or 0."
        ) from error


class _Failure:
    """A worker's error on its way home: raised in the worker, torch would wrap it in a traceback."""

    def __init__(self, error: BierError) -> None:
        self.error = error


class _Tasks(Dataset[Any], Generic[Job, Answer]):
    """The task dressed as a data set whose index is the job."""

    def __init__(self, task: Callable[[Job], Answer]) -> None:
        self.task = task

    def __getitem__(self, job: Job) -> Answer | _Failure:
        try:
            return self.task(job)
        except BierError as error:
            return _Failure(error.with_traceback(None))


def _as_it_is(answer: Answer) -> Answer:
    return answer


Progress = Callable[[int, int], None]
Plan = Iterable[Sequence[tuple[int, int]]]

_FEW = 64  # up to so many images, starting worker processes takes longer than they save
_CHUNK = 32  # images a worker reads for one answer while files are checked or the cache is built


class Broken(NamedTuple):
    """An image that cannot be read: its number, its file and why."""

    number: int
    path: str
    reason: str


class PreparedImages:
    """Images as uint8 squares (size, size, 3), by number.

    `images` is a sequence of paths, PIL images and arrays, or one uint8 array (N, H, W, 3). `boxes` (N, 4) holds
    x1, y1, x2, y2 for each image in pixels of the upright original; a row of NaN stands for the whole picture.

    `cache` names a folder for a memory-mapped cache of the prepared pixels. It is filled here, before
    the constructor returns, and serves every later run on the same files; only files that have changed are read
    again. Images that are in memory already need none and ignore it.

    Numbers always count the images as given. With `skip_broken` every file is read once (the cache remembers which
    were good); `.broken` then lists those that cannot be read and `.kept` the numbers of the others. Without it
    `.kept` is every number, and reading a broken image is a DataError.
    `progress(done, total)` follows that pass.
    """

    def __init__(
        self,
        images: Sequence[Source] | NDArray[np.uint8],
        size: int,
        boxes: ArrayLike | None = None,
        cache: str | os.PathLike[str] | None = None,
        skip_broken: bool = False,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"The 'size' of prepared images must be a positive number of pixels. Got {size} instead.")
        self.images = _checked(images)
        self.size = size
        self.boxes = _checked_boxes(boxes, len(self.images))
        self.workers = check_workers(workers)
        self.broken: list[Broken] = []
        paths = [image for image in self.images if isinstance(image, str | os.PathLike)] if self.on_disk else []
        self._cache: PixelCache | None = None
        if cache is not None and paths:
            if len(paths) < len(self.images):
                raise ConfigError("The 'cache' of prepared images needs every image to be a file; some are in memory.")
            self._cache = PixelCache(Path(cache), paths, self.boxes, size)
            self._fill_cache(self._cache, skip_broken, progress)
        elif skip_broken and not isinstance(self.images, np.ndarray):
            self._check_all(progress)
        unreadable = [broken.number for broken in self.broken]
        self.kept: NDArray[np.int64] = np.delete(np.arange(len(self.images), dtype=np.int64), unreadable)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """Image `index` as uint8 (size, size, 3); a DataError where its file is broken."""
        if self._cache is not None and (row := self._cache.row(index)) is not None:
            return row
        return self._read(index)

    def only(self, kept: ArrayLike) -> Self:
        """The same images with another `.kept`, without looking at them again: a share of the work."""
        share = copy(self)
        share.kept = np.asarray(kept, np.int64)
        return share

    @property
    def on_disk(self) -> bool:
        """Whether any image is a file."""
        if isinstance(self.images, np.ndarray):
            return False
        return any(isinstance(image, str | os.PathLike) for image in self.images)

    @property
    def best_workers(self) -> int:
        """What `workers=None` means: processes where there are files to decode, none where pixels are at hand."""
        if self.workers is not None:
            return self.workers
        at_hand = self._cache is not None or not self.on_disk or len(self) <= _FEW
        return 0 if at_hand else default_workers()

    def _read(self, index: int) -> NDArray[np.uint8]:
        image = self.images[index]
        box = self._box(index)
        if box is None and isinstance(image, np.ndarray) and image.shape == (self.size, self.size, 3):
            return image
        return read_prepared(image, self.size, box)

    def _box(self, index: int) -> Box | None:
        if self.boxes is None or np.isnan(self.boxes[index]).all():
            return None
        x1, y1, x2, y2 = (float(value) for value in self.boxes[index])
        return x1, y1, x2, y2

    def _attempt(self, indices: Sequence[int]) -> tuple[torch.Tensor, dict[int, str]]:
        """The pixels (n, size, size, 3) of those that can be read, and why the others cannot."""
        rows: list[NDArray[np.uint8]] = []
        reasons: dict[int, str] = {}
        for index in indices:
            try:
                rows.append(self._read(index))
            except DataError as error:
                reasons[index] = str(error)
        return torch.from_numpy(np.array(rows, np.uint8).reshape(-1, self.size, self.size, 3)), reasons

    def _why_not(self, indices: Sequence[int]) -> dict[int, str]:
        return self._attempt(indices)[1]

    def _note(self, reasons: Mapping[int, str]) -> None:
        for index, reason in reasons.items():
            image = self.images[index]
            path = printable(image) if isinstance(image, str | os.PathLike) else f"image {index}"
            self.broken.append(Broken(index, path, reason))

    def _pass_workers(self, images: int) -> int:
        if self.workers is not None:
            return self.workers
        return 0 if images <= _FEW else default_workers()

    def _check_all(self, progress: Progress | None) -> None:
        chunks = _chunks(range(len(self)))
        done = 0
        answers = run_in_order(self._why_not, chunks, self._pass_workers(len(self)))
        for chunk, reasons in zip(chunks, answers, strict=True):
            self._note(reasons)
            done += len(chunk)
            if progress is not None:
                progress(done, len(self))

    def _fill_cache(self, cache: PixelCache, skip_broken: bool, progress: Progress | None) -> None:
        with cache.building() as stale:
            chunks = _chunks(stale)
            done = 0
            self._cache = None  # what travels to the workers
            answers = run_in_order(self._attempt, chunks, self._pass_workers(len(stale)))
            for chunk, (pixels, reasons) in zip(chunks, answers, strict=True):
                good = [index for index in chunk if index not in reasons]
                cache.store(dict(zip(good, pixels.numpy(), strict=True)))
                if reasons and not skip_broken:
                    raise DataError(next(iter(reasons.values())))
                self._note(reasons)
                done += len(chunk)
                if progress is not None:
                    progress(done, len(stale))
            self._cache = cache


class Batches:
    """Batches of pixels: pairs of a uint8 tensor (B, 3, crop, crop) and an int64 tensor (B,) of image numbers.

    `plan` gives the (index, seed) of every image, batch by batch, and may be endless. An image depends on
    its index and seed alone, so the batches are the same for every number of `workers`. The pixels lie channels-last
    in memory (a permuted view of (B, crop, crop, 3)).

    `workers` None: processes where there are files to decode, none where the pixels are in memory or in a cache.
    `threads` makes them threads: no start-up, best where a network computes between two batches.
    Workers read ahead, so a plan with a state of its own runs ahead of the batches that have come out.
    """

    def __init__(
        self,
        source: PreparedImages,
        plan: Plan,
        crop: int,
        augment: str = "none",
        workers: int | None = None,
        threads: bool = False,
    ) -> None:
        if crop < 1:
            raise ConfigError(
                f"The 'crop' parameter of Batches must be a positive number of pixels. Got {crop} instead."
            )
        self.source = source
        self.plan = plan
        self.crop = crop
        self.augment = check_augmentation(augment)
        chosen = check_workers(workers)
        self.workers = source.best_workers if chosen is None else chosen
        self.threads = threads

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        run = run_in_threads if self.threads else run_in_order
        for pixels, indices in run(self._batch, self.plan, self.workers):
            yield pixels.permute(0, 3, 1, 2), torch.from_numpy(indices)

    def _batch(self, batch: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, NDArray[np.int64]]:
        pixels = np.empty((len(batch), self.crop, self.crop, 3), np.uint8)
        for row, (index, seed) in zip(pixels, batch, strict=True):
            row[:] = augmented(self.source[index], self.crop, self.augment, seed)
        return torch.from_numpy(pixels), np.array([index for index, _ in batch], np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"plan": ()}  # workers are told what to do and need no plan


def in_order(images: int | ArrayLike, batch_size: int) -> list[list[tuple[int, int]]]:
    """A plan of all images in order, seed 0, the last batch as short as it must be.

    `images` is how many there are, or the numbers themselves (such as `PreparedImages.kept`).
    """
    if batch_size < 1:
        raise ConfigError(f"The 'batch_size' parameter must be at least 1. Got {batch_size} instead.")
    indices = range(images) if isinstance(images, int) else np.asarray(images, np.int64).tolist()
    return [[(i, 0) for i in indices[start : start + batch_size]] for start in range(0, len(indices), batch_size)]


def _chunks(indices: Sequence[int]) -> list[list[int]]:
    return [list(indices[start : start + _CHUNK]) for start in range(0, len(indices), _CHUNK)]


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
