"""Observers that send the metrics of a run to TensorBoard or a tracking server; metrics.jsonl is always written."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bier.config import Config
from bier.errors import BierError, ConfigError, needs
from bier.files import writing
from bier.training.loop import NullObserver, Observer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Logger(NullObserver):
    """An observer that has something to close at the end."""

    def close(self) -> None: ...


class TensorBoard(Logger):
    """Writes events into the run folder; those of steps that a resumed run takes again are voided."""

    def __init__(self, config: Config, folder: Path) -> None:
        needs("tensorboard", "tensorboard")
        self.folder = folder
        self.writer: SummaryWriter | None = None
        self.previous_hook = threading.excepthook

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        if not row:
            return
        with writing(self.folder / "events.out.tfevents"):
            if self.writer is None:  # not earlier: the folder of a new run must be empty
                from torch.utils.tensorboard import SummaryWriter

                threading.excepthook = self._on_thread_error
                self.writer = SummaryWriter(self.folder, purge_step=step)
            for tag, value in scalars(row).items():
                self.writer.add_scalar(tag, value, step)

    def close(self) -> None:
        try:
            if self.writer is not None:
                with writing(self.folder / "events.out.tfevents"):
                    self.writer.close()
        finally:
            threading.excepthook = self.previous_hook

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Without the traceback of an error, such as a full disk, that the next call raises anyway."""
        if not isinstance(error.exc_value, OSError) or "event_file_writer" not in type(error.thread).__module__:
            self.previous_hook(error)


class MLflow(Logger):
    """Logs to MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where, MLFLOW_RUN_ID continues a run."""

    def __init__(self, config: Config, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # standard output is for --json
        self.mlflow = needs("mlflow", "mlflow")
        self.mlflow.log_params(config.flat())

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        self.mlflow.log_metrics(scalars(row), step=step)


class WandB(Logger):
    """Logs to Weights & Biases: WANDB_PROJECT says where, WANDB_MODE=offline keeps it here, WANDB_RUN_ID continues."""

    def __init__(self, config: Config, folder: Path) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # its last lines would go to standard output
        self.run = needs("wandb", "wandb").init(config=config.flat())

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        if row:
            self.run.log(scalars(row), step=step)


LOGGERS: dict[str, Callable[[Config, Path], Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


class CombinedObserver(NullObserver):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def prepare(self, what: str, done: int, total: int) -> None:
        for observer in self.observers:
            observer.prepare(what, done, total)

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        for observer in self.observers:
            observer.step(step, total, row)


def logger(name: str, config: Config, folder: Path) -> Logger:
    if name not in LOGGERS:
        raise ConfigError(f"The '--log' option must be one of {', '.join(LOGGERS)}. Got {name!r} instead.")
    try:
        return LOGGERS[name](config, folder)
    except BierError:
        raise
    except Exception as error:  # whatever the service and its variables of the environment come to
        raise ConfigError(f"The '--log {name}' option could not start logging: {error}") from error


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Lists become one curve per learner: `learner_losses/1` and so on."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, list):
            flat |= {f"{key}/{number}": learner for number, learner in enumerate(value, start=1)}
        elif key != "step" and not isinstance(value, str):
            flat[key] = value
    return flat
