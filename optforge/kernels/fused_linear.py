"""A decoder's product with what stands around it: norm in front, bias, gate and residual behind, in one launch for a few rows.

    h = rms_norm(x)                       where `norm` is given
    y = h @ dequantize(weight).T + bias
    y = act(y[..., :I]) * y[..., I:]      where `gate` is given: the weight is [2 I, K], the gate's rows first, then up's
    y = y + residual

x [..., K] in bf16, fp16 or fp32; y [..., N] (or [..., I]) in x's dtype. Storage of the weight:

    plain               [N, K] in x's dtype
    int8                int8 [N, K], scale fp32 [N, 1]
    e4m3fn, e4m3fnuz    uint8 [N, K], the bits; scale fp32 [N, 1] or [1, 1]
    int4                uint8 [N, ceil(K / 2)], even column in the low nibble; scale fp32 [N, groups], zero uint8 [N, groups] or None

Up to `ROWS` rows a GPU runs all of it as one kernel (`kernels.few_rows`), bound by reading the weight once. More rows are a matter of
matrix units: the parts then run one after another, each by its own operator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.kernels.dispatch import define_operator, nbytes, takes_kernel
from optforge.kernels.formats import FORMATS
from optforge.kernels.fp8_weight import fp8_weight
from optforge.kernels.gates import GATES, gated
from optforge.kernels.int4_weight import int4_weight
from optforge.kernels.int8_weight import int8_weight
from optforge.kernels.norms import rms_norm
from optforge.kernels.quantized import Quantized

ROWS = 16
"""Most rows of the fused kernel."""

STORAGES = ("plain", "int8", "int4", *FORMATS)
SMALLEST_GROUP = 32
"""Of int4: smaller groups leave a step along K too short for the matrix units, and run as parts."""


class Parts(NamedTuple):
    """The arguments of `fused_linear` that a layer holds."""

    weight: Tensor
    scale: Tensor | None
    zero: Tensor | None
    bias: Tensor | None
    storage: str
    group_size: int


def parts(linear: nn.Linear) -> Parts | None:
    """What `fused_linear` multiplies by for this layer; None where it knows no such storage (blocks, MX, NVFP4).

    A layer that rounds its activations is given too: the fused product leaves them as they are, which is closer to the model.
    """
    bias = linear.bias
    if not isinstance(linear, Quantized):
        return Parts(linear.weight, None, None, bias, "plain", 0)
    scheme = linear.scheme
    if scheme.granularity == "block" or scheme.scale_dtype != "fp32" or scheme.weight_dtype not in ("int8", "int4", "fp8"):
        return None
    storage = linear.fp8_format if scheme.weight_dtype == "fp8" else scheme.weight_dtype
    group = linear.group_size if storage == "int4" else 0
    return Parts(linear.weight, linear.weight_scale, linear.weight_zero_point if storage == "int4" else None, bias, storage, group)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    storage: str = "plain",
    group_size: int = 0,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    gate: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """The product with its surroundings, as the module's docstring has it.

    Args:
        x: [..., K].
        norm: [K], the weight of an RMSNorm in front; what it multiplies by is `norm + norm_offset` (Gemma: 1).
        gate: one of `gates.GATES`, or empty.
        residual: [..., N] (or [..., I]) in x's dtype, added to the result.
    """
    flat = x.reshape(-1, x.shape[-1])
    kept = None if residual is None else residual.reshape(flat.shape[0], -1)
    if takes_kernel(x) and _fits(flat, norm, storage, group_size):
        y: Tensor = torch.ops.optforge.fused_linear(
            flat, weight, scale, zero, bias, norm, kept, storage, group_size, eps, norm_offset, gate
        )
    else:
        y = in_parts(flat, weight, scale, zero, bias, norm, kept, storage, group_size, eps, norm_offset, gate)
    return y.reshape(*x.shape[:-1], y.shape[-1])


MULTIPLES = {"plain": 8, "int8": 16, "int4": 32} | dict.fromkeys(FORMATS, 16)
"""What K must be a multiple of in the fused kernel: it reads 16 bytes at a time. Other sizes run as parts."""


def _fits(x: Tensor, norm: Tensor | None, storage: str, group_size: int) -> bool:
    """Whether the fused kernel takes it: few rows of 16-bit numbers, and a K that it can read in whole words."""
    if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[0] > ROWS or x.shape[1] % MULTIPLES[storage] or not x.shape[1]:
        return False
    if norm is not None and norm.dtype is not torch.bfloat16:  # fp16 would overflow before the norm's factor; x has the norm's dtype
        return False
    return storage != "int4" or (group_size & -group_size) >= SMALLEST_GROUP


def in_parts(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    storage: str,
    group_size: int,
    eps: float,
    norm_offset: float,
    gate: str,
) -> Tensor:
    """The same, one operator after another; in plain PyTorch wherever those take no kernel. x [rows, K]."""
    if norm is not None:
        x = rms_norm(x, norm, eps, offset=norm_offset)
    y = _product(x, weight, scale, zero, bias, storage, group_size)
    if gate:
        y = gated(y, gate)
    return y if residual is None else y + residual


def _product(
    x: Tensor, weight: Tensor, scale: Tensor | None, zero: Tensor | None, bias: Tensor | None, storage: str, group_size: int
) -> Tensor:
    if storage == "plain":
        return F.linear(x, weight, bias)
    assert scale is not None
    if storage == "int4":
        return int4_weight(x, weight, scale, zero, bias, group_size)
    return int8_weight(x, weight, scale, bias) if storage == "int8" else fp8_weight(x, weight, scale, bias, storage)


def _launch(x: Tensor, *arguments: Any) -> Tensor:
    from optforge.kernels.few_rows import launch  # Triton exists on Linux only

    return launch(x, *arguments)


def _reference(x: Tensor, *arguments: object) -> Tensor:
    from optforge.kernels.dispatch import decompose

    with decompose():
        return in_parts(x, *arguments)  # type: ignore[arg-type]  # the operator's own, in its order


def _fake(x: Tensor, weight: Tensor, *arguments: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if arguments[-1] else 1))


def _flops(x_shape: tuple[int, ...], weight_shape: tuple[int, ...], *arguments: object, out_shape: object = None, **rest: object) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


def _moved(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    *rest: object,
) -> int:
    """Everything that is given, once, and the result."""
    outputs = weight.shape[0] // (2 if rest and rest[-1] else 1)
    return nbytes(x, weight, scale, zero, bias, norm, residual) + x.shape[0] * outputs * x.element_size()


define_operator(
    "fused_linear",
    "(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, Tensor? norm, Tensor? residual, str storage, int group_size,"
    " float eps, float norm_offset, str gate) -> Tensor",
    cuda=_launch,
    reference=_reference,
    fake=_fake,
    flops=_flops,
    moved=_moved,
)

__all__ = ["GATES", "ROWS", "STORAGES", "Parts", "fused_linear", "in_parts", "parts"]
