"""docs/benchmarks.md shows what the benchmarks have measured, and one that fails does not stop the others."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts are no package: each is started by hand, too
_page, _report, run = map(importlib.import_module, ("_page", "_report", "run"))

PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
RECORDS = _page.read(run.RESULTS)


def test_the_page_shows_the_results() -> None:
    assert _page.page_of(PAGE, RECORDS) == PAGE


def test_every_place_of_the_page_belongs_to_a_benchmark() -> None:
    measured = {record["benchmark"] for record in RECORDS}
    for name in set(re.findall("<!-- table (.*?) -->", PAGE)) - set(_page.blocks(RECORDS)):
        assert name.partition("-")[0] in set(run.benchmarks()) - measured, f"no table is called {name}"


def test_the_picture_shows_the_results() -> None:
    with Image.open(ROOT / "docs" / "images" / "growth.png") as image:
        assert image.info["Description"] == _page.digest(RECORDS)


def test_results_are_of_benchmarks_that_exist_and_keep_what_they_printed() -> None:
    names = {record["benchmark"] for record in RECORDS}
    assert names <= set(run.benchmarks())
    for name in names:
        assert (run.RESULTS / f"{name}.txt").is_file()
    assert set(run.ON_REQUEST) < set(run.benchmarks())


def test_a_benchmark_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("print('halfway')\nraise SystemExit(3)\n")
    good = "import os, pathlib\npathlib.Path(os.environ['BIER_BENCHMARKS'], 'good.json').touch()\nprint('figures')\n"
    (tmp_path / "good.py").write_text(good)
    results = tmp_path / "results"
    results.mkdir()
    (results / "bad.json").write_text(json.dumps({"seconds": 120}))
    (results / "bad.txt").write_text("earlier")
    assert run.run_all(["bad", "good"], tmp_path, results, [], "") == ["bad"]
    assert (results / "bad.txt").read_text() == "earlier"
    assert (results / "good.txt").read_text() == "figures\n"
    assert (results / "good.json").is_file()
    shown = capsys.readouterr().out
    assert "2 benchmarks, about 2 minutes, and 1 whose time is not known yet" in shown
    assert "bad: FAILED with exit code 3" in shown
    assert "good: done" in shown


def test_a_report_is_printed_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BIER_BENCHMARKS", str(tmp_path))
    monkeypatch.setenv("BIER_BENCHMARKS_NOTE", "a quiet night")
    report = _report.Report("loss", ["numpy"])
    report.figure("time", "theirs", 0.5, at_most=0.4)
    report.figure("speed", "theirs", 2.0, at_least=2)
    report.figure("memory", "nothing", 1.5, "GB")
    report.table("seconds", ["", "s"], [["ours", 0.12345], ["theirs", 1234]])
    report.growth("time", "images", "s", [10, 20, 40], {"ours": [1.0, 4.0, 16.0]})
    report.save()
    (record,) = _page.read(tmp_path)
    assert [one.get("met") for one in record["figures"]] == [False, True, None]
    assert record["note"] == "a quiet night"
    assert {"torch", "numpy"} <= set(record["versions"])
    shown = capsys.readouterr().out
    assert "goal <= 0.4: MISSED" in shown
    blocks = _page.blocks([record])
    assert "1 of 2 goals are met" in blocks["ratios"]
    assert "| `loss` | time | theirs | 0.5 x | ≤ 0.4 | **missed** |" in blocks["ratios"]
    assert "memory" not in blocks["ratios"]  # it has no goal
    assert "| theirs | 1,234 |" in blocks["loss-seconds"]
    assert "| time | ours | 10 to 40 images | 1.00 to 16.00 s | 2.00 |" in blocks["growth"]
    picture = tmp_path / "growth.png"
    _page.plot([record], picture)
    with Image.open(picture) as image:
        assert image.info["Description"] == _page.digest([record])


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIER_BENCHMARKS", raising=False)
    monkeypatch.chdir(tmp_path)
    _report.Report("loss").save()
    assert list(tmp_path.iterdir()) == []
