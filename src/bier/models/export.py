"""A model as one ONNX graph: scaling of pixels, backbone and test-time vector."""

import logging
import warnings
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from bier.errors import ConfigError, needs
from bier.files import file_aside
from bier.models.model import Model


class _Vectors(nn.Module):
    def __init__(self, model: Model, learners: int | None) -> None:
        super().__init__()
        self.network = deepcopy(model.network()).cpu().float()
        self.ensemble = deepcopy(model.ensemble).cpu()
        self.weighting, self.learners = model.weighting, learners
        self.pictures = bool(model.backbone.crop)

    def forward(self, pixels: Tensor) -> Tensor:
        if self.pictures:
            pixels = pixels.permute(0, 3, 1, 2).float()
        return self.ensemble.vector(self.network(pixels), self.weighting, self.learners)


def export_onnx(model: Model, path: str | Path, learners: int | None = None) -> None:
    """Write `path`: `pixels`, uint8 (N, crop, crop, 3) RGB, any N, to `vectors`, float32 (N, d), in float32 arithmetic.

    The crop is the centre of the prepared picture (longest side to `resize`, padded white). For the backbone `features`
    the input is `features`, float32 (N, h).
    """
    needs("onnx", "onnx")
    needs("onnxscript", "onnx")
    backbone, path = model.backbone, Path(path)
    model.ensemble.vector(torch.zeros(1, model.dimension), model.weighting, learners)  # an error where it cannot be
    if path.is_dir():  # before minutes of work
        raise ConfigError(f"The graph must be written to a file like model.onnx. Got the folder {path} instead.")
    if backbone.crop:
        name, example = "pixels", torch.zeros(2, backbone.crop, backbone.crop, 3, dtype=torch.uint8)
    else:
        name, example = "features", torch.zeros(2, backbone.features)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(path) as aside:
        _export(_Vectors(model, learners).eval(), example, name, aside)


def _export(module: nn.Module, example: Tensor, name: str, path: Path) -> None:
    chatter = logging.getLogger("torch.onnx")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # What torch's exporter and onnxscript say of their own insides is not for the user.
            for kind in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            torch.onnx.export(
                module,
                (example,),
                path,
                input_names=[name],
                output_names=["vectors"],
                dynamic_shapes=({0: torch.export.Dim("images")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        chatter.setLevel(level)
