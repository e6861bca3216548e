"""Many processes do what one would do with the whole batch."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bier
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.runs import Run, step_of
from bier.training import resolve
from bier.training.checkpoints import read_checkpoint

QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bier"]
SETTINGS = {
    "model.embedding": 12,
    "diversity.hidden": 8,
    "train.batch_classes": 3,
    "train.batch_images": 4,
    "train.optimizer": "sgd",
    "train.log_every": 1,
    "train.precision": "float32",
}


def as_options(settings: dict[str, Any]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def test_gradients_are_those_of_one_process(forked: Any, tmp_path: Path) -> None:
    script = Path(__file__).with_name("shared_gradients.py")
    differences = json.loads(forked.finished(forked.start(tmp_path, script=script)))
    assert differences.pop("apart") > 1e-2
    assert len(differences) == 12
    assert {case: value for case, value in differences.items() if not value <= 1e-9} == {}


def test_two_processes_train_what_one_does(forked: Any, features_file: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "train.steps": 12, "train.validate_every": 5, "data.validation": 0.3}
    alone = bier.train(resolve("a-bier", "features", {**settings, "data.root": str(features_file)}), tmp_path / "one")
    command = ["train", "--data", "features", "--root", features_file, "--method", "a-bier", "--json"]
    both = forked.start_two(*command, "--out", tmp_path / "two", *as_options(settings))
    result = json.loads(forked.finished(*both))
    assert both[1].out == both[1].said == ""  # only the first process speaks
    assert (result["steps"], result["best_step"]) == (12, alone.best_step)
    first, second = Run(tmp_path / "one").metrics(), Run(tmp_path / "two").metrics()
    assert [row["step"] for row in second] == [row["step"] for row in first]
    assert first[0] == second[0]  # step 0, the untrained features
    for mine, theirs in zip(first[1:], second[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("loss", "metric_loss", "diversity_loss", "gradient_norm", "metric_gradient_on_w"):
            assert math.isclose(mine[key], theirs[key], rel_tol=1e-3), key
    ends = [read_checkpoint(tmp_path / name / "checkpoints" / "step-12").objective for name in ("one", "two")]
    torch.testing.assert_close(ends[0]["ensemble.weight"], ends[1]["ensemble.weight"], rtol=1e-3, atol=1e-4)


def test_evaluate_gives_the_same_numbers(forked: Any, pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (4, 8))).save(tmp_path / "model")
    shutil.copytree(pictures, tmp_path / "pictures")
    for number in (0, 7):  # in the shares of both
        (tmp_path / "pictures" / f"class {number}" / "broken.png").write_bytes(b"no picture")
    arguments = ["evaluate", str(tmp_path / "model"), "--data", "folder", "--root", str(tmp_path / "pictures")]
    arguments += ["--skip-broken", "--json"]
    one = json.loads(forked.finished(forked.start(*arguments)))
    two = json.loads(forked.finished(*forked.start_two(*arguments)))
    assert one["queries"] == two["queries"] == 64
    for name, recalls in one["recall"].items():
        assert two["recall"][name] == pytest.approx(recalls, abs=1e-6)
    assert [Path(broken["path"]).parent.name for broken in one["skipped"]] == ["class 0", "class 7"]
    assert two["skipped"] == one["skipped"]
    assert two["map_at_r"] == pytest.approx(one["map_at_r"], abs=1e-6)
    assert two["same"]["pairs"] == one["same"]["pairs"]
    assert two["feature_correlation"] == pytest.approx(one["feature_correlation"], abs=1e-5)


PICTURES = {
    **SETTINGS,
    "model.backbone": "conv4",
    "data.validation": 0.0,
    "train.steps": 60,
    "train.checkpoint_every": 7,
    "train.keep_checkpoints": 1,
    "data.workers": 0,
}


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("killed", [0, 1])
def test_torchrun_restarts_end_as_the_undisturbed_run(
    pictures: Path, tmp_path: Path, assert_same_runs: Callable[[Path, Path], None], killed: int
) -> None:
    """SIGKILL of one of two processes at a random step; the same command goes on, and ends with the same bits."""
    arguments = ["train", "--data", "folder", "--root", str(pictures), *as_options(PICTURES)]
    restarting = [*TWO[:-2], "--max-restarts", "2", *TWO[-2:]]
    command = [*TWO, *arguments, "--out", str(tmp_path / "whole")]
    whole = subprocess.run(command, capture_output=True, text=True, env=QUIET, check=False)
    assert whole.returncode == 0, whole.stderr
    run, drawn = tmp_path / "disturbed", random.SystemRandom().randint(8, 50)
    command = [*restarting, *arguments, "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=QUIET)
    wait_for_step(run, drawn, process)
    os.kill(workers_of(process)[killed], signal.SIGKILL)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert f"Started again by torchrun: going on with {run}" in said, f"killed at step {drawn}"
    assert_same_runs(tmp_path / "whole", run)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for_step(run: Path, step: int, process: Any) -> None:
    while not any(row["step"] >= step for row in Run(run).metrics()):
        assert process.poll() is None
        time.sleep(0.05)


def test_ctrl_c_saves_for_all_and_a_death_ends_all(forked: Any, features_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {**SETTINGS, "train.steps": 1_000_000, "train.checkpoint_every": 1_000_000, "data.validation": 0.0}
    command = [*TWO, "train", "--data", "features", "--root", str(features_file), "--out", str(run)]
    command += as_options(settings)
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=QUIET, start_new_session=True
    )
    wait_for_step(run, 3, first)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: torchrun and both processes get it
    _, said = first.communicate(timeout=120)
    assert first.returncode != 0
    assert f"-m torch.distributed.run --nproc-per-node 2 -m bier train --resume {run}" in said
    (saved,) = Run(run).complete()
    assert step_of(saved) == Run(run).metrics()[-1]["step"] >= 3

    both = forked.start_two("train", "--resume", run)  # without torchrun, which would end the other one itself
    wait_for_step(run, step_of(saved) + 3, both[0])
    both[1].kill()
    assert both[0].wait(60) not in (0, -signal.SIGKILL)
    assert Run(run).complete() == [saved]
