"""The gate between a decoder's two projections: act(gate) * up, and its rounding for a product in 8 bits.

x [..., 2 I], the gate's half first, then up's, in bf16, fp16 or fp32; y [..., I] in x's dtype, arithmetic in fp32. SwiGLU and GEGLU:
Shazeer, GLU variants improve Transformer, 2020, section 2.

For training the operator has a backward in plain PyTorch, which a compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels.dispatch import LIBRARY, define_operator, nbytes, takes_kernel
from optforge.kernels.norms import rounded_rows

GATES = ("silu", "gelu", "gelu_tanh")
"""Activations of the gate: SiLU, GELU by the error function, GELU by its tanh approximation."""


def gated(x: Tensor, gate: str) -> Tensor:
    """act(x[..., :I]) * x[..., I:] in x's dtype."""
    if takes_kernel(x):
        y: Tensor = torch.ops.optforge.gated(x, gate)
        return y
    return _reference(x, gate)


def rounded_gated(x: Tensor, gate: str, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same rounded per row: stored [..., I], scale and shift fp32 [..., 1], as `norms.rounded_norm` has them."""
    if takes_kernel(x):
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.optforge.rounded_gated(x, gate, form)
        return found
    return _rounded_reference(x, gate, form)


def activated(values: Tensor, gate: str) -> Tensor:
    """The activation alone, in the dtype of `values`."""
    if gate == "silu":
        return F.silu(values)
    return F.gelu(values, approximate="tanh" if gate == "gelu_tanh" else "none")


def _values(x: Tensor, gate: str) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return activated(first, gate) * second


def _reference(x: Tensor, gate: str) -> Tensor:
    return _values(x, gate).to(x.dtype)


def _rounded_reference(x: Tensor, gate: str, form: str) -> tuple[Tensor, Tensor, Tensor]:
    return rounded_rows(_values(x, gate), form)


def _launch(x: Tensor, gate: str) -> Tensor:
    from optforge.kernels.row_kernels import gated as launch  # Triton exists on Linux only

    return launch(x, gate)


def _launch_rounded(x: Tensor, gate: str, form: str) -> tuple[Tensor, Tensor, Tensor]:
    from optforge.kernels.row_kernels import rounded_gated as launch

    return launch(x, gate, form)


def _fake(x: Tensor, gate: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _rounded_fake(x: Tensor, gate: str, form: str) -> tuple[Tensor, Tensor, Tensor]:
    stored = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8 if form == "int8" else torch.uint8)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return stored, scale, torch.empty_like(scale)


def _moved(x: Tensor, gate: str) -> int:
    return nbytes(x) * 3 // 2


def _rounded_moved(x: Tensor, gate: str, form: str) -> int:
    return nbytes(x) + x.numel() // 2 + 8 * (x.numel() // max(x.shape[-1], 1))


def _flops(*arguments: Any, **rest: Any) -> int:
    """No product; PyTorch's counter leaves such work out."""
    return 0


define_operator("gated", "(Tensor x, str gate) -> Tensor", cuda=_launch, reference=_reference, fake=_fake, flops=_flops, moved=_moved)
define_operator(
    "rounded_gated",
    "(Tensor x, str gate, str form) -> (Tensor, Tensor, Tensor)",
    cuda=_launch_rounded,
    reference=_rounded_reference,
    fake=_rounded_fake,
    flops=_flops,
    moved=_rounded_moved,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.gate = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Through the reference, whose derivative PyTorch knows."""
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        (grad_x,) = torch.autograd.grad(_reference(again, ctx.gate), again, grad)
    return grad_x, None


torch.library.register_autograd("optforge::gated", _backward, setup_context=_keep, lib=LIBRARY)
