"""y = x @ (weight * scale).T + bias with an int8 weight: half the bytes of bf16, read at every token of a decode.

x [rows, K] in bf16, fp16 or fp32; weight int8 [N, K]; scale fp32 [N, 1]; bias [N] or None; y [rows, N] in x's dtype.
int8 values are exact in bf16, so the scale is applied to the sums and the weight itself is never rounded again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels.dispatch import define, takes_kernel
from optforge.kernels.launches import INT8


def int8_weight(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The product, by kernel or reference, whichever the device takes."""
    if takes_kernel(x):
        result: Tensor = torch.ops.optforge.int8_weight(x, weight, scale, bias)
        return result
    return reference(x, weight, scale, bias)


def reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Plain PyTorch: the cast is one pass over the weight, the scale another over the (smaller) result.

    In fp16 the scale goes to the weight first: a sum of 127 times an activation soon leaves fp16's range.
    """
    if x.dtype is torch.float16:
        return torch.nn.functional.linear(x, (weight.float() * scale).half(), None if bias is None else bias.half())
    y = torch.mm(x, weight.to(x.dtype).t()).float() * scale.flatten()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _launch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from optforge.kernels.weight_only import launch  # Triton exists on Linux only

    return launch(x, weight, scale, None, bias, kind=INT8)


define("int8_weight", "Tensor scale, Tensor? bias", cuda=_launch, reference=reference)
