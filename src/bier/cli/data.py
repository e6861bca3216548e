"""`bier data`: what a data set holds against what its protocol expects, what it looks like, what is wrong with it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import isfile, lexists
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bier.cli.terminal import (
    Backbone,
    Cache,
    Data,
    Json,
    Photos,
    Root,
    Size,
    console,
    data_and_root,
    emit,
    follow_steps,
    progress_bar,
    say,
    untrained,
)
from bier.errors import DataError
from bier.files import file_aside, is_url, printable, writing
from bier.folders import check_own_folder

if TYPE_CHECKING:
    from PIL.Image import Image

    from bier.data import Dataset
    from bier.evaluate.audit import Audit
    from bier.images import Broken

LISTED = 50  # images that cannot be read
Counts = Mapping[str, Mapping[str, int]]
RANKED = {  # by protocol
    "self": "each test image is searched for among all other test images",
    "query-gallery": "each query is searched for in the gallery",
    "repeated-gallery": "one image of each class is drawn as gallery, ten times",
    "accuracy": "test images are classified",
}
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Fixes the split of folder, table and features, and the glyphs.")
]
Validation = Annotated[
    float,
    typer.Option("--validation", metavar="SHARE", help="Hold out this share of the training classes as validation."),
]
Split = Annotated[
    Literal["classes", "inside"],
    typer.Option("--split", help="Divide by whole classes, or the images inside every class."),
]
TestShare = Annotated[
    float, typer.Option("--test-share", metavar="SHARE", help="The share that a split draws for test.")
]


app = typer.Typer(help="Check a data set, look at it, or find what may be wrong with it.", no_args_is_help=True)


@app.command()
def check(
    photos: Photos = None,
    data: Data = None,
    root: Root = None,
    size: Size = "small",
    seed: Seed = 0,
    validation: Validation = 0.0,
    split: Split = "classes",
    test_share: TestShare = 0.5,
    quick: Annotated[bool, typer.Option("--quick", help="Only check that the files exist; do not read them.")] = False,
    json: Json = False,
) -> None:
    """Count images and classes, read every image, and compare with the official counts of a benchmark.

    Images that are missing or cannot be read are listed. Exit code 2 if there is one, or if a count is wrong.

    [bold]Examples[/bold]

    bier data check --data cub --root ~/data/CUB_200_2011

    bier data check --data vehicleid --root ~/data --size large --json

    bier data check photos --validation 0.1
    """
    data, root = data_and_root(photos, data, root, "data check")
    from bier.data import expected, load, note

    dataset = load(data, root, seed=seed, validation=validation, split=split, test_share=test_share, size=size)
    found, wanted = dataset.counts(), expected(data, size) if not validation else {}
    with progress_bar() as bar:
        unreadable = _missing(dataset) if quick else _unreadable(dataset, follow_steps(bar))
    if json:
        emit({**found, **({"unreadable": [one.named() for one in unreadable]} if unreadable else {})})
    else:
        _tabulate(dataset, found, wanted)
        for one in unreadable[:LISTED]:
            say(one.reason)
        if len(unreadable) > LISTED:
            say(f"... and {len(unreadable) - LISTED:,} more; --json lists all")
    _refuse(dataset, unreadable)
    wrong = _differences(found, wanted)
    if wrong:
        raise DataError(f"The data set '{data}' is not what its protocol expects: {'; '.join(wrong)}. {note(data)}")
    if not json:
        say("All files are there." if quick else "All images can be read.")
        if wanted:
            say("All counts are as the protocol expects.")


@app.command()
def show(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The picture to write, like sheet.png.")],
    photos: Photos = None,
    data: Data = None,
    root: Root = None,
    part: Annotated[
        str, typer.Option("--part", metavar="NAME", help="The part to show: train, test, query, ...")
    ] = "train",
    classes: Annotated[
        int, typer.Option("--classes", metavar="N", min=1, max=200, help="Rows: how many classes.")
    ] = 12,
    images: Annotated[int, typer.Option("--images", metavar="N", min=1, max=100, help="Columns: images of each.")] = 8,
    size: Size = "small",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Write a contact sheet of classes and their images as one picture.

    [bold]Examples[/bold]

    bier data show --data glyphs --out glyphs.png

    bier data show --data cub-cropped --root ~/data --part test --classes 20 --out birds.png
    """
    from bier.data import load
    from bier.data.sheet import contact_sheet

    data, root = data_and_root(photos, data, root, "data show")
    dataset = load(data, root, seed=seed, size=size)
    shown = dataset[part]
    title = f"{dataset.name} · {part} · {len(shown):,} images of {shown.present:,} classes"
    sheet = contact_sheet(shown, title, classes, images)
    _write_aside(sheet, out)
    if json:
        emit({"file": str(out), "width": sheet.width, "height": sheet.height})
    else:
        say(f"{title}: written to {out} ({sheet.width}x{sheet.height}).")


