"""Tables and plots from result files that were written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bier.errors import DataError
from bier.paper.budgets import FULL, SMALL
from bier.paper.experiments import Row, experiment
from bier.paper.results import Results
from bier.paper.runner import row_digest
from bier.paper.tables import table_of, write_plot, write_table


def put(out: Path, row: Row, seed: int, recall: float, **more: Any) -> None:
    count = len(row.groups)
    found = {name: {"1": recall} for name in ("ensemble", *(f"learner-{m + 1}" for m in range(count)))}
    for m in range(count):
        found[f"learner-{m + 1}"] = {"1": recall - count + m}
    Results(out).write(
        {
            "key": f"{row_digest(row, SMALL)}-{seed}",
            "seed": seed,
            "learning_rate": 3e-5,
            "groups": list(row.groups),
            "recall": found,
            "feature_correlation": 0.1,
            "classifier_correlation": 0.7 if count > 1 else None,
            **more,
        }
    )


def test_mean_and_spread_over_seeds_beside_the_paper(tmp_path: Path) -> None:
    strength = experiment("strength")
    for seed, recall in enumerate((50.0, 51.0, 54.0)):
        put(tmp_path, strength.rows[0], seed, recall)
    put(tmp_path, strength.rows[-1], 0, 56.0)
    table = table_of(strength, SMALL, Results(tmp_path))
    assert [line.label for line in table.lines if line.learner] == ["96", "160", "256"]
    assert table.cells(table.lines[0]) == [
        *("Baseline-512", "-", "-", "0.1000 ± 0.0000", "0.1530", "51.67 ± 2.08", "51.76", "3e-05", "3"),
    ]
    assert table.cells(table.lines[1])[1:] == ["-", "0.8362", "-", "0.1005", "-", "53.73", "-", "0"]
    assert table.cells(table.lines[-1])[5:7] == ["55.00", "54.09"]
    assert table.seeds == "1 to 3"
    assert not table.complete
    text = write_table(table, tmp_path).read_text()
    assert "Budget small (EfficientNet-Lite0" in text
    assert "1 to 3 seed(s); 3 row(s) not run yet." in text
    assert "| BIER-96-160-256 | 0.7000 | 0.7768 | 0.1000 | 0.0934 | 56.00 | 55.33 | 3e-05 | 1 |" in text
    json.dumps(table.to_dict(), allow_nan=False)


def test_the_note_of_classification_speaks_of_its_own_work(tmp_path: Path) -> None:
    cifar10 = experiment("cifar10")
    small, full = (table_of(cifar10, budget, Results(tmp_path)).note for budget in (SMALL, FULL))
    assert "Budget small (1,800 steps of 60 images, 300 training images of each class), 0 seed(s)" in small
    assert "Budget full (20,000 steps of 100 images, all images)" in full


def test_the_mean_of_learners_and_test_sets_of_several_sizes(tmp_path: Path) -> None:
    groups = experiment("groups")
    put(tmp_path, groups.rows[1], 0, 50.0)
    line = table_of(groups, SMALL, Results(tmp_path)).lines[1]
    assert line.ours["mean_learner"].mean == pytest.approx((48 + 49) / 2)

    datasets = experiment("datasets")
    vehicles = next(row for row in datasets.rows if row.label == "vehicleid small, BIER")
    sizes = {
        size: {
            "groups": [1],
            "recall": {"ensemble": {"1": recall}},
            "feature_correlation": 0.1,
            "classifier_correlation": 0.2,
        }
        for size, recall in (("small", 80.0), ("medium", 70.0), ("large", 60.0))
    }
    put(tmp_path, vehicles, 0, 80.0, sizes=sizes)
    lines = table_of(datasets, SMALL, Results(tmp_path)).lines
    assert {line.label: line.ours["recall"].mean for line in lines} == {
        "vehicleid small, BIER": 80.0,
        "vehicleid medium, BIER": 70.0,
        "vehicleid large, BIER": 60.0,
    }


@pytest.mark.parametrize("name", ["lambda", "embedding-size"])
def test_figures(tmp_path: Path, name: str) -> None:
    one = experiment(name)
    assert write_plot(table_of(one, SMALL, Results(tmp_path)), tmp_path) is None
    for number, row in enumerate(one.rows):
        put(tmp_path, row, 0, 50.0 + number)
    path = write_plot(table_of(one, SMALL, Results(tmp_path)), tmp_path)
    assert path == tmp_path / "tables" / f"{name}-small.png"
    with Image.open(path) as image:
        assert image.size[0] > 800
    assert {line.row.series for line in table_of(one, SMALL, Results(tmp_path)).lines} in (
        {"384 dimensions", "512 dimensions", "1024 dimensions"},
        {"Activation Loss", "Adversarial Loss"},
    )


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    row = experiment("strength").rows[0]
    path = Results(tmp_path).path(f"{row_digest(row, SMALL)}-0")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(DataError, match="Remove it to run it again"):
        table_of(experiment("strength"), SMALL, Results(tmp_path))
