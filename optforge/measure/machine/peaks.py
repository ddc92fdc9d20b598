"""The best that a machine reaches: bytes per second of its memory, operations per second of large products.

Measured peaks stand where a vendor publishes none (every CPU), and say how far off published ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from optforge.kernels import int8_dynamic as _operators  # noqa: F401 - defines optforge::int8_packed
from optforge.measure.machine.case import cache_bytes, random
from optforge.measure.machine.clock import Clock, HostClock, clock_for
from optforge.measure.machine.point import Peaks
from optforge.measure.machine.products import vnni

Tell = Callable[[str], Any]
CPU_SIZES, CUDA_SIZES = (1024, 2048), (4096, 8192)
"""Sides of the square products; the best counts."""


def peaks(device: torch.device, tell: Tell) -> Peaks:
    """Bandwidth and product rates, in a few seconds. `tell` hears of each part. Call it within a backend's session."""
    clock: Clock = HostClock(budget_s=0.4) if device.type == "cpu" else clock_for(device)
    tell("memory bandwidth")
    bandwidth, how_moved = max(_bandwidths(device, clock))
    flops, how = {}, {"bandwidth_bytes_per_s": how_moved}
    for dtype, call in _products(device):
        tell(f"{dtype} products")
        rates = [(2 * size**3 / clock.time([call(size)]).seconds, size) for size in (CPU_SIZES if device.type == "cpu" else CUDA_SIZES)]
        flops[dtype], size = max(rates)
        how[dtype] = f"a product of {size} x {size} x {size}"
    return Peaks(flops=flops, bandwidth_bytes_per_s=bandwidth, how=how)


def _bandwidths(device: torch.device, clock: Clock) -> Iterator[tuple[float, str]]:
    """Copying and summing a tensor of eight times the cache, and at least 256 MB."""
    count = max(8 * cache_bytes(device), 2**28) // 4
    x, y = torch.ones(count, device=device), torch.empty(count, device=device)
    yield 8 * count / clock.time([lambda: y.copy_(x)]).seconds, f"copying {4 * count / 1e6:.0f} MB, both directions counted"
    yield 4 * count / clock.time([x.sum]).seconds, f"summing {4 * count / 1e6:.0f} MB"


def _products(device: torch.device) -> Iterator[tuple[str, Callable[[int], Callable[[], Any]]]]:
    """Each dtype that the device multiplies, and what makes a product of that size."""

    def plain(dtype: torch.dtype) -> Callable[[int], Callable[[], Tensor]]:
        def make(size: int) -> Callable[[], Tensor]:
            a, b = random((size, size), dtype, device), random((size, size), dtype, device)
            return lambda: torch.mm(a, b)

        return make

    def whole(size: int) -> Callable[[], Tensor]:
        a, b = random((size, size), torch.int8, device), random((size, size), torch.int8, device)
        if device.type == "cpu" and vnni():
            scale, unsigned = torch.ones(size, 1), a.view(torch.uint8)
            return lambda: torch.ops.optforge.int8_packed(unsigned, b, scale)
        return lambda: torch._int_mm(a, b.t())

    def fp8(size: int) -> Callable[[], Tensor]:
        a, b = (random((size, size), torch.float8_e4m3fn, device) for _ in range(2))
        rows, columns = torch.ones(size, 1, device=device), torch.ones(1, size, device=device)
        return lambda: torch._scaled_mm(a, b.t(), rows, columns, out_dtype=torch.bfloat16)

    yield "fp32", plain(torch.float32)
    yield "bf16", plain(torch.bfloat16)
    if device.type == "cpu":
        yield "int8", whole
        return
    yield "fp16", plain(torch.float16)
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        yield "tf32", _with_tf32(plain(torch.float32))
    if capability >= (7, 5):
        yield "int8", whole
    if capability >= (8, 9) and torch.version.hip is None:
        yield "fp8", fp8


def _with_tf32(make: Callable[[int], Callable[[], Tensor]]) -> Callable[[int], Callable[[], Tensor]]:
    def made(size: int) -> Callable[[], Tensor]:
        call = make(size)

        def run() -> Tensor:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                return call()
            finally:
                torch.backends.cuda.matmul.allow_tf32 = before

        return run

    return made