@app.command()
def audit(
    photos: Photos = None,
    data: Data = None,
    root: Root = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write findings.csv and sheets of pictures here.")
    ] = None,
    backbone: Backbone = "efficientnet_lite0",
    size: Size = "small",
    seed: Seed = 0,
    validation: Validation = 0.0,
    split: Split = "classes",
    test_share: TestShare = 0.5,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Find what may be wrong with a data set before training: copies, leaks, wrong labels, outliers, bad files.

    Copies are images with the same content, and those that were re-saved, resized, mirrored or slightly cropped. A copy
    in another part of the split is a leak. Labels are suspect where another class is much nearer than the own one.
    findings.csv has every finding, the worst first; nothing is changed or deleted.

    [bold]Examples[/bold]

    bier data audit photos --out audit

    bier data audit shop.csv --split inside --json
    """
    from bier.data import load
    from bier.evaluate.audit import AUDIT, FINDINGS, ON_A_SHEET, audit_dataset
    from bier.models.model import load as load_model

    start = perf_counter()
    data, root = data_and_root(photos, data, root, "data audit")
    dataset = load(data, root, seed=seed, validation=validation, split=split, test_share=test_share, size=size)
    if out is not None:  # before minutes of work
        check_own_folder(out, AUDIT)
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
    with progress_bar() as bar:
        model = load_model(untrained(backbone or "efficientnet_lite0"))
        done = audit_dataset(model, dataset, cache, progress=follow_steps(bar))
    place = None if root is None or is_url(root) else Path(root).expanduser()
    base = place.parent if place is not None and place.is_file() else place
    written = [] if out is None else [str(path) for path in done.write(out, base)]
    seconds = round(perf_counter() - start, 3)
    if json:
        counts = {name: len(done.of(name)) for name in FINDINGS}
        worst = {name: [done.described(one, base) for one in done.of(name)[:ON_A_SHEET]] for name in FINDINGS}
        parts = dataset.counts()
        emit({"parts": parts, "counts": counts, "worst": worst, "written": written, "seconds": seconds})
        return
    _tabulate_findings(done, base)
    say(f"\n{len(done.part):,} images, {seconds:.1f} s" + (f"; see {', '.join(written)}" if written else ""))


def _tabulate_findings(done: "Audit", root: Path | None) -> None:
    from rich.table import Table

    from bier.evaluate.audit import FINDINGS

    table = Table(box=None)
    table.add_column("finding", no_wrap=True)
    table.add_column("found", justify="right")
    table.add_column("")
    for name, meaning in FINDINGS.items():
        table.add_row(name, f"{len(done.of(name)):,}", meaning)
    console.print(table)
    for name in FINDINGS:
        worst = [done.described(one, root) for one in done.of(name)[:3]]
        if worst:
            say(f"\n{name}, the worst first:")
        for row in worst:
            say("  " + "  ".join(str(row[key]) for key in ("score", "path", "other_path") if row[key] is not None))


def _tabulate(dataset: "Dataset", found: Counts, wanted: Counts) -> None:
    from rich.table import Table
    from rich.text import Text

    say(f"{dataset.name}: {RANKED[dataset.protocol]}.")
    table = Table()
    table.add_column("part")
    table.add_column("count")
    table.add_column("found", justify="right")
    if wanted:
        table.add_column("expected", justify="right")
        table.add_column("")
    for part, counts in found.items():
        for what, value in counts.items():
            goal = wanted.get(part, {}).get(what)
            verdict = "" if goal is None else Text("as expected", "green") if goal == value else Text("differs", "red")
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


def _missing(dataset: "Dataset") -> "list[Broken]":
    """The images that the lists name and the disk does not have."""
    from bier.images import Broken

    listed = [path for part in dataset.parts.values() if isinstance(part.images, tuple) for path in part.images]
    return [
        Broken(number, printable(path), f"There is no file {printable(path)}.")
        for number, path in enumerate(listed)
        if not isfile(path)  # noqa: PTH113 - unlike Path.is_file, no error for a name that no file can have
    ]


def _unreadable(dataset: "Dataset", progress: "Callable[[str, int, int], None]") -> "list[Broken]":
    """The images that cannot be read, or that their box misses."""
    from bier.images import find_broken

    broken: list[Broken] = []
    for name, part in dataset.parts.items():
        if isinstance(part.images, tuple):
            follow = partial(progress, f"reading the images of '{name}'")
            broken += find_broken(part.images, part.boxes, progress=follow)
    return broken


def _refuse(dataset: "Dataset", unreadable: "Sequence[Broken]") -> None:
    """An error that counts the images that cannot be read."""
    if not unreadable:
        return
    count = sum(len(part) for part in dataset.parts.values())
    which = "cannot be read" if any(lexists(one.path) for one in unreadable) else "are missing"
    raise DataError(
        f"{len(unreadable):,} of the {count:,} images of '{dataset.name}' {which}; the first is {unreadable[0].path}."
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
