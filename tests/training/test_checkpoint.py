"""Checkpoints are complete or absent, and old ones go."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bier.errors import ConfigError, TrainingError
from bier.runs import Run
from bier.training.checkpoints import (
    Checkpoint,
    begin,
    check_new,
    prune,
    random_state,
    read_checkpoint,
    set_random_state,
    write_checkpoint,
)


def some(step: int) -> Checkpoint:
    weights = {"x": torch.full((3, 2), float(step))}
    return Checkpoint(weights, {"state": {}}, {"batches": step}, {"step": step}, {"cpu": torch.get_rng_state()[None]})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in Run(run).checkpoints.iterdir())


def write(run: Path, step: int, checkpoint: Checkpoint) -> Path:
    write_checkpoint(Run(run), step, checkpoint)
    return Run(run).checkpoint(step)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 12, some(12))
    assert path == tmp_path / "checkpoints" / "step-12"
    again = read_checkpoint(path)
    assert torch.equal(again.objective["x"], torch.full((3, 2), 12.0))
    assert (again.sampler, again.trainer) == ({"batches": 12}, {"step": 12})
    assert torch.equal(again.random["cpu"], some(12).random["cpu"])
    assert names(tmp_path) == ["step-12"]


def test_the_name_appears_when_everything_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moment a kill chooses, `step-N` is either absent or whole and flushed."""
    flushed: list[str] = []
    seen: list[tuple[list[str], list[str]]] = []
    flush, rename = os.fsync, Path.rename

    def watched_flush(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        assert not (tmp_path / "checkpoints" / "step-5").exists() or flushed[-1] == "checkpoints"
        flush(handle)

    def watched_rename(path: Path, target: Path) -> Path:
        seen.append((sorted(file.name for file in path.iterdir()), list(flushed)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_flush)
    monkeypatch.setattr(Path, "rename", watched_rename)
    write(tmp_path, 5, some(5))
    ((files, before),) = seen
    assert files == ["SHA256SUMS", "state.pt"]
    assert "state.pt" in before
    assert flushed[-1] == "checkpoints"  # and the rename itself, last of all


def test_what_a_kill_left_half_written_is_ignored_and_removed(tmp_path: Path) -> None:
    write(tmp_path, 5, some(5))
    left = tmp_path / "checkpoints" / ".step-6.1234"
    left.mkdir()
    (left / "state.pt").write_bytes(b"half")
    assert Run(tmp_path).newest() == tmp_path / "checkpoints" / "step-5"
    prune(Run(tmp_path), keep=2, best=None)
    assert names(tmp_path) == ["step-5"]


def test_order_is_by_number(tmp_path: Path) -> None:
    assert Run(tmp_path / "nowhere").newest() is None
    for step in (100, 9, 20):
        write(tmp_path, step, some(step))
    (tmp_path / "checkpoints" / "step-notes").mkdir()  # a stranger
    assert [path.name for path in Run(tmp_path).complete()] == ["step-9", "step-20", "step-100"]


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (2, None, ["step-4", "step-5"]),
        (1, None, ["step-5"]),
        (2, 1, ["step-1", "step-4", "step-5"]),
        (2, 4, ["step-4", "step-5"]),
        (9, 1, ["step-1", "step-2", "step-3", "step-4", "step-5"]),
    ],
)
def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path, keep: int, best: int | None, left: list[str]) -> None:
    for step in range(1, 6):
        write(tmp_path, step, some(step))
    prune(Run(tmp_path), keep, best)
    assert names(tmp_path) == left


def test_a_checkpoint_that_is_there_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 3, some(1))
    write(tmp_path, 3, some(2))
    assert read_checkpoint(Run(tmp_path).checkpoint(3)).trainer["step"] == 2
    assert names(tmp_path) == ["step-3"]


