"""RMSNorm and LayerNorm over the last dimension, with the residual sum before them and the rounding of activations after them.

    hidden = x + residual                     in x's dtype, where a residual is given
    y = (hidden - mean) / sqrt(var + eps) * (weight + offset) + bias

x [..., K] in bf16, fp16 or fp32. RMSNorm takes no mean off and knows no bias. Arithmetic is fp32, rounded once at the end. With
`rounded_*` y comes as fp8 or int8 with its scale per row, which a dynamic product would otherwise make in a pass of its own.

Sources: Zhang and Sennrich, Root mean square layer normalization, 2019, section 3; Ba et al., Layer normalization, 2016, section 3.

For training there is a backward, in plain PyTorch, that a compiler fuses; Liger's Triton kernels are the better choice uncompiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optforge.kernels.dispatch import LIBRARY, define_operator, nbytes, takes_kernel
from optforge.kernels.formats import FORMATS
from optforge.kernels.rounding import fp8_rows, int8_rows

FORMS = ("int8", *FORMATS)
"""What activations are rounded to: int8 with an offset per row, or an fp8 of a device."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """RMSNorm of x [..., K], in x's dtype."""
    return _norm(x, None, weight, None, eps, offset, centered=False)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and that sum, both in x's dtype."""
    return _norm(x, residual, weight, None, eps, offset, centered=False)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of x [..., K], in x's dtype."""
    return _norm(x, None, weight, bias, eps, 0.0, centered=True)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """LayerNorm of x + residual, and that sum, both in x's dtype."""
    return _norm(x, residual, weight, bias, eps, 0.0, centered=True)


def rounded_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    form: str,
    *,
    offset: float = 0.0,
    centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm rounded per row: stored [..., K], scale and shift fp32 [..., 1], and the sum with the residual.

    Args:
        form: of `FORMS`. int8: y is close to scale * stored + shift. fp8: stored is its bits in uint8, and shift is zero.
    """
    if takes_kernel(x):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.optforge.rounded_norm(
            x, residual, weight, bias, eps, offset, centered, form
        )
        return found
    return _rounded_reference(x, residual, weight, bias, eps, offset, centered, form)


def rounded_rows(y: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Stored, scale and shift of y [..., K] in plain PyTorch."""
    flat = y.reshape(-1, y.shape[-1])
    if form == "int8":
        stored, scale, shift = int8_rows(flat)
    else:
        stored, scale = fp8_rows(flat, FORMATS[form], per_row=True)
        stored, shift = stored.view(torch.uint8), torch.zeros_like(scale)
    around = (*y.shape[:-1], 1)
    return stored.reshape(y.shape), scale.reshape(around), shift.reshape(around)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, *, centered: bool
) -> tuple[Tensor, Tensor]:
    if takes_kernel(x):
        found: tuple[Tensor, Tensor] = torch.ops.optforge.norm(x, residual, weight, bias, eps, offset, centered)
        return found[0], (x if residual is None else found[1])
    return _reference(x, residual, weight, bias, eps, offset, centered)


def _reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, Tensor]:
    hidden = x if residual is None else x + residual
    return _normed(hidden, weight, bias, eps, offset, centered).to(x.dtype), hidden


def _normed(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool) -> Tensor:
    """fp32."""
    values = hidden.float()
    if centered:
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        values = values * (weight.float() + offset)
    return values if bias is None else values + bias.float()


def _rounded_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounds the fp32 values, without x's dtype in between."""
    hidden = x if residual is None else x + residual
    return (*rounded_rows(_normed(hidden, weight, bias, eps, offset, centered), form), hidden)


def _apart(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """As an operator must: the sum in memory of its own, and nothing of it where nothing is added."""
    y, hidden = _reference(x, *arguments)
    return y, (x.new_empty(0) if arguments[0] is None else hidden)


def _rounded_apart(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stored, scale, shift, hidden = _rounded_reference(x, *arguments)
    return stored, scale, shift, hidden.clone() if hidden is x else hidden


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, Tensor]:
    from optforge.kernels.row_kernels import norm  # Triton exists on Linux only

    return norm(x, residual, weight, bias, eps, offset, centered=centered)


def _launch_rounded(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from optforge.kernels.row_kernels import rounded_norm as launch

    return launch(x, residual, weight, bias, eps, offset, centered=centered, form=form)


def _fake(x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)


def _rounded_fake(x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    stored = x.new_empty(x.shape, dtype=torch.int8 if arguments[-1] == "int8" else torch.uint8)
    return stored, scale, torch.empty_like(scale), x.new_empty(x.shape)


def _flops(x_shape: tuple[int, ...], *arguments: Any, **rest: Any) -> int:
    """No product; PyTorch's counter leaves such work out."""
    return 0


def _moved(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> int:
    """What is given and y; and the sum where there is a residual."""
    return nbytes(x, residual, weight, bias) + nbytes(x) * (1 if residual is None else 2)


def _rounded_moved(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> int:
    rows = x.numel() // max(x.shape[-1], 1)
    return nbytes(x, residual, weight, bias) + x.numel() + 8 * rows + nbytes(x)


_ARGUMENTS = "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float offset, bool centered"
define_operator("norm", f"({_ARGUMENTS}) -> (Tensor, Tensor)", cuda=_launch, reference=_apart, fake=_fake, flops=_flops, moved=_moved)
define_operator(
    "rounded_norm",
    f"({_ARGUMENTS}, str form) -> (Tensor, Tensor, Tensor, Tensor)",
    cuda=_launch_rounded,
    reference=_rounded_apart,
    fake=_rounded_fake,
    flops=_flops,
    moved=_rounded_moved,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, residual, weight, bias, ctx.eps, ctx.offset, ctx.centered = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(x if residual is None else output[1], weight, bias)


def _backward(ctx: Any, grad: Tensor, grad_hidden: Tensor | None) -> tuple[Any, ...]:
    """With n the normalized values and g = grad * (weight + offset): (g - mean(g n) n [- mean(g])) / sqrt(var + eps)."""
    hidden, weight, bias = ctx.saved_tensors
    values, upstream = hidden.float(), grad.float()
    if ctx.centered:
        values = values - values.mean(-1, keepdim=True)
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + ctx.eps)
    normed = values * inverse
    g = upstream if weight is None else upstream * (weight.float() + ctx.offset)
    inner = g - normed * (g * normed).mean(-1, keepdim=True)
    if ctx.centered:
        inner = inner - g.mean(-1, keepdim=True)
    grad_x = (inner * inverse).to(hidden.dtype)
    if ctx.has_residual and grad_hidden is not None:
        grad_x = grad_x + grad_hidden
    rows = tuple(range(grad.dim() - 1))
    grad_weight = None if weight is None else (upstream * normed).sum(rows).to(weight.dtype)
    grad_bias = None if bias is None else upstream.sum(rows).to(bias.dtype)
    return grad_x, (grad_x if ctx.has_residual else None), grad_weight, grad_bias, None, None, None


torch.library.register_autograd("optforge::norm", _backward, setup_context=_keep, lib=LIBRARY)
