"""A model as one ONNX graph: a decoded picture, or a batch of prepared ones, to test-time vectors."""

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from bier.errors import ConfigError, needs
from bier.files import file_aside
from bier.images.transforms import WHITE
from bier.models.backends import onnx_graph
from bier.models.model import Model

GraphInput: TypeAlias = Literal["image", "crops"]

# `prepare` and the centre crop of bier.images.transforms, in ONNX's own text form. Sides are divided as float64 and
# halves are rounded to even, as Python does. The picture stays uint8 (H, W, 3), for which ONNX Runtime resizes with
# whole numbers, as Pillow does.
_PREPARE = """
<ir_version: {ir_version}, opset_import: ["" : {opset}]>
prepare (uint8[height, width, 3] image) => (uint8[1, {crop}, {crop}, 3] pixels)
<int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] three = {{3}},
 int64[1] size = {{{size}}}, uint8 white = {{{white}}},
 int64[2] start = {{{start}, {start}}}, int64[2] end = {{{end}, {end}}}, int64[2] axes = {{1, 2}},
 int64[8] widen = {{0, {before}, {before}, 0, 0, {after}, {after}, 0}}>
{{
  sides = Shape <end = 2> (image)
  longest = ReduceMax (sides)
  scaled = Mul (sides, size)
  numerator = Cast <to = 11> (scaled)
  denominator = Cast <to = 11> (longest)
  exact = Div (numerator, denominator)
  rounded = Round (exact)
  whole = Cast <to = 7> (rounded)
  inner = Max (whole, one)
  sizes = Concat <axis = 0> (one, inner, three)
  batch = Unsqueeze (image, zero)
  resized = Resize <mode = "linear", antialias = 1> (batch, , , sizes)
  room = Sub (size, inner)
  margin = Div (room, two)
  rest = Sub (room, margin)
  pads = Concat <axis = 0> (zero, margin, zero, zero, rest, zero)
  square = Pad (resized, pads, white)
  widened = Pad <mode = "edge"> (square, widen)
  pixels = Slice (widened, start, end, axes)
}}
"""


class _Vectors(nn.Module):
    def __init__(self, model: Model, learners: int | None, single: bool) -> None:
        super().__init__()
        self.network = deepcopy(model.network()).cpu().float()
        self.ensemble = deepcopy(model.ensemble).cpu()
        self.weighting, self.learners, self.single = model.weighting, learners, single
        self.pictures = bool(model.backbone.crop)
        self.mirror = model.mirror and self.pictures

    def forward(self, pixels: Tensor) -> Tensor:
        if self.pictures:
            pixels = pixels.permute(0, 3, 1, 2).float()
        z = self.network(pixels)
        if self.mirror:
            z = (z + self.network(pixels.flip(-1))) / 2
        vectors = self.ensemble.vector(z, self.weighting, self.learners)
        return vectors[0] if self.single else vectors


def export_onnx(model: Model, path: str | Path, learners: int | None = None, *, takes: GraphInput = "image") -> None:
    """Write `path`, a graph that computes the test-time vector in float32 arithmetic.

    Args:
        model: any model.
        path: the file to write, replaced if it is there.
        learners: the vector of the first m learners only.
        takes: `image`: from `image`, uint8 (height, width, 3) RGB of any size as a decoder returns it, to `vector`,
            float32 (d,). The graph resizes, pads, crops and scales as `Model.encode` does. `crops`: from `pixels`,
            uint8 (N, crop, crop, 3), any N, prepared by the caller, to `vectors`, float32 (N, d). The backbone
            `features` has neither: from `features`, float32 (N, h), to `vectors`.
    """
    needs("onnx", "onnx")
    needs("onnxscript", "onnx")
    import onnx

    if takes not in get_args(GraphInput):
        raise ConfigError(f"The 'takes' parameter must be one of {', '.join(get_args(GraphInput))}. Got {takes!r}.")
    path, single = Path(path), takes == "image" and bool(model.backbone.crop)
    model.ensemble.vector(torch.zeros(1, model.dimension), model.weighting, learners)  # an error where it cannot be
    if path.suffix != ".onnx" or path.is_dir():  # before minutes of work, and in place of no picture
        raise ConfigError(f"The graph must be written to a file that ends in .onnx. Got {str(path)!r} instead.")
    graph = _network_graph(model, learners, single)
    if single:
        graph = _with_preparation(graph, model.backbone.resize, model.backbone.crop)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(path) as aside:
        onnx.save(graph, aside)


def _network_graph(model: Model, learners: int | None, single: bool) -> Any:
    backbone = model.backbone
    count = 1 if single else 2  # 1 would be taken for a constant
    if backbone.crop:
        name, example = "pixels", torch.zeros(count, backbone.crop, backbone.crop, 3, dtype=torch.uint8)
    else:
        name, example = "features", torch.zeros(count, backbone.features)
    module = _Vectors(model, learners, single).eval()
    return onnx_graph(module, example, name, "vector" if single else "vectors", fixed=single)


def _with_preparation(network: Any, size: int, crop: int) -> Any:
    """The network behind the preparation of one picture; `pixels`, its input so far, is what joins the two."""
    from onnx import compose, parser

    opset = next(one.version for one in network.opset_import if not one.domain)
    missing = max(0, crop - size)  # then the border is repeated, as `augment` does
    start = max(0, size - crop) // 2
    before = missing // 2
    text = _PREPARE.format(
        ir_version=network.ir_version,
        opset=opset,
        size=size,
        crop=crop,
        white=WHITE,
        start=start,
        end=start + crop,
        before=before,
        after=missing - before,
    )
    prepare = compose.add_prefix(
        parser.parse_model(text), "prepare/", rename_inputs=False, rename_outputs=False
    )  # a name that the network has too would be an error
    return compose.merge_models(prepare, network, io_map=[("pixels", "pixels")], name="bier")
