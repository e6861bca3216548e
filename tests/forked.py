"""Processes for tests, each a fork of one that has imported torch and `bier`: their start takes milliseconds.

The process that is forked is `multiprocessing`'s fork server. It has computed nothing and has one thread.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SERVER: Any = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *("bier.cli", "bier.collection", "bier.data", "bier.evaluate.ensemble", "bier.paper.runner"),
        *("bier.training.loop", "faiss"),
    ]
)
folder = Path(tempfile.gettempdir())  # for what the processes print; set by the fixture `forked`


class Forked:
    """A running command; its standard output and standard error go to files."""

    def __init__(self, script: str | None, arguments: tuple[object, ...], environment: dict[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        words = [str(word) for word in arguments]
        given = (str(self._folder), script, words, environment, str(Path.cwd()))
        self._process = SERVER.Process(target=_run, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def out(self) -> str:
        return self._text("out")

    @property
    def said(self) -> str:
        return self._text("err")

    def _text(self, name: str) -> str:
        file = self._folder / name
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def poll(self) -> int | None:
        code = self._process.exitcode
        return None if code is None else int(code)

    def wait(self, timeout: float = 120) -> int:
        """Its exit code. A process that runs on after `timeout` seconds is killed, and its code is -9."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
        return int(self._process.exitcode)

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def start(*arguments: object, script: str | Path | None = None, environment: dict[str, str] | None = None) -> Forked:
    """Start `bier ARGUMENTS`, or a Python script with these arguments."""
    return Forked(None if script is None else str(script), arguments, environment or {})


def start_two(*arguments: object, script: str | Path | None = None) -> tuple[Forked, Forked]:
    """Start a command in two processes with the variables by which torchrun makes them one group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = ({"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1"))
    first, second = (start(*arguments, script=script, environment=group | rank) for rank in ranks)
    return first, second


def finished(*processes: Forked, timeout: float = 240) -> str:
    """The standard output of the first; all have to end without an error."""
    until = time.monotonic() + timeout
    for process in processes:
        code = process.wait(max(1.0, until - time.monotonic()))
        assert code == 0, f"exit code {code}: {process.said}"
    return processes[0].out


def _run(output: str, script: str | None, arguments: list[str], environment: dict[str, str], here: str) -> None:
    """In the fork."""
    import torch

    import bier.cli

    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    os.chdir(here)
    torch.set_num_threads(1)
    sys.argv = [script or str(Path(bier.cli.__file__).parents[1] / "__main__.py"), *arguments]
    try:
        if script is None:
            bier.cli.main()
        else:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
