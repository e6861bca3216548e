"""What every command shares: options, where text goes, how progress looks, how JSON is printed."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="NAME",
        help="The data set: glyphs (needs no root), folder, table, features, cub, cub-cropped, cars, cars-cropped, "
        "sop, inshop, vehicleid or cifar10.",
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="PATH",
        help="Where the data set is: its folder or the folder that contains it; for table and features the file.",
    ),
]
Size = Annotated[str, typer.Option("--size", metavar="SIZE", help="The test set of vehicleid: small, medium or large.")]
SkipBroken = Annotated[
    bool,
    typer.Option("--skip-broken", help="Leave out images that cannot be read, and list them, instead of stopping."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Keep prepared images in this folder; later runs read them from there, many times faster.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change one setting, like train.steps=500; may be repeated."
    ),
]


console = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]


def say(message: str) -> None:
    """A line for people, on standard error."""
    console.print(message, markup=False, soft_wrap=True)


def emit(result: Mapping[str, Any]) -> None:
    """The one JSON object of a command run with `--json`."""
    sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on standard error; silent where standard error is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield bar
