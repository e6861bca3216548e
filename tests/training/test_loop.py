"""The loop: what it writes, when it stops, what it keeps."""

import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import bier
from bier.config import Config
from bier.errors import ConfigError, DataError, TrainingError
from bier.evaluate.correlation import classifier_correlation
from bier.method.diversity import ActivationLoss
from bier.method.equations import row_norm_deviation
from bier.runs import Run
from bier.training import loop, resolve
from bier.training.checkpoints import read_checkpoint
from bier.training.optimizer import learning_rate
from bier.training.setup import TrainingSetup, build, load_data, solve_start

SMALL = {
    "model.embedding": 12,
    "diversity.hidden": 8,
    "train.steps": 12,
    "train.precision": "float32",
    "train.batch_classes": 3,
    "train.batch_images": 4,
    "train.checkpoint_every": 4,
    "train.log_every": 1,
    "train.validate_every": 3,
}


class Watch:
    """Keeps what an observer is told, and interrupts at a step as Ctrl-C does."""

    def __init__(self, interrupt_at: int = 0) -> None:
        self.interrupt_at = interrupt_at
        self.steps: list[int] = []
        self.prepared: set[str] = set()

    def prepare(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.prepared.add(what)

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        self.steps.append(step)
        if step == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)


def config(root: Path, method: str = "a-bier", **settings: Any) -> Config:
    given = {**SMALL, "data.root": str(root), "data.validation": 0.0}
    return resolve(method, "features", given | {key.replace("__", "."): value for key, value in settings.items()})


