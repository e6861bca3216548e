"""Contenders that are timed in turns, each in a process of its own."""

import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

import torch

from _report import clock


def take_turns(
    prepare: Callable[[str], Callable[[], object]], names: Iterable[str], rounds: int, threads: int
) -> dict[str, list[float]]:
    """The seconds of each round by contender.

    prepare: called with a name in the process of that contender, returns what is timed. What one contender does to its
    memory cannot help another, and what else the machine does meets all of them.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in names:
        pipes[name], theirs = context.Pipe()
        context.Process(target=_serve, args=(prepare, name, threads, theirs), daemon=True).start()
        pipes[name].recv()
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(rounds):
        for name, pipe in pipes.items():
            pipe.send(True)
            seconds[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(False)
    return seconds


def _serve(prepare: Callable[[str], Callable[[], object]], name: str, threads: int, pipe: Connection) -> None:
    torch.set_num_threads(threads)
    run = prepare(name)
    run()  # the first time allocates
    pipe.send("ready")
    while pipe.recv():
        start = clock()
        run()
        pipe.send(clock() - start)
