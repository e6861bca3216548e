"""In bfloat16 on a CPU the gradients of depthwise convolutions are computed in float32, and nothing else changes."""

import pytest
import torch
from torch import Tensor, nn

from bier.models.backbone import autocast


def gradients(layer: nn.Module, x: Tensor, upstream: Tensor, context: object) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    with context:  # type: ignore[attr-defined]
        y = layer(x)
    return (y, *torch.autograd.grad(y, (x, *layer.parameters()), upstream.to(y.dtype)))


@pytest.mark.parametrize(
    ("kernel", "stride", "bias"), [(3, 1, False), (3, 2, True), (5, 1, True), (5, 2, False), (7, 1, True)]
)
def test_equal_to_float32_of_the_same_rounded_numbers(kernel: int, stride: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(12, 12, kernel, stride, kernel // 2, groups=12, bias=bias)
    x = torch.randn(4, 12, 9, 9).to(torch.bfloat16).float()
    upstream = torch.randn_like(layer(x)).to(torch.bfloat16).float()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    _, *expected = gradients(layer, x, upstream, torch.autocast("cpu", enabled=False))
    y, *found = gradients(layer, x, upstream, autocast("bfloat16", x.device))
    assert y.dtype == torch.bfloat16
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_forward_is_that_of_autocast() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding="same", groups=8))
    network.append(nn.Conv2d(8, 8, 5, 2, 2, groups=8)).append(nn.Conv2d(8, 4, 3, groups=2))
    x = torch.randn(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = network(x)
    with autocast("bfloat16", x.device):
        assert torch.equal(network(x), expected)
        with torch.no_grad():
            assert torch.equal(network(x), expected)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    layer = nn.Conv2d(4, 4, 3, groups=4)
    layer.weight.requires_grad_(False)
    x = torch.randn(1, 4, 8, 8)
    with autocast("bfloat16", x.device):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 36.0))
