"""The command line: `main` runs a command and turns errors a user can mend into one line and exit code 2.

Each command is a function in a file of its own, whose docstring is its help. These files import torch and what needs it
inside the function, so that help and mistakes in options show at once.
"""

import sys
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from bier.cli import data, demo, embed, evaluate, export, index, paper, search, serve, settings, train
from bier.cli.terminal import command, say
from bier.errors import BierError

app = typer.Typer(
    name="bier",
    help="Train an embedding ensemble on image folders, measure it on unseen classes, search with it.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(embed.embed)
app.command()(index.index)
app.command()(search.search)
app.command()(serve.serve)
app.command()(settings.settings)
app.command()(export.export)
app.add_typer(data.app, name="data")
app.add_typer(paper.app, name="paper")


def main() -> NoReturn:
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
    # A command that a message from below the command line names, as the reader can paste it.
    say("bier: " + " ".join(message.split()).replace(": bier ", f": {command().strip()} "))
    sys.exit(code)
