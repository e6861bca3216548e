"""`bier paper` as a user runs it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bier.paper.experiments import EXPERIMENTS

Cli = Callable[..., tuple[int, str, str]]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def test_list(cli: Cli) -> None:
    code, out, _ = cli("paper", "list", "--json")
    assert code == 0
    listed = json.loads(out)
    assert list(listed["experiments"]) == list(EXPERIMENTS)
    assert listed["all"]["main"] < sum(one["runs"]["main"] for one in listed["experiments"].values())
    code, out, said = cli("paper", "list")
    assert (code, out) == (0, "")
    assert "embedding-size" in said


OF_THE_PAPER = [name for name in EXPERIMENTS if name != "peers"]


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # HistogramLoss
@pytest.mark.parametrize("names", [pytest.param(["all"], marks=pytest.mark.slow, id="all"), OF_THE_PAPER])
def test_all_of_it_with_the_smoke_budget(names: list[str], cli: Cli, tmp_path: Path) -> None:
    out_folder = tmp_path / "out"
    code, out, said = cli("paper", "run", *names, "--budget", "smoke", "--out", out_folder, "--json")
    assert code == 0, said
    result = json.loads(out)
    assert list(result["missing"]) == ["cars", "cars-cropped", "sop", "inshop", "vehicleid"]
    lines = [line for path in out_folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(result["made"]) == len(lines)
    for name, one in result["experiments"].items():
        assert one["complete"] != (name in result["missing"]), name
        assert all(Path(path).is_file() for path in one["files"])
        assert "Budget smoke" in (out_folder / "tables" / f"{name}-smoke.md").read_text()
    assert len(result["experiments"]["cub-cropped"]["rows"]) == 6
    assert len(result["experiments"]["pictures"]["files"]) > 2
    for name in ("groups", "embedding-size", "lambda", "summary"):
        assert (out_folder / "tables" / f"{name}-smoke.png").is_file()

    code, out, said = cli("paper", "run", "summary", "--budget", "smoke", "--out", out_folder)
    assert (code, out) == (0, "")
    assert "0 run(s) made, 7 were already there." in said
    code, out, _ = cli("paper", "show", "cifar10", "--out", out_folder, "--json")
    shown = json.loads(out)["experiments"]["cifar10"]
    assert shown == result["experiments"]["cifar10"]


def test_show_takes_the_budget_that_something_was_trained_with(cli: Cli, tmp_path: Path) -> None:
    """The network as it came is the same under every budget."""
    shutil.copy(Path(__file__).parents[2] / "docs" / "results" / "reduced" / "cub.jsonl", tmp_path)
    code, out, _ = cli("paper", "show", "summary", "--out", tmp_path, "--json")
    assert code == 0
    assert json.loads(out)["experiments"]["summary"]["budget"] == "main"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "strenght"], "Did you mean 'strength'?"),
        (["run", "strength", "--budget", "tiny"], "must be one of smoke, main, third, paper"),
        (["run", "strength"], "The budget 'main' needs --root"),
        (["run", "cifar10", "--root", "."], "'cifar10': There is no data_batch_1.bin"),
        (["show", "strength", "--out", "nowhere"], "There are no results of 'strength' in nowhere."),
    ],
)
def test_one_line_for_bad_input(
    cli: Cli, arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, said = cli("paper", *arguments)
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert expected in said


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    command = ["paper", "run", "strength", "--budget", "smoke", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([sys.executable, "-m", "bier", *command], stderr=subprocess.PIPE, text=True, env=QUIET)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob("*.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)  # again, should the first have come within the last step of a run
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)  # a second one while the process ends would kill it
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert re.search(f"Go on with: .*python.* -m bier {re.escape(' '.join(command))}", said)
    assert 1 <= len((tmp_path / "out" / "cub.jsonl").read_text().splitlines()) < 10
