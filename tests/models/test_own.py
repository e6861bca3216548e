"""Networks and weights that a user brings: saved and loaded again, and one line where that cannot be."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import bier
from bier.errors import ModelError
from bier.models.backbone import Backbone
from bier.models.backbones import build_backbone

PICTURES = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
Cli = Callable[..., tuple[int, str, str]]


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def own(module: nn.Module, name: str = "mine") -> Backbone:
    return Backbone(name, {"all": module}, features=6, crop=16, resize=16, mean=(120.0,) * 3, std=(60.0,) * 3)


def test_a_network_of_ones_own_there_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = bier.Model(own(network()), bier.EmbeddingEnsemble(6, (2, 3)), precision="float32").eval()
    model.save(tmp_path / "model")
    expected = model.encode(PICTURES)
    for given in (network(), own(network())):
        loaded = bier.load(tmp_path / "model", backbone=given)
        np.testing.assert_array_equal(loaded.encode(PICTURES), expected)
    with pytest.raises(ModelError, match=r"backbone 'mine'.*bier\.load\(PATH, backbone=MODULE\)"):
        bier.load(tmp_path / "model")
    with pytest.raises(ModelError, match="cannot be used"):
        bier.load(tmp_path / "model", backbone=nn.Linear(3, 6))


def test_a_plain_module_is_told_what_it_lacks() -> None:
    with pytest.raises(ModelError, match=r"Backbone\(NAME, .* Got Sequential instead"):
        bier.Model(network(), bier.EmbeddingEnsemble(6, (2, 3)))  # type: ignore[arg-type]


def test_the_name_of_a_backbone_is_a_model() -> None:
    model = bier.load("efficientnet_lite0")
    assert (model.backbone.name, model.dimension) == ("efficientnet_lite0", 1280)


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "module.model.", "backbone."])
def test_a_checkpoint_of_torch(tmp_path: Path, prefix: str) -> None:
    expected = build_backbone("efficientnet_lite0")
    weights = {prefix + name.removeprefix("body."): value for name, value in _timm_names(expected).items()}
    torch.save({"epoch": 3, "state_dict": {**weights, "head.weight": torch.zeros(2)}}, tmp_path / "weights.pth")
    loaded = build_backbone("efficientnet_lite0", weights=tmp_path / "weights.pth")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in expected.state_dict().items())


def _timm_names(backbone: Backbone) -> dict[str, torch.Tensor]:
    import timm

    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    model.reset_classifier(0)
    own = [value for name, value in backbone.state_dict().items()]
    return dict(zip(model.state_dict(), own, strict=True))


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


def test_weights_that_cannot_be_read_are_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "not.pth").write_bytes(b"no zip")
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    torch.save([1, 2], tmp_path / "list.pt")
    Image.fromarray(PICTURES[0]).save(tmp_path / "folder" / "a.png")
    save_file({"conv_stem.weight": torch.zeros(32, 3, 3, 3)}, tmp_path / "few.safetensors")
    for name in ("folder", "pipe.safetensors", "not.pth", "evil.pth", "list.pt", "few.safetensors", "none"):
        code, out, said = cli("embed", "--backbone", f"efficientnet_lite0={name}", "folder", "--out", "v.safetensors")
        assert (code, out, len(said.splitlines())) == (2, "", 1), (name, said)
        assert name in said
    assert not (tmp_path / "ran").exists()


def broken(weights: dict[str, torch.Tensor], how: str) -> None:
    name = "ensemble.weight"
    kinds = {"int": torch.int32, "bool": torch.bool, "complex": torch.complex64}
    if how in kinds:
        weights[name] = weights[name].to(kinds[how])
    else:
        weights[name][0, 0] = float(how)


@pytest.mark.parametrize("how", ["nan", "inf", "int", "bool", "complex"])
def test_weights_that_are_no_numbers(cli: Cli, tmp_path: Path, how: str) -> None:
    model = bier.Model(build_backbone("conv4"), bier.EmbeddingEnsemble(512, (2, 3)))
    weights = model.state_dict()
    broken(weights, how)
    from bier.models.folder import write_folder

    write_folder(tmp_path / "model", weights, model.description())
    (tmp_path / "photos").mkdir()
    Image.fromarray(PICTURES[0]).save(tmp_path / "photos" / "a.png")
    commands = [("embed", tmp_path / "model", tmp_path / "photos", "--out", tmp_path / "out.safetensors")]
    commands.append(("export", tmp_path / "model", "--out", tmp_path / "out.onnx"))
    for command in commands:
        code, out, said = cli(*command)
        assert (code, out) == (2, "")
        assert "ensemble.weight" in said


def test_a_deviation_that_no_pixel_has(tmp_path: Path) -> None:
    from bier.models.folder import write_folder

    model = bier.Model(build_backbone("conv4"), bier.EmbeddingEnsemble(512, (2, 3)))
    for value in (1e-300, 1e300):
        write_folder(tmp_path / "model", model.state_dict(), model.description() | {"std": [value] * 3})
        with pytest.raises(ModelError, match="std"):
            bier.load(tmp_path / "model")


def test_a_file_of_weights_with_nan(tmp_path: Path) -> None:
    weights = _timm_names(build_backbone("efficientnet_lite0"))
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    loaded["conv_stem.weight"][0] = torch.nan
    save_file(loaded, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"conv_stem\.weight has NaN"):
        build_backbone("efficientnet_lite0", weights=tmp_path / "w.safetensors")


def test_the_packaged_weights_go_by_name_and_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    from bier.models import timm_models

    weights = timm_models._packaged_weights("efficientnet_lite0")
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    timm_models._load_packaged(model, dict(reversed(weights.items())))  # whatever their order
    expected = build_backbone("efficientnet_lite0").state_dict()
    model.reset_classifier(0)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), expected.values(), strict=True))
    weights["_fc.weight"] = weights.pop("_fc.bias")
    with pytest.raises(ModelError, match=r"must hold _fc\.weight"):
        timm_models._load_packaged(timm.create_model("tf_efficientnet_lite0"), weights)
    monkeypatch.setitem(timm_models.DIGESTS, "efficientnet_lite0", "0" * 64)
    with pytest.raises(ModelError, match=r"not those of version 0\.1\.0"):
        build_backbone("efficientnet_lite0")
