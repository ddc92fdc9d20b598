"""The Triton kernel behind `linear_cross_entropy`: the loss of each row of logits, and their gradient in their place.

One program takes a row: once through for the largest logit and the sum of exponentials, once more, from the cache, for the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:  # the compiler's own processes have no use for PyTorch
    from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def cross_entropy_kernel(  # type: ignore[no-untyped-def]  # pointers and tiles
    z_ptr, targets_ptr, inverse_ptr, losses_ptr, V, stride_zm, ignore_index, GRADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    counted = target != ignore_index
    z_row = z_ptr + row * stride_zm
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        at = start + offs
        z = tl.load(z_row + at, mask=at < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, z)
        total = total * tl.exp(top - higher) + tl.exp(z - higher)
        top = higher
    most = tl.max(top, 0)
    normalizer = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
    own = tl.load(z_row + tl.where(counted, target, 0)).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(counted, normalizer - own, 0.0))
    if GRADS:
        by = tl.where(counted, tl.load(inverse_ptr), 0.0)
        tl.debug_barrier()  # the row's own logit has been read by all before anyone writes
        for start in range(0, V, BLOCK):
            at = start + offs
            z = tl.load(z_row + at, mask=at < V, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(z - normalizer) - tl.where(at == target, 1.0, 0.0)
            tl.store(z_row + at, tl.where(counted, gradient * by, 0.0).to(z_ptr.dtype.element_ty), mask=at < V)


def step(logits: Tensor, targets: Tensor, inverse: Tensor, ignore_index: int, grads: bool) -> Tensor:
    """Losses fp32 [rows]; logits [rows, V] become their gradients where `grads` asks for it."""
    import torch

    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
            KERNELS["cross_entropy_kernel"][(rows,)](
                logits, targets, inverse, losses, vocabulary, logits.stride(0), ignore_index, GRADS=grads, BLOCK=block, num_warps=8
            )
    return losses


KERNELS: dict[str, Any] = {"cross_entropy_kernel": cross_entropy_kernel}
