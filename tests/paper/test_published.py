"""What the documents publish is what the commands draw from the results beside them, cell by cell."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bier.paper.budgets import budget_of
from bier.paper.experiments import experiment
from bier.paper.results import Results
from bier.paper.tables import Table, refresh, table_of

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "results"
APPENDIX = ROOT / "docs" / "results-appendix.md"
PAGES = {PUBLISHED: PUBLISHED.with_suffix(".md"), PUBLISHED / "reduced": APPENDIX}
TABLES = [path for folder in PAGES for path in sorted((folder / "tables").glob("*.md"))]


def drawn(path: Path) -> Table:
    name, _, budget = path.stem.rpartition("-")
    return table_of(experiment(name), budget_of(budget), Results(path.parents[1]))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_a_table_is_drawn_from_its_results(path: Path) -> None:
    """Those of results that are older than the code that reads them, too."""
    table = drawn(path)
    assert any(line.seeds for line in table.lines)
    assert table.markdown() == path.read_text()


@pytest.mark.parametrize(("folder", "page"), PAGES.items(), ids=["results", "appendix"])
def test_a_page_shows_its_tables(folder: Path, page: Path, tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    copy.write_text(page.read_text())
    tables = [path for path in TABLES if path.parents[1] == folder]
    assert sorted(refresh(copy, [drawn(path) for path in tables])) == [path.stem for path in tables]
    assert copy.read_text() == page.read_text()


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PUBLISHED / f"{name}.jsonl").read_text().splitlines()]


def cells(text: str, mark: str) -> dict[str, list[str]]:
    """The table of a page behind a mark, by the first cell of each row."""
    rows = re.findall(r"^\|.*\|$", text.split(mark, 1)[1].split("\n\n\n")[0].split("\n## ")[0], flags=re.MULTILINE)
    split = [[cell.strip().strip("*") for cell in row.strip("|").split("|")] for row in rows]
    return {first: rest for first, *rest in split[2:]}


def recall(found: Sequence[Mapping[str, Any]], name: str = "ensemble") -> float:
    assert found
    return statistics.fmean(line["recall"][name]["1"] for line in found)


def final(name: str, budget: str, *labels: str) -> list[dict[str, Any]]:
    found = [line for line in lines(name) if line.get("budget") == budget and line["label"] in labels]
    return [line for line in found if line["kind"] != "search"]


def test_the_readme_has_the_figures_of_the_results() -> None:
    """Two numbers that are swapped are found."""
    thirty = {line["method"]: line for line in lines("thirty-minutes")}
    untrained = {line["recall"]["untrained"]["1"] for line in thirty.values()}
    googlenet = [
        final("reduced/cub", "main", "GoogLeNet, not trained"),
        final("reduced/cub", "main", "cub, Baseline"),
        final("reduced/cub", "main", "cub, A-BIER"),
    ]
    googlenet[2] = [line for line in googlenet[2] if line["settings"]["train.embedding_factor"] == 2.0]
    assert [len(found) for found in googlenet] == [1, 3, 3]
    lite = [untrained.pop(), recall([thirty["baseline"]]), recall([thirty["a-bier"]])]
    expected = [[f"{left:.1f}", f"{recall(right):.1f}"] for left, right in zip(lite, googlenet, strict=True)]
    assert list(cells((ROOT / "README.md").read_text(), "CUB-200-2011").values()) == expected


def test_the_longer_runs_of_the_appendix() -> None:
    shown = cells(APPENDIX.read_text(), "<!-- long -->")
    for method, row in shown.items():
        found = final("reduced/cub", "long", f"cub, {method}")
        names = [name for name in found[0]["recall"] if name.startswith("learner-")]
        alone = [f"{recall(found, name):.2f}" for name in names] if len(names) > 1 else []
        pairs = [line["classifier_correlation"] for line in found]
        assert row == [
            f"{recall(found):.2f}",
            ", ".join(alone),
            "-" if pairs[0] is None else f"{statistics.fmean(pairs):.4f}",
            f"{statistics.fmean(line['feature_correlation'] for line in found):.4f}",
            str(len(found)),
        ]
    assert list(shown) == ["Baseline", "BIER", "A-BIER"]


def test_the_held_out_table_of_the_appendix() -> None:
    """Best and last R@1 of each curve, and how often it was validated."""
    curves = [line for name in ("reduced/held-out", "reduced/cub") for line in lines(name) if line.get("curve")]
    for label, row in cells(APPENDIX.read_text(), "<!-- held out -->").items():
        method, factor, *rest = label.removesuffix(" *").split(", ")
        times = float(re.findall(r"(\d+) x", factor)[0])
        rate = next((float(text.split()[1]) for text in rest if text.startswith("rate")), 1e-4)
        boosting = next((text for text in ("shrinkage", "gradient") if text in label), "eta")
        matching = [
            line["curve"]
            for line in curves
            if line["method"] == method.lower()
            and line["settings"]["train.steps"] == 500
            and line["settings"]["model.trainable_from"] == "inception_4a"
            and (line["settings"]["train.embedding_factor"], line["settings"]["train.learning_rate"]) == (times, rate)
            and line["settings"].get("loss.boosting", "eta") == boosting
            and line["settings"]["diversity.weight"] == 1e-3
            and not line["settings"].get("model.bias")
            and line["curve"][-1][0] == 500
        ]
        texts = []
        for curve in matching:
            best = max(curve, key=lambda point: point[1])
            texts.append([f"{best[1]:.1f} ({best[0]})", f"{curve[-1][1]:.1f}", str(curve[1][0] - curve[0][0])])
        assert row in texts, (label, row, texts)


def test_the_way_to_the_paper_s_length() -> None:
    """Each column is one measurement of the run."""
    (run,) = final("cub", "paper", "A-BIER")
    curve, ratios = run["curve"], dict(run["gradient_ratios"])
    names = {"R@1": "ensemble", "R@1 weighted by sqrt(alpha)": "ensemble-sqrt"}
    names |= {f"learner {m}": f"learner-{m}" for m in (1, 2, 3)}
    expected = {title: [f"{point['recall'][name]:.2f}" for point in curve] for title, name in names.items()}
    expected["clf. corr."] = [f"{point['classifier_correlation']:.3f}" for point in curve]
    expected["feature corr."] = [f"{point['feature_correlation']:.3f}" for point in curve]
    expected["gradient ratio on W"] = [f"{ratios[point['step']]:.2f}" for point in curve]
    assert cells(APPENDIX.read_text(), "<!-- length -->") == expected
    early, late, last = (f"{recall:.1f}" for _, recall in run["train_recall"])
    assert f"{early} after 27 passes, {late} after 64 and {last} after 82" in " ".join(APPENDIX.read_text().split())
