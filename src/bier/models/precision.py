"""Which arithmetic a network runs in: float32, or bfloat16 where the hardware multiplies it natively."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias, get_args

import torch

from bier.errors import ConfigError

Precision: TypeAlias = Literal["auto", "float32", "bfloat16"]


def resolve_precision(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on hardware that has it and float32 elsewhere, where emulating it is many times slower."""
    if precision not in get_args(Precision):
        raise ConfigError(
            f"The 'precision' parameter must be one of {', '.join(get_args(Precision))}. Got {precision!r} instead."
        )
    if precision == "auto":
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Run a network in this precision; its weights stay float32."""
    if resolve_precision(precision, device) is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
