"""What every command shares: options, where text goes, how progress looks, how JSON is printed."""

import json
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from bier.errors import BierError, ConfigError
from bier.files import is_url, place_of, printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import Progress, Task, TaskID
    from rich.text import Text

    from bier.models.model import Untrained

SECONDS_BETWEEN_LINES = 10.0  # of progress where there is no terminal
_CREDENTIALS = re.compile(r"://[^\s/]*@")
NAME_WIDTH = 24  # a longer name of a table's row takes more lines where space is short

Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="NAME",
        help="The data set: glyphs (needs no root), folder, table, features, cub, cub-cropped, cars, cars-cropped, "
        "sop, inshop, vehicleid or cifar10.",
    ),
]
Root = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="PATH",
        help="Where the data set is: its folder or the folder that contains it; for table and features the file. "
        "For folder and table also a URL.",
    ),
]


Photos = Annotated[
    str | None,
    typer.Argument(
        metavar="PHOTOS",
        help="A folder with one folder per class, or a table of images; with --data the root of that data set.",
    ),
]


def data_and_root(photos: str | None, data: str | None, root: str | None, command: str) -> tuple[str, str | None]:
    """The data set that a command is about: photographs need no name, and nothing at all is explained."""
    if photos is not None and root is not None:
        raise ConfigError(f"Give the photographs once. Got {photos!r} and --root {root!r}.")
    root = photos if root is None else root
    if root is not None:
        data = data or ("table" if root.lower().endswith((".csv", ".parquet")) else "folder")
        if data in ("folder", "table"):  # a benchmark says what belongs there
            check_place(root)
    if data is None:
        raise ConfigError(
            "Give a folder of photographs with one folder per class, like photos/mugs/1.jpg, or a data set by its "
            f"name, like --data cub --root CUB_200_2011. For photographs: bier {command} photos"
        )
    if data == "glyphs" and root is not None:
        raise ConfigError(f"The data set 'glyphs' draws its images and takes no folder. Got {root!r}.")
    return data, root


def check_place(place: str) -> None:
    """Before anything heavy is imported; what it holds is checked where it is read."""
    if not is_url(place) and not os.path.lexists(Path(place).expanduser()):
        raise ConfigError(f"There is no folder or file {place!r}.")


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
MoreImages = Annotated[
    str | None,
    typer.Argument(
        metavar="IMAGES",
        help="With a model: a folder of images, or a table (CSV or Parquet) with the columns path and label; or the "
        "URL of one.",
    ),
]
Backbone = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        metavar="NAME",
        help="Use the plain features of this pretrained backbone, like efficientnet_lite0, in place of a trained "
        "model. NAME=FILE reads its weights from a file.",
    ),
]
Backend = Annotated[
    Literal["torch", "onnx", "openvino"],
    typer.Option(
        "--backend", help="What runs the network; on a CPU onnx and openvino are faster than torch for some networks."
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help="Look at each picture once, at the resolution of training: several times as fast and less accurate where "
        "the model does more (docs/training.md).",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change one setting, like train.steps=500; may be repeated."
    ),
]


def shown(text: str) -> str:
    """Text of several lines without control characters: a label may hold codes that a terminal obeys.

    Nor with the user and the password of a URL, as a table of images may have them.
    """
    return "\n".join(map(printable, _CREDENTIALS.sub("://***@", text).split("\n")))


class PlainConsole(Console):
    """Prints what it is given, which may come from anybody's data: no markup, no emoji codes, no control characters."""

    def render_str(self, text: str, **options: Any) -> "Text":
        return super().render_str(shown(text), **options)


console = PlainConsole(stderr=True, highlight=False, markup=False, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]


def untrained(backbone: str) -> "Untrained":
    """The model that `--backbone` names."""
    from bier.models.model import Untrained

    name, _, file = backbone.partition("=")
    return Untrained(name, Path(file) if file else None)


def model_and_images(first: str, second: str | None, backbone: str | None) -> tuple["Path | Untrained", Path | str]:
    """Arguments MODEL IMAGES; with `--backbone` only IMAGES, which may be a URL."""
    given = [path for path in (first, second) if path is not None]
    if len(given) != (2 if backbone is None else 1):
        wanted = "a run or model and then the images, or --backbone NAME and the images alone"
        raise ConfigError(f"Give {wanted}. Got {len(given)} path{'s' * (len(given) != 1)} instead.")
    return (downloaded(Path(given[0])) if backbone is None else untrained(backbone)), place_of(given[-1])


def model_or_backbone(model: Path | None, backbone: str | None) -> "Path | Untrained":
    """An argument MODEL, or `--backbone` in its place."""
    if (model is None) == (backbone is None):
        raise ConfigError("Give either a run or model, or --backbone NAME.")
    if model is not None:
        return downloaded(model)
    assert backbone is not None
    return untrained(backbone)


def downloaded(model: Path) -> Path:
    """`hf:owner/name` as the folder that it was downloaded to; any other path as it is, without waiting for torch."""
    if not str(model).startswith("hf:"):
        return model
    from bier.models.model import local_folder

    return local_folder(model)


