"""The run folder: its config, its metrics and its TensorBoard events."""

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import bier
from bier import durable
from bier.config import Config
from bier.errors import ConfigError
from bier.training.checkpoint import writing

CONFIG, METRICS, CHECKPOINTS, MODEL = "config.toml", "metrics.jsonl", "checkpoints", "model"


def write_config(run: Path, config: Config, split: Mapping[str, Any]) -> None:
    """runs/NAME/config.toml: every setting, the versions that made the run, and how the data was divided."""
    made_by = {"bier": bier.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    records: dict[str, Mapping[str, Any]] = {"made_by": made_by, "split": split}
    with writing(run / CONFIG, run / CHECKPOINTS):
        run.mkdir(parents=True, exist_ok=True)
        durable.write(run / CONFIG, config.to_toml(records).encode())


def check_same_config(run: Path, config: Config) -> None:
    """A run goes on only with the settings it was started with."""
    different = Config.from_toml(run / CONFIG).differing(config)
    if different:
        raise ConfigError(f"{run} was started with other settings (there / here): {'; '.join(different)}.")


class Metrics:
    """metrics.jsonl, a line a logging step, and TensorBoard events beside it.

    Lines hold nothing that depends on the clock, so that an interrupted and resumed run writes the same file as one
    that was never interrupted. `resume_at` drops lines beyond that step: they will be written again.
    """

    def __init__(self, run: Path, resume_at: int, writes: bool = True) -> None:
        self.run = run
        self.path = run / METRICS
        self.writes = writes  # one process of many does
        if not writes:
            return
        kept = [row for row in read_metrics(run) if row["step"] <= resume_at]
        with writing(self.path, run / CHECKPOINTS):
            durable.write(self.path, "".join(map(_line, kept)).encode())
            self.file = self.path.open("ab", buffering=0)  # a line is handed over whole, and no part of it twice
            self.events = Events(run, resume_at)

    def write(self, row: Mapping[str, Any], clock: Mapping[str, float] | None = None) -> None:
        """`row` goes to both; `clock` (images per second and the like) to TensorBoard only."""
        if not self.writes:
            return
        with writing(self.path, self.run / CHECKPOINTS):
            line = _line(row).encode()
            while line:
                line = line[self.file.write(line) :]
            self.events.write(row["step"], {**_scalars(row), **(clock or {})})

    def flush(self) -> None:
        """Make the lines so far durable; done before each checkpoint, so that none of them can outrun its metrics."""
        with writing(self.path, self.run / CHECKPOINTS):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.writes:
            self.file.close()
            self.events.close()


class Events:
    """A TensorBoard file. Torch's own writer hands its events to a thread, where a full disk goes unheard."""

    def __init__(self, run: Path, resume_at: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        path = run / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.file = path.open("wb", buffering=0)
        self.writer = RecordWriter(self.file)
        self._add(Event(file_version="brain.Event:2"))
        if resume_at:  # what an earlier file says of later steps is void
            self._add(Event(step=resume_at + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(Event(step=step, summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self.writer.write(event.SerializeToString())

    def close(self) -> None:
        self.file.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that a kill cut off is left out."""
    path = run / METRICS
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Lists become one curve a learner: `learner_losses/1` and so on."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, list):
            flat |= {f"{key}/{number}": one for number, one in enumerate(value, start=1)}
        elif key != "step":
            flat[key] = value
    return flat