class Harmful:
    """Pickles to a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("damage", ["cut", "missing", "flipped", "no sums", "other content", "harmful"])
def test_damage_is_one_line(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, 3, some(3))
    file = path / "state.pt"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "missing":
        file.unlink()
    elif damage == "flipped":  # in the numbers themselves, which torch does not look at
        content = file.read_bytes()
        assert content.count(some(3).objective["x"].numpy().tobytes()) == 1
        position = content.index(some(3).objective["x"].numpy().tobytes())
        file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    elif damage == "no sums":
        (path / "SHA256SUMS").write_bytes(b"")
    elif damage == "other content":
        torch.save({"x": 1}, file)
        (path / "SHA256SUMS").unlink()
    else:  # no code from a checkpoint is run
        torch.save({**vars(some(3)), "sampler": Harmful(tmp_path / "trace")}, file)
        (path / "SHA256SUMS").unlink()
    with pytest.raises(TrainingError) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "trace").exists()


def test_only_what_we_have_written_is_removed(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, some(step))
    notes = Run(tmp_path).checkpoint(1) / "notes.txt"
    notes.write_text("mine")
    prune(Run(tmp_path), keep=1, best=None)
    assert list(notes.parent.iterdir()) == [notes]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path, 3, some(3))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(TrainingError, match="Permission denied"):
            write(tmp_path, 4, some(4))
    finally:
        tmp_path.chmod(0o700)


def test_where_a_file_stands_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(TrainingError) as caught:
        write_checkpoint(Run(tmp_path), 4, some(4))
    assert "Could not write" in str(caught.value)
    assert "no earlier checkpoint exists" in str(caught.value)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_an_optimizer_goes_on_as_if_it_had_never_stopped(tmp_path: Path, kind: str) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
        groups = [{"params": list(module[0].parameters()), "factor": 1.0}, {"params": list(module[1].parameters())}]
        if kind == "adam":
            return module, torch.optim.Adam(groups, lr=0.01)
        return module, torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            optimizer.zero_grad()
            module(torch.randn(3, 2, 6, 6)).square().sum().backward()
            optimizer.step()

    module, optimizer = fresh()
    steps(module, optimizer, 0, 6)
    half, half_optimizer = fresh()
    steps(half, half_optimizer, 0, 3)
    written = replace(some(3), objective=half.state_dict(), optimizer=half_optimizer.state_dict())
    state = read_checkpoint(write(tmp_path, 3, written))
    again, again_optimizer = fresh()
    again.load_state_dict(state.objective)
    again_optimizer.load_state_dict(dict(state.optimizer))
    steps(again, again_optimizer, 3, 6)
    for name, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_weight_that_is_not_finite_has_a_name() -> None:
    assert some(1).not_finite() is None
    broken = replace(some(1), objective={"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])})
    assert broken.not_finite() == "weights/b"
    broken = replace(some(1), optimizer={"state": {4: {"exp_avg": torch.tensor([torch.inf]), "step": 3}}})
    assert broken.not_finite() == "optimizer/4/exp_avg"


def test_the_generator_of_the_gpu_in_use_is_kept_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: a dictionary stands for the generators of several."""
    gpus = {torch.device("cuda", index): torch.full((4,), index, dtype=torch.uint8) for index in range(3)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: gpus[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: gpus.update({device: state}))
    mine = torch.device("cuda", 1)
    before = torch.get_rng_state()
    state = random_state(mine)
    assert state.keys() == {"cpu", "cuda"}
    torch.rand(3)
    gpus[mine] += 100
    set_random_state(mine, state)
    assert torch.equal(torch.get_rng_state(), before)
    assert [int(gpu[0]) for gpu in gpus.values()] == [0, 1, 2]
    assert random_state(torch.device("cpu")).keys() == {"cpu"}
    gpus[mine] += 100
    set_random_state(mine, random_state(torch.device("cpu")))  # a checkpoint of a run without a GPU
    assert int(gpus[mine][0]) == 101


def test_what_a_kill_leaves_before_the_config_is_a_new_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in (".lock", "..bier.json.new-abc-1-2"):
        (tmp_path / name).touch()
        check_new(run)
    (tmp_path / "data.csv").touch()
    with pytest.raises(ConfigError, match="must be new or empty"):
        check_new(run)  # without our record it may be anybody's
    begin(run)
    for name in (".torchrun", ".data.csv.new-abc-1-2", ".config.toml.new-abc-1-2", "trunk-0123456789ab"):
        (tmp_path / name).touch()
    check_new(run)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"holds 'thesis\.txt'"):
        check_new(run)
