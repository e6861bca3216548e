"""Checkpoints: complete or absent. A kill at any instant leaves the newest complete one."""

import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from bier import durable
from bier.errors import TrainingError

STEP = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped: tensors by name, and plain values."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-N`, aside and flushed, then renamed. A full disk is a TrainingError and changes nothing."""
    target = folder / f"{STEP}{step}"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    with writing(target, folder), durable.folder_aside(target) as aside:
        (aside / "state.safetensors").write_bytes(save(tensors))
        (aside / "state.json").write_text(json.dumps(dict(checkpoint.values), indent=1))
    return target


def read_checkpoint(path: Path) -> Checkpoint:
    try:
        return Checkpoint(load_file(path / "state.safetensors"), json.loads((path / "state.json").read_text()))
    except Exception as error:
        raise TrainingError(
            f"The checkpoint {path} cannot be read ({error}); remove it to go on from the one before."
        ) from error


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. What was being written when the run was killed is not among them."""
    found = [path for path in folder.glob(f"{STEP}*") if path.name.removeprefix(STEP).isdigit()]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    found = complete(folder)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(STEP))


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` and the best, and what earlier kills left half-written."""
    for path in complete(folder)[:-keep]:
        if step_of(path) != best:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{STEP}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writing(target: Path, checkpoints: Path) -> Iterator[None]:
    """Turns what goes wrong while a file of the run is written, such as a full disk, into one line."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else error.strerror or str(error)
        previous = newest(checkpoints)
        rest = f"{previous} is intact; free some space and resume" if previous else "no earlier checkpoint exists"
        raise TrainingError(f"Could not write {target}: {reason}. {rest}.") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments, each under the number of its parameter."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer/{number}/{name}": value if isinstance(value, Tensor) else torch.tensor(value)
        for number, row in state.items()
        for name, value in row.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The opposite of `optimizer_tensors`; learning rates stay those of `optimizer`."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, number, name = key.split("/")
            state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {f"weights/{name}": value for name, value in module.state_dict().items()}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    prefix = "weights/"
    module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
