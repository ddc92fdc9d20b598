"""y = x @ (weight * scale).T + bias in int8: activations go to int8 per row as they come, the product runs in int8.

x [rows, K] in bf16, fp16 or fp32; weight int8 [N, K]; scale fp32 [N, 1]; weight_sum fp32 [N], the sum of each dequantized
weight row; bias [N] or None; y [rows, N] in x's dtype. Activations are asymmetric, a scale and an offset per row: on
SmolLM2 one scale in all costs 66% in perplexity, symmetric rows 3.9%, asymmetric rows 1.5%. With x close to
s[m] * q[m, k] + offset[m],

    sum_k x[m, k] * w[n, k]  =  s[m] * scale[n] * sum_k q[m, k] * weight[n, k]  +  offset[m] * weight_sum[n]

The integer sum is exact: 128 * 127 * K stays below 2^31 up to K = 132,000. Above 2^24 (from K = 1,033 on, in the worst
case) its conversion to fp32 rounds by 6e-8 of it, a hundredth of what rounding the activations costs at K = 14,336.

The product is `torch._int_mm`, oneDNN's on CPU and cuBLAS's on CUDA. What comes before and after is plain PyTorch, which
Inductor fuses with the layers around it; one more pass over the activations would eat the gain at small widths. Divisions
and clamps are few there, because the fused loops work out each row's numbers again for every vector of values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels.rounding import int8_rows

CUDA_ROWS = 17
"""cuBLAS's int8 product refuses fewer rows; K and N must be multiples of 8."""


def int8_dynamic(x: Tensor, weight: Tensor, scale: Tensor, weight_sum: Tensor, bias: Tensor | None) -> Tensor:
    """The product; plain PyTorch around `torch._int_mm`, the same on every device."""
    rounded, row_scale, offset = int8_rows(x)
    y = int_product(rounded, weight).float() * scale.flatten() * row_scale + offset * weight_sum
    return (y if bias is None else y + bias.float()).to(x.dtype)


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """a [rows, K] @ b [N, K].T, int8 in, int32 out and exact; on CUDA sizes that cuBLAS refuses are filled with zeros."""
    if not a.is_cuda:
        return torch._int_mm(a, b.t())
    rows, outputs = a.shape[0], b.shape[0]
    short_k, short_n = -a.shape[1] % 8, -outputs % 8
    a = F.pad(a, (0, short_k, 0, max(0, CUDA_ROWS - rows)))
    b = F.pad(b, (0, short_k, 0, short_n)) if short_k or short_n else b
    return torch._int_mm(a, b.t())[:rows, :outputs]
