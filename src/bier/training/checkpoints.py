"""What a run writes while it trains, so that it can be resumed exactly: config, metrics, checkpoints and models."""

import json
import os
import platform
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bier
from bier import files, folders, system
from bier.config import Config
from bier.errors import ConfigError, TrainingError
from bier.method.classifier import BoostedClassifier
from bier.models.model import Model
from bier.runs import Run, step_of
from bier.training.optimizer import learning_rate

STATE = "state.pt"


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


def write_checkpoint(run: Run, step: int, checkpoint: Checkpoint) -> None:
    """Write it aside and flushed, then rename it. A full disk is a TrainingError and changes nothing.

    Its SHA256SUMS can be checked with `sha256sum -c`.
    """
    target = run.checkpoint(step)
    content = BytesIO()  # torch's own writer to a file reports a full disk as a RuntimeError without a reason
    torch.save(vars(checkpoint), content)
    with writing(target, run), files.folder_aside(target) as aside:
        (aside / STATE).write_bytes(content.getbuffer())
        files.write_checksums(aside)


def read_checkpoint(path: Path) -> Checkpoint:
    try:
        files.check_files(path, STATE)
        return Checkpoint(**torch.load(path / STATE, map_location="cpu", weights_only=True))
    except Exception as error:
        raise damaged_checkpoint(path, error) from error


