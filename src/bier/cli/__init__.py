"""The command line: `main` runs a command and turns errors a user can mend into one line and exit code 2.

Each command is a function in a file of its own, whose docstring is its help. These files import torch and what needs it
inside the function, so that help and mistakes in options show at once.
"""

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from bier import __version__
from bier.cli import data, demo, embed, evaluate, export, index, lists, paper, search, serve, train
from bier.cli.terminal import command, is_first_process, say
from bier.errors import BierError, ConfigError
from bier.system import use_device

# Messages of torch, C++ and the system where memory runs out; there is no exception type for it.
NO_MEMORY = (
    *("allocate memory", "out of memory", "not enough memory", "bad_alloc"),
    *("can't start new thread", "failed to map segment", "could not create a primitive"),
)
MISSING_OPERATOR = re.compile(r"aten::\w+")
LONGEST = 2_000  # characters of a message, as a path of thousands would make it


class _Flags:
    """Typer shows `<bool>` behind a flag, as if it took a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return params


class _Command(_Flags, TyperCommand):
    pass


class _Group(_Flags, TyperGroup):
    pass


app = typer.Typer(
    name="bier",
    cls=_Group,
    help="Train an embedding ensemble on image folders, measure it on unseen classes, search with it.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda given: _show_version(given), help="Print the version."
        ),
    ] = False,
) -> None:
    """Options before the name of a command."""


def _show_version(given: bool) -> None:
    if given:
        print(f"bier {__version__}")
        raise typer.Exit


app.command("try")(serve.try_photos)
app.command()(demo.demo)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(embed.embed)
app.command()(index.index)
app.command()(search.search)
app.command()(search.label)
app.command()(serve.serve)
app.command()(lists.settings)
app.command()(lists.backbones)
app.command()(export.export)
app.add_typer(data.app, name="data", cls=_Group)
app.add_typer(paper.app, name="paper", cls=_Group)
COMPUTE = {"demo", "train", "evaluate", "embed", "index", "search", "label", "serve", "try_photos"}
COMPUTE |= {"backbones", "audit", "run"}
DEVICE = typer.Option(
    "--device",
    metavar="NAME",
    help="Compute on this device: cpu, cuda:1, mps, ...; auto takes the accelerator.",
)


def _on_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """The command with one more option, `--device`."""

    @wraps(run)
    def on_device(*arguments: Any, device: str, **options: Any) -> Any:
        if device != "auto":
            use_device(device)
        return run(*arguments, **options)

    kind, signature = Annotated[str, DEVICE], inspect.signature(run)
    option = inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=kind)
    on_device.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    on_device.__annotations__ = {**run.__annotations__, "device": kind}
    return on_device


for _one in (*app.registered_commands, *data.app.registered_commands, *paper.app.registered_commands):
    if _one.callback is not None and _one.callback.__name__ in COMPUTE:
        _one.callback = _on_device(_one.callback)
    # Typer keeps the line breaks of a docstring, and breaks its lines once more where the terminal is narrower.
    _one.cls = _Command
    _one.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(_one.callback) or "")


class _Notes(logging.Handler):
    """Prints what `bier` logs, such as folders that a listing leaves out; of several processes the first does."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_first_process():
            say(f"bier: {record.getMessage()}")


logging.getLogger("bier").handlers[:] = [_Notes()]
logging.getLogger("bier").setLevel(logging.INFO)


def main() -> NoReturn:
    _open_streams()
    try:
        _check_surroundings()
        code = app(args=_arguments(), standalone_mode=False)
        sys.stdout.flush()
    except BierError as error:
        _end(str(error), 2)
    except TyperException as error:
        _end(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", 130)
    except BrokenPipeError:  # as in `bier settings | head`: the reader has closed the output
        _end("", 1)
    # Errors that any command may raise anywhere.
    except OSError as error:
        place = "" if error.filename is None else f" {os.fsdecode(error.filename)}"
        _end(f"Cannot read or write{place or ' a file'}: {error.strerror or error}.", 2)
    except RecursionError:
        _end("What was given is nested too deeply to be read.", 2)
    except BaseException as error:
        if operator := MISSING_OPERATOR.search(str(error)) if isinstance(error, NotImplementedError) else None:
            _end(f"The device has no {operator[0]}. Compute on the CPU: --device cpu.", 2)
        if not _lacks_memory(error):
            raise
        # torch's own exception for an accelerator derives from RuntimeError; its message goes on for a page.
        reason = str(error).split(". ")[0] or "the command needs more than this machine has"
        smaller = "; try a smaller batch: train.batch_images=4 or --batch-size 16" * ("out of memory" in reason)
        _end(f"Memory ran out: {reason}{smaller}.", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Python has None for a stream that the shell has closed, as `>&-` does; what is printed there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123


def _check_surroundings() -> None:
    """What every library takes for granted, and answers with a traceback or a crash where it is not so."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("The folder that the command was started in is gone. Change to one that exists.") from None
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        value = os.environ.get(name, "0")
        if not value.isdecimal() or not value.isascii():
            raise ConfigError(
                f"The variable {name} must be a whole number, as torchrun sets it. Got {value!r} instead."
            )


def _lacks_memory(error: BaseException) -> bool:
    told = isinstance(error, RuntimeError | ImportError) and any(words in str(error) for words in NO_MEMORY)
    panic = type(error).__name__ == "PanicException"  # of a library in Rust: no Exception, and without a public name
    return isinstance(error, MemoryError) or told or panic


def _arguments() -> list[str]:
    """Those of the command line. An empty one would stand for the folder that the command was started in."""
    arguments = sys.argv[1:]
    if "" in arguments:
        place = arguments.index("")
        after = f" after {arguments[place - 1]}" if place else ""
        raise ConfigError(f"An argument must not be empty. Got ''{after}, as a shell variable without a value gives.")
    return arguments or ["--help"]


def _end(message: str, code: int) -> NoReturn:
    """Print one line and exit, also where nothing can be printed."""
    # A command that a message from below the command line names, as the reader can paste it.
    line = " ".join(message.split()).replace(": bier ", f": {command().strip()} ")
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} [...] {line[-LONGEST // 2 :]}"
    with suppress(OSError):
        if line:
            say(f"bier: {line}")
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more at its end, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
