"""Collective operations that also work in a single process, such as gathering embeddings with their gradients."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from bier.errors import ConfigError
from bier.system import device

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if _running() else 0


def world() -> int:
    return dist.get_world_size() if _running() else 1


def _running() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def process_group(backend: str | None = None, timeout: timedelta | None = None) -> Iterator[None]:
    """Join the other processes if torchrun started this one; leave them at the end, also after an error.

    backend, timeout: as `init_process_group` has them; by default gloo (and NCCL on GPUs) with torch's own timeout.
    """
    if "RANK" not in os.environ or _running():
        yield
        return
    _check_environment()
    here, default = device(), "gloo"
    if here.type != "cpu":
        torch.accelerator.set_device_index(here)  # what torch places there without a number belongs on this one
        default = f"cpu:gloo,{here.type}:{dist.get_default_backend_for_device(here)}"
    dist.init_process_group(backend or default, timeout=timeout, **_empty_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_environment() -> None:
    """What torchrun sets, where somebody has set it by hand."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        value = os.environ.get(name, "0" if name == "LOCAL_RANK" else "")
        if not (value.isascii() and value.isdigit()):
            raise ConfigError(
                f"The environment variable {name} must be a whole number, as torchrun sets it. Got {value!r} instead; "
                "to train in one process, unset RANK."
            )
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(
            "With RANK set, MASTER_ADDR must be too, as torchrun does; to train in one process, unset RANK."
        )


def _empty_store() -> dict[str, Any]:
    """A part of torchrun's store that no process has used before, for processes that torchrun has started again.

    torchrun keeps its store, and a new process that reads the address of one that has ended waits for it until the
    timeout. Agents on several machines count their restarts separately, so that they cannot agree on a name by them;
    docs/scale.md names a variable that makes them begin with an empty store.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return {}
    store, number, count = next(rendezvous("env://"))
    return {"store": dist.PrefixStore(f"restart-{restarts}", store), "rank": number, "world_size": count}  # type: ignore[attr-defined]


def gather(local: Tensor) -> Tensor:
    """The rows of all processes in the order of their ranks: (b, ...) -> (sum of b, ...), with gradients.

    Processes may bring different numbers of rows, as the last batches of a loader without `drop_last` do.

    Every process computes the same loss from the gathered rows. On the way back each row collects the gradient of
    all those copies, which is `world` times its true one; DistributedDataParallel then averages over processes, and
    what it hands to the optimizer is the gradient that one process with the whole batch would have found.
    """
    if world() == 1:
        return local
    if not local.is_floating_point():
        return _gathered(local, _row_counts(local))
    rows: Tensor = _Gather.apply(local, _row_counts(local))
    return rows


def _row_counts(local: Tensor) -> list[int]:
    """How many rows each process has."""
    counts = [torch.zeros(1, dtype=torch.int64, device=local.device) for _ in range(world())]
    dist.all_gather(counts, torch.tensor([len(local)], device=local.device))
    return [int(count) for count in counts]


def _gathered(local: Tensor, counts: Sequence[int]) -> Tensor:
    """Processes with fewer rows than others pad theirs: the collective takes tensors of one shape only."""
    padded = local.new_zeros(max(counts), *local.shape[1:])
    padded[: len(local)] = local
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded)
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, counts: list[int]) -> Tensor:
        ctx.start, ctx.count = sum(counts[: rank()]), len(local)
        return _gathered(local, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # another node may hold the same tensor
        dist.all_reduce(gradient)  # the sum over the copies of the loss
        return gradient[ctx.start : ctx.start + ctx.count], None


def barrier() -> None:
    """Wait until all processes have called this."""
    if world() > 1:
        dist.barrier()


def any_process(flag: bool) -> bool:
    """Whether the flag is true on any process."""
    if world() == 1:
        return flag
    vote = torch.tensor([int(flag)])
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def from_first(compute: Callable[[], T]) -> T:
    """What process 0 computes, on every process."""
    if world() == 1:
        return compute()
    values: list[Any] = [compute() if rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    value: T = values[0]
    return value


def sharded(
    numbers: NDArray[np.int64], compute: Callable[[NDArray[np.int64]], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """The rows that `compute` gives for all numbers, each process computing its share: (N, d) on every process."""
    if world() == 1:
        return compute(numbers)
    local = torch.from_numpy(compute(np.array_split(numbers, world())[rank()]))
    rows: NDArray[np.float32] = _gathered(local, _row_counts(local)).numpy()
    return rows
