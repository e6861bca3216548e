"""Tables and plots from result files that were written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bier.config import Config
from bier.errors import DataError
from bier.paper import results as results_of
from bier.paper.budgets import MAIN, PAPER, Budget
from bier.paper.experiments import Row, experiment
from bier.paper.results import Job, Results
from bier.paper.tables import refresh, table_of, write_plot, write_table


def put(out: Path, row: Row, seed: int, reached: float, budget: Budget = MAIN, **more: Any) -> None:
    count = len(row.groups)
    found = {name: {"1": reached} for name in ("ensemble", *(f"learner-{m + 1}" for m in range(count)))}
    for m in range(count):
        found[f"learner-{m + 1}"] = {"1": reached - count + m}
    results, job = Results(out), Job(row, budget, seed)
    results.add(
        {
            **job.identity(),
            "label": row.label,
            "data": row.data,
            "seed": seed,
            "groups": list(row.groups),
            "recall": found,
            "feature_correlation": 0.1,
            "classifier_correlation": 0.7 if count > 1 else None,
            **more,
        }
    )


def test_an_untrained_network_is_the_same_under_every_budget(tmp_path: Path) -> None:
    untrained, baseline, *_ = experiment("strength").rows
    put(tmp_path, untrained, 0, 42.0)
    put(tmp_path, baseline, 0, 50.0)
    results = Results(tmp_path)
    assert [results.of(Job(row, MAIN, 0)) is not None for row in (untrained, baseline)] == [True, True]
    assert [results.of(Job(row, PAPER, 0)) is not None for row in (untrained, baseline)] == [True, False]


def test_mean_and_spread_over_seeds_beside_the_paper(tmp_path: Path) -> None:
    strength = experiment("strength")
    for seed, recall in enumerate((50.0, 51.0, 54.0)):
        put(tmp_path, strength.rows[1], seed, recall)
    put(tmp_path, strength.rows[-1], 0, 56.0)
    table = table_of(strength, MAIN, Results(tmp_path))
    assert [line.label for line in table.lines if line.learner] == ["96", "160", "256"]
    assert table.cells(table.lines[1]) == [
        *("Baseline-512", "-", "-", "0.1000 ± 0.0000", "0.1530", "51.67 ± 2.08", "51.76", "0.0001", "3"),
    ]
    assert table.cells(table.lines[2])[1:] == ["-", "0.8362", "-", "0.1005", "-", "53.73", "-", "0"]
    assert table.cells(table.lines[-1])[5:7] == ["55.00", "54.09"]
    assert table.seeds == "1 to 3"
    assert not table.complete
    text = write_table(table, tmp_path).read_text()
    assert "Budget main (GoogLeNet" in text
    assert "1 to 3 seed(s); 4 row(s) not run yet." in text
    assert "| BIER-96-160-256 | 0.7000 | 0.7768 | 0.1000 | 0.0934 | 56.00 | 55.33 | 3e-05 | 1 |" in text
    json.dumps(table.to_dict(), allow_nan=False)


def test_the_note_of_classification_speaks_of_its_own_work(tmp_path: Path) -> None:
    cifar10 = experiment("cifar10")
    note = table_of(cifar10, MAIN, Results(tmp_path)).note
    assert "Budget main (cifar10-quick: 16,000 steps of 100 images, all images; cifar10-quick-wider: 8,000" in note


def test_a_partial_table_shows_the_data_sets_that_something_was_trained_on(tmp_path: Path) -> None:
    pictures = experiment("pictures")
    assert table_of(pictures, MAIN, Results(tmp_path)).lines == ()
    put(tmp_path, next(row for row in pictures.rows if row.label == "A-BIER, cars"), 0, 80.0)
    assert [line.label for line in table_of(pictures, MAIN, Results(tmp_path)).lines] == ["A-BIER, cars"]


def test_the_last_learner_is_a_row_of_its_own_beside_the_papers(tmp_path: Path) -> None:
    cub = experiment("cub")
    row = next(row for row in cub.rows if row.label == "A-BIER")
    recall = {name: {str(k): 50.0 + k + n for k in (1, 2, 4, 8, 16, 32)} for n, name in enumerate(LEARNERS)}
    put(tmp_path, row, 0, 0.0, recall=recall)
    table = table_of(cub, MAIN, Results(tmp_path))
    learner, whole = (table.cells(table.lines[place]) for place in (4, 5))
    assert learner[:5] == ["A-BIER, learner 3", "54.00", "55.30", "55.00", "67.00"]
    assert whole[:5] == ["A-BIER", "51.00", "57.50", "52.00", "68.70"]
    assert learner[table.head.index("clf. corr.")] == "-"


LEARNERS = ("ensemble", "learner-1", "learner-2", "learner-3")


def test_the_figure_of_a_data_set_is_over_passes(tmp_path: Path) -> None:
    cub = experiment("cub")
    bars = table_of(cub, MAIN, Results(tmp_path))
    assert write_plot(bars, tmp_path) is None
    curve = [{"step": 10 * n, "passes": float(n), "recall": {"ensemble": 49.0 + n, "learner-3": 48.0}} for n in (1, 2)]
    row = next(row for row in cub.rows if row.label == "A-BIER")
    put(
        tmp_path,
        row,
        0,
        51.0,
        recall={name: {str(k): 51.0 for k in (1, 2, 4, 8, 16, 32)} for name in LEARNERS},
        curve=curve,
    )
    table = table_of(cub, MAIN, Results(tmp_path))
    assert [line.curve for line in table.lines[-2:]] == [((1.0, 48.0), (2.0, 48.0)), ((1.0, 50.0), (2.0, 51.0))]
    path = write_plot(table, tmp_path)
    assert path == tmp_path / "tables" / "cub-main.png"


def test_a_table_says_where_images_are_absent(tmp_path: Path) -> None:
    for data, counts in (("cars", (8048, 8122)), ("cub", (5864, 5924))):
        row = next(row for row in experiment(data).rows if row.label == "Baseline")
        recall = {"ensemble": {str(k): 51.0 for k in (1, 2, 4, 8, 16, 32)}}
        put(tmp_path, row, 0, 51.0, recall=recall, images=dict(zip(("train", "test"), counts, strict=True)))
    cars, cub = (table_of(experiment(data), MAIN, Results(tmp_path)).note for data in ("cars", "cub"))
    assert "; 8,048 training and 8,122 test images (the paper: 8,054 training and 8,131 test images); " in cars
    assert "; 5,864 training and 5,924 test images; " in cub


def test_the_mean_of_learners_and_test_sets_of_several_sizes(tmp_path: Path) -> None:
    groups = experiment("groups")
    put(tmp_path, groups.rows[1], 0, 50.0)
    line = table_of(groups, MAIN, Results(tmp_path)).lines[1]
    assert line.ours["mean_learner"].mean == pytest.approx((48 + 49) / 2)

    vehicleid = experiment("vehicleid")
    vehicles = next(row for row in vehicleid.rows if row.label == "BIER, small")
    sizes = {
        size: {
            "groups": [1],
            "recall": {name: {"1": recall - (name != "ensemble"), "5": 90.0} for name in LEARNERS},
            "feature_correlation": 0.1,
            "classifier_correlation": 0.2,
        }
        for size, recall in (("small", 80.0), ("medium", 70.0), ("large", 60.0))
    }
    put(tmp_path, vehicles, 0, 80.0, sizes=sizes)
    lines = table_of(vehicleid, MAIN, Results(tmp_path)).lines
    assert {line.label: line.ours["recall"].mean for line in lines if line.ours} == {
        "BIER, learner 3, small": 79.0,
        "BIER, small": 80.0,
        "BIER, learner 3, medium": 69.0,
        "BIER, medium": 70.0,
        "BIER, learner 3, large": 59.0,
        "BIER, large": 60.0,
    }


@pytest.mark.parametrize("name", ["lambda", "embedding-size"])
def test_figures(tmp_path: Path, name: str) -> None:
    one = experiment(name)
    assert write_plot(table_of(one, MAIN, Results(tmp_path)), tmp_path) is None
    for number, row in enumerate(one.rows):
        put(tmp_path, row, 0, 50.0 + number)
    path = write_plot(table_of(one, MAIN, Results(tmp_path)), tmp_path)
    assert path == tmp_path / "tables" / f"{name}-main.png"
    with Image.open(path) as image:
        assert image.size[0] > 800
    assert {line.row.series for line in table_of(one, MAIN, Results(tmp_path)).lines} in (
        {"384 dimensions", "512 dimensions", "1024 dimensions"},
        {"Activation Loss", "Adversarial Loss"},
    )


def test_bars_of_the_main_table(tmp_path: Path) -> None:
    summary = experiment("summary")
    everything = {str(k): 40.0 + k for k in (1, 2, 4, 8, 16, 32)}
    put(tmp_path, summary.rows[0], 0, 41.9, recall={"ensemble": everything}, groups=[1024])
    put(tmp_path, summary.rows[1], 0, 50.0, recall={"ensemble": everything})
    table = table_of(summary, MAIN, Results(tmp_path))
    head, untrained, baseline = table.head, *(table.cells(line) for line in table.lines[:2])
    assert untrained[head.index("R@32")] == "72.00"
    assert untrained[-2:] == ["-", "1"]
    assert baseline[head.index("rate")] == "0.0001"
    path = write_plot(table, tmp_path)
    assert path is not None
    with Image.open(path) as image:
        assert image.size[0] > 800


def test_a_page_takes_its_tables(tmp_path: Path) -> None:
    table = table_of(experiment("strength"), MAIN, Results(tmp_path))
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- table strength-main -->\nold\n<!-- end -->\n\nafter\n")
    assert refresh(page, [table, table_of(experiment("losses"), MAIN, Results(tmp_path))]) == ["strength-main"]
    text = page.read_text()
    assert "old" not in text
    assert table.rows() in text
    assert text.startswith("before\n\n<!-- table strength-main -->\n")
    assert text.endswith("<!-- end -->\n\nafter\n")
    page.write_text("<!-- table strength-main -->\n")
    with pytest.raises(DataError, match="must have <!-- end -->"):
        refresh(page, [table])


def test_a_new_setting_does_not_lose_old_results(tmp_path: Path) -> None:
    row = experiment("strength").rows[1]
    put(tmp_path, row, 0, 50.0)
    path = Results(tmp_path).path("cub")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["settings"]["model.bias"]  # as if it had been written before there was such a setting
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(Results(tmp_path).seeds(row, MAIN)) == 1
    for line in lines:
        line["settings"]["model.bias"] = True
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Results(tmp_path).seeds(row, MAIN) == []


def test_a_setting_that_is_gone_does_not_lose_old_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = experiment("strength").rows[1]
    put(tmp_path, row, 0, 50.0)
    defaults = {key: value for key, value in Config().flat().items() if key != "model.bias"}
    monkeypatch.setattr(results_of, "_defaults", lambda: defaults)
    assert len(Results(tmp_path).seeds(row, MAIN)) == 1
    path = Results(tmp_path).path("cub")
    path.write_text(path.read_text().replace('"model.bias": false', '"model.bias": true'))
    assert Results(tmp_path).seeds(row, MAIN) == []


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "cub.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"cub\.jsonl must hold results of `bier paper run`"):
        table_of(experiment("strength"), MAIN, Results(tmp_path))
