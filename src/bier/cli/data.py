"""`bier data`: what a data set holds against what its protocol expects, and what it looks like."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bier.cli.terminal import Data, Json, Root, Size, console, emit, say
from bier.errors import DataError
from bier.files import file_aside

if TYPE_CHECKING:
    from PIL.Image import Image

    from bier.data import Dataset

Counts = Mapping[str, Mapping[str, int]]
Seed = Annotated[int, typer.Option("--seed", help="Fixes the split of folder, table and features, and the glyphs.")]
Validation = Annotated[
    float, typer.Option("--validation", help="Hold out this share of the training classes as validation.")
]
Split = Annotated[
    Literal["classes", "inside"],
    typer.Option("--split", help="Divide by whole classes, or the images inside every class."),
]
TestShare = Annotated[float, typer.Option("--test-share", help="The share that a split draws for test.")]


app = typer.Typer(help="Check a data set against its protocol, or look at it.", no_args_is_help=True)


@app.command()
def check(
    data: Data = "glyphs",
    root: Root = None,
    size: Size = "small",
    seed: Seed = 0,
    validation: Validation = 0.0,
    split: Split = "classes",
    test_share: TestShare = 0.5,
    json: Json = False,
) -> None:
    """Compare what is on disk with what the official protocol expects, count by count.

    Every image that the lists name is looked up. Exit code 2 if a count is wrong or a file is missing.

    [bold]Examples[/bold]

    bier data check --data cub --root ~/data/CUB_200_2011

    bier data check --data vehicleid --root ~/data --size large --json

    bier data check --data folder --root photos --validation 0.1
    """
    from bier.data import expected, load, note

    dataset = load(data, root, seed=seed, validation=validation, split=split, test_share=test_share, size=size)
    found, wanted = dataset.counts(), expected(data, size) if not validation else {}
    if json:
        emit(found)
    else:
        _tabulate(dataset, found, wanted)
    _refuse_missing(dataset)
    wrong = _differences(found, wanted)
    if wrong:
        raise DataError(f"The data set '{data}' is not what its protocol expects: {'; '.join(wrong)}. {note(data)}")
    if not json:
        say("All counts are as the protocol expects." if wanted else "All files are there.")


@app.command()
def show(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The picture to write, like sheet.png.")],
    data: Data = "glyphs",
    root: Root = None,
    part: Annotated[str, typer.Option("--part", help="The part to show: train, test, query, ...")] = "train",
    classes: Annotated[int, typer.Option("--classes", min=1, max=200, help="Rows: how many classes.")] = 12,
    images: Annotated[int, typer.Option("--images", min=1, max=100, help="Columns: images of each.")] = 8,
    size: Size = "small",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Write a contact sheet of classes and their images as one picture.

    [bold]Examples[/bold]

    bier data show --out glyphs.png

    bier data show --data cub-cropped --root ~/data --part test --classes 20 --out birds.png
    """
    from bier.data import load
    from bier.data.sheet import contact_sheet

    dataset = load(data, root, seed=seed, size=size)
    shown = dataset[part]
    title = f"{dataset.name} · {part} · {len(shown):,} images of {shown.present:,} classes"
    sheet = contact_sheet(shown, title, classes, images)
    _write_aside(sheet, out)
    if json:
        emit({"file": str(out), "width": sheet.width, "height": sheet.height})
    else:
        say(f"{title}: written to {out} ({sheet.width}x{sheet.height}).")


def _tabulate(dataset: "Dataset", found: Counts, wanted: Counts) -> None:
    from rich.table import Table

    table = Table(title=f"{dataset.name}, {dataset.protocol} protocol", title_justify="left")
    table.add_column("part")
    table.add_column("count")
    table.add_column("found", justify="right")
    if wanted:
        table.add_column("expected", justify="right")
        table.add_column("")
    for part, counts in found.items():
        for what, value in counts.items():
            goal = wanted.get(part, {}).get(what)
            verdict = "" if goal is None else "[green]as expected[/green]" if goal == value else "[red]differs[/red]"
            row = [part, what, f"{value:,}"]
            table.add_row(*row, *(["not stated" if goal is None else f"{goal:,}", verdict] if wanted else []))
    console.print(table)


def _differences(found: Counts, wanted: Counts) -> list[str]:
    """A few words for every count that is not as expected."""
    return [
        f"{part} has {found.get(part, {}).get(what, 0):,} {what}, expected {goal:,}"
        for part, counts in wanted.items()
        for what, goal in counts.items()
        if found.get(part, {}).get(what, 0) != goal
    ]


def _refuse_missing(dataset: "Dataset") -> None:
    """An error that counts the images that the lists name and the disk does not have."""
    from bier.images import printable

    listed: Sequence[Path] = [
        path for part in dataset.parts.values() if isinstance(part.images, tuple) for path in part.images
    ]
    missing = [path for path in listed if not path.is_file()]
    if missing:
        raise DataError(
            f"{len(missing):,} of the {len(listed):,} images of '{dataset.name}' are missing; the first is "
            f"{printable(missing[0])}."
        )


def _write_aside(sheet: "Image", out: Path) -> None:
    """The picture is complete under its name or not there at all."""
    from PIL.Image import registered_extensions

    known = registered_extensions()
    if out.suffix.lower() not in known or not out.parent.is_dir():
        raise DataError(
            f"The contact sheet must be a picture in a folder that exists, like sheet.png. Got {out} instead."
        )
    with file_aside(out) as aside:
        sheet.save(aside, format=known[out.suffix.lower()])
