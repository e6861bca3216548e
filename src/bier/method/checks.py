"""Checks of what enters the method: parameters (ConfigError) and batches (DataError), one line each."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bier.errors import ConfigError, DataError


def check_number(name: str, value: Any, least: float = -math.inf, below: float = math.inf) -> None:
    """A number from `least` up to, but not including, `below`. Infinity is one where `least` alone is given."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and least <= value and (value < below or value == below == math.inf > -least):
        return
    limits = f" of at least {least}" * (least > -math.inf) + f" and below {below}" * (below < math.inf)
    kind = "number" if limits else "finite number"
    raise ConfigError(f"The '{name}' parameter must be a {kind}{limits}. Got {value!r} instead.")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """A whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"The '{name}' parameter must be a whole number of at least {least}. Got {value!r} instead.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"The '{name}' parameter must be one of {', '.join(choices)}. Got {value!r} instead.")


def checked_groups(groups: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the learners as a tuple."""
    sizes = tuple(groups) if isinstance(groups, Sequence) else ()
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise ConfigError(f"The 'groups' parameter must be a list of whole numbers above 0. Got {groups!r} instead.")
    return sizes


def check_rows(rows: Any, width: int, what: str = "embeddings", least: int = 1) -> None:
    """Real numbers of shape (B, width), with at least so many rows."""
    if not isinstance(rows, Tensor):
        raise DataError(f"The {what} must be a tensor. Got {type(rows).__name__} instead.")
    is_dense = rows.layout is torch.strided
    fits = rows.ndim == 2 and rows.shape[1] == width and rows.shape[0] >= least  # len() would be constant in an export
    if not is_dense or not rows.is_floating_point() or not fits:
        kind, shape = f"{rows.dtype}{'' if is_dense else f' ({rows.layout})'}", tuple(rows.shape)
        raise DataError(f"Expected float {what} of shape (B, {width}). Got {kind} of shape {shape} instead.")


def check_labels(labels: Any, rows: Tensor) -> None:
    """One integer for each row, on the same device."""
    if not isinstance(labels, Tensor):
        raise DataError(f"The labels must be a tensor. Got {type(labels).__name__} instead.")
    is_integer = not labels.is_floating_point() and not labels.is_complex() and labels.layout is torch.strided
    if labels.shape != rows.shape[:1] or not is_integer:
        raise DataError(
            f"Expected one integer label for each of the {len(rows)} embeddings. "
            f"Got {labels.dtype} of shape {tuple(labels.shape)} instead."
        )
    if labels.device != rows.device:
        raise DataError(f"The labels must be on {rows.device}, as the embeddings are. Got {labels.device} instead.")


def check_same(same: Any, rows: Tensor) -> None:
    """A symmetric matrix of bool, or of 1, 0 and -1, for all pairs of rows, on the same device."""
    count = len(rows)
    if not isinstance(same, Tensor) or same.is_floating_point() or same.is_complex() or same.shape != (count, count):
        got = f"{same.dtype} of shape {tuple(same.shape)}" if isinstance(same, Tensor) else type(same).__name__
        raise DataError(
            f"Expected 'same' to be a bool or integer tensor of shape ({count}, {count}). Got {got} instead."
        )
    if same.device != rows.device:
        raise DataError(f"'same' must be on {rows.device}, as the embeddings are. Got {same.device} instead.")
    if not looks_at_values(same):
        return
    if not torch.equal(same, same.T):
        raise DataError("'same' must be symmetric: entry (i, j) says of images i and j what entry (j, i) says.")
    if same.dtype != torch.bool and count and not -1 <= int(same.min()) <= int(same.max()) <= 1:
        raise DataError(
            f"'same' must hold 1, 0 and -1. Got values from {int(same.min())} to {int(same.max())} instead."
        )


def check_finite(rows: Tensor, what: str = "embeddings") -> None:
    """No NaN and no infinity. Only on the CPU: elsewhere the check would wait for the device in every step, and a loss
    that is not finite shows the same."""
    if not looks_at_values(rows):
        return
    # A finite sum proves finite values at a thirtieth of the cost of looking at each; only a sum may overflow.
    if not torch.isfinite(rows.detach().sum()) and not torch.isfinite(rows).all():
        raise DataError(f"The {what} of this batch contain NaN or infinite values.")


def looks_at_values(tensor: Tensor) -> bool:
    """Whether the values of a tensor may decide what Python does next: on the CPU, and not while compiling."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
