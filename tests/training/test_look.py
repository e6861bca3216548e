"""How a run looks at pictures: at one resolution while it trains, closer and at the mirror image when it encodes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bier
from bier.evaluate.recall import rank_r
from bier.models.model import Model, starting_point
from bier.paper.budgets import BUDGETS, config_of
from bier.paper.experiments import DATASETS
from bier.training import resolve
from bier.training.setup import Scores, Validation, load_data

Cli = Callable[..., tuple[int, str, str]]
ONE_LOOK = (0, False)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve classes of four noisy pictures."""
    folder, random = tmp_path_factory.mktemp("look") / "photos", np.random.default_rng(0)
    for number in range(12):
        (folder / f"{number:02}").mkdir(parents=True)
        pattern = random.integers(0, 256, (8, 8, 3)).repeat(12, 0).repeat(12, 1)
        for picture in range(4):
            noisy = (pattern + random.integers(-120, 121, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / f"{number:02}" / f"{picture}.png")
    return folder


def look(data: str, **settings: object) -> tuple[int, bool]:
    config = resolve("a-bier", data, {f"model.{key}": value for key, value in settings.items()})
    return config.model.test_resolution, config.model.mirror


def test_pretrained_networks_of_photographs_look_closer() -> None:
    assert look("folder") == look("cub") == (320, True)
    assert look("folder", backbone="efficientnet_lite1") == (352, True)
    assert look("folder", resolution=160) == (224, True)
    assert look("folder", mirror=False) == (320, False)
    assert look("folder", test_resolution=0) == (0, True)
    assert look("folder", pretrained=False) == ONE_LOOK
    for other in ("googlenet-bvlc", "vit_small_patch14_dinov2", "conv4"):
        assert look("folder", backbone=other) == ONE_LOOK
    assert look("glyphs", backbone="efficientnet_lite0") == look("glyphs") == look("features") == ONE_LOOK
    assert not resolve("a-bier", "folder", {"data.augment": "shift"}).model.mirror  # things with a left and a right
    default = bier.Config().model  # that of the config.toml of an older run
    assert (default.test_resolution, default.mirror) == ONE_LOOK


def test_the_paper_looks_once() -> None:
    for budget in BUDGETS.values():
        for row in (row for experiment in DATASETS for row in experiment.rows if not row.untrained):
            settings = config_of(row, budget).model
            assert (settings.test_resolution, settings.mirror) == ONE_LOOK, row


def test_the_model_and_its_figures_are_of_the_closer_look(cli: Cli, photos: Path, tmp_path: Path) -> None:
    settings = {"data.root": str(photos), "data.workers": 0, "model.resolution": 64, "model.embedding": 12}
    settings |= {"train.steps": 2, "train.batch_classes": 2, "train.batch_images": 2, "diversity.hidden": 8}
    settings |= {"train.precision": "float32", "data.validation_classes": 3, "model.trunk_views": 1}
    config = resolve("a-bier", "folder", {**settings, "model.trainable_from": "blocks.6", "train.learning_rate": 0.0})
    run = tmp_path / "run"
    result = bier.train(config, run)
    model = bier.load(run)
    assert (model.backbone.crop, model.trained_at, model.mirror) == (96, 64, True)

    dataset = load_data(config)
    validation = dataset["validation"]

    def measured(model: Model) -> float:
        """MAP@R of the validation images among all of training, of which none is a match."""
        vectors = model.encode([*validation.images, *dataset["train"].images])
        numbers = [*validation.labels, *range(1000, 1000 + len(dataset["train"]))]
        return rank_r(torch.from_numpy(vectors), torch.tensor(numbers)).map_at_r * len(numbers) / len(validation)

    plain = starting_point(config.model, precision="float32")
    assert plain is not None
    assert (plain.backbone.crop, plain.mirror) == (96, True)
    assert result.untrained is not None
    assert result.best is not None
    assert result.untrained.map_at_r == pytest.approx(measured(plain), abs=1e-3)
    assert result.best.map_at_r == pytest.approx(measured(model), abs=1e-3)
    assert model.metadata["validation"]["map"] == result.best.map_at_r
    assert model.metadata["untrained"]["map"] == result.untrained.map_at_r
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["validation_map"] != pytest.approx(result.untrained.map_at_r, abs=1e-3)  # a quicker look

    before = (run / "model" / "model.json").read_bytes()
    closer, quick = (
        json.loads(cli("evaluate", run, "--json", "--report", tmp_path / name, *options)[1])
        for name, options in (("closer", ()), ("quick", ("--fast",)))
    )
    assert closer["measured"]["look"] == "96 x 96 pixels and mirrored"
    assert quick["measured"]["look"] == "64 x 64 pixels"
    assert "each at 96 x 96 pixels and mirrored" in (tmp_path / "closer" / "index.html").read_text()
    test = dataset["test"]
    for found, fast in ((closer, False), (quick, True)):
        for name, one in (("ensemble", model), ("untrained", plain)):
            vectors = one.encode(test.images, fast=fast)
            expected = bier.recall_at_k(vectors, test.labels, [1])[1]
            assert found["recall"][name]["1"] == pytest.approx(expected, abs=1e-3)
    assert (run / "model" / "model.json").read_bytes() == before


def test_the_untrained_backbone_is_kept_where_it_is_better_as_encoded(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = {"loss": "binomial-deviance", "why": "few classes"}

    def measured(_: Validation, model: Model) -> Scores:
        if model.metadata["method"] == "untrained":
            return Scores(90.0, 80.0)
        model.metadata["choice"] = choice  # as a run has it that was to choose its loss
        return Scores(95.0, 70.0)

    monkeypatch.setattr(Validation, "measure_encoded", measured)
    monkeypatch.setattr(Validation, "measure_untrained", lambda *_: Scores(0.0, 0.0))  # by training's look it is worse
    settings = {"data.root": str(photos), "data.workers": 0, "model.resolution": 64, "model.embedding": 12}
    settings |= {"train.steps": 1, "train.batch_classes": 2, "train.batch_images": 2, "data.validation_classes": 3}
    result = bier.train(resolve("baseline", "folder", settings), tmp_path / "run", same=False)
    assert (result.best_step, result.best, result.untrained) == (0, Scores(90.0, 80.0), Scores(90.0, 80.0))
    kept = bier.load(tmp_path / "run").metadata
    assert (kept["method"], kept["choice"]) == ("untrained", choice)
    assert kept["validation"] == {"step": 0, "recall": 90.0, "map": 80.0}
