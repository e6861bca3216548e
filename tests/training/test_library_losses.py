"""`loss.name` is a class of pytorch-metric-learning: such a run is set up, trained and resumed as any other."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import bier
from bier.config import Config
from bier.errors import ConfigError
from bier.training import resolve
from bier.training.checkpoints import read_checkpoint
from bier.training.loop import NullObserver

pytest.importorskip("pytorch_metric_learning")

SameRuns = Callable[[Path, Path], None]
SMALL = {
    "model.embedding": 24,
    "train.steps": 12,
    "train.batch_classes": 3,
    "train.batch_images": 3,
    "train.log_every": 1,
    "train.checkpoint_every": 4,
    "train.keep_checkpoints": 9,
    "data.validation": 0.0,
    "diversity.hidden": 8,
}
MARGIN = {
    "loss.name": "MarginLoss",
    "loss.settings": {"learn_beta": True, "nu": 0.1, "beta": 1.0},
    "loss.miner": "DistanceWeightedMiner",
    "loss.miner_settings": {"nonzero_loss_cutoff": 1.9},
}


def config(root: Path, **settings: Any) -> Config:
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return resolve("a-bier", "features", {**SMALL, "data.root": str(root), **given})


class KilledError(Exception):
    pass


class KilledAt(NullObserver):
    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        if step == self.last:
            raise KilledError


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({"loss.name": "ProxyAnchorLoss", "loss.settings": {"alpha": 16}}, 3),
        ({"loss.name": "SubCenterArcFaceLoss", "loss.settings": {"sub_centers": 2}}, 3),
        (MARGIN, 3),
        ({"loss.name": "MultiSimilarityLoss", "loss.miner": "MultiSimilarityMiner"}, 0),
        ({"loss.name": "CrossBatchMemory", "loss.settings": {"loss": "ContrastiveLoss", "memory_size": 40}}, 7),
        ({"loss.name": "TripletMarginLoss", "loss.settings": {"distance": "CosineSimilarity", "margin": 0.1}}, 0),
    ],
    ids=lambda one: one["loss.name"] if isinstance(one, dict) else "",
)
def test_resumed_to_the_bit(
    features_file: Path, tmp_path: Path, settings: dict[str, Any], parameters: int, assert_same_runs: SameRuns
) -> None:
    """Proxies and the rest of the loss's own parameters are trained, saved and restored; so is what a miner draws."""
    chosen = config(features_file, **settings)
    whole = bier.train(chosen, tmp_path / "whole").folder
    assert Config.from_toml(whole / "config.toml") == chosen
    with pytest.raises(KilledError):
        bier.train(chosen, tmp_path / "broken", observer=KilledAt(7))
    broken = bier.train(Config.from_toml(whole / "config.toml"), tmp_path / "broken", resume=True).folder
    assert_same_runs(whole, broken)
    early, late = (read_checkpoint(whole / "checkpoints" / f"step-{step}").objective for step in (4, 12))
    own = [name for name in late if name.startswith("metric.")]
    assert len(own) == parameters
    assert not any(torch.equal(early[name], late[name]) for name in own)


def test_proxies_are_trained_at_a_hundred_times_the_rate(features_file: Path, tmp_path: Path) -> None:
    """Whatever the rate of the embedding layer: ADAM's first step moves each weight by its rate."""
    settings = {"loss.name": "ProxyNCALoss", "train.embedding_factor": 2.0, "train.learning_rate": 1e-5}
    settings |= {"train.steps": 2, "train.checkpoint_every": 1, "train.warmup": 0, "diversity.name": "none"}
    run = bier.train(config(features_file, **settings), tmp_path / "run").folder
    optimizer = read_checkpoint(run / "checkpoints" / "step-1").optimizer
    assert [group["factor"] for group in optimizer["param_groups"]] == [2.0, 100.0]
    assert [len(group["params"]) for group in optimizer["param_groups"]] == [1, 3]
    early, late = (read_checkpoint(run / "checkpoints" / f"step-{step}") for step in (1, 2))
    name = "metric.loss.learners.2.proxies"
    moved = (late.objective[name] - early.objective[name]).abs().max().item()
    assert moved == pytest.approx(late.optimizer["param_groups"][1]["lr"], rel=0.5)


def test_a_loss_that_is_not_there_is_refused_before_images_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'loss\.name' must name a class .* Did you mean 'CircleLoss'\?"):
        bier.train(config(tmp_path / "nothing", loss__name="CirclesLoss"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"'loss\.settings' must hold arguments of CircleLoss"):
        bier.train(config(tmp_path / "nothing", loss__name="CircleLoss", loss__settings={"n": 1}), tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss.settings": {"alpha": 2}}, r"'loss\.settings' goes with a loss of pytorch-metric-learning"),
        ({"loss.miner": "BatchHardMiner"}, r"'loss\.miner' goes with a loss of pytorch-metric-learning"),
        ({"loss.name": "CircleLoss", "loss.miner_settings": {"a": 1}}, r"arguments of 'loss\.miner'; set that too"),
        ({"loss.name": "CircleLoss", "loss.boosting": "shrinkage"}, r"goes with loss\.name=binomial-deviance"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **settings)
