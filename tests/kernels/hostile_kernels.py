"""Kernels that a compiler refuses, that need too much, or that never end. Compiled by test_cross_compile.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def fp8_kernel(x_ptr, y_ptr):  # type: ignore[no-untyped-def]  # pointers
    """Converts to e4m3, which devices before sm_89 cannot."""
    at = tl.arange(0, 128)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.float8e4nv))


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def endless_kernel(x_ptr, y_ptr):  # type: ignore[no-untyped-def]  # pointers
    """Is unrolled a hundred million times."""
    at = tl.arange(0, 128)
    total = tl.load(x_ptr + at)
    for step in tl.static_range(100_000_000):
        total += tl.load(x_ptr + at + step)
    tl.store(y_ptr + at, total)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def wide_kernel(x_ptr, y_ptr):  # type: ignore[no-untyped-def]  # pointers
    """A product of a tile of 256 x 256 in fp16 with itself: 131,072 bytes of shared memory, more than sm_89 has."""
    rows, columns = tl.arange(0, 256)[:, None], tl.arange(0, 256)[None, :]
    x = tl.load(x_ptr + rows * 256 + columns)
    tl.store(y_ptr + rows * 256 + columns, tl.dot(x, x.trans()).to(tl.float16))
