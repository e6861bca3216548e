"""The memory of large tensors: by default it is given back after every use and fetched anew, page by page."""

import ctypes
import sys
from functools import cache

# The names that glibc's malloc.h gives to what mallopt sets.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = -1  # as an unsigned size: the largest


@cache
def reuse_memory() -> bool:
    """Let the process keep what it freed, so that the next step finds its pages in place; True where that worked.

    By default glibc returns every block above 32 MB to the system at once and the next step pays for clearing each page
    again: more than half of the time of a training step. The process then holds its peak memory until it ends. Nothing
    happens where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 64 * 2**20))
    return all(library.mallopt(name, value) == 1 for name, value in settings)
