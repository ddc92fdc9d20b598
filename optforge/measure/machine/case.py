"""One operator to measure: what it is, how much it moves, and how its calls are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optforge.measure.machine.clock import Call
from optforge.measure.machine.point import FORWARD

FLOWING = 5e5
"""Bytes, half of what the second-level cache of a core holds as a rule."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operator at one size. `make(copies)` returns that many calls, each on cold operands of its own."""

    kind: str
    name: str
    dtype: str
    size: tuple[int, ...]
    detail: str = ""
    phase: str = FORWARD
    flops: float = 0.0
    bytes: float
    cold: float = 0.0
    """Bytes of the operands that a model reads once a pass (weights, a KV cache), which are therefore cycled through; the
    others were written just before and may be in the cache, as in a model. Where there are none, see `flows`."""
    extra: float = 0.0
    """Bytes that making the case takes beside its operands, at most."""
    captures: bool = True
    """Its calls can be captured in a CUDA graph; otherwise the host launches them, which must be little beside their time."""
    apart: bool = False
    """In a model other kernels run between two of these. Without one between them, cuBLAS begins a product on CUDA before the
    product before it has ended, and hides a microsecond of each."""
    compiled: bool = False
    """A program of Inductor's is called, so entering it is in the time."""
    make: Callable[[int], list[Call]]

    @property
    def title(self) -> str:
        return f"{self.name} {self.dtype} {'x'.join(map(str, self.size))}{' ' + self.detail if self.detail else ''}"


def flows(case: Case, device: torch.device) -> bool:
    """Whether its operands are too large to wait in a CPU core's own cache for the next layer: they too are cycled through then.

    In a prefill of 1,024 tokens the kernels between the products took two to four times as long as on tensors that a core had
    just read.
    """
    return device.type == "cpu" and not case.cold and case.bytes > FLOWING


def again(calls: list[Call], count: int) -> list[Call]:
    """`count` calls like the first of `calls`, each on copies of its tensors; only it where it is no `partial` of tensors."""
    first = calls[0]
    if not isinstance(first, partial) or not any(isinstance(value, Tensor) for value in first.args):
        return calls
    others = [
        partial(first.func, *(value.clone() if isinstance(value, Tensor) else value for value in first.args), **first.keywords)
        for _ in range(count - 1)
    ]
    return [first, *others]


def warm(call: Callable[..., Any], inputs: Callable[[], tuple[Any, ...]]) -> Callable[[int], list[Call]]:
    """What makes a case whose operands were all written just before: one call, again and again on the same tensors."""
    return lambda copies: [partial(call, *inputs())]


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values near the normal distribution's, in any dtype; integers over their whole range.

    From a generator of their own: the default one may have been caught in a capture that failed.
    """
    source = torch.Generator(device).manual_seed(0)
    if dtype in (torch.int8, torch.uint8):
        low, high = (-127, 128) if dtype is torch.int8 else (0, 256)
        return torch.randint(low, high, shape, dtype=dtype, device=device, generator=source)
    normal = torch.randn(shape, dtype=torch.float32 if dtype.itemsize == 1 else dtype, device=device, generator=source)
    return normal.to(dtype)


def cache_bytes(device: torch.device) -> int:
    """The last-level cache: L2 on CUDA, the highest level that Linux shows on a CPU (32 MiB where it shows none)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    sizes = [path.read_text().strip() for path in levels]
    return max((int(size[:-1]) * {"K": 1024, "M": 1024**2}[size[-1]] for size in sizes if size), default=32 * 1024**2)


def copies(case: Case, cache: int, *, most: int = 320) -> int:
    """How many operands make a cycle that the cache cannot hold: three times its size; of all operands where none is `cold`."""
    cycled = case.cold or case.bytes
    return max(1, min(most, round(3 * cache / cycled)))
