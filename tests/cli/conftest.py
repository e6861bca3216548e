"""Running a command in this process, through the same door as a terminal does."""

import sys
from collections.abc import Callable

import pytest

from bier.cli import main


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`cli("train", "--data", ...)` gives the exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bier", *map(str, arguments)])
        monkeypatch.setattr("bier.cli.terminal.console.width", 2000)  # no line is broken
        monkeypatch.setattr("bier.cli.terminal.SECONDS_BETWEEN_LINES", 3600)  # progress, on a slow machine
        with pytest.raises(SystemExit) as ended:
            main()
        out, said = capsys.readouterr()
        return int(ended.value.code or 0), out, said

    return run