def test_from_python_without_a_terminal(features_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch = Watch()
    run = bier.train(config(features_file), tmp_path / "run", observer=watch)
    assert capfd.readouterr() == ("", "")
    assert run[:-1] == (tmp_path / "run", 12, None, None, False, None, None, 0, 0, (), None)
    assert watch.steps == list(range(1, 13))
    assert Config.from_toml(run.folder / "config.toml") == config(features_file)
    model = bier.load(run.folder)
    assert model.groups == bier.group_sizes(12, 3)
    assert model.metadata.pop("same")["part"] == "train"
    assert model.metadata == {"data": "features", "method": "a-bier", "seed": 0}
    assert [path.name for path in Run(run.folder).complete()] == ["step-8", "step-12"]
    state = read_checkpoint(run.folder / "checkpoints" / "step-12")
    assert torch.equal(state.objective["ensemble.weight"], model.ensemble.weight)


def test_a_run_is_repeated_from_its_config_alone(features_file: Path, tmp_path: Path) -> None:
    first = bier.train(config(features_file), tmp_path / "first").folder
    second = bier.train(Config.from_toml(first / "config.toml"), tmp_path / "second").folder
    for name in ("metrics.jsonl", "config.toml", "model/model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize("method", ["baseline", "init", "bier", "activation-bier", "a-bier"])
def test_metrics_of_every_method(features_file: Path, tmp_path: Path, method: str) -> None:
    learners = 1 if method == "baseline" else 3
    chosen = config(features_file, method, train__steps=6)
    run = bier.train(chosen, tmp_path / "run").folder
    rows = Run(run).metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert len(row["learner_losses"]) == len(row["positive_weights"]) == len(row["negative_weights"]) == learners
        assert math.isclose(row["metric_loss"], sum(row["learner_losses"]) / learners, rel_tol=1e-5)
        assert row["gradient_norm"] > 0
        boosted = method in ("bier", "activation-bier", "a-bier")
        assert (row["negative_weights"] != [1.0] * learners) == boosted
        if method.endswith("-bier"):
            assert row["row_norm_deviation"] <= 1e-3
            diversity = chosen.diversity.weight * row["diversity_loss"]
            assert math.isclose(row["loss"], row["metric_loss"] + diversity, rel_tol=1e-5)
            assert row["diversity_gradient_on_w"] > 0
        else:
            assert "diversity_loss" not in row
            assert row["loss"] == row["metric_loss"]


@pytest.mark.parametrize("method", ["init", "bier"])
@pytest.mark.parametrize("start", ["activation", "adversarial"])
def test_a_solved_start_has_rows_of_length_1(features_file: Path, tmp_path: Path, method: str, start: str) -> None:
    chosen = config(features_file, method, model__start=start)
    watch = Watch()
    setup = build(chosen, Run(tmp_path), watch.prepare)
    drawn = setup.objective.ensemble.weight.detach().clone()
    assert row_norm_deviation(drawn) > 1e-3
    solve_start(setup, watch.prepare)
    assert row_norm_deviation(setup.objective.ensemble.weight) <= 1e-3
    assert watch.prepared == {"features for the start", "solving for W"}


@pytest.mark.parametrize("start", ["activation", "adversarial"])
def test_the_start_that_is_shipped_takes_learners_apart(tmp_path: Path, start: str) -> None:
    """Few steps of the solver lower the correlation between learners, and the Activation Loss where that is solved."""
    random = np.random.default_rng(0)
    features = np.maximum(random.normal(size=(300, 6)) @ random.normal(size=(6, 64)) + 0.5, 0)  # as after a ReLU
    path = tmp_path / "features.safetensors"
    save_file({"features": features.astype(np.float32), "labels": np.repeat(np.arange(10), 30)}, path)
    setup = build(config(path, "bier", model__start=start, model__embedding=48), Run(tmp_path), Watch().prepare)
    ensemble, phi = setup.objective.ensemble, torch.from_numpy(features).float()
    loss = ActivationLoss(ensemble.groups)

    @torch.no_grad()
    def measure() -> tuple[float, float]:
        loss.hold(ensemble)
        together = classifier_correlation(ensemble(phi), ensemble.groups)
        assert together is not None
        return loss.parts(ensemble, phi).similarity.item(), together

    before = measure()
    solve_start(setup, Watch().prepare)
    after = measure()
    assert after[1] < before[1] - 0.1
    assert after[0] < 0.5 * before[0] or start == "adversarial"


@pytest.mark.parametrize("method", ["activation-bier", "a-bier"])
def test_a_loss_that_breaks_ends_the_run(features_file: Path, tmp_path: Path, method: str) -> None:
    settings = {"train__optimizer": "sgd", "train__learning_rate": 100.0, "diversity__norm_weight": 1e6}
    with pytest.raises(TrainingError) as caught:
        bier.train(config(features_file, method, train__checkpoint_every=1, **settings), tmp_path / "run")
    message = str(caught.value)
    assert message.startswith("Step ")
    assert "\n" not in message
    assert any(part in message for part in ("diversity loss is", "norm of the gradient is", "weights/", "embeddings"))
    assert "train.learning_rate" in message
    kept = Run(tmp_path / "run").complete()
    assert (str(kept[-1]) if kept else "there is no checkpoint yet") in message
    for path in kept:  # what it calls good is good
        assert read_checkpoint(path).not_finite() is None


def test_weights_that_break_are_not_saved(features_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setups: list[TrainingSetup] = []

    def building(*arguments: Any) -> TrainingSetup:
        setups.append(build(*arguments))
        return setups[-1]

    class Poison(Watch):
        def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
            if step == 8:
                setups[0].objective.ensemble.weight.data[3, 2] = float("nan")

    monkeypatch.setattr(loop, "build", building)
    with pytest.raises(TrainingError) as caught:
        bier.train(config(features_file), tmp_path / "run", observer=Poison())
    assert str(caught.value).startswith("Step 8: weights/ensemble.weight contains NaN")
    assert f"the last good checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step-4'}" in str(caught.value)
    assert [path.name for path in Run(tmp_path / "run").complete()] == ["step-4"]


def test_ctrl_c_saves_and_the_end_is_the_same(
    features_file: Path, tmp_path: Path, assert_same_checkpoints: Callable[[Path, Path], None]
) -> None:
    chosen = config(features_file, data__validation=0.3)
    whole = bier.train(chosen, tmp_path / "whole").folder
    handler = signal.getsignal(signal.SIGINT)
    stopped = bier.train(chosen, tmp_path / "run", observer=Watch(interrupt_at=6))
    assert (stopped.step, stopped.interrupted) == (6, True)
    assert signal.getsignal(signal.SIGINT) is handler
    assert (stopped.folder / "checkpoints" / "step-6").is_dir()
    assert not (stopped.folder / "model").exists()
    ended = bier.train(chosen, tmp_path / "run", resume=True)
    assert not ended.interrupted
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (ended.folder / name).read_bytes()
    assert_same_checkpoints(whole / "checkpoints" / "step-12", ended.folder / "checkpoints" / "step-12")


def test_the_best_by_validation_is_the_model(features_file: Path, tmp_path: Path) -> None:
    settings = {"data__validation": 0.4, "train__steps": 40, "train__learning_rate": 0.3}
    settings |= {"train__schedule": "constant", "train__validate_by": "recall"}
    run = bier.train(config(features_file, **settings), tmp_path / "run")
    values = {row["step"]: row["validation"] for row in Run(run.folder).metrics() if "validation" in row}
    assert sorted(values) == [*range(3, 40, 3), 40]
    best = max(values.values())
    assert run.best_validation == best
    assert run.best_step == min(step for step, value in values.items() if value == best)  # the first of equals
    kept = {path.name for path in Run(run.folder).complete()}
    assert f"step-{run.best_step}" in kept
    state = read_checkpoint(run.folder / "checkpoints" / f"step-{run.best_step}")
    assert torch.equal(state.objective["ensemble.weight"], bier.load(run.folder).ensemble.weight)
    validation = load_data(config(features_file, **settings))["validation"]
    vectors = bier.load(run.folder).encode(validation.images)
    assert math.isclose(bier.recall_at_k(vectors, validation.labels, [1])[1], best)


def test_snapshots_are_the_models_of_their_steps(features_file: Path, tmp_path: Path) -> None:
    chosen = config(features_file, data__validation=0.3)
    plain = bier.train(chosen, tmp_path / "plain").folder
    run = bier.train(chosen, tmp_path / "run", snapshots=(4, 7)).folder
    assert sorted(path.name for path in run.glob("model*")) == ["model", "model-step-4", "model-step-7"]
    for name in ("metrics.jsonl", "model/model.safetensors"):  # they change nothing else
        assert (plain / name).read_bytes() == (run / name).read_bytes()
    unvalidated = bier.train(config(features_file), tmp_path / "unvalidated", snapshots=[12]).folder
    final, snapshot = (unvalidated / name / "model.safetensors" for name in ("model", "model-step-12"))
    assert final.read_bytes() == snapshot.read_bytes()
    weights = [bier.load(run / f"model-step-{step}").ensemble.weight for step in (4, 7)]
    assert not torch.allclose(*weights)


def test_a_resumed_run_has_the_snapshots_of_a_whole_one(features_file: Path, tmp_path: Path) -> None:
    chosen = config(features_file)  # checkpoints at 4, 8 and 12
    whole = bier.train(chosen, tmp_path / "whole", snapshots=(2, 4, 10)).folder
    assert bier.train(chosen, tmp_path / "run", snapshots=(2, 4, 10), observer=Watch(interrupt_at=6)).interrupted
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")  # as after a kill: step 5 is trained again
    kept = (tmp_path / "run" / "model-step-4").stat().st_mtime_ns
    run = bier.train(chosen, tmp_path / "run", resume=True, snapshots=(2, 4, 10)).folder
    assert (run / "model-step-4").stat().st_mtime_ns == kept
    for step in (2, 4, 10):
        name = f"model-step-{step}/model.safetensors"
        assert (whole / name).read_bytes() == (run / name).read_bytes()


def test_snapshots_that_cannot_be_taken(features_file: Path, tmp_path: Path) -> None:
    chosen = config(features_file)
    with pytest.raises(ConfigError, match=r"'snapshots' parameter must hold steps from 1 to 12\. Got 13"):
        bier.train(chosen, tmp_path / "run", snapshots=(3, 13))
    assert not (tmp_path / "run").exists()
    assert bier.train(chosen, tmp_path / "run", observer=Watch(interrupt_at=6)).interrupted
    with pytest.raises(ConfigError, match="reached step 6 without a snapshot of step 5"):
        bier.train(chosen, tmp_path / "run", resume=True, snapshots=(5, 9))
    assert bier.train(chosen, tmp_path / "run", resume=True, snapshots=(9,)).step == 12
    assert (tmp_path / "run" / "model-step-9").is_dir()


def test_early_stopping(features_file: Path, tmp_path: Path) -> None:
    settings = {"data__validation": 0.4, "train__steps": 500, "train__patience": 3, "train__learning_rate": 0.3}
    run = bier.train(config(features_file, train__schedule="constant", **settings), tmp_path / "run")
    assert run.step < 500
    assert not run.interrupted
    assert run.best_step is not None
    assert run.step == run.best_step + 3 * 3
    assert read_checkpoint(run.folder / "checkpoints" / f"step-{run.step}").trainer["stale"] == 3
    again = bier.train(config(features_file, train__schedule="constant", **settings), run.folder, resume=True)
    assert again.step == run.step  # it does not start to train again


def test_patience_needs_validation(features_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'train\.patience' = 2 .*data\.validation"):
        bier.train(config(features_file, train__patience=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_learning_rate_over_time(features_file: Path) -> None:
    settings = config(features_file, train__steps=100, train__warmup=10, train__learning_rate=1.0).train
    assert settings.schedule == "cosine"
    rates = [learning_rate(settings, step) for step in range(1, 101)]
    assert rates[:10] == [step / 10 for step in range(1, 11)]
    assert rates[54] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_wrong_data_ends_before_any_work(features_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The backbone 'features'"):
        bier.train(config(features_file, model__backbone="conv4"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"needs loss\.name="):
        bier.train(config(features_file, loss__name="cross-entropy"), tmp_path / "run")
    with pytest.raises(DataError, match="nowhere"):
        bier.train(config(tmp_path / "nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fewer_training_classes(features_file: Path) -> None:
    everything, fewer = (load_data(config(features_file, data__train_classes=count)) for count in (0, 3))
    assert len(everything["train"].classes) == 6
    assert [name in everything["train"].classes for name in fewer["train"].classes] == [True] * 3
    assert len(fewer["train"]) == 36
    assert fewer["test"].classes == everything["test"].classes
    with pytest.raises(ConfigError, match=r"'data\.train_classes' = 7 .* 6 classes"):
        load_data(config(features_file, data__train_classes=7))


def test_fewer_training_images(features_file: Path) -> None:
    everything, fewer = (load_data(config(features_file, data__train_images=count)) for count in (0, 5))
    assert np.bincount(fewer["train"].labels).tolist() == [5] * len(everything["train"].classes)
    assert {tuple(row) for row in fewer["train"].images} < {tuple(row) for row in everything["train"].images}
    assert len(fewer["test"]) == len(everything["test"])
    more = load_data(config(features_file, data__train_images=1000))
    assert len(more["train"]) == len(everything["train"])


def test_the_split_does_not_follow_the_seed_of_the_weights(features_file: Path) -> None:
    first, second = (load_data(config(features_file, seed=seed))["test"].classes for seed in (0, 1))
    other = load_data(config(features_file, data__seed=1))["test"].classes
    assert first == second != other


@pytest.mark.parametrize("start", ["glorot", "activation"])
def test_the_bias_starts_by_taking_the_mean_of_the_features_away(
    features_file: Path, tmp_path: Path, start: str
) -> None:
    settings = {"model__bias": True, "model__start": start, "train__learning_rate": 0.0, "train__steps": 1}
    asked = config(features_file, **settings)
    ensemble = bier.load(bier.train(asked, tmp_path / "run").folder).ensemble
    features = torch.from_numpy(load_data(asked)["train"].images)
    assert ensemble.bias is not None
    torch.testing.assert_close(ensemble.bias, -ensemble.weight @ features.mean(dim=0), rtol=1e-4, atol=1e-5)
    assert features.mean(dim=0).norm() > 0.1
    assert bier.load(bier.train(config(features_file), tmp_path / "plain").folder).ensemble.bias is None
