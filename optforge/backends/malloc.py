"""Lets glibc keep the memory that a pass frees, as PyTorch's allocators for GPUs do, for the length of a session.

By itself glibc maps every block above 32 MB anew and gives the end of its heap back whenever 64 MB of it are free. Each call of a
convolutional network then fills thousands of new pages, which takes longer than some of its operators (docs/log.md has
figures), and how many depends on what ran before. That is neither the model's time nor a recipe's, and it makes runs differ.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# Parameters of mallopt(3), as in glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
MIB = 1 << 20
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: (1 << 31) - 1}
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * MIB, _TRIM_THRESHOLD: 64 * MIB}
"""Where glibc's own adjustment ends in a process that has freed a large block; setting a parameter switches the adjustment off."""

KEPT, OWN = "glibc, freed memory is kept", "the system's own"


@contextmanager
def kept() -> Iterator[None]:
    """Freed memory stays with the process inside the block; afterwards it is given back, and further frees are as usual."""
    mallopt = _symbol("mallopt")
    if mallopt is None:
        yield
        return
    try:
        _set(mallopt, _KEPT)
        yield
    finally:
        _set(mallopt, _USUAL)
        trim()


def trim() -> None:
    """Gives free memory back to the system, where the C library can."""
    release = _symbol("malloc_trim")
    if release is not None:
        release(0)


def described() -> str:
    """What `kept` does in this process, for a report."""
    return OWN if _symbol("mallopt") is None else KEPT


def _set(mallopt: Callable[..., int], values: dict[int, int]) -> None:
    for parameter, value in values.items():
        mallopt(parameter, value)


@cache
def _symbol(name: str) -> Callable[..., int] | None:
    """A function of glibc, or None under another C library."""
    if platform.system() != "Linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
