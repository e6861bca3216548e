"""Folding changes the cost and not the result, and what is folded can be trained."""

import pytest
import torch
from torch import nn

from bier.models.backbone import fold_batch_norm, folded
from bier.models.backbones import build_backbone


def unsettle(module: nn.Module) -> None:
    """Statistics and affine parameters as after training, so that forgetting one of them shows."""
    torch.manual_seed(1)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
            norm.running_mean = torch.randn(norm.num_features) * 0.3
            norm.running_var = torch.rand(norm.num_features) + 0.5


def test_folding_is_exact() -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
    )
    unsettle(layers)
    layers.double().eval()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    before = layers(x)
    assert fold_batch_norm(layers) == 2
    assert not any(isinstance(m, nn.BatchNorm2d) for m in layers.modules())
    torch.testing.assert_close(layers(x), before, rtol=1e-12, atol=1e-12)


def test_a_norm_that_does_not_follow_a_convolution_stays() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.BatchNorm2d(8))
    assert fold_batch_norm(layers) == 0
    assert isinstance(layers[2], nn.BatchNorm2d)


@pytest.mark.parametrize("name", ["efficientnet_lite0", "resnet10t", "conv4"])
def test_a_folded_backbone_gives_the_same_features(name: str) -> None:
    backbone = build_backbone(name, pretrained=name == "efficientnet_lite0").eval()
    if name != "efficientnet_lite0":
        unsettle(backbone)
    copy = folded(backbone)
    assert copy.folded
    assert not backbone.folded
    x = torch.randint(0, 256, (2, 3, backbone.crop, backbone.crop), dtype=torch.uint8)
    with torch.no_grad():
        expected = backbone(x)
        torch.testing.assert_close(copy(x), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_what_is_folded_can_be_trained() -> None:
    copy = folded(build_backbone("efficientnet_lite0")).train()
    copy(torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)).sum().backward()
    convolutions = [m for m in copy.modules() if isinstance(m, nn.Conv2d)]
    assert all(c.bias is not None and c.bias.grad is not None and c.weight.grad is not None for c in convolutions)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in copy.modules())


def test_a_module_that_calls_its_parts_in_another_order_is_left_whole() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 3, 1)
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            maps: torch.Tensor = self.first(torch.relu(self.norm(x)))
            return maps.mean((2, 3))

    backbone = build_backbone("conv4").eval()
    backbone.body.layers = nn.ModuleList([Crossed()])
    unsettle(backbone)
    copy = folded(backbone)
    assert not copy.folded
    x = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)
    assert torch.equal(copy(x), backbone(x))
