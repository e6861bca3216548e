"""Processes that work in order, report clean errors and leave nothing behind."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count

import pytest
import torch
from torch.utils.data import Dataset

from bier.errors import ConfigError, DataError
from bier.images.dataset import check_workers, default_workers, load_batches, run_in_threads


class Tasks(Dataset[int]):
    """A data set that computes its items."""

    def __init__(self, task: Callable[[int], int]) -> None:
        self.task = task

    def __getitem__(self, numbers: list[int]) -> int:
        (number,) = numbers
        return self.task(number)


def answers_of(task: Callable[[int], int], numbers: Iterable[int], workers: int) -> Iterator[int]:
    """The answers of a loader whose batches hold one item each."""
    return load_batches(Tasks(task), ([number] for number in numbers), workers)


def square_after_a_nap(number: int) -> int:
    time.sleep(0.02 * (number % 3 == 0))
    return number * number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise DataError("The number 3 is broken.")
    return number


def stumble(number: int) -> int:
    raise ZeroDivisionError("a mistake of ours")


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def threads(number: int) -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_answers_come_in_order(workers: int) -> None:
    assert list(answers_of(square_after_a_nap, range(10), workers)) == [n * n for n in range(10)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_clean_and_after_the_answers_before_it(workers: int) -> None:
    answers = answers_of(fail_at_three, range(9), workers)
    assert [next(answers) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError) as caught:
        next(answers)
    assert str(caught.value) == "The number 3 is broken."
    assert type(caught.value) is DataError


@pytest.mark.parametrize("workers", [0, 1])
def test_mistakes_of_ours_are_not_dressed_up(workers: int) -> None:
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        list(answers_of(stumble, range(2), workers))


def test_a_worker_that_dies() -> None:
    with pytest.raises(
        DataError, match=r"A worker process that reads images died \(.*try fewer workers, or 0"
    ) as caught:
        list(answers_of(die, range(4), 1))
    assert "\n" not in str(caught.value)


def test_endless_jobs_and_an_early_end_leave_no_process() -> None:
    before = set(multiprocessing.active_children())  # other tests' workers may still be on their way out
    answers = answers_of(square_after_a_nap, count(), 2)
    assert [next(answers) for _ in range(4)] == [0, 1, 4, 9]
    mine = set(multiprocessing.active_children()) - before
    assert len(mine) == 2
    answers.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 10
    while mine & set(multiprocessing.active_children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not mine & set(multiprocessing.active_children())


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(answers_of(square_after_a_nap, range(3), 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_use_one_thread_each() -> None:
    assert list(answers_of(threads, range(2), 1)) == [1, 1]


def test_numbers_of_workers() -> None:
    assert 1 <= default_workers() <= 4
    assert check_workers(None) is None
    assert check_workers(0) == 0
    with pytest.raises(ConfigError, match="Got -1 instead"):
        check_workers(-1)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_threads_answer_in_order_and_raise_what_a_task_raised(workers: int) -> None:
    def task(job: int) -> int:
        if job == 5:
            raise DataError("five")
        return job * job

    assert list(run_in_threads(task, range(5), workers)) == [0, 1, 4, 9, 16]
    with pytest.raises(DataError, match="five"):
        list(run_in_threads(task, range(8), workers))
