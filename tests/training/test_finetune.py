"""Which weights move: all, those from a stage on, or the embedding alone; from pixels or from cached maps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import bier
from bier.config import Config
from bier.errors import DataError, ModelError
from bier.evaluate.dataset import assess
from bier.models import maps as frozen
from bier.models.backbone import Backbone
from bier.models.backbones import build_backbone
from bier.models.maps import TrunkCache
from bier.runs import Run
from bier.training import resolve, setup
from bier.training.setup import load_data

STAGES = ("conv1", "conv2", "conv3", "conv4")


def config(root: Path, **settings: Any) -> Config:
    given = {
        "data.root": str(root),
        "data.validation": 0.5,
        "data.workers": 0,
        "model.backbone": "conv4",
        "model.embedding": 12,
        "diversity.hidden": 8,
        "train.steps": 4,
        "train.batch_classes": 2,
        "train.batch_images": 3,
        "train.learning_rate": 1e-2,
        "train.validate_every": 4,
        "train.precision": "float32",
    }
    return resolve("a-bier", "folder", given | {key.replace("__", "."): value for key, value in settings.items()})


def moved(folder: Path) -> list[str]:
    """The stages of which any weight or statistic has changed since the start of the run."""
    torch.manual_seed(0)
    start = build_backbone("conv4").state_dict()
    end = bier.load(folder).backbone.state_dict()
    assert start.keys() == end.keys()

    def changed(stage: int) -> bool:
        names = [name for name in start if name.startswith(f"body.layers.{stage}.")]
        assert names
        return any(not torch.equal(start[name], end[name]) for name in names)

    return [name for number, name in enumerate(STAGES) if changed(number)]


@pytest.mark.parametrize("views", [0, 2])
@pytest.mark.parametrize(("stage", "expected"), [("conv3", ["conv3", "conv4"]), ("embedding", [])])
def test_frozen_stages_stay_and_others_move(
    pictures: Path, tmp_path: Path, views: int, stage: str, expected: list[str]
) -> None:
    cache = str(tmp_path / "cache")
    chosen = config(pictures, model__trainable_from=stage, model__trunk_views=views, data__cache=cache)
    run = bier.train(chosen, tmp_path / "run")
    assert moved(run.folder) == expected
    assert run.best_validation is not None
    assert bool(list((tmp_path / "cache").glob("trunk-*"))) == bool(views)


def test_everything_is_trained_by_default(pictures: Path, tmp_path: Path) -> None:
    assert moved(bier.train(config(pictures), tmp_path / "run").folder) == list(STAGES)


def test_a_run_on_cached_maps_goes_on_as_if_never_stopped(
    pictures: Path, tmp_path: Path, assert_same_checkpoints: Callable[[Path, Path], None]
) -> None:
    chosen = config(pictures, model__trainable_from="conv3", model__trunk_views=2, train__checkpoint_every=2)
    whole = bier.train(chosen, tmp_path / "whole").folder
    run = bier.train(chosen, tmp_path / "run").folder
    last = run / "checkpoints" / "step-4"
    assert last.is_dir()
    last.rename(tmp_path / "gone")
    bier.train(chosen, run, resume=True)
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (run / name).read_bytes()
    assert_same_checkpoints(whole / "checkpoints" / "step-4", run / "checkpoints" / "step-4")


@pytest.mark.parametrize("adapt", ["none", "lora"])
def test_the_last_blocks_of_a_transformer_are_trained_on_cached_tokens(
    pictures: Path, tmp_path: Path, adapt: str, assert_same_checkpoints: Callable[[Path, Path], None]
) -> None:
    """With a rate per block and an average of the weights; the saved model is plain, and a resumed run is the same."""
    vit = {"model__backbone": "test_vit", "model__pretrained": False, "model__resolution": 48, "model__adapt": adapt}
    chosen = config(
        pictures,
        model__trainable_from="blocks.3",
        model__trunk_views=2,
        train__layer_decay=0.8,
        train__ema=0.5,
        train__checkpoint_every=2,
        data__cache=str(tmp_path / "cache"),
        **vit,
    )
    whole = bier.train(chosen, tmp_path / "whole").folder
    (maps,) = {json.loads(path.read_text())["shape"][0] for path in tmp_path.glob("cache/trunk-*/maps.json")}
    assert maps == 10  # a class token and 3 x 3 patches
    torch.manual_seed(0)
    start = build_backbone("test_vit", pretrained=False, resolution=48)
    end = bier.load(whole).backbone
    assert end.state_dict().keys() == start.state_dict().keys()
    moved = {
        start.stages[int(name.split(".")[2])]
        for name, value in start.state_dict().items()
        if not torch.equal(value, end.state_dict()[name])
    }
    assert moved == {"blocks.3", "blocks.4", "blocks.5"} | ({"head"} if adapt == "none" else set())
    run = bier.train(chosen, tmp_path / "run").folder
    (run / "checkpoints" / "step-4").rename(tmp_path / "gone")
    bier.train(chosen, run, resume=True)
    assert (whole / "model/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()
    assert_same_checkpoints(whole / "checkpoints" / "step-4", run / "checkpoints" / "step-4")


def test_an_unknown_stage(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must be one of conv1, conv2, conv3, conv4.*'conv9'"):
        bier.train(config(pictures, model__trainable_from="conv9"), tmp_path / "run")


def test_embedding_factor_zero_leaves_the_embedding(pictures: Path, tmp_path: Path) -> None:
    """The rate of W is the factor times that of the backbone; without a diversity loss nothing else moves W."""

    def weight(factor: float, name: str) -> Tensor:
        settings = {"train__embedding_factor": factor, "diversity__name": "none", "data__validation": 0.0}
        run = bier.train(config(pictures, train__weight_decay=0.0, **settings), tmp_path / name)
        return bier.load(run.folder).ensemble.weight

    torch.manual_seed(0)
    backbone = build_backbone("conv4")
    drawn = bier.EmbeddingEnsemble(backbone.features, bier.group_sizes(12, 3)).weight
    assert torch.equal(weight(0.0, "still"), drawn)
    assert not torch.equal(weight(1.0, "moving"), drawn)


def test_a_broken_image_is_named_or_skipped(pictures: Path, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for name in range(4):
        (root / f"{name}").mkdir(parents=True)
        for number in range(4):
            source = pictures / f"class {name}" / f"{number}.png"
            Image.open(source).save(root / f"{name}" / f"{number}.jpg", quality=95)
        broken = root / f"{name}" / "3.jpg"
        broken.write_bytes(broken.read_bytes()[:700])
    with pytest.raises(DataError, match=r"3\.jpg"):
        bier.train(config(root, data__validation=0.0, train__steps=8), tmp_path / "refused")
    skipping = config(root, data__validation=0.0, data__skip_broken=True)
    assert bier.train(skipping, tmp_path / "run").step == 4


def test_a_class_with_one_image_is_no_trouble(pictures: Path, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for name in range(6):
        (root / f"{name}").mkdir(parents=True)
        for number in range(1 if name % 2 else 5):
            Image.open(pictures / f"class {name}" / f"{number}.png").save(root / f"{name}" / f"{number}.png")
    assert bier.train(config(root, data__validation=0.0), tmp_path / "run").step == 4


def test_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "photos" / "empty").mkdir(parents=True)
    with pytest.raises(DataError, match="It holds none"):
        bier.train(config(tmp_path / "photos"), tmp_path / "run")
    with pytest.raises(DataError, match="needs a root"):
        bier.train(config(tmp_path).with_settings({"data.root": ""}), tmp_path / "run")


def test_too_few_classes_says_what_to_do(pictures: Path, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for name in range(4):
        (root / f"{name}").mkdir(parents=True)
        for number in range(4):
            Image.open(pictures / f"class {name}" / f"{number}.png").save(root / f"{name}" / f"{number}.png")
    with pytest.raises(DataError, match=r"at least 2 classes\. Got 1 .*data\.validation=0\.5.*set data\.validation=0 "):
        bier.train(config(root), tmp_path / "run")
    assert bier.train(config(root, data__split="inside"), tmp_path / "run").step == 4


def test_smaller_pictures_than_the_backbone_s_own(pictures: Path, tmp_path: Path) -> None:
    small = config(pictures, model__backbone="efficientnet_lite0", model__pretrained=False, model__resolution=56)
    model = bier.load(bier.train(small, tmp_path / "run").folder)
    assert (model.backbone.crop, model.backbone.resize) == (56, 64)
    assert model.encode([next(pictures.rglob("*.png"))]).shape == (1, 12)


def test_a_resolution_that_the_backbone_cannot_take(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'conv4' cannot look at 32 x 32 pixels; its own side is 48"):
        bier.train(config(pictures, model__resolution=32), tmp_path / "run")


def test_measuring_from_kept_maps_gives_the_same_numbers(pictures: Path, tmp_path: Path) -> None:
    """Maps lie in bfloat16, so distances move in the third digit; the ranking of these pictures does not."""
    chosen = config(pictures, model__trainable_from="conv3", model__trunk_views=1)
    model = bier.load(bier.train(chosen, tmp_path / "run").folder)
    dataset = load_data(chosen)
    plain = assess(model, dataset)
    for _ in range(2):  # computed, then found
        kept = assess(model, dataset, cache=tmp_path / "cache", frozen_before="conv3")
        torch.testing.assert_close(kept.result.test.z, plain.result.test.z, rtol=0.03, atol=0.03)
    assert len(list((tmp_path / "cache").glob("trunk-*/maps.bin"))) == 1


def built_maps(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, seed: int
) -> tuple[TrunkCache, list[str]]:
    """The maps of a run with the same pretrained weights whatever its seed, and what it said while it made them."""

    def pretrained(*given: Any, **more: Any) -> Backbone:
        torch.manual_seed(7)
        return build_backbone(*given, **more)

    monkeypatch.setattr(setup, "build_backbone", pretrained)
    chosen = config(pictures, seed=seed, model__trainable_from=stage, model__trunk_views=2, train__precision="bfloat16")
    chosen = chosen.with_settings({"data.cache": str(tmp_path / "cache")})
    said: list[str] = []
    inputs = setup.build(chosen, Run(tmp_path / "run"), lambda what, done, total: said.append(f"{what}: {done}")).inputs
    assert isinstance(inputs, TrunkCache)
    return inputs, said


def test_each_seed_has_crops_of_its_own(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of several seeds once shared their crops, and their spread left augmentation out."""
    first, _ = built_maps(pictures, tmp_path, monkeypatch, "conv3", seed=0)
    other, _ = built_maps(pictures, tmp_path, monkeypatch, "conv3", seed=1)
    again, _ = built_maps(pictures, tmp_path, monkeypatch, "conv3", seed=0)
    assert not torch.equal(first.maps([0, 1], [0, 0]), other.maps([0, 1], [0, 0]))
    assert torch.equal(first.maps([0, 1], [0, 0]), again.maps([0, 1], [0, 0]))


def test_maps_come_from_earlier_maps_and_say_their_size(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = built_maps(pictures, tmp_path, monkeypatch, "conv2", seed=0)
    assert next(what for what in said if "maps" in what) == "maps of the frozen stages, 0.0 GB: 0"
    made = []
    monkeypatch.setattr(
        frozen, "TrunkCache", lambda *given, **more: made.append(more.get("earlier")) or TrunkCache(*given, **more)
    )
    maps, _ = built_maps(pictures, tmp_path, monkeypatch, "conv4", seed=0)
    assert sum(earlier is not None for earlier in made) == 2  # of training and of validation images
    direct, _ = built_maps(pictures, tmp_path / "elsewhere", monkeypatch, "conv4", seed=0)
    assert torch.equal(maps.maps([0, 1], [0, 1]), direct.maps([0, 1], [0, 1]))
