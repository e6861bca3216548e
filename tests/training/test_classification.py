"""Classification by the same loop, on a small data set in the layout of CIFAR-10."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import bier
from bier.config import Config
from bier.errors import ConfigError, ModelError
from bier.evaluate.dataset import assess_classifier
from bier.runs import Run
from bier.training import resolve
from bier.training.setup import load_data


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of a colour each, with noise."""
    random = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin"
    root.mkdir()
    colours = random.integers(0, 256, (10, 3))
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = np.arange(60, dtype=np.uint8) % 10
        pixels = colours[labels][:, :, None] + random.normal(scale=30, size=(60, 3, 1024))
        records = np.concatenate([labels[:, None], np.clip(pixels, 0, 255).reshape(60, -1).astype(np.uint8)], axis=1)
        (root / f"{name}.bin").write_bytes(records.tobytes())
    return root


def config(root: Path, method: str = "a-bier", **settings: Any) -> Config:
    given = {
        "data.root": str(root),
        "model.embedding": 16,
        "diversity.hidden": 8,
        "loss.dropout": 0.3,
        "train.steps": 8,
        "train.batch_images": 2,
        "train.checkpoint_every": 3,
        "train.validate_every": 4,
        "train.log_every": 1,
        "train.precision": "float32",
    }
    return resolve(method, "cifar10", given | {key.replace("__", "."): value for key, value in settings.items()})


@pytest.mark.parametrize("method", ["baseline", "a-bier"])
def test_train_and_assess(cifar: Path, tmp_path: Path, method: str) -> None:
    chosen = config(cifar, method)
    run = bier.train(chosen, tmp_path / "run")
    rows = Run(run.folder).metrics()
    assert [row["step"] for row in rows if "validation" in row] == [4, 8]
    learners = 1 if method == "baseline" else 2
    weights = load_file(run.folder / "classifier.safetensors")
    assert {name.split(".")[1] for name in weights} == {str(number) for number in range(learners)}
    dataset = load_data(chosen)
    result = assess_classifier(run.folder, bier.load(run.folder), dataset)
    names = {"ensemble", "learner-1"} | ({"learner-2", "prefix-2"} if learners == 2 else set())
    assert result["accuracy"].keys() == names
    assert result["images"] == 60
    if learners == 2:
        assert result["accuracy"]["prefix-2"] == result["accuracy"]["ensemble"]
    validation = assess_classifier(run.folder, bier.load(run.folder), dataset, "validation")
    assert validation["accuracy"]["ensemble"] == pytest.approx(run.best_validation)


class Interrupt:
    def prepare(self, what: str, done: int, total: int) -> None: ...

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def test_dropout_goes_on_where_it_was(cifar: Path, tmp_path: Path) -> None:
    whole = bier.train(config(cifar), tmp_path / "whole").folder
    assert bier.train(config(cifar), tmp_path / "run", observer=Interrupt()).interrupted
    run = bier.train(config(cifar), tmp_path / "run", resume=True).folder
    for name in ("metrics.jsonl", "model/model.safetensors", "classifier.safetensors"):
        assert (whole / name).read_bytes() == (run / name).read_bytes()


def test_a_metric_loss_is_refused(cifar: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'cifar10' needs loss\.name=cross-entropy\. Got 'triplet'"):
        bier.train(config(cifar, loss__name="triplet"), tmp_path / "run")


def test_a_model_that_does_not_classify(cifar: Path, tmp_path: Path) -> None:
    run = bier.train(config(cifar, train__steps=1), tmp_path / "run").folder
    (run / "classifier.safetensors").unlink()
    with pytest.raises(ModelError, match="was not trained to classify"):
        assess_classifier(run, bier.load(run), load_data(config(cifar)))
