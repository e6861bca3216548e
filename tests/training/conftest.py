"""How tests of training compare runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bier.runs import Run
from bier.training.checkpoints import read_checkpoint


def leaves(state: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries and lists, by their paths."""
    if isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {path: leaf for key, value in items for path, leaf in leaves(value, f"{name}/{key}").items()}
    return {name: state}


def same_checkpoints(one: Path, other: Path) -> None:
    """The content is compared and not the files: a pickle also depends on which equal strings are one object."""
    mine, theirs = (leaves(vars(read_checkpoint(path))) for path in (one, other))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, f"{one.name} {name}"


def same_runs(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "config.toml", "model/model.safetensors", "model/model.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    steps = [path.name for path in Run(one).complete()]
    assert steps == [path.name for path in Run(other).complete()]
    for step in steps:
        same_checkpoints(one / "checkpoints" / step, other / "checkpoints" / step)


@pytest.fixture
def assert_same_checkpoints() -> Callable[[Path, Path], None]:
    return same_checkpoints


@pytest.fixture
def assert_same_runs() -> Callable[[Path, Path], None]:
    """Weights, checkpoints and metrics, to the bit."""
    return same_runs
