"""What every backbone is: a channel scaling, then named stages in order, then one feature vector an image."""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bier.errors import ModelError


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

    The channel scaling is inside, so that nobody can forget it. `resize` is the side of the prepared image that `crop`
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
    ) -> None:
        super().__init__()
        self.name = name
        self.features = features
        self.crop = crop
        self.resize = resize
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

    def look_at(self, crop: int) -> None:
        """Take pictures of another side; the prepared square keeps its proportion to the crop."""
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
