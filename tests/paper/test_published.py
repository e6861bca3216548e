"""The tables in docs/results are what today's settings draw from the result files beside them."""

from pathlib import Path

import pytest

from bier.paper.budgets import budget_of
from bier.paper.experiments import experiment
from bier.paper.results import Results
from bier.paper.tables import table_of

PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "paper"


@pytest.mark.parametrize("path", sorted((PUBLISHED / "tables").glob("*.md")), ids=lambda path: path.stem)
def test_a_table_is_drawn_from_its_results(path: Path) -> None:
    name, _, budget = path.stem.rpartition("-")
    table = table_of(experiment(name), budget_of(budget), Results(PUBLISHED))
    assert any(line.seeds for line in table.lines)
    assert table.markdown() == path.read_text()
