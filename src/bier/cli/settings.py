"""`bier settings`: every setting with its default, the values it takes and what it means."""

import shutil
import textwrap
from collections.abc import Iterable
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import Json, emit
from bier.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from bier.config import Described


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
