"""y = x @ (weight * scale).T + bias with an int8 weight: half the bytes of bf16, read at every token of a decode.

x [rows, K] in bf16, fp16 or fp32; weight int8 [N, K]; scale fp32 [N, 1]; bias [N] or None; y [rows, N] in x's dtype.
int8 values are exact in bf16, so the scale is applied to the sums and the weight itself is never rounded again.

On a CPU a few rows of bf16 take PyTorch's own product of bf16 with int8, which converts in registers: one row of 576 x 576 takes 22 us,
against 62 us of the bf16 product and 16 us of `torch._int_mm`, which wants its activations rounded too; four rows 26, 62 and 40 us
(docs/log.md). It reads past the end of rows that are no multiple of 32 long (one of 33 ended the process), so those do not take it. It
is an operator of this package, since Inductor's own lowering of it fails on an input that it would compute in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels.dispatch import decomposing, define, define_plain, on_cpu, product_flops, takes_kernel
from optforge.kernels.launches import INT8

FEW_ROWS = 8
"""From here on the bf16 product is as fast, which reads each weight once for all rows."""


def int8_weight(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The product, by kernel or reference, whichever the device takes."""
    if takes_kernel(x):
        result: Tensor = torch.ops.optforge.int8_weight(x, weight, scale, bias)
        return result
    if _is_few(x):
        return _scaled(torch.ops.optforge.int8_few(x, weight), scale, bias)
    return reference(x, weight, scale, bias)


def _is_few(x: Tensor) -> bool:
    """Whether PyTorch's product of bf16 with int8 serves on this CPU; within `dispatch.decompose` nothing but plain operators does."""
    if decomposing():  # asked first: a comparison of rows would bind an exported program to fewer, or to more, of them
        return False
    columns = x.shape[1]
    return on_cpu(x) and x.dtype is torch.bfloat16 and columns > 0 and columns % 32 == 0 and 0 < x.shape[0] < FEW_ROWS


def reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Plain PyTorch: the cast is one pass over the weight, the scale another over the (smaller) result.

    In fp16 the scale goes to the weight first: a sum of 127 times an activation soon leaves fp16's range.
    """
    if x.dtype is torch.float16:
        return torch.nn.functional.linear(x, (weight.float() * scale).half(), None if bias is None else bias.half())
    return _scaled(torch.mm(x, weight.to(x.dtype).t()), scale, bias)


def _scaled(sums: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Sums [rows, N] of unscaled products to the result, in their dtype."""
    y = sums.float() * scale.flatten()
    return (y if bias is None else y + bias.float()).to(sums.dtype)


def _launch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from optforge.kernels.weight_only import launch  # Triton exists on Linux only

    return launch(x, weight, scale, None, bias, kind=INT8)


def _few(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight, x.new_ones(weight.shape[0]))
    return product


define_plain(
    "int8_few",
    "(Tensor x, Tensor weight) -> Tensor",
    cpu=_few,
    fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]),
    flops=product_flops,
)
define("int8_weight", "Tensor scale, Tensor? bias", cuda=_launch, reference=reference)
