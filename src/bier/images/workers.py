"""Work spread over processes whose answers come back in order."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from bier.errors import BierError, ConfigError, DataError

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
