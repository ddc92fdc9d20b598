"""y = x @ dequantize(weight).T + bias with an int4 weight in groups: a quarter of the bytes of bf16.

x [rows, K]; weight uint8 [N, ceil(K / 2)], the even column in the low nibble; scale fp32 [N, groups]; zero uint8
[N, groups], or None for symmetric storage (a nibble stands for value + 8); bias [N] or None; y [rows, N] in x's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels.dispatch import define, takes_kernel
from optforge.kernels.launches import INT4
from optforge.kernels.rounding import from_int4

GROUP_SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Group sizes that the kernel takes: a step along K must be at least 16 and stay within one group."""


def int4_weight(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group_size: int) -> Tensor:
    """The product, by kernel or reference, whichever the device takes."""
    if takes_kernel(x):
        result: Tensor = torch.ops.optforge.int4_weight(x, weight, scale, zero, bias, group_size)
        return result
    return reference(x, weight, scale, zero, bias, group_size)


def reference(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group_size: int) -> Tensor:
    """Plain PyTorch: dequantizes to x's dtype, then multiplies."""
    values = from_int4(weight, scale, zero, x.shape[1], group_size, x.dtype)
    return torch.nn.functional.linear(x, values, None if bias is None else bias.to(x.dtype))


def _launch(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group_size: int) -> Tensor:
    from optforge.kernels.weight_only import launch  # Triton exists on Linux only

    return launch(x, weight, scale, zero, bias, kind=INT4, group=group_size)


define("int4_weight", "Tensor scale, Tensor? zero, Tensor? bias, int group_size", cuda=_launch, reference=reference)
