"""The command line: `main` runs a command and turns errors a user can mend into one line and exit code 2."""

import sys
from importlib import import_module
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from bier.cli.terminal import say
from bier.errors import BierError

app = typer.Typer(
    name="bier",
    help="Train an embedding ensemble on image folders, measure it honestly, search with it.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

COMMANDS = ("demo", "train", "evaluate", "embed", "index", "search", "serve", "paper", "data", "export")


def _register() -> None:
    """Each command lives in a file of its own that has `register(app)`."""
    for name in COMMANDS:
        import_module(f"bier.cli.{name}").register(app)


def main() -> NoReturn:
    _register()
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except BierError as error:
        _end(str(error), 2)
    except TyperException as error:
        _end(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _end(message: str, code: int) -> NoReturn:
    say("bier: " + " ".join(message.split()))
    sys.exit(code)
