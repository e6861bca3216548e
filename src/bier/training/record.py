"""The run folder: its config, its metrics and its TensorBoard events."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import bier
from bier.config import Config
from bier.errors import ConfigError, TrainingError
from bier.training.checkpoint import flush_folder, write_flushed

CONFIG, METRICS, CHECKPOINTS, MODEL = "config.toml", "metrics.jsonl", "checkpoints", "model"


def write_config(run: Path, config: Config, split: Mapping[str, Any]) -> None:
    """runs/NAME/config.toml: every setting, the versions that made the run, and how the data was divided."""
    made_by = {"bier": bier.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    records: dict[str, Mapping[str, Any]] = {"made_by": made_by, "split": split}
    run.mkdir(parents=True, exist_ok=True)
    aside = run / f".{CONFIG}.{os.getpid()}"
    write_flushed(aside, config.to_toml(records).encode())
    aside.rename(run / CONFIG)
    flush_folder(run)


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
        self.path = run / METRICS
        self.writes = writes  # one process of many does
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only training needs it

        kept = [row for row in read_metrics(run) if row["step"] <= resume_at]
        aside = self.path.with_name(f".{METRICS}.{os.getpid()}")
        write_flushed(aside, "".join(map(_line, kept)).encode())
        aside.rename(self.path)
        self.file = self.path.open("a", encoding="utf-8")
        self.events = SummaryWriter(str(run), purge_step=resume_at + 1)

    def write(self, row: Mapping[str, Any], clock: Mapping[str, float] | None = None) -> None:
        """`row` goes to both; `clock` (images per second and the like) to TensorBoard only."""
        if not self.writes:
            return
        try:
            self.file.write(_line(row))
            self.file.flush()
        except OSError as error:
            raise TrainingError(
                f"Could not write {self.path}: {error.strerror}. The checkpoints are intact."
            ) from error
        for key, value in {**_scalars(row), **(clock or {})}.items():
            self.events.add_scalar(key, value, row["step"])

    def flush(self) -> None:
        """Make the lines so far durable; done before each checkpoint, so that none of them can outrun its metrics."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.writes:
            self.file.close()
            self.events.close()


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
