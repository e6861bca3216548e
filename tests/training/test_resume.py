"""A run that was killed at random moments ends with the very bits of one that never was."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bier
from bier.config import Config
from bier.errors import BusyError, ConfigError, TrainingError
from bier.files import locked
from bier.runs import Run, step_of
from bier.training import resolve
from bier.training.checkpoints import read_checkpoint, write_checkpoint

KILLS = 5
SameRuns = Callable[[Path, Path], None]
Cli = Callable[..., tuple[int, str, str]]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def killed_and_whole(config: Config, folder: Path, longest: float) -> None:
    """Train in folder/broken with kills at KILLS different steps and more, and in folder/whole without."""
    (folder / "settings.toml").write_text(config.to_toml())
    script = Path(__file__).with_name("killed_runs.py")
    arguments = [folder / "settings.toml", folder, KILLS, 0, longest]
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, env=QUIET, check=False
    )
    assert done.returncode == 0, done.stderr
    resumed_at: list[int] = json.loads(done.stdout)
    assert len({*resumed_at} - {0}) == KILLS
    assert resumed_at == sorted(resumed_at)


def test_killed_on_image_files_with_workers_and_validation(
    pictures: Path, tmp_path: Path, assert_same_runs: SameRuns
) -> None:
    settings = {
        "data.root": str(pictures),
        "data.validation": 0.5,
        "data.workers": 2,
        "data.augment": "strong",
        "model.backbone": "conv4",
        "model.embedding": 24,
        "diversity.hidden": 16,
        "train.steps": 120,
        "train.batch_classes": 2,
        "train.batch_images": 4,
        "train.learning_rate": 1e-3,
        "train.schedule": "cosine",
        "train.warmup": 5,
        "train.log_every": 2,
        "train.checkpoint_every": 3,
        "train.validate_every": 7,
    }
    killed_and_whole(resolve("a-bier", "folder", settings), tmp_path, longest=0.1)
    assert_same_runs(tmp_path / "whole", tmp_path / "broken")
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {*range(2, 121, 2), *range(7, 121, 7)}
    half_written = [path.name for path in (tmp_path / "broken" / "checkpoints").glob(".*")]
    assert half_written == []


def test_killed_with_momentum_and_a_solved_start(
    features_file: Path, tmp_path: Path, assert_same_runs: SameRuns
) -> None:
    settings = {
        "data.root": str(features_file),
        "model.embedding": 12,
        "train.steps": 400,
        "train.batch_classes": 3,
        "train.batch_images": 4,
        "train.optimizer": "sgd",
        "train.log_every": 1,
        "train.checkpoint_every": 5,
        "train.keep_checkpoints": 1,
    }
    killed_and_whole(resolve("bier", "features", settings), tmp_path, longest=0.04)
    assert_same_runs(tmp_path / "whole", tmp_path / "broken")


def small(root: Path, **settings: Any) -> Config:
    given = {"data.root": str(root), "model.embedding": 12, "diversity.hidden": 8, "train.steps": 6}
    given |= {"train.batch_classes": 3, "train.batch_images": 3, "train.checkpoint_every": 2, "train.log_every": 1}
    return resolve("a-bier", "features", given | settings)


def test_a_finished_run_can_be_resumed_and_nothing_changes(
    features_file: Path, tmp_path: Path, assert_same_runs: SameRuns
) -> None:
    config = small(features_file)
    bier.train(config, tmp_path / "run")
    bier.train(config, tmp_path / "whole")
    again = bier.train(config, tmp_path / "run", resume=True)
    assert (again.step, again.interrupted) == (6, False)
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


def test_another_config_is_refused_with_the_keys(features_file: Path, tmp_path: Path) -> None:
    bier.train(small(features_file), tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        bier.train(small(features_file, **{"loss.cost": 9.0, "seed": 3}), tmp_path / "run", resume=True)
    assert "seed: 0 / 3" in str(caught.value)
    assert "loss.cost: 10.0 / 9.0" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_is_not_overwritten_and_a_missing_one_not_resumed(features_file: Path, tmp_path: Path) -> None:
    config = small(features_file)
    bier.train(config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"already holds a run\. Resume it with --resume"):
        bier.train(config, tmp_path / "run")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="There is no run to resume at"):
        bier.train(config, tmp_path / "elsewhere", resume=True)
    assert not (tmp_path / "elsewhere").exists()


def cut_back(run: Path, step: int) -> None:
    """As if the run had been killed after this checkpoint."""
    shutil.rmtree(run / "model")
    for checkpoint in Run(run).complete():
        if step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)


def test_a_command_that_torchrun_starts_again_goes_on(
    cli: Cli, features_file: Path, tmp_path: Path, assert_same_runs: SameRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in one process; test_distributed.py kills one of two."""
    settings = ("train.checkpoint_every=2", "train.keep_checkpoints=9", "data.validation=0.0", "train.log_every=1")
    options = [word for setting in settings for word in ("--set", setting)]
    command = ("train", "--data", "features", "--root", features_file, "--steps", 6, *options, "--out")
    assert cli(*command, tmp_path / "whole")[0] == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    cut_back(tmp_path / "again", 4)

    code, _, said = cli(*command, tmp_path / "again")
    assert (code, "already holds a run" in said) == (2, True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this job")  # the run is not of this job, whatever was restarted
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert cli(*command, tmp_path / "again")[0] == 2
    (tmp_path / "again" / ".torchrun").write_text("this job")
    code, _, said = cli(*command, tmp_path / "again")
    assert code == 0, said
    assert f"Started again by torchrun: going on with {tmp_path / 'again'} from its newest checkpoint." in said
    assert_same_runs(tmp_path / "whole", tmp_path / "again")

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # a job without an id counts its restarts
    cut_back(tmp_path / "again", 2)
    assert cli(*command, tmp_path / "again")[0] == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "again")
    code, _, said = cli(*command, tmp_path / "again", "--set", "train.learning_rate=0.5")
    assert (code, "other settings" in said) == (2, True)


