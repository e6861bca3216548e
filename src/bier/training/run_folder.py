"""The run folder: config, metrics, TensorBoard events, checkpoints and models."""

import json
import os
import platform
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import bier
from bier import files
from bier.config import Config
from bier.errors import ConfigError, TrainingError
from bier.evaluate.dataset import classifier_file
from bier.method.classifier import BoostedClassifier
from bier.models.model import Model

STEP, STATE = "step-", "state.pt"


@dataclass(frozen=True)
class Checkpoint:
    """All the state that a run needs to resume exactly."""

    objective: Mapping[str, Tensor]  # state_dict of the networks and losses
    optimizer: Mapping[str, Any]  # state_dict
    sampler: Mapping[str, Any]  # state_dict
    trainer: Mapping[str, Any]  # fields of TrainerState
    random: Mapping[str, Tensor]  # states of the generators by type of device: uint8 (processes, n)
    average: Mapping[str, Tensor] = field(default_factory=dict)  # state_dict of the moving average, where there is one

    def not_finite(self) -> str | None:
        """The name of a weight or optimizer state with NaN or infinite values; None if there is none."""
        tensors = {f"weights/{name}": value for name, value in self.objective.items()}
        for number, row in self.optimizer["state"].items():
            tensors |= {f"optimizer/{number}/{key}": value for key, value in row.items() if isinstance(value, Tensor)}
        return next((name for name, value in tensors.items() if not torch.isfinite(value).all()), None)


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-N`, aside and flushed, then renamed. A full disk is a TrainingError and changes nothing.

    Its SHA256SUMS can be checked with `sha256sum -c`.
    """
    target = folder / f"{STEP}{step}"
    content = BytesIO()  # torch's own writer to a file reports a full disk as a RuntimeError without a reason
    torch.save(vars(checkpoint), content)
    with writing(target, folder), files.folder_aside(target) as aside:
        (aside / STATE).write_bytes(content.getbuffer())
        files.write_checksums(aside)
    return target


def read_checkpoint(path: Path) -> Checkpoint:
    try:
        files.check_files(path, STATE)
        if (path / "state.safetensors").exists():
            return _read_old_checkpoint(path)
        return Checkpoint(**torch.load(path / STATE, map_location="cpu", weights_only=True))
    except Exception as error:
        raise damaged_checkpoint(path, error) from error


def damaged_checkpoint(path: Path, error: Exception) -> TrainingError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return TrainingError(f"The checkpoint {path} cannot be read ({reason}); remove it to go on from the one before.")


def _read_old_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint of version 0.1: tensors in state.safetensors, plain values in state.json."""
    tensors, values = load_file(path / "state.safetensors"), json.loads((path / "state.json").read_text())
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, number, name = key.split("/")
            moments.setdefault(int(number), {})[name] = value
    weights = {key.removeprefix("weights/"): value for key, value in tensors.items() if key.startswith("weights/")}
    return Checkpoint(weights, {"state": moments}, values["sampler"], values["standing"], {"cpu": tensors["random"]})


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the optimizer's state. An old checkpoint has no parameter groups: `optimizer` has those of the config."""
    optimizer.load_state_dict({"param_groups": optimizer.state_dict()["param_groups"], **state})


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that a run on `device` draws from (dropout on a GPU draws from the GPU's)."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first; not one that was being written when the run was killed."""
    found = [path for path in folder.glob(f"{STEP}*") if path.name.removeprefix(STEP).isdigit()]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    found = complete(folder)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(STEP))


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` and the best, and incomplete ones that a killed run has left."""
    for path in complete(folder)[:-keep]:
        if step_of(path) != best:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{STEP}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writing(target: Path, checkpoints: Path) -> Iterator[None]:
    """Turn an OSError while a file of the run is written, such as a full disk, into a TrainingError of one line."""
    try:
        yield
    except OSError as error:
        previous = newest(checkpoints)
        rest = f"{previous} is intact; free some space and resume" if previous else "no earlier checkpoint exists"
        raise TrainingError(f"Could not write {target}: {files.reason(error)}. {rest}.") from error


CONFIG, METRICS, CHECKPOINTS, MODEL = "config.toml", "metrics.jsonl", "checkpoints", "model"
JOB = ".torchrun"  # the id of the job that began the run


def default_folder(config: Config) -> Path:
    return Path("runs") / f"{config.data.name}-{config.method}-{config.seed}"


def begun_by_this_job(run: Path) -> bool:
    """Whether the torchrun that has started this process began the run, and a failure or a new machine interrupted it.

    A job with an id of its own (--standalone, --rdzv-id) is known by it, because a machine that joins later has no
    restarts to count. Without one the restarts are counted: at the first start a run that is there is not this job's.
    """
    if not (run / CONFIG).is_file():
        return False
    job = _torchrun_job()
    if job is None:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return (run / JOB).is_file() and (run / JOB).read_text() == job


def _torchrun_job() -> str | None:
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if job == "none" else job


def check_new(run: Path) -> None:
    """Raise a ConfigError if there is a run in the folder."""
    if (run / CONFIG).exists():
        raise ConfigError(f"{run} already holds a run. Resume it with --resume {run}, or choose another --out.")


def model_folder(run: Path, step: int | None = None) -> Path:
    return run / (MODEL if step is None else f"{MODEL}-{STEP}{step}")


def save_model(run: Path, model: Model, metric: nn.Module, step: int | None = None) -> Path:
    """Write runs/NAME/model, or runs/NAME/model-step-N for a snapshot; a classifier goes to a file beside it."""
    folder = model_folder(run, step)
    with writing(folder, run / CHECKPOINTS):
        if isinstance(metric, BoostedClassifier):
            weights = {name: value.detach().cpu().numpy() for name, value in metric.state_dict().items()}
            files.write_tensors(classifier_file(folder), weights)
        model.save(folder)
    return folder


def write_config(run: Path, config: Config, split: Mapping[str, Any]) -> None:
    """runs/NAME/config.toml: every setting, the versions that made the run, and how the data was divided."""
    made_by = {"bier": bier.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    records: dict[str, Mapping[str, Any]] = {"made_by": made_by, "split": split}
    with writing(run / CONFIG, run / CHECKPOINTS):
        run.mkdir(parents=True, exist_ok=True)
        if (job := _torchrun_job()) is not None:
            files.write(run / JOB, job.encode())
        files.write(run / CONFIG, config.to_toml(records).encode())


def check_same_config(run: Path, config: Config) -> None:
    """Raise a ConfigError unless the run was started with the same settings."""
    different = Config.from_toml(run / CONFIG).differing(config)
    if different:
        raise ConfigError(f"{run} was started with other settings (there / here): {'; '.join(different)}.")


class Metrics:
    """metrics.jsonl, one line per logging step, and the same numbers as TensorBoard events.

    metrics.jsonl is the durable record. Its lines hold nothing that depends on the clock, so that an interrupted and
    resumed run writes the same file as one that was never interrupted. `resume_at` drops lines and voids events beyond
    that step: they will be written again.
    """

    def __init__(self, run: Path, resume_at: int, writes: bool = True) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run = run
        self.path = run / METRICS
        self.writes = writes  # only one of several processes does
        if not writes:
            return
        kept = [row for row in read_metrics(run) if row["step"] <= resume_at]
        with writing(self.path, run / CHECKPOINTS):
            files.write(self.path, "".join(map(_line, kept)).encode())
            self.file = self.path.open("ab", buffering=0)  # unbuffered, so that a failed write is not repeated at close
            self.events = SummaryWriter(run, purge_step=resume_at + 1)
        # The writer's thread prints the traceback of an error, such as a full disk, that the next call raises anyway.
        self.previous_hook, threading.excepthook = threading.excepthook, self._on_thread_error

    def write(self, row: Mapping[str, Any], clock: Mapping[str, float] | None = None) -> None:
        """`row` goes to both; `clock` (images per second and the like) to TensorBoard only."""
        if not self.writes:
            return
        with writing(self.path, self.run / CHECKPOINTS):
            line = _line(row).encode()
            while line:
                line = line[self.file.write(line) :]
        with writing(self.run / "events.out.tfevents", self.run / CHECKPOINTS):
            for tag, value in {**scalars(row), **(clock or {})}.items():
                self.events.add_scalar(tag, value, row["step"])

    def flush(self) -> None:
        """Flush the lines to disk; called before each checkpoint, so that no checkpoint is newer than its metrics."""
        with writing(self.path, self.run / CHECKPOINTS):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if not self.writes:
            return
        self.file.close()
        try:
            with writing(self.run / "events.out.tfevents", self.run / CHECKPOINTS):
                self.events.close()
        finally:
            threading.excepthook = self.previous_hook

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        if not isinstance(error.exc_value, OSError) or "event_file_writer" not in type(error.thread).__module__:
            self.previous_hook(error)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without an incomplete last line that a killed run has left."""
    path = run / METRICS
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise TypeError(f"the step is {row['step']!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):
                break
            raise TrainingError(
                f"Line {number} of {path} is damaged ({error}). Remove the line, or the lines from there on; "
                "a resumed run writes those after its checkpoint again."
            ) from error
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Lists become one curve per learner: `learner_losses/1` and so on."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, list):
            flat |= {f"{key}/{number}": one for number, one in enumerate(value, start=1)}
        elif key != "step":
            flat[key] = value
    return flat
