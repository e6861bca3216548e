"""A full disk ends a run with one line, and what was saved before still serves."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bier
from bier.runs import Run
from bier.training import resolve
from bier.training.checkpoints import read_checkpoint

SETTINGS = {
    "model.embedding": 12,
    "diversity.hidden": 64,
    "train.steps": 30,
    "train.batch_classes": 3,
    "train.batch_images": 3,
    "train.checkpoint_every": 5,
    "train.log_every": 1,
    "data.validation": 0.0,
}


def limited(largest: int) -> Callable[[], None]:
    """No file may grow beyond so many bytes, as if the disk were full; Python turns the signal into an OSError."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))


# `bier` without lines of progress, which a slow machine would show before the one line that is looked for.
QUIET = "import bier.cli.terminal as t; t.SECONDS_BETWEEN_LINES = 3600; from bier.cli import main; main()"


def resume(run: Path, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", QUIET, "train", "--resume", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=before, check=False)


class Stop:
    """Asks a run to stop at a step, as Ctrl-C does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def prepare(self, what: str, done: int, total: int) -> None: ...

    def step(self, step: int, total: int, row: object) -> None:
        if step == self.at:
            os.kill(os.getpid(), 2)


@pytest.fixture
def run(features_file: Path, tmp_path: Path) -> Path:
    """A run that was stopped at step 7."""
    config = resolve("a-bier", "features", {**SETTINGS, "data.root": str(features_file)})
    assert bier.train(config, tmp_path / "run", observer=Stop(7)).interrupted
    return tmp_path / "run"


def assert_one_line(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said in line


def assert_intact(run: Path, step: int) -> None:
    newest = Run(run).complete()[-1]
    assert newest.name == f"step-{step}"
    read_checkpoint(newest)
    assert list((run / "checkpoints").glob(".*")) == []


def test_a_checkpoint_that_does_not_fit(run: Path) -> None:
    assert_intact(run, 7)
    size = (Run(run).complete()[-1] / "state.pt").stat().st_size
    done = resume(run, limited(size - 1000))
    assert_one_line(done, f"Could not write {run}/checkpoints/step-10: the disk is full. {run}/checkpoints/step-7 is")
    assert "resume" in done.stderr
    assert_intact(run, 7)
    assert resume(run).returncode == 0
    assert [row["step"] for row in Run(run).metrics()] == list(range(1, 31))


def test_metrics_that_do_not_fit(run: Path) -> None:
    written = (run / "metrics.jsonl").stat().st_size
    done = resume(run, limited(written + 100))
    assert_one_line(done, f"Could not write {run}/metrics.jsonl: the disk is full.")
    assert_intact(run, 7)
    assert resume(run).returncode == 0
    assert [row["step"] for row in Run(run).metrics()] == list(range(1, 31))
    assert (run / "metrics.jsonl").read_text().count("\n") == 30


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full(features_file: Path, little_disk: Path) -> None:
    run = little_disk / "run"
    config = resolve("a-bier", "features", {**SETTINGS, "data.root": str(features_file)})
    assert bier.train(config, run, observer=Stop(7)).interrupted
    free = os.statvfs(little_disk).f_bavail * os.statvfs(little_disk).f_frsize
    with (little_disk / "other").open("wb") as file:
        file.write(bytes(max(free - 20_000, 0)))
    done = resume(run)
    assert_one_line(done, "the disk is full")
    assert_intact(run, 7)
    (little_disk / "other").unlink()
    assert resume(run).returncode == 0
    assert (run / "model" / "model.safetensors").is_file()
