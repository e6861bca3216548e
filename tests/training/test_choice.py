"""A run that begins with two losses goes on with the better one, from where it stands."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import bier
from bier.config import Config
from bier.errors import ConfigError
from bier.runs import Run
from bier.training import choice, resolve
from bier.training.checkpoints import read_checkpoint
from bier.training.loop import NullObserver

STEPS, EACH = 48, 6
SMALL = {
    "model.embedding": 12,
    "diversity.hidden": 8,
    "train.steps": STEPS,
    "train.precision": "float32",
    "train.batch_classes": 4,
    "train.batch_images": 4,
    "train.validate_every": 16,
    "train.checkpoint_every": 8,
    "train.log_every": 1,
    "train.learning_rate": 3e-3,
    "data.validation": 0.5,
}


@pytest.fixture(scope="module")
def many_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred classes of six vectors: fifty to train on, of which validation holds out half."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(100), 6)
    features = (random.normal(size=(100, 24))[labels] + 0.9 * random.normal(size=(600, 24))).astype(np.float32)
    path = tmp_path_factory.mktemp("vectors") / "features.safetensors"
    save_file({"features": features, "labels": labels}, path)
    return path


@pytest.fixture(autouse=True)
def short_runs_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "LEAST_STEPS", 40)


def config(root: Path, **settings: Any) -> Config:
    given = {**SMALL, "data.root": str(root)}
    return resolve("a-bier", "features", given | {key.replace("__", "."): value for key, value in settings.items()})


class Watching(NullObserver):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.said: list[str] = []
        self.tried: dict[str, int] = {}

    def prepare(self, what: str, done: int, total: int) -> None:
        if what.startswith("trying"):
            self.tried[what] = self.tried.get(what, 0) + 1

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        if "choice" in row:
            self.said.append(row["choice"])
        else:
            self.steps.append(step)


@pytest.mark.parametrize("order", [("still", "learning"), ("learning", "still")])
def test_the_better_candidate_goes_on_from_where_it_stands(
    many_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    changes = {"learning": {"train.learning_rate": 0.3}, "still": {"train.learning_rate": 0.0}}
    monkeypatch.setattr(choice, "CANDIDATES", {name: changes[name] for name in order})
    watching, given = Watching(), config(many_classes)
    run = bier.train(given, tmp_path / "run", same=False, choose_loss=True, observer=watching)
    found = run.choice
    assert found is not None
    assert found["map"]["learning"] > found["map"]["still"] + 0.25
    assert found["loss"] == "learning"
    assert run.step == STEPS
    assert watching.tried == {"trying learning": EACH, "trying still": EACH}
    assert watching.steps == [0, *range(1, STEPS + 1)]
    assert watching.said == [found["why"]]
    for value in (*found["map"].values(), EACH, 25):
        assert f"{value:.2f}".removesuffix(".00") in found["why"]

    rows = Run(run.folder).metrics()
    assert [row["step"] for row in rows] == [*range(STEPS + 1)]  # each step once, those of the winner alone
    assert rows[EACH]["validation_map"] == found["map"]["learning"]
    kept = Run(run.folder)
    assert kept.config == given.with_settings(changes["learning"])
    assert kept.records["choice"]["why"] == found["why"]
    assert not (run.folder / "candidates").exists()
    assert json.loads((run.folder / "model" / "model.json").read_text())["metadata"]["choice"] == found

    # the same start and the same batches: these are the weights of a run that named the loss
    named = bier.train(kept.config, tmp_path / "named", same=False)
    assert named.choice is None
    ends = [read_checkpoint(Run(folder).checkpoint(STEPS)).objective for folder in (run.folder, named.folder)]
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_the_losses_themselves_are_tried_and_a_tie_is_the_gentle_ones(
    many_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bier.train(config(many_classes), tmp_path / "run", same=False, choose_loss=True)
    assert run.choice is not None
    assert set(run.choice["map"]) == {"binomial-deviance", "multi-similarity"}
    assert Run(run.folder).config.loss.name == run.choice["loss"]
    assert run.choice["map"]["binomial-deviance"] != run.choice["map"]["multi-similarity"]
    monkeypatch.setattr(choice, "TIE", 100.0)
    tie = bier.train(config(many_classes), tmp_path / "tie", same=False, choose_loss=True)
    assert tie.choice is not None
    assert tie.choice["loss"] == "binomial-deviance"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"data.validation": 0.2}, "takes 20 held-out classes, and there are 10"),
        ({"data.validation": 0.0}, "takes 20 held-out classes, and there are 0"),
        ({"train.steps": 30}, "takes 40 steps, and there are 30"),
    ],
)
def test_the_gentle_one_where_nothing_can_be_told(
    many_classes: Path, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    watching, given = Watching(), config(many_classes).with_settings(settings)
    run = bier.train(given, tmp_path / "run", same=False, choose_loss=True, observer=watching)
    assert run.choice is not None
    assert run.choice["loss"] == "binomial-deviance"
    assert why in run.choice["why"]
    assert watching.said == [run.choice["why"]]
    assert watching.tried == {}
    assert Run(run.folder).config == given


def test_killed_while_it_chooses(
    many_classes: Path, tmp_path: Path, forked: ModuleType, assert_same_runs: Callable[[Path, Path], None]
) -> None:
    script = Path(__file__).with_name("killed_choice.py")
    (tmp_path / "settings.toml").write_text(config(many_classes).to_toml())

    def train(folder: str, moment: str) -> int:
        process = forked.start(tmp_path / "settings.toml", tmp_path / folder, moment, script=script)
        code: int = process.wait()
        assert code in (0, -9), process.said
        return code

    assert train("whole", "never") == 0
    moments = ["trying binomial-deviance 3", "trying multi-similarity 1", "trying multi-similarity 5", "becoming"]
    for moment in moments:
        assert train("broken", moment) == -9, moment
        assert Run(tmp_path / "broken").records["choice"].keys() == {"steps", "candidates", "classes"}
    assert train("broken", "never") == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "broken")
    assert not (tmp_path / "broken" / "candidates").exists()
    assert train("broken", "never") == 0  # after its end, too


def test_what_does_not_go_together(many_classes: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no 'snapshots'"):
        bier.train(config(many_classes), tmp_path / "run", choose_loss=True, snapshots=[3])
    assert not (tmp_path / "run" / "config.toml").exists()
