"""Observers that send the metrics of a run to a tracking server; metrics.jsonl and TensorBoard are always written."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from bier.config import Config
from bier.errors import BierError, ConfigError, needs
from bier.training.loop import Observer, Silent
from bier.training.run_folder import scalars


class MLflow(Silent):
    """Logs to MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where, MLFLOW_RUN_ID continues a run."""

    def __init__(self, config: Config) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # standard output is for --json
        self.mlflow = needs("mlflow", "mlflow")
        self.mlflow.log_params(config.flat())

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        self.mlflow.log_metrics(scalars(row), step=step)


class WandB(Silent):
    """Logs to Weights & Biases: WANDB_PROJECT says where, WANDB_MODE=offline keeps it here, WANDB_RUN_ID continues."""

    def __init__(self, config: Config) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # its last lines would go to standard output
        self.run = needs("wandb", "wandb").init(config=config.flat())

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        if row:
            self.run.log(scalars(row), step=step)


LOGGERS: dict[str, Callable[[Config], Observer]] = {"mlflow": MLflow, "wandb": WandB}


class CombinedObserver(Silent):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def prepare(self, what: str, done: int, total: int) -> None:
        for one in self.observers:
            one.prepare(what, done, total)

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        for one in self.observers:
            one.step(step, total, row)


def logger(name: str, config: Config) -> Observer:
    if name not in LOGGERS:
        raise ConfigError(f"The '--log' option must be one of {', '.join(LOGGERS)}. Got {name!r} instead.")
    try:
        return LOGGERS[name](config)
    except BierError:
        raise
    except Exception as error:  # whatever the service and its variables of the environment come to
        raise ConfigError(f"The '--log {name}' option could not start logging: {error}") from error
