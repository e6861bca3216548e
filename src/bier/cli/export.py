"""`bier export`: a model for other programs."""

import json as json_library
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bier.cli.terminal import Backbone, Json, emit, model_or_backbone, say
from bier.errors import ConfigError
from bier.files import folder_aside, read_file

if TYPE_CHECKING:
    from bier.models.model import Model


Out = Annotated[Path, typer.Option("--out", metavar="PATH", help="Where the graph or the folder goes.")]
ModelPath = Annotated[
    Path | None, typer.Argument(metavar="MODEL", help="A run, the folder of a model, or hf:owner/name.")
]
Format = Annotated[
    Literal["onnx", "hub"], typer.Option("--to", help="An ONNX graph, or a folder for the Hugging Face Hub.")
]
GraphInput = Annotated[
    Literal["image", "crops"],
    typer.Option(
        "--input", help="onnx: one decoded picture of any size, or a batch of crops that the caller has prepared."
    ),
]
Learners = Annotated[int | None, typer.Option("--learners", metavar="M", help="onnx: only the first M learners.")]
Results = Annotated[
    Path | None,
    typer.Option("--results", metavar="FILE", help="hub: what `bier evaluate --json` has printed, for the card."),
]
Licence = Annotated[str | None, typer.Option("--licence", metavar="NAME", help="hub: of the weights.")]


def export(
    out: Out,
    model: ModelPath = None,
    backbone: Backbone = None,
    to: Format = "onnx",
    takes: GraphInput = "image",
    learners: Learners = None,
    results: Results = None,
    licence: Licence = None,
    json: Json = False,
) -> None:
    """Write a model for other programs: an ONNX graph, or a folder for the Hugging Face Hub.

    The graph has all that follows decoding: resizing, padding, cropping and scaling of the picture, the backbone and
    the test-time vector. Its input `image` is uint8 (height, width, 3) in RGB, upright, of any size; its output
    `vector` is float32 (d). With --input crops it has no resizing and takes batches: `pixels`, uint8 (N, crop, crop,
    3), any N, to `vectors`, float32 (N, d).

    The folder has the weights, config.json and a model card; `hf upload OWNER/NAME FOLDER` uploads it, and
    hf:OWNER/NAME is then a model in every command.

    [bold]Examples[/bold]

    bier export runs/birds --to onnx --out birds.onnx

    bier export runs/birds --out small.onnx --learners 1

    bier export runs/birds --out batches.onnx --input crops

    bier export --backbone efficientnet_lite0 --out plain.onnx

    bier export runs/birds --to hub --results birds.json --licence cc-by-nc-4.0 --out birds
    """
    from bier.models.model import load

    source = model_or_backbone(model, backbone)
    if to == "hub":
        if learners is not None:
            raise ConfigError("--learners is for --to onnx; from the hub, encode(learners=M) gives a shorter vector.")
        if takes != "image":
            raise ConfigError("--input is for --to onnx.")
        loaded = load(source, device="cpu")
        _for_hub(loaded, source if isinstance(source, Path) else None, out, results, licence)
    else:
        from bier.models.export import export_onnx

        if results is not None or licence is not None:
            raise ConfigError("--results and --licence are for the model card of --to hub.")
        loaded = load(source, precision="float32", device="cpu")
        export_onnx(loaded, out, learners, takes=takes)
    dimension = sum(loaded.groups[:learners])
    if json:
        emit({"out": str(out), "format": to, "crop": loaded.backbone.crop, "dimension": dimension})
    elif to == "hub":
        say(f"{out}: {_input_of(loaded, 'crops')} to {dimension} dimensions (hub)")
        say(f"Read {out / 'README.md'}, then upload it with: hf upload OWNER/NAME {out}")
    else:
        say(f"{out}: {_input_of(loaded, takes)} to {dimension} dimensions (onnx)")


def _input_of(model: "Model", takes: str) -> str:
    crop = model.backbone.crop
    if not crop:
        return f"{model.backbone.features} features"
    return "a picture of any size" if takes == "image" else f"{crop}x{crop} pixels"


def _for_hub(model: "Model", run: Path | None, out: Path, results: Path | None, licence: str | None) -> None:
    """The folder with weights, config.json and a card, and the retrieval picture of the run's report if it has one."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"The folder {str(out)!r} must be new or empty.")
    card: dict[str, Any] = {"licence": licence, "results": _read_results(results) if results else None}
    if run is not None and (run / "config.toml").is_file():
        lines = read_file(run / "config.toml").decode("utf-8").splitlines()
        # Paths of this machine are private and of no use elsewhere. The checksum covers them and is left out too.
        private = ("root =", "cache =", "weights =", "sha256 =")
        card["settings"] = "\n".join(line for line in lines if not line.startswith(private))
    pictures = [run / "report" / f"{name}.png" for name in ("typical", "learners")] if run is not None else []
    with folder_aside(out) as aside:
        if picture := next(filter(Path.is_file, pictures), None):
            shutil.copyfile(picture, aside / picture.name)
            card["picture"] = picture.name
        model.save_pretrained(aside, model_card_kwargs=card)


def _read_results(path: Path) -> dict[str, Any]:
    try:
        found = json_library.loads(read_file(path))
        assert isinstance(found["recall"]["ensemble"], dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"--results must be a file that `bier evaluate --json` has printed. Got {path}.") from error
    return dict(found)
