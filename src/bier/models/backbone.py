"""What every backbone is: a channel scaling, then named stages in order, then one feature vector per image."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from typing import Any, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.overrides import TorchFunctionMode

from bier.errors import ConfigError, ModelError

Precision: TypeAlias = Literal["auto", "float32", "bfloat16"]


def resolve_precision(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on hardware that has it and float32 elsewhere, where emulating it is many times slower."""
    if precision not in get_args(Precision):
        raise ConfigError(
            f"The 'precision' parameter must be one of {', '.join(get_args(Precision))}. Got {precision!r} instead."
        )
    if precision == "auto":
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def _has_bfloat16(device: torch.device) -> bool:
    if device.type != "cpu":  # Apple's says nothing about it
        supported = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
        return supported is not None and bool(supported(including_emulation=False))
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


@contextmanager
def autocast(precision: str, device: torch.device) -> Iterator[None]:
    """Run a network in this precision; its weights stay float32."""
    if resolve_precision(precision, device) is torch.float32:
        yield
        return
    with torch.autocast(device.type, torch.bfloat16), _DepthwiseGradients() if device.type == "cpu" else nullcontext():
        yield


class _DepthwiseGradients(TorchFunctionMode):
    """Computes the gradients of depthwise convolutions in float32, and all else as torch does.

    On a CPU torch has no fast kernel for them in bfloat16: those of a 5x5 or strided one take 3 to 80 times as long as
    in float32, and more than half of a training step of EfficientNet-Lite0.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d and not kwargs and torch.is_grad_enabled() and _is_depthwise(*args):
            return _Depthwise.apply(*args)
        return func(*args, **(kwargs or {}))


def _is_depthwise(x: Tensor, weight: Tensor, *rest: Any) -> bool:
    """Whether these are the arguments of such a convolution, all of them and with its padding in numbers."""
    return len(rest) == 5 and rest[-1] == len(weight) == x.shape[1] > 1 and not isinstance(rest[2], str)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.has_bias = geometry, bias is not None
        return torch.conv2d(x, weight, bias, *geometry)  # autocast is on

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        wanted = (*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2])
        gradients = torch.ops.aten.convolution_backward(
            *(gradient.float(), x.float(), weight.float(), [groups] if ctx.has_bias else None),
            *(stride, padding, dilation, False, (0, 0), groups, wanted),
        )
        return (*gradients, None, None, None, None)


class Scale(nn.Module):
    """Pixels 0..255 of any type, (B, 3, H, W) RGB, to (x - mean) / std in the precision of `mean`.

    The result is channels-last: that is the layout in which convolutions are fastest.
    """

    mean: Tensor
    factor: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Constants of the backbone, not weights: they stay out of the state dict.
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("factor", 1 / torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = pixels.to(self.mean.dtype, memory_format=torch.channels_last)
        return (pixels - self.mean) * self.factor


class Stages(nn.Module):
    """Named stages in order. `frozen_norm` keeps the statistics of batch norm as they are, also under `.train()`."""

    def __init__(self, stages: Mapping[str, nn.Module], *, frozen_norm: bool) -> None:
        super().__init__()
        self.names = tuple(stages)
        self.frozen_norm = frozen_norm
        self.layers = nn.ModuleList(stages.values())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.modules() if self.frozen_norm else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        for layer in self.layers:
            parameters = list(layer.parameters())
            if parameters and not any(p.requires_grad for p in parameters):
                layer.eval()  # a frozen stage gives the same maps in training and in use
        return self

    def part(self, first: int, last: int | None = None) -> "Stages":
        """The stages `first` to `last`, sharing their weights with these."""
        names = self.names[first:last]
        return Stages(dict(zip(names, self.layers[first:last], strict=True)), frozen_norm=self.frozen_norm)


class Backbone(nn.Module):
    """Pixels to features: (B, 3, crop, crop) RGB, uint8 or float in 0..255, to (B, features).

    The channel scaling is part of the network. `resize` is the side of the prepared image that `crop`
    is cut from. `stages` names the parts in order; `split(stage)` cuts before one of them.
    The backbone named `features` has neither pixels nor stages: it hands on (B, features) arrays, and `crop` is 0.
    """

    def __init__(
        self,
        name: str,
        stages: Mapping[str, nn.Module],
        *,
        features: int,
        crop: int,
        resize: int,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        frozen_norm: bool = True,
        pool: str = "",
    ) -> None:
        super().__init__()
        self.name = name
        self.features = features
        self.crop = crop
        self.resize = resize
        self.pool = pool  # how features are pooled, where that is not the network's own way
        self.folded = False  # whether batch norm has been folded into the convolutions
        self.scale: nn.Module = Scale(mean, std) if crop else nn.Identity()
        self.body = Stages(stages, frozen_norm=frozen_norm)
        self.to(memory_format=torch.channels_last)

    @property
    def stages(self) -> tuple[str, ...]:
        return self.body.names

    def forward(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.body(self.scale(pixels))
        return features

    def set_input_size(self, crop: int) -> None:
        """Take pictures of another side; the prepared square keeps its proportion to the crop."""
        if crop == self.crop:
            return
        if not self.crop:
            raise ModelError(f"The backbone {self.name!r} takes features, not pictures. Got a side of {crop} pixels.")
        training = self.training
        picture = torch.zeros(1, 3, crop, crop, dtype=torch.uint8, device=next(self.parameters()).device)
        try:
            with torch.no_grad():
                width = self.eval()(picture).shape[1]
        except (RuntimeError, AssertionError):
            width = 0
        if width != self.features:
            raise ModelError(
                f"The backbone {self.name!r} cannot look at {crop} x {crop} pixels; its own side is {self.crop}."
            )
        self.train(training)
        self.resize, self.crop = round(self.resize * crop / self.crop), crop

    def seen_at(self, side: int) -> "Backbone":
        """This network, with the same weights, for pictures of another side; itself for 0 and its own."""
        if side in (0, self.crop):
            return self
        other = copy(self)
        other.set_input_size(side)
        return other

    def split(self, stage: str) -> tuple[nn.Module, nn.Module]:
        """(trunk, rest) with rest(trunk(x)) == self(x), sharing this backbone's weights; `rest` begins with `stage`."""
        at = self._position(stage)
        return nn.Sequential(self.scale, self.body.part(0, at)), self.body.part(at)

    def freeze_before(self, stage: str | None) -> None:
        """Only `stage` and what follows it is trained; None trains everything."""
        at = 0 if stage is None else self._position(stage)
        for position, layer in enumerate(self.body.layers):
            layer.requires_grad_(position >= at)
        self.train(self.training)

    def _position(self, stage: str) -> int:
        if stage not in self.stages:
            raise ModelError(
                f"The stage of backbone {self.name!r} must be one of {', '.join(self.stages) or 'none'}."
                f" Got {stage!r} instead."
            )
        return self.stages.index(stage)