def damaged_checkpoint(path: Path, error: Exception) -> TrainingError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return TrainingError(f"The checkpoint {path} cannot be read ({reason}); remove it to go on from the one before.")


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that a run on `device` draws from (dropout on a GPU draws from the GPU's)."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({device.type: system.random_state(device)} if device.type != "cpu" else {})


def set_random_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        system.set_random_state(device, state[device.type])


def prune(run: Run, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` and the best, and incomplete ones that a killed run has left."""
    for path in run.complete()[:-keep]:
        if step_of(path) != best:
            _remove(path)
    for path in run.checkpoints.glob(".step-*"):
        _remove(path)


def _remove(checkpoint: Path) -> None:
    """What we have written there, and nothing else."""
    for name in (files.SUMS, STATE):
        (checkpoint / name).unlink(missing_ok=True)
    with suppress(OSError):
        checkpoint.rmdir()


@contextmanager
def writing(target: Path, run: Run) -> Iterator[None]:
    """Turn an OSError while a file of the run is written, such as a full disk, into a TrainingError of one line."""
    try:
        yield
    except OSError as error:
        previous = run.newest()
        rest = f"{previous} is intact; free some space and resume" if previous else "no earlier checkpoint exists"
        raise TrainingError(f"Could not write {target}: {files.reason(error)}. {rest}.") from error


def begun_by_this_job(run: Run) -> bool:
    """Whether this torchrun job began the run and was restarted, after a failure or for a new machine.

    A job with an id of its own (--standalone, --rdzv-id) is known by it, because a machine that joins later has no
    restarts to count. Without one the restarts are counted: at the first start a run that is there is not this job's.
    """
    if not run.exists:
        return False
    job = _torchrun_job()
    if job is None:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return run.job_file.is_file() and run.job_file.read_text() == job


def _torchrun_job() -> str | None:
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if job == "none" else job


def check_new(run: Run) -> None:
    """A ConfigError unless the folder is new or empty, or holds what a start of ours left before its config.toml."""
    run.check_absent()
    if run.path.exists() and not run.path.is_dir():
        raise ConfigError(f"The folder of a run must be a folder. Got {run}, which is a file.")
    names = {file.name for file in run.path.iterdir()} if run.path.is_dir() else set()
    begun, asides = {files.LOCK}, [folders.RECORD]  # what a kill may have left before the record was there
    if folders.folder_kind(run.path) == "run":
        ours = [run.job_file.name, run.data_file.name, run.config_file.name]
        begun |= {folders.RECORD, *ours, *(folder.name for folder in run.maps())}
        asides += ours
    begun |= {name for name in names if name.startswith(tuple(f".{aside}.new-" for aside in asides))}
    if others := sorted(names - begun):
        raise ConfigError(f"The folder of a new run must be new or empty. Got {run}, which holds {others[0]!r}.")


def begin(run: Run) -> None:
    """Mark the folder as ours, before anything else is written there."""
    with writing(run.path, run):
        folders.mark(run.path, "run")


def save_model(run: Run, model: Model, metric: nn.Module, step: int | None = None) -> None:
    """Write runs/NAME/model, or runs/NAME/model-step-N for a snapshot; a classifier goes to a file beside it."""
    folder = run.model(step)
    with writing(folder, run):
        if isinstance(metric, BoostedClassifier):
            weights = {name: value.detach().cpu().numpy() for name, value in metric.state_dict().items()}
            files.write_tensors(run.classifier(step), weights)
        model.save(folder)


def write_config(run: Run, config: Config, split: Mapping[str, Any], choice: Mapping[str, Any] | None = None) -> None:
    """runs/NAME/config.toml: every setting, the versions that made the run, how the data was divided, and the choice of
    the loss where there is one."""
    made_by = {"bier": bier.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    made_by["device"] = str(system.device())
    with writing(run.config_file, run):
        if (job := _torchrun_job()) is not None:
            files.write(run.job_file, job.encode())
        chosen = {"choice": choice} if choice else {}
        run.write_config(config, {"made_by": made_by, "split": split, **chosen})


MAY_CHANGE = ("train.steps", "data.root", "data.skip_broken", "data.workers")  # when a run is resumed


def check_same_config(run: Run, config: Config) -> None:
    """Raise a ConfigError unless the run was started with the same settings, but for those that may change."""
    different = [text for text in run.config.differing(config) if text.partition(":")[0] not in MAY_CHANGE]
    if different:
        raise ConfigError(f"{run} was started with other settings (there / here): {'; '.join(different)}.")


def change_settings(run: Run, config: Config) -> None:
    """Keep settings that were changed for the rest of the run, and say what another length does to the schedule."""
    before = run.config
    if before == config:
        return
    records = {name: dict(values) for name, values in run.records.items()}
    if (length := config.train.steps) != (planned := before.train.steps):
        records.setdefault("made_by", {}).setdefault("planned_steps", []).append(planned)
        old, new = (learning_rate(settings, run.step + 1) for settings in (before.train, config.train))
        if config.train.schedule == "constant":
            what = f"constant, as in a run of {length} steps from the start"
        else:
            what = (
                f"that of a {config.train.schedule} schedule over {length} steps from here on: {new:.3g} at step "
                f"{run.step + 1} (it was {max(old, 0.0):.3g}); a run of {length} steps from the start has other weights"
            )
        warnings.warn(
            f"The run was planned for {planned} steps and goes on from step {run.step} to {length}. "
            f"The learning rate is {what}.",
            stacklevel=2,
        )
    run.write_config(config, records)


def remove_maps(run: Run) -> None:
    """The maps of the frozen stages in the folder of a run that has ended well; those in `data.cache` stay."""
    for folder in run.maps():
        shutil.rmtree(folder, ignore_errors=True)


class Metrics:
    """metrics.jsonl, one line per logging step.

    Its lines hold nothing that depends on the clock, so that an interrupted and resumed run writes the same file as one
    that was never interrupted. `resume_at` drops lines beyond that step: they will be written again.
    """

    def __init__(self, run: Run, resume_at: int, writes: bool = True) -> None:
        self.run = run
        self.writes = writes  # only one of several processes does
        if not writes:
            return
        rows = [row for row in run.metrics() if row["step"] <= resume_at]
        with writing(run.metrics_file, run):
            files.write(run.metrics_file, "".join(map(_line, rows)).encode())
            # unbuffered, so that a failed write is not repeated at close
            self.file = run.metrics_file.open("ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        with writing(self.run.metrics_file, self.run):
            line = _line(row).encode()
            while line:
                line = line[self.file.write(line) :]

    def flush(self) -> None:
        """Flush the lines to disk; called before each checkpoint, so that no checkpoint is newer than its metrics."""
        with writing(self.run.metrics_file, self.run):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.writes:
            self.file.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"
