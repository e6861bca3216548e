"""The machine: the device that computes, what the C library does with freed memory (kept for the next step of training,
returned by a server that waits), whether there is room for a library that crashes without it, and requests to stop.

Nothing here imports torch before a device is asked for: the processes that decode images for the server have none.
"""

import ctypes
import logging
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from bier.errors import ConfigError

if TYPE_CHECKING:
    import torch

# The names that glibc's malloc.h gives to what mallopt sets.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_NEVER = -1  # as an unsigned size: the largest
_KEPT = 32 * 2**20  # bytes that a server keeps at the end of each heap, enough for one picture in the network
_returning = False
_asked = "auto"


def use_device(name: str) -> "torch.device":
    """Compute on this device for the rest of the process, wherever no other is named."""
    global _asked
    _device(name)  # an error where there is none
    _asked = name
    return device()


@contextmanager
def computing_on(name: str | None) -> Iterator[None]:
    """The same for a while; None changes nothing."""
    global _asked
    before = _asked
    if name is not None:
        use_device(name)
    try:
        yield
    finally:
        _asked = before


def device(name: "str | torch.device | None" = None) -> "torch.device":
    """`auto` is the accelerator of the machine (under torchrun that of this process), else the CPU. Any other name is
    torch's, such as `cpu`, `cuda:1`, `mps` or `xpu`. By default what `use_device` was told, at first `auto`."""
    chosen = _device(str(name or _asked))
    if chosen.type != "cpu" or _asked != "auto":
        _announce(chosen)
    return chosen


@cache
def _announce(device: "torch.device") -> None:
    """Once: where a command computes, if that is not what every machine has."""
    logging.getLogger("bier").info("computing on %s", describe(device))


def _device(name: str) -> "torch.device":
    import torch

    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and there is None):
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto" and there is not None:
        return torch.device(there.type, local)
    count = torch.accelerator.device_count() if there is not None else 0
    try:
        chosen = torch.device(name)
    except RuntimeError:
        chosen = torch.device("cpu")  # not a name of torch's; refused below
    if there is None or chosen.type != there.type or (chosen.index or 0) >= count:
        names = ["auto", "cpu", *(f"{there.type}:{number}" for number in range(count) if there is not None)]
        raise ConfigError(f"The device must be one of {', '.join(names)} on this machine. Got {name!r} instead.")
    return chosen if chosen.index is not None else torch.device(chosen.type, local)


def describe(device: "torch.device") -> str:
    """`cuda:0 (NVIDIA A100)`; the type alone where torch knows no name."""
    import torch

    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{device} ({name(device)})" if name is not None else str(device)


def random_state(device: "torch.device") -> "torch.Tensor":
    """The state of the generator of an accelerator; dropout there draws from it."""
    import torch

    get = torch.get_device_module(device).get_rng_state
    state: torch.Tensor = get() if device.type == "mps" else get(device)  # of which there is one
    return state


def set_random_state(device: "torch.device", state: "torch.Tensor") -> None:
    import torch

    put = torch.get_device_module(device).set_rng_state
    put(state) if device.type == "mps" else put(state, device)


def has_fused_optimizers(device: "torch.device") -> bool:
    """Whether an optimizer of torch takes its whole step in one kernel there; on a CPU that is no gain."""
    return device.type in ("cuda", "xpu", "mps")


@cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def reuse_memory() -> bool:
    """Let the process keep what it freed, so that the next step finds its pages in place; True where that worked.

    By default glibc returns every block above 32 MB to the system at once and the next step pays for clearing each page
    again: more than half of the time of a training step. The process then holds its peak memory until it ends. Nothing
    happens where the C library is another one, nor after `return_memory`.
    """
    return not _returning and _set((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 64 * 2**20))


def return_memory() -> bool:
    """The opposite, for the rest of the process: what is free goes back to the system now and from now on."""
    global _returning
    _returning = True
    done = _set(
        *((_MMAP_MAX, 65_536), (_MMAP_THRESHOLD, _KEPT), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, 2**20)),
        (_ARENA_MAX, 2),  # each thread that has a heap of its own would keep its own free pages
    )
    trim_memory()
    return done


def trim_memory() -> None:
    """Return all free pages to the system, those in the middle of a heap too."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def check_room(size: int, what: str) -> None:
    """MemoryError unless `size` bytes of address space can be had, for what would end the process without them."""
    if os.name == "posix":
        try:
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()  # no page of it is touched
        except OSError as error:
            raise MemoryError(f"{what} needs {size / 2**20:.0f} MB of address space") from error


@cache
def _set(*settings: tuple[int, int]) -> bool:
    library = _glibc()
    return library is not None and all(library.mallopt(name, value) == 1 for name, value in settings)


SAME_REQUEST = 1.0  # seconds; torchrun forwards a Ctrl-C that its processes have also received from the terminal


@contextmanager
def stop_requests() -> Iterator[list[float]]:
    """A list to which Ctrl-C and SIGTERM append their time. A second one, later, stops the process at once."""
    requests: list[float] = []

    def request(_: int, __: Any) -> None:
        now = time.monotonic()
        if requests and now - requests[0] > SAME_REQUEST:
            raise KeyboardInterrupt
        requests.append(now)

    try:
        before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals cannot be caught
        yield requests
        return
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