def fold_batch_norm(module: nn.Module) -> int:
    """Replace every convolution and the batch norm behind it by one convolution with a bias, in place; how many it was.

    The result computes what the module computed in eval mode, and can be trained on: there are no statistics left. Only
    neighbours among the children of one module are folded.
    """
    folded = 0
    for parent in list(module.modules()):
        convolution: nn.Conv2d | None = None
        for child_name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                convolution = child
            elif isinstance(child, nn.BatchNorm2d) and convolution is not None and child.running_var is not None:
                _fold_into(convolution, child)
                setattr(parent, child_name, getattr(child, "act", nn.Identity()))  # timm's norms carry an activation
                convolution = None
                folded += 1
            elif not isinstance(child, nn.Identity):
                convolution = None
    return folded


def _fold_into(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.no_grad():
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
    trained = norm.weight.requires_grad if norm.affine else convolution.weight.requires_grad
    convolution.weight.requires_grad_(trained)
    convolution.bias.requires_grad_(trained)


@torch.no_grad()
def folded(backbone: Backbone) -> Backbone:
    """A copy in eval mode with the batch norms folded; a plain copy where folding would change the features.

    A model of timm may call its parts in another order than it lists them. One random picture tells.
    """
    plain = deepcopy(backbone).eval()
    if backbone.folded or not fold_batch_norm(plain):
        return plain
    plain.folded = True
    picture = torch.randint(0, 256, (2, 3, backbone.crop, backbone.crop), generator=torch.Generator().manual_seed(0))
    picture = picture.to(next(backbone.parameters()).device, torch.uint8)
    was_training = backbone.training
    expected = backbone.eval()(picture)
    backbone.train(was_training)
    largest = float(expected.abs().max())
    if not math.isfinite(largest):
        raise ModelError(
            f"The features of {backbone.name!r} must be finite. They are not: its training has diverged; "
            "train again with a lower train.learning_rate."
        )
    if torch.allclose(plain(picture), expected, rtol=1e-2, atol=1e-3 * largest):
        return plain
    return deepcopy(backbone).eval()
