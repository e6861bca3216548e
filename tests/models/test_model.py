"""A model encodes anything that is an image, streams, and survives a disk."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import bier
from bier import files
from bier.collection.encoding import folder_fingerprint
from bier.errors import BierError, ConfigError, DataError, ModelError
from bier.images import ImageDataset
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbone import folded
from bier.models.backbones import build_backbone
from bier.models.folder import write_folder
from bier.models.model import Model, load


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 48, 48, 3), dtype=np.uint8)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    ensemble = EmbeddingEnsemble(512, (8, 16, 24))
    return Model(build_backbone("conv4"), ensemble, precision="float32", metadata={"data": "glyphs"})


def test_every_kind_of_image_gives_the_same_vector(model: Model, pictures: np.ndarray, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(len(pictures))]
    for path, array in zip(paths, pictures, strict=True):
        Image.fromarray(array).save(path)
    expected = model.encode(pictures)
    assert expected.shape == (7, 48)
    assert expected.dtype == np.float32
    generated: Iterator[Path] = (path for path in paths)
    for images in (
        paths,
        [str(path) for path in paths],
        [Image.fromarray(a) for a in pictures],
        list(pictures),
        generated,
        ImageDataset(paths, 48),
    ):
        np.testing.assert_allclose(model.encode(images, batch_size=3), expected, rtol=1e-4, atol=1e-5)
    for one in (paths[2], pictures[2], Image.fromarray(pictures[2])):
        np.testing.assert_allclose(model.encode(one), expected[2:3], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.encode(paths, workers=2), model.encode(paths, workers=0))
    assert model.encode([]).shape == (0, 48)
    assert model.encode([], learners=2).shape == (0, 24)


def test_the_vector_is_the_ensemble_of_the_raw_embedding(model: Model, pictures: np.ndarray) -> None:
    raw = model.embed_raw(pictures)
    with torch.no_grad():
        pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2)
        np.testing.assert_allclose(raw, model.ensemble(model.backbone.eval()(pixels)).numpy(), rtol=1e-3, atol=1e-4)
    roots = np.sqrt(np.array([1, 2, 3]) / 6)  # alpha_m of three learners: m / (1 + 2 + 3)
    parts = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in np.split(raw, [8, 24], axis=1)]
    expected = np.concatenate([root * part for root, part in zip(roots, parts, strict=True)], axis=1)
    np.testing.assert_allclose(model.encode(pictures), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.vectors(raw), expected, rtol=1e-4, atol=1e-6)
    assert model.encode(pictures, learners=1).shape == (7, 8)
    np.testing.assert_allclose(np.linalg.norm(model.encode(pictures, learners=1), axis=1), 1, rtol=1e-5)


def test_new_weights_are_seen(model: Model, pictures: np.ndarray) -> None:
    before = model.encode(pictures)
    with torch.no_grad():
        next(model.backbone.parameters()).mul_(2).add_(0.1)
    assert not np.allclose(model.encode(pictures), before)


def test_encoding_leaves_the_model_as_it_was(model: Model, pictures: np.ndarray) -> None:
    model.backbone.train()
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    model.encode(pictures)
    assert model.backbone.training
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())
    model.ensemble(model.backbone(torch.zeros(2, 3, 48, 48))).sum().backward()


def test_progress_counts_images(model: Model, pictures: np.ndarray) -> None:
    seen: list[tuple[int, int]] = []
    model.encode(pictures, batch_size=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 7), (6, 7), (7, 7)]
    model.encode(iter(pictures), batch_size=5, progress=lambda done, total: seen.append((done, total)))
    assert seen[3:] == [(5, 0), (7, 0)]


def test_features_in_the_place_of_images() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    model = Model(build_backbone("features", features=12), EmbeddingEnsemble(12, (4, 6)))
    raw = model.embed_raw(rows, batch_size=2)
    np.testing.assert_allclose(raw, rows @ model.ensemble.weight.detach().numpy().T, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match="shape"):
        model.encode(rows[:, :5])


@pytest.mark.parametrize("fold", [False, True])
def test_saved_and_loaded(model: Model, pictures: np.ndarray, tmp_path: Path, fold: bool) -> None:
    if fold:
        model = Model(folded(model.backbone), model.ensemble, "alpha", "float32", {"steps": 3})
    expected = model.encode(pictures)
    run = tmp_path / "runs" / "mine"
    model.save(run / "model")
    model.save(run / "model")  # replaces what is there
    assert sorted(path.name for path in run.rglob("*")) == ["model", "model.json", "model.safetensors"]
    for path in (run, run / "model", str(run)):
        again = load(path)
        np.testing.assert_array_equal(again.encode(pictures), expected)
        assert (again.groups, again.dimension, again.weighting) == ((8, 16, 24), 48, model.weighting)
        assert (again.metadata, again.backbone.folded) == (model.metadata, fold)


def test_bias_is_saved_and_models_from_before_it_load(pictures: np.ndarray, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ensemble = EmbeddingEnsemble(512, (8, 16), bias=True)
    with torch.no_grad():
        ensemble.bias.normal_()  # type: ignore[union-attr]
    model = Model(build_backbone("conv4"), ensemble)
    model.save(tmp_path / "biased")
    again = load(tmp_path / "biased")
    assert torch.equal(again.ensemble.bias, ensemble.bias)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.encode(pictures), model.encode(pictures))

    plain = Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16)))
    plain.save(tmp_path / "plain")
    description = json.loads((tmp_path / "plain/model.json").read_text())
    assert description.pop("bias") is False
    assert load(tmp_path / "plain").ensemble.bias is None


def test_forward_gives_what_encode_gives(model: Model, pictures: np.ndarray) -> None:
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    model.eval()
    with torch.no_grad():
        for inputs in (pixels, pixels.float()):
            vectors = model(inputs)
            assert (vectors.shape, vectors.dtype) == ((7, 48), torch.float32)
            np.testing.assert_allclose(vectors.numpy(), model.encode(pictures), rtol=1e-3, atol=1e-5)
        short = model(pixels, learners=1)
    np.testing.assert_allclose(short.numpy(), model.encode(pictures, learners=1), rtol=1e-3, atol=1e-5)
    with pytest.raises(DataError, match=r"shape \(B, 3, 48, 48\). Got \(7, 48, 48, 3\)"):
        model(torch.from_numpy(pictures))


def test_forward_takes_features_and_has_a_gradient() -> None:
    model = Model(build_backbone("features", features=12), EmbeddingEnsemble(12, (4, 6)))
    rows = torch.randn(5, 12, requires_grad=True)
    vectors = model(rows)
    np.testing.assert_allclose(vectors.detach().numpy(), model.encode(rows.detach().numpy()), atol=1e-6)
    vectors[:, 0].sum().backward()
    assert rows.grad is not None
    assert rows.grad.abs().sum() > 0
    with pytest.raises(DataError, match=r"shape \(B, 12\). Got \(5, 11\)"):
        model(rows[:, :11])


def test_a_model_is_a_module_like_any_other(model: Model, pictures: np.ndarray) -> None:
    names = [*model.state_dict()]
    assert {name.split(".")[0] for name in names} == {"backbone", "ensemble"}
    torch.manual_seed(1)
    other = Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16, 24)), precision="float32")
    before = other.encode(pictures)
    other.load_state_dict(model.state_dict())
    assert not np.allclose(other.encode(pictures), before)
    np.testing.assert_array_equal(other.encode(pictures), model.encode(pictures))
    assert not model.train().eval().backbone.training
    exact = model.encode(pictures)
    assert model.double() is model
    np.testing.assert_allclose(model.encode(pictures), exact, atol=1e-5)  # computed anew, in double
    assert model.network()[1].weight.dtype is torch.float64
    assert model.to("meta").device.type == "meta"


def test_progress_bar_when_asked(model: Model, pictures: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (False, None):
        model.encode(pictures, progress=progress)
    assert capsys.readouterr() == ("", "")
    model.encode(pictures, batch_size=3, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "7/7" in shown.err
    model.encode(iter(pictures), batch_size=3, progress=True)
    assert "7/" in capsys.readouterr().err


def test_damage_is_one_line(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.json is missing"):
        load(tmp_path)
    model.save(tmp_path / "m")
    description = json.loads((tmp_path / "m/model.json").read_text())
    weights = (tmp_path / "m/model.safetensors").read_bytes()

    def refused(text: str, data: bytes = weights) -> str:
        (tmp_path / "m/model.json").write_text(text)
        (tmp_path / "m/model.safetensors").write_bytes(data)
        with pytest.raises(ModelError) as caught:
            load(tmp_path / "m")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "damaged" in refused(json.dumps(description), weights[:-7])
    assert "damaged" in refused(json.dumps(description)[:50])
    assert "format version 1. Got 9" in refused(json.dumps(description | {"version": 9}))
    changed = description | {"mean": [107.5, 127.5, 127.5]}  # loads, and gives other vectors, if nothing covers it
    assert "checksum does not match" in refused(json.dumps(changed))
    del changed["checksum"]
    assert "no checksum" in refused(json.dumps(changed | {"chacksum": description["checksum"]}))

    def forged(**changes: object) -> str:
        """A record with a checksum that fits, as somebody may write it on purpose."""
        return refused(json.dumps(files.with_checksum(description | changes)))

    assert "cannot be used" in forged(groups=[8, 16])
    assert "cannot be used" in forged(backbone="con4")
    assert "shape" in forged(backbone="vit_giant_patch14_224")
    assert "'crop': Field required" in refused(
        json.dumps(files.with_checksum({k: v for k, v in description.items() if k != "crop"}))
    )
    for changes in (
        {"groups": [2**40]}, {"groups": [24, 24, 2**30]}, {"groups": "48"}, {"groups": [8.5, 39.5]}, {"groups": []},
        {"features": 10**12}, {"features": "512"}, {"features": True}, {"crop": 10**9}, {"resize": -1}, {"crop": None},
        {"mean": ["a"] * 3}, {"std": [0.0, 1.0, 1.0]}, {"std": [float("nan")] * 3}, {"mean": [127.5]},
        {"weighting": "none"}, {"precision": 3}, {"metadata": []}, {"folded": "no"}, {"bias": 1}, {"backbone": 7},
    ):  # fmt: skip
        assert "cannot be used" in forged(**changes), changes
    same = {"prefixes": [0.5] * 3, "learners": [0.5, None, 0.5], "precision": 95.0, "part": "test", "classes": 2}
    (tmp_path / "m/model.json").write_text(
        json.dumps(files.with_checksum(description | {"metadata": {"same": same, "validation": None, "mine": [1]}}))
    )
    assert load(tmp_path / "m").metadata == {"same": same, "validation": None, "mine": [1]}
    for metadata in (  # what `search --same`, `evaluate`, `serve` and the model card read
        {"same": 5}, {"same": "x"}, {"same": [1]}, {"same": {"prefixes": [0.5] * 3}}, {"same": same | {"prefixes": 5}},
        {"same": same | {"prefixes": []}}, {"same": same | {"learners": [0.5]}}, {"same": same | {"classes": "two"}},
        {"same": same | {"learners": [float("nan")] * 3}}, {"same": same | {"prefixes": ["a"] * 3}},
        {"same": same | {"precision": None}}, {"validation": 5}, {"validation": {"recall": "x"}}, {"untrained": "x"},
        {"untrained": {"recall": None}}, {"validation": {"recall": 50.0, "map": []}},
    ):  # fmt: skip
        assert "cannot be used" in forged(metadata=metadata), metadata


def test_a_dataset_of_another_size_is_refused(model: Model, pictures: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"must hold images of 48 x 48 pixels.* Got 32 x 32 instead"):
        model.encode(ImageDataset(pictures, 32, crop=32))


def test_a_model_whose_replacement_was_killed_is_found(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "run" / "model")
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with files.folder_aside(tmp_path / "run" / "other") as aside:
        name = aside.name.replace("other.new", "model.old").replace(f"-{os.getpid()}-", f"-{int(dead.stdout)}-")
    (tmp_path / "run" / "model").rename(tmp_path / "run" / name)
    assert load(tmp_path / "run").groups == model.groups
    assert load(tmp_path / "run" / "model").groups == model.groups


def test_bad_arguments(model: Model, pictures: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        model.encode(pictures, batch_size=0)
    with pytest.raises(ConfigError, match="learners"):
        model.encode(pictures, learners=4)
    with pytest.raises(ConfigError, match="precision"):
        Model(model.backbone, model.ensemble, precision="float8")
    with pytest.raises(ModelError, match="512 features"):
        Model(model.backbone, EmbeddingEnsemble(100, (4, 4)))
    with pytest.raises(BierError, match=r"absent\.jpg"):
        model.encode(tmp_path / "absent.jpg")
    with pytest.raises(DataError, match="int"):
        model.encode(3)  # type: ignore[arg-type]


def test_bfloat16_is_close(model: Model, pictures: np.ndarray) -> None:
    exact = Model(model.backbone, model.ensemble, precision="float32").encode(pictures)
    rough = Model(model.backbone, model.ensemble, precision="bfloat16").encode(pictures)
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - exact).max() < 0.05


def test_a_pretrained_model_gives_normalised_features(tmp_path: Path) -> None:
    model = bier.pretrained("efficientnet_lite0", precision="float32")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 256, 256, 3), dtype=np.uint8)
    vectors = model.encode(pixels, fast=True)
    with torch.no_grad():
        features = model.backbone(torch.from_numpy(pixels[:, 16:240, 16:240]).permute(0, 3, 1, 2)).numpy()
    assert vectors == pytest.approx(features / np.linalg.norm(features, axis=1, keepdims=True), abs=1e-4)
    assert (model.groups, model.dimension) == ((1280,), 1280)
    model.save(tmp_path / "model")
    assert bier.load(tmp_path / "model").encode(pixels, fast=True) == pytest.approx(vectors, abs=1e-6)


def test_tensors_and_torch_datasets_are_images(model: Model, pictures: np.ndarray) -> None:
    expected = model.encode(pictures)
    tensor = torch.from_numpy(pictures).permute(0, 3, 1, 2)

    class Mine(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(pictures)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return tensor[index].float() / 255, index % 2

    for images in (tensor, tensor.float() / 255, list(tensor), Mine()):
        np.testing.assert_allclose(model.encode(images, batch_size=3), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.encode(tensor[2]), expected[2:3], rtol=1e-4, atol=1e-5)
    subset = torch.utils.data.Subset(ImageDataset(pictures, 48), [4, 1])
    np.testing.assert_allclose(model.encode(subset), expected[[4, 1]], rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match="from 0 to 1, not normalised"):
        model.encode(tensor.float() / 128 - 1)
    with pytest.raises(DataError, match=r"shape \(3, H, W\)"):
        model.encode(torch.zeros(2, 48, 48, 3, dtype=torch.uint8))


def test_similarities_a_threshold_and_three_lines(model: Model, pictures: np.ndarray) -> None:
    vectors = model.encode(pictures, convert_to_tensor=True)
    assert isinstance(vectors, torch.Tensor)
    similar = model.similarity(vectors, vectors[:2])
    assert tuple(similar.shape) == (7, 2)
    np.testing.assert_allclose(model.similarity(vectors.numpy(), vectors[:2].numpy()), similar.numpy(), atol=1e-6)
    assert model.threshold is None
    model.metadata["same"] = {"prefixes": [0.1, 0.2, 0.625], "learners": [0.1, 0.2, 0.3]}
    assert model.threshold == 0.625
    assert len(repr(model).splitlines()) == 3
    assert "conv4" in repr(model)
    assert "0.625" in repr(model)


def test_the_mirror_image_counts_too_and_is_kept(model: Model, pictures: np.ndarray, tmp_path: Path) -> None:
    raw, turned = model.embed_raw(pictures), model.embed_raw(pictures[:, :, ::-1])
    model.mirror = True
    np.testing.assert_allclose(model.embed_raw(pictures), (raw + turned) / 2, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(model.encode(pictures), model.encode(pictures[:, :, ::-1]), atol=1e-5)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.mirror
    np.testing.assert_array_equal(again.encode(pictures), model.encode(pictures))
    with torch.no_grad():
        pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2)
        np.testing.assert_allclose(model.eval()(pixels).numpy(), model.encode(pictures), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def closer() -> Model:
    """Trained at 64 pixels, so to speak, and looking at 96 and at the mirror image."""
    return bier.pretrained("efficientnet_lite0", precision="float32", resolution=64)


def test_pretrained_networks_look_closer_when_they_encode(closer: Model, pictures: np.ndarray, tmp_path: Path) -> None:
    assert (closer.backbone.crop, closer.trained_at, closer.mirror) == (96, 64, True)
    at = {
        side: bier.pretrained("efficientnet_lite0", None, "float32", resolution=side, test_resolution=0, mirror=False)
        for side in (64, 96)
    }
    both = at[96].embed_raw(pictures) + at[96].embed_raw(pictures[:, :, ::-1])
    np.testing.assert_allclose(closer.embed_raw(pictures), both / 2, rtol=1e-3, atol=1e-4)
    once = at[64].encode(pictures)
    np.testing.assert_allclose(closer.encode(pictures, fast=True), once, atol=1e-5)
    assert np.abs(closer.encode(pictures) - once).max() > 1e-2
    closer.save(tmp_path / "model")
    again = load(tmp_path / "model")
    np.testing.assert_array_equal(again.encode(pictures), closer.encode(pictures))
    np.testing.assert_array_equal(
        load(tmp_path / "model", fast=True).encode(pictures), closer.encode(pictures, fast=True)
    )
    assert "96 x 96 pixels and mirrored" in repr(again)
    assert "96x96 pixels, RGB and their mirror image; 64x64 in training" in str(again.generate_model_card())


def test_models_that_name_no_look_have_one(model: Model, pictures: np.ndarray, tmp_path: Path) -> None:
    expected = model.encode(pictures)
    description = model.description()
    del description["mirror"], description["trained_at"]  # as they were before
    write_folder(tmp_path / "model", model.state_dict(), description)
    again = load(tmp_path / "model")
    assert again.is_fast
    np.testing.assert_array_equal(again.encode(pictures), expected)
    np.testing.assert_array_equal(again.encode(pictures, fast=True), expected)
    assert folder_fingerprint(tmp_path / "model") == folder_fingerprint(tmp_path / "model", fast=True)
