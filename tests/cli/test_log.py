"""Loggers receive what metrics.jsonl has, under the names that TensorBoard shows."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bier.runs import Run
from bier.training.observers import scalars

SMALL = ("model.embedding=12", "diversity.hidden=8", "data.validation=0", "train.steps=3", "train.log_every=1")


def train_with(cli: Callable[..., tuple[int, str, str]], name: str, data: Path, run: Path) -> tuple[int, str, str]:
    options = ["--data", "features", "--root", data, "--method", "bier", "--out", run, "--log", name, "--json"]
    return cli("train", *options, *(word for one in SMALL for word in ("--set", one)))


@pytest.mark.filterwarnings("default")  # the library's own, of every release
def test_mlflow_has_the_settings_and_every_row(
    cli: Callable[..., tuple[int, str, str]], features_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        code, out, said = train_with(cli, "mlflow", features_file, tmp_path / "run")
        assert code == 0, said
        assert json.loads(out)["steps"] == 3
        logged = mlflow.last_active_run()
    finally:
        mlflow.end_run()
    rows = Run(tmp_path / "run").metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    client = mlflow.MlflowClient()
    for name in scalars(rows[0]):
        history = [(one.step, one.value) for one in client.get_metric_history(logged.info.run_id, name)]
        assert history == [(row["step"], pytest.approx(scalars(row)[name])) for row in rows]
    assert client.get_run(logged.info.run_id).data.params["model.embedding"] == "12"


def test_an_unknown_logger_is_one_line(
    cli: Callable[..., tuple[int, str, str]], features_file: Path, tmp_path: Path
) -> None:
    code, out, said = train_with(cli, "comet", features_file, tmp_path / "run")
    assert (code, out) == (2, "")
    assert said == "bier: The '--log' option must be one of tensorboard, mlflow, wandb. Got 'comet' instead.\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("default")
def test_wandb_keeps_every_row_offline_and_prints_nothing_on_standard_output(
    features_file: Path, tmp_path: Path
) -> None:
    """In a process of its own: its last lines are printed when that ends."""
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    options = ["--data", "features", "--root", features_file, "--method", "bier", "--out", tmp_path / "run"]
    settings = [word for one in SMALL for word in ("--set", one)]
    command = [sys.executable, "-m", "bier", "train", *options, *settings, "--log", "wandb", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert log.read_bytes().count(b"metric_gradient_on_w") >= 3


def test_a_logger_that_cannot_start_is_one_line(
    cli: Callable[..., tuple[int, str, str]], features_file: Path, tmp_path: Path
) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri("nowhere://at/all")
    try:
        code, out, said = train_with(cli, "mlflow", features_file, tmp_path / "run")
    finally:
        mlflow.set_tracking_uri("")
    assert (code, out) == (2, "")
    assert said.startswith("bier: The '--log mlflow' option could not start logging: ")
    assert len(said.splitlines()) == 1


def test_tensorboard_has_every_row_once(
    cli: Callable[..., tuple[int, str, str]], features_file: Path, tmp_path: Path
) -> None:
    """Steps that a resumed run takes again are voided."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    code, _, said = train_with(cli, "tensorboard", features_file, run)
    assert code == 0, said
    shutil.rmtree(run / "checkpoints")
    assert cli("train", "--resume", run, "--log", "tensorboard")[0] == 0
    shown = events.EventAccumulator(str(run))
    shown.Reload()
    rows = Run(run).metrics()
    assert [event.step for event in shown.Scalars("learner_losses/3")] == [1, 2, 3]
    for name, value in scalars(rows[2]).items():
        assert shown.Scalars(name)[2].value == pytest.approx(value)


def test_tensorboard_events_that_do_not_fit_are_one_line(
    cli: Callable[..., tuple[int, str, str]], features_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written by a thread; its error ends the run, and no traceback is printed."""
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    written: list[bytes] = []

    def write(_: object, data: bytes) -> None:
        written.append(data)
        if len(written) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_writer.RecordWriter, "write", write)
    hook = threading.excepthook
    code, out, said = train_with(cli, "tensorboard", features_file, tmp_path / "run")
    assert (code, out, len(said.splitlines())) == (2, "", 1), said
    assert "events.out.tfevents: the disk is full" in said
    assert threading.excepthook is hook
