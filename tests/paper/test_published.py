"""What docs/results publishes is what the command draws from the results beside it."""

from pathlib import Path

import pytest

from bier.paper.budgets import budget_of
from bier.paper.experiments import experiment
from bier.paper.results import Results
from bier.paper.tables import Table, refresh, table_of

PUBLISHED = Path(__file__).parents[2] / "docs" / "results"
PAGE = PUBLISHED.with_suffix(".md")
TABLES = sorted((PUBLISHED / "tables").glob("*.md"))


def drawn(path: Path) -> Table:
    name, _, budget = path.stem.rpartition("-")
    return table_of(experiment(name), budget_of(budget), Results(PUBLISHED))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_is_drawn_from_its_results(path: Path) -> None:
    table = drawn(path)
    assert any(line.seeds for line in table.lines)
    assert table.markdown() == path.read_text()


def test_the_page_shows_the_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    assert sorted(refresh(page, [drawn(path) for path in TABLES])) == [path.stem for path in TABLES]
    assert page.read_text() == PAGE.read_text()
