"""The Triton kernel behind `argmax`: a row split over programs, the last of which compares what the others found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from optforge.kernels import configurations
from optforge.kernels.configurations import Shape

if TYPE_CHECKING:  # the compiler's own processes have no use for PyTorch
    from torch import Tensor

_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(values):  # type: ignore[no-untyped-def]  # tiles
    """fp32 as int32 in the same order: -0 and 0 are one, NaN lies above all."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values == values, ordered, 0x7FFFFFFF)  # noqa: PLR0124 - false for NaN


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def argmax_kernel(  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, y_ptr, best_ptr, place_ptr, count_ptr, V, stride_xm,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, SPLIT)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    each = tl.cdiv(tl.cdiv(V, BLOCK), SPLIT) * BLOCK
    best = tl.full((BLOCK,), -2147483648, tl.int32)
    place = tl.full((BLOCK,), _NOWHERE, tl.int32)
    for start in range(part * each, tl.minimum(part * each + each, V), BLOCK):
        at = start + offs
        values = _ordered(tl.load(x_ptr + row.to(tl.int64) * stride_xm + at, mask=at < V, other=0.0).to(tl.float32))
        better = (at < V) & ((values > best) | (place == _NOWHERE))
        best = tl.where(better, values, best)
        place = tl.where(better, at, place)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, place, _NOWHERE), 0)
    if SPLIT == 1:
        tl.store(y_ptr + row, first.to(tl.int64))
    else:
        tl.store(best_ptr + row * SPLIT + part, top)
        tl.store(place_ptr + row * SPLIT + part, first)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + row, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            parts = tl.arange(0, BLOCK_S)
            there = parts < SPLIT
            tops = tl.load(best_ptr + row * SPLIT + parts, mask=there, other=-2147483648, cache_modifier=".cg")
            places = tl.load(place_ptr + row * SPLIT + parts, mask=there, other=_NOWHERE, cache_modifier=".cg")
            tl.store(y_ptr + row, tl.min(tl.where(tops == tl.max(tops, 0), places, _NOWHERE), 0).to(tl.int64))
            tl.store(count_ptr + row, 0)


def launch(logits: Tensor, config: configurations.Config | None = None) -> Tensor:
    """int64 [...] of logits [..., V].

    Args:
        config: instead of the one that `configurations.chosen` gives; for tuning and tests.
    """
    import torch

    from optforge.kernels.devices import device_of
    from optforge.kernels.semaphores import semaphores

    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows, vocabulary = flat.shape
    y = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return y.reshape(logits.shape[:-1])
    if config is None:
        config = configurations.chosen(shape_of(flat), device_of(logits))
    split = config["SPLIT"]
    best = place = counts = y
    if split > 1:
        best, place = (torch.empty(rows * split, dtype=torch.int32, device=logits.device) for _ in range(2))
        counts = semaphores(logits, logits, rows)
    early = {"launch_pdl": True} if config["PDL"] else {}
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        KERNELS["argmax_kernel"][(rows, split)](
            flat, y, best, place, counts, vocabulary, flat.stride(0), BLOCK_S=triton.next_power_of_2(split), **config, **early
        )
    return y.reshape(logits.shape[:-1])


def shape_of(logits: Tensor) -> Shape:
    """What a configuration is chosen by. logits [rows, V]."""
    from optforge.kernels.devices import DTYPES

    return Shape(operator="argmax", form="plain", dtype=DTYPES[logits.dtype], rows=logits.shape[0], outputs=1, columns=logits.shape[1])


KERNELS: dict[str, Any] = {"argmax_kernel": argmax_kernel}
