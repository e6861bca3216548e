"""The run folder: its config, metrics, TensorBoard events and checkpoints."""

import errno
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

import bier
from bier import files
from bier.config import Config
from bier.errors import ConfigError, TrainingError
from bier.evaluate.dataset import classifier_file
from bier.method.classifier import BoostedClassifier
from bier.models.model import Model

STEP = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped: tensors by name, and plain values."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-N`, aside and flushed, then renamed. A full disk is a TrainingError and changes nothing."""
    target = folder / f"{STEP}{step}"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    with writing(target, folder), files.folder_aside(target) as aside:
        (aside / "state.safetensors").write_bytes(save(tensors))
        (aside / "state.json").write_text(json.dumps(dict(checkpoint.values), indent=1))
    return target


def read_checkpoint(path: Path) -> Checkpoint:
    try:
        return Checkpoint(load_file(path / "state.safetensors"), json.loads((path / "state.json").read_text()))
    except Exception as error:
        raise TrainingError(
            f"The checkpoint {path} cannot be read ({error}); remove it to go on from the one before."
        ) from error


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. What was being written when the run was killed is not among them."""
    found = [path for path in folder.glob(f"{STEP}*") if path.name.removeprefix(STEP).isdigit()]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    found = complete(folder)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(STEP))


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` and the best, and what earlier kills left half-written."""
    for path in complete(folder)[:-keep]:
        if step_of(path) != best:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{STEP}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writing(target: Path, checkpoints: Path) -> Iterator[None]:
    """Turns what goes wrong while a file of the run is written, such as a full disk, into one line."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else error.strerror or str(error)
        previous = newest(checkpoints)
        rest = f"{previous} is intact; free some space and resume" if previous else "no earlier checkpoint exists"
        raise TrainingError(f"Could not write {target}: {reason}. {rest}.") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments, each under the number of its parameter."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer/{number}/{name}": value if isinstance(value, Tensor) else torch.tensor(value)
        for number, row in state.items()
        for name, value in row.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The opposite of `optimizer_tensors`; learning rates stay those of `optimizer`."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, number, name = key.split("/")
            state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {f"weights/{name}": value for name, value in module.state_dict().items()}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    prefix = "weights/"
    module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})


CONFIG, METRICS, CHECKPOINTS, MODEL = "config.toml", "metrics.jsonl", "checkpoints", "model"


def model_folder(run: Path, step: int | None = None) -> Path:
    return run / (MODEL if step is None else f"{MODEL}-{STEP}{step}")


def save_model(run: Path, model: Model, metric: nn.Module, step: int | None = None) -> Path:
    """Write runs/NAME/model, or runs/NAME/model-step-N for a snapshot; a classifier goes to a file beside it."""
    folder = model_folder(run, step)
    with writing(folder, run / CHECKPOINTS):
        if isinstance(metric, BoostedClassifier):
            files.write(classifier_file(folder), save(metric.state_dict()))
        model.save(folder)
    return folder


def write_config(run: Path, config: Config, split: Mapping[str, Any]) -> None:
    """runs/NAME/config.toml: every setting, the versions that made the run, and how the data was divided."""
    made_by = {"bier": bier.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    records: dict[str, Mapping[str, Any]] = {"made_by": made_by, "split": split}
    with writing(run / CONFIG, run / CHECKPOINTS):
        run.mkdir(parents=True, exist_ok=True)
        files.write(run / CONFIG, config.to_toml(records).encode())


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
            files.write(self.path, "".join(map(_line, kept)).encode())
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
