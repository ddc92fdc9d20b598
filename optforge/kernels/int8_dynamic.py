"""y = x @ (weight * scale).T + bias in int8: activations go to int8 per row as they come, the product runs in int8.

x [rows, K] in bf16, fp16 or fp32; weight int8 [N, K]; scale fp32 [N, 1]; weight_sum fp32 [N], the sum of each dequantized
weight row; bias [N] or None; y [rows, N] in x's dtype. Activations are asymmetric, a scale and an offset per row: on
SmolLM2 one scale in all costs 66% in perplexity, symmetric rows 3.9%, asymmetric rows 1.5%. With x close to
s[m] * q[m, k] + offset[m],

    sum_k x[m, k] * w[n, k]  =  s[m] * scale[n] * sum_k q[m, k] * weight[n, k]  +  offset[m] * weight_sum[n]

The integer sum is exact: 128 * 127 * K stays below 2^31 up to K = 132,000. Above 2^24 (from K = 1,033 on, in the worst
case) its conversion to fp32 rounds by 6e-8 of it, a hundredth of what rounding the activations costs at K = 14,336.

On a CPU with VNNI the product is oneDNN's quantized linear, uint8 by int8 with prepacked weights (a bit flip makes the int8
activations uint8, and the offset takes up the 128); a few rows, other CPUs and CUDA take `torch._int_mm`. What comes before
and after is plain PyTorch, which Inductor fuses with the layers around it; one more pass over the activations would eat the
gain at small widths. The offset is a float and not an integer zero point, and divisions are few, because the fused loops
work out each row's numbers again for every vector of values: that made them a third slower.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels import dispatch
from optforge.kernels.rounding import int8_rows

CUDA_ROWS = 17
"""cuBLAS's int8 product refuses fewer rows; K and N must be multiples of 8."""

PACKED_ROWS = 8
"""Fewer rows run faster unpacked: 1 row of 3072 x 576 takes 0.039 ms packed and 0.030 ms by `torch._int_mm` (docs/log.md)."""


def int8_dynamic(x: Tensor, weight: Tensor, scale: Tensor, weight_sum: Tensor, bias: Tensor | None) -> Tensor:
    """The product, by whichever of the three the device and the rows take."""
    return _multiplied(x, *int8_rows(x), weight, scale, weight_sum, bias)


def int8_static(
    x: Tensor, weight: Tensor, scale: Tensor, weight_sum: Tensor, bias: Tensor | None, input_scale: Tensor, input_offset: Tensor
) -> Tensor:
    """The same with one scale and one offset of all inputs, fp32 [1] each, that calibration found: x outside of -128 to 127 steps
    saturates. Rounding is then pointwise, without a pass for each row's range."""
    rounded = torch.round((x.float() - input_offset) / input_scale).clamp(-128, 127).to(torch.int8)
    return _multiplied(x, rounded, input_scale, input_offset, weight, scale, weight_sum, bias)


def _multiplied(
    x: Tensor, rounded: Tensor, row_scale: Tensor, offset: Tensor, weight: Tensor, scale: Tensor, weight_sum: Tensor, bias: Tensor | None
) -> Tensor:
    if _packs(x, weight):
        unsigned = rounded.view(torch.uint8).bitwise_xor(128)  # rounded + 128
        product: Tensor = torch.ops.optforge.int8_packed(unsigned, weight, scale)
        y = product * row_scale + (offset - 128 * row_scale) * weight_sum
    else:
        y = int_product(rounded, weight).float() * scale.flatten() * row_scale + offset * weight_sum
    return (y if bias is None else y + bias.float()).to(x.dtype)


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """a [rows, K] @ b [N, K].T, int8 in, int32 out and exact; on CUDA sizes that cuBLAS refuses are filled with zeros."""
    if not dispatch.on_gpu(a):
        return torch._int_mm(a, b.t())
    rows, outputs = a.shape[0], b.shape[0]
    short_k, short_n = -a.shape[1] % 8, -outputs % 8
    a = F.pad(a, (0, short_k, 0, max(0, CUDA_ROWS - rows)))
    b = F.pad(b, (0, short_k, 0, short_n)) if short_k or short_n else b
    return torch._int_mm(a, b.t())[:rows, :outputs]


def _packs(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's packed product runs: on a CPU with VNNI, for enough rows, outside `dispatch.decompose`."""
    if dispatch.decomposing() or not _VNNI:  # asked first: under export a look at the rows would fix their smallest number
        return False
    return dispatch.on_cpu(x) and x.shape[0] >= PACKED_ROWS and 0 not in weight.shape


_VNNI = torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()  # type: ignore[no-untyped-call]  # PyTorch leaves them untyped
_PACKED = "_optforge_packed"
"""Attribute of a weight that holds its packed form, and what it was packed from."""


def _packed(weight: Tensor) -> Tensor:
    """oneDNN's layout of the weight, made once and again whenever the weight's memory or content is another.

    It hangs on the weight itself, so that it goes when the weight goes, and is in no state dict. It takes as much memory
    as the weight once more.
    """
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    found: tuple[tuple[int, int], Tensor] | None = getattr(weight, _PACKED, None)
    if found is None or found[0] != state:
        found = (state, torch.ops.onednn.qlinear_prepack(weight.detach(), None))
        setattr(weight, _PACKED, found)
    return found[1]


def _int8_packed(a: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    outputs = weight.shape[0]
    zeros = torch.zeros(outputs, dtype=torch.int32)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        a, 1.0, 0, _packed(weight), scale.flatten(), zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _fake(a: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], weight.shape[0], dtype=torch.float32)


dispatch.define_plain(
    "int8_packed", "(Tensor a, Tensor weight, Tensor scale) -> Tensor", cpu=_int8_packed, fake=_fake, flops=dispatch.product_flops
)