def is_first_process() -> bool:
    """Whether torchrun has not started this process, or has started it first: of several processes one prints."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """A line for people, on standard error."""
    console.print(message, soft_wrap=True)


def say_skipped(skipped: Iterable[Mapping[str, str]]) -> None:
    """The list that `--skip-broken` promises."""
    for broken in skipped:
        say(f"skipped: {broken['reason']}")


def emit(result: Mapping[str, Any]) -> None:
    """The one JSON object of a command run with `--json`."""
    try:
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()
    except OSError as error:
        raise BierError(f"Cannot write the result to standard output: {error.strerror or error}.") from error


def table_of_numbers(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    caption: str | None = None,
    style: Callable[[int], str | None] = lambda row: None,
) -> "Group":
    """A table that fits the terminal without cutting anything: with too many columns it becomes several, one below
    the other, each with the names of the rows.

    Args:
        head: The headings. One of several words takes as many lines where space is short.
        rows: The cells; the first of each row is its name.
        title: Above the table.
        caption: Below the table.
        style: The style of a row by its number.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    names, *columns = zip(head, *rows, strict=True)
    name_width = max(map(len, names))
    if len(_side_by_side(columns, console.width - name_width - 2)) > 1:
        name_width = min(name_width, NAME_WIDTH)
    parts: list[Any] = [Text(shown(title), style="bold")] if title else []
    for some in _side_by_side(columns, console.width - name_width - 2):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column(head[0], overflow="fold", min_width=name_width)
        for column in some:
            table.add_column(column[0], justify="right", min_width=_number_width(column))
        for number, cells in enumerate(zip(names[1:], *(column[1:] for column in some), strict=True)):
            table.add_row(*map(printable, cells), style=style(number))
        parts.append(table)
    return Group(*parts, *([Text(shown(caption), style="dim")] if caption else []))


def _number_width(column: Sequence[str]) -> int:
    """Enough for each number with its spread, and each word of the heading."""
    return max(max(map(len, column[1:]), default=0), max(map(len, column[0].split()), default=0))


def _side_by_side(columns: Iterable[Sequence[str]], width: int) -> list[list[Sequence[str]]]:
    """The columns in groups, each as many as fit the width, and at least one."""
    groups: list[list[Sequence[str]]] = []
    left = 0
    for column in columns:
        needed = _number_width(column) + 2
        if not groups or needed > left:
            groups.append([])
            left = width
        groups[-1].append(column)
        left -= needed
    return groups


def command(*arguments: object, processes: bool = False) -> str:
    """A `bier` command as the reader can paste it: with the program as it was started, and quoted where needed.

    Args:
        arguments: What follows `bier`.
        processes: Start as many processes as torchrun started here, as resuming a run needs them.
    """
    python = _program(sys.executable)
    started, words = Path(sys.argv[0]), shlex.join(map(str, arguments))
    if processes and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        return f"{python} -m torch.distributed.run --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m bier {words}"
    if started.name == "__main__.py":
        return f"{python} -m bier {words}"
    return f"{_program(sys.argv[0])} {words}"


def _program(path: str) -> str:
    """Its name where the shell finds it by that, else its path."""
    found = shutil.which(Path(path).name)
    same = found is not None and Path(found).absolute() == Path(path).absolute()
    return Path(path).name if same else shlex.quote(path)


@contextmanager
def progress_bar() -> Iterator["Progress"]:
    """Progress on standard error: a bar in a terminal, elsewhere a plain line about every ten seconds."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        if console.is_terminal or not is_first_process():
            yield bar
        else:
            with _plain_lines(bar):
                yield bar


@contextmanager
def step(bar: "Progress", what: str) -> Iterator["TaskID"]:
    """A part of the work, shown while it lasts; its task is there to be updated."""
    task = bar.add_task(printable(what), total=None, status="")
    try:
        yield task
    finally:
        bar.remove_task(task)


@contextmanager
def counted_step(bar: "Progress", what: str) -> Iterator[Callable[[int, int], None]]:
    """As `step`, with a callback (done, total) for work that counts what it has done."""
    with step(bar, what) as task:
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _plain_lines(bar: "Progress") -> Iterator[None]:
    """Print where the work stands at regular times, from a thread, so that a step that reports nothing shows too."""
    ended = threading.Event()
    begun = time.monotonic()

    def repeat() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            tasks = [task for task in bar.tasks if task.visible and not task.finished]
            lines = [_plain(task) for task in tasks if task.total is not None or task is tasks[-1]]
            say("; ".join(lines) or f"working, {time.monotonic() - begun:.0f} s")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _plain(task: "Task") -> str:
    """`training: 120 of 600, 0:01:05 left, loss 0.512`, with what is known of it."""
    if task.total is None:
        return f"{task.description}, {task.elapsed or 0:.0f} s"
    known = [f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}"]
    if task.time_remaining is not None:
        known.append(f"{timedelta(seconds=round(task.time_remaining))} left")
    if task.fields.get("status"):
        known.append(task.fields["status"])
    return ", ".join(known)


def follow_steps(bar: "Progress") -> Callable[[str, int, int], None]:
    """A callback (step, done, total) that shows each step as a line of its own; a total of 0 is not known."""
    tasks: dict[str, TaskID] = {}

    def follow(step: str, done: int, total: int) -> None:
        if step not in tasks:
            tasks[step] = bar.add_task(step, total=None, status="")
        bar.update(tasks[step], completed=done, total=total or None)

    return follow
