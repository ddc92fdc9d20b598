"""y = x @ (weight * scale).T + bias with an fp8 weight stored as its bits: half the bytes of bf16, on any device.

x [rows, K]; weight uint8 [N, K], the bits of e4m3fn or e4m3fnuz; scale fp32 [N, 1] or [1, 1]; bias [N] or None;
y [rows, N] in x's dtype. fp8 values are exact in bf16 and fp16, so the scale is applied to the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels.dispatch import define, takes_kernel
from optforge.kernels.formats import FORMATS
from optforge.kernels.launches import FP8


def fp8_weight(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, fmt: str) -> Tensor:
    """The product, by kernel or reference, whichever the device takes. `fmt` is a key of `formats.FORMATS`."""
    if takes_kernel(x):
        result: Tensor = torch.ops.optforge.fp8_weight(x, weight, scale, bias, fmt)
        return result
    return reference(x, weight, scale, bias, fmt)


def reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, fmt: str) -> Tensor:
    """Plain PyTorch: the cast is one pass over the weight, the scale another over the (smaller) result.

    In fp16 the scale goes to the weight first: a sum of 448 times an activation soon leaves fp16's range.
    """
    values = weight.view(FORMATS[fmt].dtype)
    if x.dtype is torch.float16:
        return torch.nn.functional.linear(x, (values.float() * scale).half(), None if bias is None else bias.half())
    y = torch.mm(x, values.to(x.dtype).t()).float() * scale.flatten()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _launch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, fmt: str) -> Tensor:
    from optforge.kernels.weight_only import launch  # Triton exists on Linux only

    return launch(x, weight, scale, None, bias, kind=FP8, factor=FORMATS[fmt].half_factor)


define("fp8_weight", "Tensor scale, Tensor? bias, str fmt", cuda=_launch, reference=reference)
