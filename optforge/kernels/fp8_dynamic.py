"""y = x8 @ weight8.T * (row scale * channel scale) + bias: activations go to fp8 as they come, the product runs in fp8.

x [rows, K] in bf16, fp16 or fp32; weight uint8 [N, K], the bits of e4m3fn or e4m3fnuz; scale fp32 [N, 1] or [1, 1];
bias [N] or None; y [rows, N] in x's dtype. With one scale per weight row the activations have one per row as well, else
one in all (the two forms that the matrix units' libraries take). Sums are fp32, without the faster accumulation of
Hopper, whose 14 bits would be one more loss beside the format's own.

The product is `torch._scaled_mm`; the rounding before it is plain PyTorch, so that Inductor fuses it with the norm that
makes x. There is no kernel of our own and no operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels.dispatch import takes_kernel
from optforge.kernels.formats import FNUZ, FORMATS, OCP, Fp8Format
from optforge.kernels.rounding import fp8_rows, to_fp8


def fp8_dynamic(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, fmt: str, *, per_row: bool, input_scale: Tensor | None = None
) -> Tensor:
    """The product; on a device whose own format is another, or that has none, the same numbers in plain PyTorch.

    Args:
        input_scale: fp32 [1], found by calibration; x beyond it saturates. None: found in x itself.
    """
    form = FORMATS[fmt]
    native = form if x.is_meta else FNUZ if torch.version.hip and "gfx94" in _arch(x) else OCP
    if not x.shape[0] or not takes_kernel(x) or form is not native:
        return reference(x, weight, scale, bias, fmt, per_row=per_row, input_scale=input_scale)
    rounded, row_scale = _rounded(x, form, per_row, input_scale)
    channel_scale = scale.t() if per_row else scale
    y = torch._scaled_mm(rounded, weight.view(form.dtype).t(), row_scale, channel_scale, out_dtype=torch.bfloat16)
    return (y if bias is None else y + bias).to(x.dtype)


def reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, fmt: str, *, per_row: bool, input_scale: Tensor | None = None
) -> Tensor:
    """Plain PyTorch: the same fp8 values, multiplied in bf16 where x is bf16 (they are exact there), else in fp32."""
    rounded, row_scale = _rounded(x, FORMATS[fmt], per_row, input_scale)
    dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    product = torch.mm(rounded.to(dtype), weight.view(FORMATS[fmt].dtype).to(dtype).t())
    y = product.float() * row_scale * scale.flatten()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _rounded(x: Tensor, form: Fp8Format, per_row: bool, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp8 [rows, K] and its scales, [rows, 1] or [1, 1]."""
    if input_scale is None:
        return fp8_rows(x, form, per_row=per_row)
    spread = input_scale.reshape(1, 1).expand(x.shape[0] if per_row else 1, 1)
    return to_fp8(x.float() / input_scale, form), spread.contiguous()


def _arch(x: Tensor) -> str:
    return str(torch.cuda.get_device_properties(x.device).gcnArchName)
