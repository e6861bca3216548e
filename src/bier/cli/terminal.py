"""What every command shares: where text goes, how progress looks, how JSON is printed."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
