"""What is printed in a terminal of 80 columns: no word is cut, and no number is broken."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bier.cli import app, terminal
from bier.cli.demo import KS, METHODS, comparison
from bier.cli.evaluate import comparison_table, single_table
from bier.cli.paper import _print
from bier.paper.budgets import MAIN
from bier.paper.experiments import EXPERIMENTS
from bier.paper.tables import Line, Spread, Table

CUT = "\u2026"
NAMES = ("ensemble", "learner-1", "learner-2", "learner-3", "prefix-2")
EVALUATED = {
    "recall": {name: dict.fromkeys(("1", "2", "4", "8", "16", "32"), 98.76) for name in NAMES},
    "weighting": "sqrt",
    "groups": [96, 160, 256],
    "measured": {"data": "folder", "part": "test", "classes": 11316, "images": 60502, "root": "photos/of/the/shop"},
    "classifier_correlation": 0.1234,
    "feature_correlation": 0.0987,
    "map_at_r": 45.67,
    "queries": 60502,
    "gallery": 60502,
    "without_positive": 0,
    "seconds": 123.4,
}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Sends what is printed to 80 columns; gives it when called."""
    text = io.StringIO()
    console = Console(file=text, width=80, highlight=False)
    monkeypatch.setattr(terminal, "console", console)
    monkeypatch.setattr("bier.cli.paper.console", console)
    return text.getvalue


def rendered(table: object) -> str:
    text = io.StringIO()
    Console(file=text, width=80).print(table)
    return text.getvalue()


@pytest.mark.parametrize("seeds", [1, 3])
def test_demo(seeds: int) -> None:
    measures = [*(f"R@{k}" for k in KS), "feature_correlation", "classifier_correlation", "training_seconds"]
    row = {name: {"mean": 123.456, "spread": 12.345} for name in measures}
    text = rendered(comparison(dict.fromkeys(METHODS, row), seeds))
    assert CUT not in text
    for words in ("feature correlation", "classifier correlation", "baseline", "a-bier", "difference"):
        assert words in text
    assert text.count("123.46" + (" ± 12.35" if seeds > 1 else "")) == 2 * len(KS)


def test_evaluate() -> None:
    text = rendered(single_table("runs/a-run-with-a-rather-long-name", EVALUATED))
    assert CUT not in text
    assert text.count("98.76") == 30
    runs = {f"runs/a-run-with-a-rather-long-name-{number}/model": EVALUATED for number in range(2)}
    text = rendered(comparison_table(runs))
    assert CUT not in text
    assert text.count("98.76") == 12
    assert text.count("0.1234") == text.count("0.0987") == text.count("45.67") == 2
    for word in ("feature", "classifier", "corr.", "mAP@R"):
        assert word in text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_paper_show(name: str, narrow: Callable[[], str]) -> None:
    one = EXPERIMENTS[name]
    ours = {column.key: Spread(47.11, 1.03) for column in one.columns}
    lines = tuple(Line(row.label, 0, 3, (3e-05,), ours, row.paper, row) for row in one.rows)
    _print(Table(one, MAIN, lines), [])
    text = narrow()
    assert CUT not in text
    assert max(map(len, text.splitlines())) <= 80
    for column in one.columns:
        assert column.title.split()[0] in text
        cell = ours[column.key].text(column.digits)
        assert text.count(cell) >= len(lines)
    assert text.count("3e-05") == len(lines)


def test_paper_list(narrow: Callable[[], str]) -> None:
    from bier.cli.paper import list_experiments

    list_experiments(False)
    assert CUT not in narrow()
    assert "strength" in narrow()


@pytest.mark.parametrize("data", ["inshop", "folder"])
def test_data_check(data: str, monkeypatch: pytest.MonkeyPatch, pictures: Path) -> None:
    from bier.cli import data as command
    from bier.data import expected, load

    text = io.StringIO()
    monkeypatch.setattr(command, "console", Console(file=text, width=80))
    dataset = load("folder", pictures)
    wanted = expected(data)
    command._tabulate(dataset, wanted or dataset.counts(), wanted)
    assert CUT not in text.getvalue()
    assert "classes" in text.getvalue()


def test_help_breaks_lines_only_where_the_terminal_ends() -> None:
    shown = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    assert "<bool>" not in shown  # a flag takes no value
    lines = [line.strip() for line in shown.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("A run is measured"))
    assert min(map(len, lines[first : first + 6])) > 60
