"""Running experiments on tiny drawn data: once, again, after a stop, and on data that is not there."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from bier.config import Config
from bier.errors import ConfigError, DataError
from bier.paper import runner
from bier.paper.budgets import MAIN, SMOKE
from bier.paper.experiments import Experiment, experiment
from bier.paper.results import Job, plan
from bier.paper.runner import Places, run
from bier.paper.tiny import draw_tiny_data


class Watch:
    def __init__(self) -> None:
        self.begun: list[tuple[int, int, str]] = []
        self.configs: list[Config] = []
        self.lacking: list[str] = []

    def begin(self, number: int, total: int, job: Job, config: Config) -> "Watch":
        self.begun.append((number, total, job.label))
        self.configs.append(config)
        return self

    def prepare(self, what: str, done: int, total: int) -> None: ...

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None: ...

    def measuring(self, done: int, total: int) -> None: ...

    def missing(self, name: str, reason: str) -> None:
        self.lacking.append(name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_tiny_data(tmp_path_factory.mktemp("tiny"))


def lines(out: Path, kind: str = "final", data: str = "cub") -> list[dict[str, Any]]:
    """The results of one kind, by seed."""
    found = [json.loads(line) for line in (out / f"{data}.jsonl").read_text().splitlines()]
    return sorted((one for one in found if one["kind"] == kind), key=lambda one: int(one["seed"]))


def only(name: str, *labels: str) -> Experiment:
    one = experiment(name)
    return replace(one, rows=tuple(row for row in one.rows if row.label in labels))


def test_what_is_done_stays_done(root: Path, tmp_path: Path) -> None:
    places, watch = Places(root, tmp_path), Watch()
    first = run([only("summary", "Baseline")], SMOKE, places, watch)
    assert (len(first.made), first.found) == (1, [])
    (result,) = lines(tmp_path)
    assert {"settings", "recall", "feature_correlation", "seconds", "versions", "date"} <= set(result)
    assert (result["budget"], result["seed"], result["images"]) == ("smoke", 0, {"train": 48, "test": 48})
    assert str(root) not in json.dumps(result)
    assert not (tmp_path / "runs" / first.made[0] / "checkpoints").exists()

    again = run([only("losses", "Binomial-Deviance-512")], SMOKE, places, Watch(), seeds=2)
    assert again.found == first.made
    assert [one["seed"] for one in lines(tmp_path)] == [0, 1]


def test_a_stopped_run_goes_on(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run([only("summary", "Baseline")], SMOKE, Places(root, tmp_path / "whole"), Watch())

    class Stopping(Watch):
        def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
            import signal

            signal.raise_signal(signal.SIGINT)

    places = Places(root, tmp_path / "parts")
    stopped = run([only("summary", "Baseline")], SMOKE, places, Stopping())
    assert stopped.interrupted
    assert not stopped.made
    done = run([only("summary", "Baseline")], SMOKE, places, Watch())
    assert done.made == whole.made
    ((one,), (other,)) = (lines(tmp_path / name) for name in ("whole", "parts"))
    assert (one["recall"], one["feature_correlation"]) == (other["recall"], other["feature_correlation"])
    assert (one["resumed"], other["resumed"]) == (False, True)


def test_a_run_is_measured_on_its_way(root: Path, tmp_path: Path) -> None:
    run([only("cub", "BIER")], SMOKE, Places(root, tmp_path), Watch())
    (result,) = lines(tmp_path)
    curve = result["curve"]
    assert [(point["step"], point["passes"]) for point in curve] == [(1, 0.19), (2, 0.38), (3, 0.56)]
    last = curve[-1]
    assert last["recall"]["ensemble"] == result["recall"]["ensemble"]["1"]
    assert last["recall"]["learner-3"] == result["recall"]["learner-3"]["1"]
    assert {"feature_correlation", "classifier_correlation"} < set(last)


def test_an_untrained_network_is_measured_once(root: Path, tmp_path: Path) -> None:
    places = Places(root, tmp_path)
    outcome = run([only("summary", "GoogLeNet, not trained")], SMOKE, places, Watch(), seeds=3)
    assert len(outcome.made) == 1
    (result,) = lines(tmp_path, "untrained")
    assert (result["method"], result["queries"], len(result["groups"])) == ("untrained", 48, 1)
    assert run([only("strength", "GoogLeNet, not trained")], SMOKE, places, Watch()).made == []


def test_googlenet_needs_its_weights(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There are no weights of GoogLeNet at .*bvlc_googlenet\.caffemodel"):
        run([only("summary", "GoogLeNet, not trained")], MAIN, Places(root, tmp_path), Watch())


def test_stagewise_trains_on_the_features_of_a_baseline(root: Path, tmp_path: Path) -> None:
    watch = Watch()
    run([only("end-to-end", "Stagewise: features fixed")], SMOKE, Places(root, tmp_path), watch)
    labels = [label for _, _, label in watch.begun]
    assert labels == ["cub: Baseline-512, seed 0", "cub: Stagewise: features fixed, seed 0"]
    assert watch.configs[-1].model.backbone == "features"
    (result,) = [one for one in lines(tmp_path) if one["features_of"]]
    assert (result["queries"], result["groups"]) == (48, [12, 20, 32])


def test_a_network_that_is_needed_and_gone_is_trained_again(root: Path, tmp_path: Path) -> None:
    """Results may have been copied without their run folders."""
    places, stagewise = Places(root, tmp_path), only("end-to-end", "Stagewise: features fixed")
    made = run([only("summary", "Baseline")], SMOKE, places, Watch()).made
    shutil.rmtree(tmp_path / "runs")
    again = run([stagewise], SMOKE, places, Watch())
    assert set(made) < set(again.made)
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "features")
    assert run([stagewise], SMOKE, places, Watch()).made == []  # all results are there


def test_missing_data_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'cub': There is no images\.txt"):
        run([experiment("strength")], SMOKE, Places(tmp_path, tmp_path / "out"), Watch())
    watch = Watch()
    names = ("cub", "cars-cropped", "vehicleid")
    outcome = run(
        [only(name, "Baseline", "Baseline, small") for name in names], SMOKE, Places(root, tmp_path / "out"), watch
    )
    assert watch.lacking == list(outcome.missing) == ["cars-cropped", "vehicleid"]
    assert len(outcome.made) == 1


def test_classification_that_was_done_is_not_done_again(root: Path, tmp_path: Path) -> None:
    places = Places(root, tmp_path)
    made = run([only("cifar10", "Quick, Baseline")], SMOKE, places, Watch()).made
    again = run([only("cifar10", "Quick, Baseline")], SMOKE, places, Watch())
    assert again.made == []
    assert sorted(again.found) == sorted(made)


def test_results_of_other_data_are_refused(root: Path, tmp_path: Path) -> None:
    places = Places(root, tmp_path)
    run([only("summary", "Baseline")], SMOKE, places, Watch())
    path = tmp_path / "cub.jsonl"
    path.write_text(path.read_text().replace('"train": 48', '"train": 5864'))
    with pytest.raises(ConfigError, match="measured on other data"):
        run([only("summary", "Baseline")], SMOKE, places, Watch())


def test_a_loss_of_other_authors_is_boosted(root: Path, tmp_path: Path) -> None:
    watch = Watch()
    run([only("peers", "Margin-96-160-256")], SMOKE, Places(root, tmp_path), watch)
    (result,) = lines(tmp_path)
    assert (result["settings"]["loss.name"], result["settings"]["loss.settings"]) == (
        "MarginLoss",
        {"learn_beta": True},
    )
    assert "learner-3" in result["recall"]
    again = run([only("peers", "Margin-96-160-256")], SMOKE, Places(root, tmp_path), watch)
    assert again.made == []


def test_two_processes_share_the_work(root: Path, tmp_path: Path) -> None:
    """While another holds the first run of two, this one makes the second, then waits for the other's result."""
    both = [only("summary", "Baseline", "Boosting, random initialisation")]
    places = Places(root, tmp_path)
    first, second = (job.name for job in plan(both, SMOKE, 1))
    (tmp_path / "locks").mkdir()
    lock = FileLock(tmp_path / "locks" / first)
    lock.acquire()

    class Other(Watch):
        def begin(self, number: int, total: int, job: Job, config: Config) -> "Watch":
            if job.name == second:  # the other process is killed: its run falls to us
                lock.release()
            return super().begin(number, total, job, config)

    watch = Other()
    outcome = run(both, SMOKE, places, watch)
    assert outcome.made == [second, first]
    assert [number for number, _, _ in watch.begun] == [2, 1]


def test_a_result_of_another_process_is_found(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = [only("summary", "Baseline")]
    (key,) = (job.name for job in plan(one, SMOKE, 1))
    made = run(one, SMOKE, Places(root, tmp_path / "other"), Watch())
    places = Places(root, tmp_path / "mine")
    (tmp_path / "mine" / "locks").mkdir(parents=True)
    lock = FileLock(tmp_path / "mine" / "locks" / key)
    lock.acquire()

    def finish_elsewhere(seconds: float) -> None:
        shutil.copy(tmp_path / "other" / "cub.jsonl", tmp_path / "mine")
        lock.release()

    monkeypatch.setattr(runner.time, "sleep", finish_elsewhere)
    outcome = run(one, SMOKE, places, Watch())
    assert (outcome.made, outcome.found) == ([], made.made)
