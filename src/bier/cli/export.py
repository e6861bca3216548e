"""`bier export`: a model for other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from bier.cli.terminal import Backbone, Json, emit, model_or_backbone, say


def export(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the graph goes.")],
    model: Annotated[Path | None, typer.Argument(help="A run, or the folder of a model.")] = None,
    backbone: Backbone = None,
    to: Annotated[Literal["onnx"], typer.Option("--to", help="The format.")] = "onnx",
    learners: Annotated[int | None, typer.Option("--learners", metavar="M", help="Only the first M learners.")] = None,
    json: Json = False,
) -> None:
    """Write one graph with the scaling of pixels, the backbone and the test-time vector.

    Its input `pixels` is uint8 (N, crop, crop, 3) in RGB, any N; its output `vectors` is float32 (N, d).

    [bold]Examples[/bold]

    bier export runs/birds --to onnx --out birds.onnx

    bier export runs/birds --out small.onnx --learners 1

    bier export --backbone efficientnet_lite0 --out plain.onnx
    """
    from bier.models.export import export_onnx
    from bier.models.model import load

    loaded = load(model_or_backbone(model, backbone), precision="float32", device="cpu")
    export_onnx(loaded, out, learners)
    dimension = sum(loaded.groups[:learners])
    if json:
        emit({"out": str(out), "format": to, "crop": loaded.backbone.crop, "dimension": dimension})
    else:
        say(f"{out}: {loaded.backbone.crop}x{loaded.backbone.crop} pixels to {dimension} dimensions ({to})")
