"""What each setting of the optimizer does to the weights, and that a run with all of them is resumed exactly."""

import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bier
from bier.config import Config
from bier.errors import ConfigError
from bier.evaluate.dataset import assess
from bier.runs import Run
from bier.training import loop, resolve
from bier.training.optimizer import build_optimizer
from bier.training.setup import TrainingSetup, build, load_data

STAGES = ("conv1", "conv2", "conv3", "conv4")
RATE = 1e-3


def config(root: Path, method: str = "baseline", **settings: Any) -> Config:
    given = {
        "data.root": str(root),
        "data.validation": 0.0,
        "data.workers": 0,
        "model.backbone": "conv4",
        "model.embedding": 12,
        "diversity.hidden": 8,
        "train.steps": 1,
        "train.batch_classes": 2,
        "train.batch_images": 3,
        "train.learning_rate": RATE,
        "train.weight_decay": 0.0,
        "train.log_every": 1,
        "train.precision": "float32",
    }
    return resolve(method, "folder", given | {key.replace("__", "."): value for key, value in settings.items()})


class Recorder:
    """Keeps the objective of a run and its weights after each step, and interrupts at a step as Ctrl-C does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interrupt_at: int = 0) -> None:
        self.interrupt_at = interrupt_at
        self.weights: list[dict[str, Tensor]] = []
        monkeypatch.setattr(loop, "build", self._build)

    def _build(self, *arguments: Any) -> TrainingSetup:
        self.setup = build(*arguments)
        self.weights = [self._now()]
        return self.setup

    def _now(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.setup.objective.state_dict().items()}

    def prepare(self, what: str, done: int, total: int) -> None: ...

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        self.weights.append(self._now())
        if step == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)

    def largest_change(self, prefix: str, since: int = 0) -> float:
        """Of any weight whose name begins so, from the state after step `since` to the last one."""
        names = [
            name for name in self.weights[0] if name.startswith(prefix) and self.weights[0][name].is_floating_point()
        ]
        assert names
        return max(float((self.weights[-1][name] - self.weights[since][name]).abs().max()) for name in names)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.mark.parametrize(("name", "expected"), [("adamw", 1 - 0.1 * 0.5), ("adam", None), ("sgd", 1 - 0.1 * 0.5)])
def test_adamw_decays_weights_apart_from_the_gradient(
    features_file: Path, tmp_path: Path, name: str, expected: float | None
) -> None:
    """Without a gradient, AdamW (as SGD) scales weights by 1 - rate x decay; ADAM divides the decay by its own size."""
    settings = {"train.optimizer": name, "train.weight_decay": 0.5, "train.learning_rate": 0.1}
    chosen = resolve("baseline", "features", {**settings, "data.root": str(features_file), "data.validation": 0.0})
    objective = build(chosen, Run(tmp_path), lambda *_: None).objective
    before = objective.ensemble.weight.detach().clone()
    optimizer = build_optimizer(chosen, objective)
    objective.ensemble.weight.grad = torch.zeros_like(before)
    optimizer.step()
    moved = before - 0.1 * before / (before.abs() + 2e-8) if expected is None else expected * before
    torch.testing.assert_close(objective.ensemble.weight.detach(), moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_clipping_scales_the_gradient_down(pictures: Path, tmp_path: Path, recorder: Recorder, clip: float) -> None:
    """The first step of SGD is the rate times the gradient. The log has the norm before clipping."""
    chosen = config(pictures, train__optimizer="sgd", train__embedding_factor=1.0, train__clip=clip)
    bier.train(chosen, tmp_path / "run", observer=recorder)
    trained = dict(recorder.setup.objective.named_parameters())
    change = torch.cat([(recorder.weights[1][name] - recorder.weights[0][name]).flatten() for name in trained])
    norm = Run(tmp_path / "run").metrics()[0]["gradient_norm"]
    assert norm > 0.1
    expected = min(norm, clip) if clip else norm
    assert float(change.norm()) == pytest.approx(RATE * expected, rel=1e-2)


@pytest.mark.parametrize(("first", "views"), [("", 0), ("conv3", 1)])
def test_earlier_stages_have_lower_rates(
    pictures: Path, tmp_path: Path, recorder: Recorder, first: str, views: int
) -> None:
    """The first step of ADAM moves each weight by its rate, whatever the size of the gradient."""
    trunk = {"model__trainable_from": first, "model__trunk_views": views}
    bier.train(config(pictures, train__layer_decay=0.5, **trunk), tmp_path / "run", observer=recorder)
    trained = STAGES[STAGES.index(first or "conv1") :]
    prefix = "network.layers" if views else "network.body.layers"
    for number, _ in enumerate(trained):
        expected = RATE * 0.5 ** (len(trained) - 1 - number)
        names = [f"{prefix}.{number}.{name}" for name, _ in _stage(recorder, prefix, number)]
        changes = [(recorder.weights[1][name] - recorder.weights[0][name]).abs().max() for name in names]
        assert float(max(changes)) == pytest.approx(expected, rel=1e-2)
    assert recorder.largest_change("ensemble.weight") == pytest.approx(10 * RATE, rel=1e-2)
    assert Run(tmp_path / "run").metrics()[0]["learning_rate"] == RATE


def _stage(recorder: Recorder, prefix: str, number: int) -> list[tuple[str, Tensor]]:
    module = recorder.setup.objective.get_submodule(f"{prefix}.{number}")
    return list(module.named_parameters())


def test_regressors_have_a_rate_of_their_own(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"diversity__norm_weight": 0.0}  # rows of length 1 would hide the step
    for factor, expected in ((0.0, 10 * RATE), (100.0, 100 * RATE)):
        recorder = Recorder(monkeypatch)
        chosen = config(pictures, "a-bier", diversity__factor=factor, **free)
        bier.train(chosen, tmp_path / f"run-{factor}", observer=recorder)
        assert recorder.largest_change("diversity.regressors") == pytest.approx(expected, rel=1e-2)
        assert recorder.largest_change("ensemble.weight") == pytest.approx(10 * RATE, rel=1e-2)


def test_the_backbone_waits_for_the_embedding(pictures: Path, tmp_path: Path, recorder: Recorder) -> None:
    """Neither weights nor the statistics of batch norm move; ADAM then starts as in a first step."""
    bier.train(config(pictures, train__steps=4, train__embedding_warmup=3), tmp_path / "run", observer=recorder)
    for step in (1, 2, 3):
        for name, value in recorder.weights[0].items():
            assert torch.equal(recorder.weights[step][name], value) == name.startswith("network."), (step, name)
    moved = {name for name, value in recorder.weights[3].items() if not torch.equal(recorder.weights[4][name], value)}
    assert moved == recorder.weights[0].keys()
    parameters = dict(recorder.setup.objective.network.named_parameters())
    changes = [recorder.weights[4][f"network.{name}"] - recorder.weights[3][f"network.{name}"] for name in parameters]
    assert max(float(change.abs().max()) for change in changes) == pytest.approx(RATE, rel=1e-2)
    with pytest.raises(ConfigError, match=r"'train\.embedding_warmup' = 5 is longer than 'train\.steps' = 4"):
        config(pictures, train__steps=4, train__embedding_warmup=5)


@pytest.mark.parametrize("method", ["baseline", "a-bier"])
def test_the_average_of_the_weights_is_saved(pictures: Path, tmp_path: Path, recorder: Recorder, method: str) -> None:
    chosen = config(pictures, method, train__steps=6, train__ema=0.4, train__learning_rate=1e-2)
    run = bier.train(chosen, tmp_path / "run", observer=recorder, snapshots=(4,)).folder
    expected = {}
    for step, weights in enumerate(recorder.weights[1:]):
        decay = min(0.4, (1 + step) / (10 + step)) if step else 0.0
        for name, value in weights.items():
            expected[name] = decay * expected.get(name, 0.0) + (1 - decay) * value
        if method == "a-bier":
            expected["ensemble.weight"] /= expected["ensemble.weight"].norm(dim=1, keepdim=True)
        if step == 3:
            _same_model(run / "model-step-4", expected)
    _same_model(run / "model", expected)
    assert not torch.allclose(bier.load(run).ensemble.weight, recorder.weights[-1]["ensemble.weight"], rtol=1e-3)


def _same_model(folder: Path, expected: Mapping[str, Tensor]) -> None:
    model = bier.load(folder)
    torch.testing.assert_close(model.ensemble.weight.detach(), expected["ensemble.weight"])
    for name, value in model.backbone.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[f"network.{name}"])


def test_the_average_is_validated(pictures: Path, tmp_path: Path) -> None:
    """The score of the best step in the log is that of the model that was saved, and not of the weights in training."""
    settings = {"data__validation": 0.5, "train__steps": 6, "train__validate_every": 3, "train__learning_rate": 1e-2}
    chosen = config(pictures, train__ema=0.95, **settings)
    run = bier.train(chosen, tmp_path / "run")
    dataset = load_data(chosen)
    scores = assess(bier.load(run.folder), dataset, part="validation").result
    logged = [row for row in Run(run.folder).metrics() if row["step"] == run.best_step]
    assert scores.recall["ensemble"][1] == pytest.approx(logged[0]["validation"])
    plain = bier.train(config(pictures, **settings), tmp_path / "plain")
    losses = [[row["loss"] for row in Run(folder).metrics()] for folder in (run.folder, plain.folder)]
    assert losses[0] == losses[1]  # averaging changes nothing in training


EVERYTHING = {
    "train__optimizer": "adamw",
    "train__weight_decay": 0.01,
    "train__clip": 0.5,
    "train__layer_decay": 0.7,
    "train__embedding_warmup": 3,
    "train__ema": 0.9,
    "diversity__factor": 3.0,
    "train__steps": 8,
    "train__checkpoint_every": 2,
    "train__keep_checkpoints": 9,
    "train__validate_every": 4,
    "data__validation": 0.5,
}


@pytest.mark.parametrize("interrupt_at", [2, 5])
def test_a_run_with_everything_is_resumed_exactly(
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assert_same_runs: Callable[[Path, Path], None],
    interrupt_at: int,
) -> None:
    chosen = config(pictures, "a-bier", **EVERYTHING)
    bier.train(chosen, tmp_path / "whole")
    first = bier.train(chosen, tmp_path / "run", observer=Recorder(monkeypatch, interrupt_at))
    assert first.interrupted
    assert bier.train(chosen, tmp_path / "run", resume=True).step == 8
    for path in Run(tmp_path / "run").complete():
        if not (tmp_path / "whole" / "checkpoints" / path.name).exists():  # the one of the interruption
            assert path.name == f"step-{interrupt_at}"
            shutil.rmtree(path)
    assert_same_runs(tmp_path / "whole", tmp_path / "run")


def test_the_default_groups_are_those_of_earlier_versions(pictures: Path, tmp_path: Path) -> None:
    chosen = config(pictures, "a-bier")
    objective = build(chosen, Run(tmp_path), lambda *_: None).objective
    network, behind = build_optimizer(chosen, objective).param_groups
    assert [id(p) for p in network["params"]] == [id(p) for p in objective.network.parameters()]
    named = dict(objective.named_parameters())
    assert [id(p) for p in behind["params"]] == [id(p) for name, p in named.items() if not name.startswith("network.")]
    assert (network["factor"], behind["factor"]) == (1.0, 10.0)


def test_two_processes_warm_up_what_one_does(forked: Any, pictures: Path, tmp_path: Path) -> None:
    """While the backbone waits it takes no part in the loss, which DistributedDataParallel has to expect."""
    everything = {**EVERYTHING, "train__steps": 4, "train__batch_images": 4}
    chosen = config(pictures, "a-bier", **everything)
    alone = bier.train(chosen, tmp_path / "one").folder
    (tmp_path / "config.toml").write_text(chosen.to_toml())
    (tmp_path / "train.py").write_text(
        "import sys, pathlib, bier, bier.config\n"
        "bier.train(bier.config.Config.from_toml(pathlib.Path(sys.argv[1])), sys.argv[2])\n"
    )
    both = forked.start_two(tmp_path / "config.toml", tmp_path / "two", script=tmp_path / "train.py")
    forked.finished(*both)
    rows = [Run(folder).metrics() for folder in (alone, tmp_path / "two")]
    assert [row["step"] for row in rows[1]] == [1, 2, 3, 4]
    for mine, theirs in zip(rows[0][:3], rows[1][:3], strict=True):  # afterwards each has statistics of its own
        assert math.isclose(mine["loss"], theirs["loss"], rel_tol=1e-3), json.dumps([mine, theirs])
        assert math.isclose(mine["gradient_norm"], theirs["gradient_norm"], rel_tol=1e-2)
