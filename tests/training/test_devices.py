"""Which device each process uses. No GPU is needed: torch's functions that ask for accelerators are replaced."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import bier
from bier import cli, distributed, system
from bier.config import Config
from bier.errors import ConfigError
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.runs import Run
from bier.training import checkpoints, resolve
from bier.training.setup import build

SECOND = torch.device("cuda", 1)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process as the second of two on a machine with GPUs."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(system, "_asked", "auto")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.mark.usefixtures("second_of_two")
def test_the_device_that_is_asked_for() -> None:
    assert system.device() == system.device("cuda") == system.device("cuda:1") == SECOND
    assert system.device("cuda:0") == torch.device("cuda", 0)
    assert system.device("cpu") == torch.device("cpu")
    for name in ("cuda:2", "mps", "gpu", "meta", "cuda:x"):
        with pytest.raises(ConfigError, match=f"one of auto, cpu, cuda:0, cuda:1 on this machine. Got '{name}'"):
            system.device(name)
    system.use_device("cuda:0")
    assert system.device() == torch.device("cuda", 0)
    with pytest.raises(ConfigError):
        system.use_device("mps")
    assert system.device() == torch.device("cuda", 0)


def test_without_an_accelerator() -> None:
    assert system.device("auto") == system.device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"one of auto, cpu on this machine. Got 'cuda'"):
        system.device("cuda")


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "abc"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "-1"), ("MASTER_ADDR", "")]
)
def test_an_environment_that_torchrun_has_not_set(name: str, value: str, tmp_path: Path) -> None:
    """Through the command line; it was a traceback."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    command = [sys.executable, "-m", "bier", "train", "--data", "glyphs", "--set", "train.steps=1"]
    command += ["--out", str(tmp_path / "run")]
    ended = subprocess.run(command, env={**os.environ, **torchrun, name: value}, capture_output=True, text=True)
    assert ended.returncode == 2
    assert name in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("bier: ")


@pytest.mark.usefixtures("second_of_two")
def test_a_model_is_loaded_on_the_gpu_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (4, 8))).save(tmp_path / "model")
    placed: list[Any] = []

    def to(model: Model, device: Any) -> Model:
        placed.append(device)
        return model

    monkeypatch.setattr(Model, "to", to)
    bier.load(tmp_path / "model")
    bier.load(tmp_path / "model", device="cpu")
    assert placed == [SECOND, torch.device("cpu")]


@pytest.mark.usefixtures("second_of_two")
def test_a_process_group_uses_the_gpu_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: calls.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    with distributed.process_group():
        assert calls == [SECOND, "cpu:gloo,cuda:nccl"]
    assert calls[-1] == "left"


def test_a_run_names_its_device_and_says_when_it_goes_on_with_another(features_file: Path, tmp_path: Path) -> None:
    settings = {"data.root": str(features_file), "model.embedding": 12, "train.steps": 2, "train.batch_classes": 3}
    config = resolve("baseline", "features", settings)
    run = bier.train(config, tmp_path / "run", device="cpu", same=False).folder
    text = (run / "config.toml").read_text()
    assert 'device = "cpu"' in text
    moved = Config.from_toml(run / "config.toml").to_toml({"made_by": {"device": "cuda:0"}})
    (run / "config.toml").write_text(moved)  # as if the run had begun on a GPU
    with pytest.warns(UserWarning, match="The run began on cuda:0 and goes on with cpu"):
        bier.train(config, run, resume=True, same=False)
    with pytest.raises(ConfigError, match="The device must be one of auto, cpu"):
        bier.train(config, tmp_path / "other", device="mps")
    assert not (tmp_path / "other").exists()
    assert system.device("auto") == system.device()  # the choice of one run is not that of the next


def test_the_command_line_names_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It is the first line of a command that computes, where a device was asked for; a wrong one is refused."""
    monkeypatch.setattr(system, "_asked", "auto")
    system._announce.cache_clear()

    def bier_command(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["bier", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().err.splitlines()

    code, lines = bier_command("search", str(tmp_path / "no-index"), "a.jpg", "--device", "mps")
    assert (code, len(lines)) == (2, 1)
    assert "must be one of auto, cpu" in lines[0]
    code, lines = bier_command("search", str(tmp_path / "no-index"), "a.jpg", "--device", "cpu")
    assert (code, lines[0]) == (2, "bier: computing on cpu")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"),
            "Memory ran out: CUDA",
        ),
        (NotImplementedError("The operator 'aten::_fft_r2c' is not currently implemented"), "no aten::_fft_r2c. Comp"),
    ],
)
def test_what_only_a_device_raises_is_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The errors are torch's own; only a device would raise them, so here the command does."""

    def run(**_: Any) -> int:
        raise error

    monkeypatch.setattr(cli, "app", run)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert line in lines[0]


def test_a_resumed_run_restores_the_generator_of_its_gpu(
    features_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run computes on the CPU and believes that its generators are those of the second GPU."""
    gpu = {SECOND: torch.tensor([5], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: gpu[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: gpu.update({device: state}))
    saved, restored = checkpoints.random_state, checkpoints.set_random_state
    monkeypatch.setattr(checkpoints, "random_state", lambda device: saved(SECOND))
    monkeypatch.setattr(checkpoints, "set_random_state", lambda device, state: restored(SECOND, state))
    settings = {"data.root": str(features_file), "model.embedding": 12, "train.steps": 2, "train.batch_classes": 3}
    config = resolve("baseline", "features", settings)
    run = bier.train(config, tmp_path / "run").folder
    gpu[SECOND] = torch.tensor([9], dtype=torch.uint8)
    bier.train(config, run, resume=True)
    assert gpu[SECOND].tolist() == [5]


def test_no_process_waits_at_a_barrier_for_maps(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A barrier has a time limit, which the maps of a large data set exceed; their file lock has none."""

    def barrier() -> None:
        raise AssertionError("waited at a barrier")

    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setattr(distributed, "world", lambda: 2)
    settings = {"data.root": str(pictures), "data.validation": 0.0, "model.backbone": "conv4", "model.embedding": 24}
    settings |= {"model.trainable_from": "conv4", "model.trunk_views": 1, "train.batch_classes": 2}
    config = resolve("baseline", "folder", settings)
    for rank in (1, 0):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        build(config, Run(tmp_path), lambda what, done, total: None)
    assert len(list(tmp_path.glob("trunk-*/maps.bin"))) == 1