def test_another_number_of_processes_is_said(features_file: Path, tmp_path: Path) -> None:
    """A cluster that has lost a machine goes on."""
    config = resolve("bier", "features", {"data.root": str(features_file), "train.steps": 4, "data.validation": 0.0})
    config = config.with_settings({"train.checkpoint_every": 2, "train.keep_checkpoints": 9})
    bier.train(config, tmp_path / "run")
    cut_back(tmp_path / "run", 2)
    (checkpoint,) = Run(tmp_path / "run").complete()
    saved = read_checkpoint(checkpoint)
    two = {kind: rows.repeat(2, 1) for kind, rows in saved.random.items()}
    write_checkpoint(Run(tmp_path / "run"), 2, replace(saved, random=two))
    with pytest.warns(UserWarning, match="Up to step 2 the run had 2 processes, now it has 1. Batches"):
        assert bier.train(config, tmp_path / "run", resume=True).step == 4


def test_a_damaged_checkpoint_is_one_line_and_the_one_before_serves(
    features_file: Path, tmp_path: Path, assert_same_runs: SameRuns
) -> None:
    config = small(features_file)
    bier.train(config, tmp_path / "whole")
    bier.train(config, tmp_path / "run")
    newest = Run(tmp_path / "run").complete()[-1]
    weights = newest / "state.pt"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(TrainingError) as caught:
        bier.train(config, tmp_path / "run", resume=True)
    assert str(newest) in str(caught.value)
    assert "remove it to go on from the one before" in str(caught.value)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    bier.train(config, tmp_path / "run", resume=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "run")


def test_a_damaged_line_of_the_metrics_is_named_and_an_incomplete_last_one_left_out(
    features_file: Path, tmp_path: Path, assert_same_runs: SameRuns
) -> None:
    config = small(features_file)
    bier.train(config, tmp_path / "whole")
    run = bier.train(config, tmp_path / "run").folder
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, '{"step": 7, "lo']))
    assert [row["step"] for row in Run(run).metrics()] == [0, 1, 2, 3, 4, 5, 6]
    for damaged in (lines[2][:30] + "\n", lines[2].replace('"step"', '"stop"'), "[]\n", '{"step": "3"}\n', "\xff\n"):
        path.write_text("".join([*lines[:2], damaged, *lines[3:]]), encoding="latin-1")
        before = path.read_bytes()
        with pytest.raises(TrainingError, match=r"Line 3 of .*metrics\.jsonl is damaged") as caught:
            bier.train(config, run, resume=True)
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == before
    path.write_text("".join(lines))
    bier.train(config, run, resume=True)
    assert_same_runs(tmp_path / "whole", run)


def test_two_processes_on_one_run(features_file: Path, tmp_path: Path) -> None:
    config = small(features_file)
    run = bier.train(config, tmp_path / "run").folder
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with locked(run, "training in"), pytest.raises(BusyError, match=r"Another process is training in .*run\."):
        bier.train(config, run, resume=True)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with locked(tmp_path / "new", "training in"), pytest.raises(BusyError):
        bier.train(config, tmp_path / "new")


@pytest.fixture
def stopped(cli: Cli, pictures: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(run, photos): a run that was stopped at step 2 of 6, on a folder of its own."""
    root = tmp_path / "photos"
    shutil.copytree(pictures, root)
    settings = {"model.backbone": "conv4", "model.embedding": 12, "diversity.hidden": 8, "train.batch_classes": 2}
    settings |= {"train.checkpoint_every": 2, "train.keep_checkpoints": 9, "train.log_every": 1, "data.workers": 0}
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    code, _, said = cli("train", "--data", "folder", "--root", root, "--steps", 6, *options, "--out", tmp_path / "run")
    assert code == 0, said
    cut_back(tmp_path / "run", 2)
    return tmp_path / "run", root


@pytest.mark.filterwarnings("default")
def test_a_class_that_was_added_moves_nothing(cli: Cli, stopped: tuple[Path, Path]) -> None:
    run, root = stopped
    before = Run(run).classes
    shutil.copytree(root / "class 0", root / "a new class")
    code, _, said = cli("train", "--resume", run)
    assert code == 0, said
    assert (
        f"The data set is not what it was when {run} began: 8 images added, 1 class new ('a new class'). The run goes "
        "on; what is new is not used." in said
    )
    assert Run(run).classes == before


@pytest.mark.filterwarnings("default")
def test_images_that_are_gone_or_changed_are_named(cli: Cli, stopped: tuple[Path, Path]) -> None:
    run, root = stopped
    images = Run(run).images
    assert images is not None
    first, second, *_ = (image.path for image in images if image.split == "train")
    (root / first).unlink()
    shutil.copy(root / "class 7" / "7.png", root / second)
    code, _, said = cli("train", "--resume", run)
    assert code == 0, said
    (line,) = (line for line in said.splitlines() if "is not what it was" in line)
    assert f"1 image gone (the first is {first}), 1 image changed (the first is {second}). The run goes on." in line
    assert (run / "model" / "model.json").is_file()


def test_a_class_that_was_renamed_is_named(cli: Cli, stopped: tuple[Path, Path]) -> None:
    run, root = stopped
    classes = Run(run).classes
    assert classes is not None
    name = classes["train"][0]
    (root / name).rename(root / "other")
    code, out, said = cli("train", "--resume", run)
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert f"1 class gone or renamed ('{name}'), 8 images added, 1 class new ('other'). Put it back" in said
    (root / "other").rename(root / name)
    assert cli("train", "--resume", run)[0] == 0
