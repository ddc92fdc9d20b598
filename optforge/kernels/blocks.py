"""Weights and activations in blocks that share a scale: fp8 in squares of 128, MX in groups of 32, NVFP4 in groups of 16.

Plain PyTorch, without an operator of its own: no kernel here multiplies these, so a layer dequantizes and multiplies in the model's
dtype, and what a plan predicts or a profiler sees is that work itself, dequantization included. Inductor fuses the dequantization
into one pass over the weight.

    scheme      elements     scale of a block
    fp8_block   e4m3         fp32, absmax / largest; weights [128, 128], activations [1, 128]
    mxfp8       e4m3fn       e8m0, a power of two; [1, 32] both
    mxfp4       e2m1         e8m0; [1, 32] both
    nvfp4       e2m1         e4m3fn times one fp32 scale (of the weight; of each row of activations); [1, 16] both

Where a size is no multiple of the block, the last block is shorter. MX scales follow the specification (section 6.3): values
between the largest element and the next power of two saturate. Activations lie flat [rows, K].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels.formats import E2M1_MAXIMUM, FORMATS, OCP, from_e2m1, from_e8m0, to_e2m1, to_e8m0
from optforge.kernels.rounding import TINY, pack_int4, to_fp8, unpack_int4
from optforge.spec import Scheme

SMALLEST_E4M3 = 2.0**-9
SMALLEST_GLOBAL = 2.0**-100
"""Of NVFP4's fp32 scale: times the smallest block scale it is still a normal float, so a block of zeros divides by no zero."""


def store(weight: Tensor, scheme: Scheme, fmt: str) -> dict[str, Tensor]:
    """The parameters of a weight [N, K] by name: `weight` uint8, `weight_scale` fp32 or uint8, NVFP4's `weight_global_scale` fp32 [1].

    Args:
        fmt: key of `formats.FORMATS`, of fp8 elements under fp32 scales.
    """
    values = weight.float()
    if scheme.granularity == "block":
        side = scheme.group_size or 128
        scale = (_square_largest(values, side) / FORMATS[fmt].maximum).clamp_min(TINY)
        return {"weight": to_fp8(values / _square_spread(scale, values, side), FORMATS[fmt]).view(torch.uint8), "weight_scale": scale}
    whole = values.abs().amax().reshape(1, 1) if values.numel() else values.new_ones(1, 1)
    codes, scale, whole_scale = _rounded(values, scheme, whole)
    stored = {"weight": pack_int4(codes) if scheme.weight_dtype == "fp4" else codes, "weight_scale": scale}
    return stored if whole_scale is None else stored | {"weight_global_scale": whole_scale.reshape(1)}


def dequantize(weight: Tensor, scale: Tensor, whole: Tensor | None, columns: int, scheme: Scheme, fmt: str) -> Tensor:
    """fp32 [N, K] that stored rows stand for."""
    if scheme.granularity == "block":
        values = weight.view(FORMATS[fmt].dtype).float()
        return values * _square_spread(scale, values, scheme.group_size or 128)
    codes = unpack_int4(weight, columns) if scheme.weight_dtype == "fp4" else weight
    return _valued(codes, scale, whole, scheme)


def block_product(x: Tensor, weight: Tensor, scale: Tensor, whole: Tensor | None, bias: Tensor | None, scheme: Scheme, fmt: str) -> Tensor:
    """y = x @ dequantize(weight).T + bias in x's dtype, x rounded to the scheme's blocks first where it rounds activations.

    x [rows, K] in bf16, fp16 or fp32; y [rows, N] in x's dtype.
    """
    values = dequantize(weight, scale, whole, x.shape[1], scheme, fmt).to(x.dtype)
    taken = x if scheme.activation_dtype is None else round_rows(x, scheme, fmt)
    return F.linear(taken, values, None if bias is None else bias.to(x.dtype))


def round_rows(x: Tensor, scheme: Scheme, fmt: str) -> Tensor:
    """x [rows, K] with each block of a row rounded and brought back, in x's dtype."""
    values = x.float()
    if scheme.granularity == "block":
        size = scheme.group_size or 128
        scale = (_largest(values, size) / FORMATS[fmt].maximum).clamp_min(TINY)
        spread = _spread(scale, values.shape[1], size)
        return (to_fp8(values / spread, FORMATS[fmt]).float() * spread).to(x.dtype)
    codes, scale, whole = _rounded(values, scheme, values.abs().amax(1, keepdim=True))
    return _valued(codes, scale, whole, scheme).to(x.dtype)


def bound(original: Tensor, scale: Tensor, whole: Tensor | None, scheme: Scheme) -> Tensor:
    """The largest error of each stored value: half a step, and in MX what saturates.

    An e4m3 value is off by at most 1/16 of itself or half the smallest step. Steps of e2m1 are at most a sixteenth of a value of 6
    or half of 0.5. MX saturates from 448 to 512, and from 6 to 8; NVFP4 where its e4m3 scale is rounded down, which is a sixteenth of
    the scale, or half of its smallest step.
    """
    size = original.abs()
    if scheme.granularity == "block":
        return size / 16 + _square_spread(scale, original, scheme.group_size or 128) * 2.0**-10
    spread = _spread(_scales(scale, whole, scheme), original.shape[1], scheme.group_size or 32)
    relative, smallest = (1 / 4, 0.25) if scheme.weight_dtype == "fp4" else (1 / 8, 2.0**-10)
    saturated = 0.0 if whole is None else whole * E2M1_MAXIMUM * SMALLEST_E4M3 / 2
    return size * relative + spread * smallest + saturated


def _rounded(values: Tensor, scheme: Scheme, largest: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [rows, K], scales uint8 [rows, groups], and the fp32 scales above them, [rows, 1] or [1, 1], of NVFP4.

    Args:
        largest: absolute values, [rows, 1] or [1, 1], that those fp32 scales are made of.
    """
    size = scheme.group_size or 32
    whole: Tensor | None = None
    groups = _largest(values, size)
    if scheme.scale_dtype == "e8m0":
        scale = to_e8m0(groups, scheme.weight_dtype)
    else:
        whole = (largest / (E2M1_MAXIMUM * OCP.maximum)).clamp_min(SMALLEST_GLOBAL)
        scale = to_fp8((groups / E2M1_MAXIMUM / whole).clamp_min(SMALLEST_E4M3), OCP).view(torch.uint8)
    scaled = values / _spread(_scales(scale, whole, scheme), values.shape[1], size)
    return (to_e2m1(scaled) if scheme.weight_dtype == "fp4" else to_fp8(scaled, OCP).view(torch.uint8)), scale, whole


def _valued(codes: Tensor, scale: Tensor, whole: Tensor | None, scheme: Scheme) -> Tensor:
    """fp32 values of codes [rows, K] under their scales."""
    values = from_e2m1(codes) if scheme.weight_dtype == "fp4" else codes.view(OCP.dtype).float()
    return values * _spread(_scales(scale, whole, scheme), codes.shape[1], scheme.group_size or 32)


def _scales(scale: Tensor, whole: Tensor | None, scheme: Scheme) -> Tensor:
    """fp32 [rows, groups] of stored scales."""
    if scheme.scale_dtype == "e8m0":
        return from_e8m0(scale)
    assert whole is not None
    return scale.view(OCP.dtype).float() * whole


def _largest(values: Tensor, size: int) -> Tensor:
    """Largest absolute value of each group of a row, [rows, groups]; the last group may be shorter."""
    padded = F.pad(values.abs(), (0, -values.shape[1] % size))
    return padded.reshape(values.shape[0], padded.shape[1] // size, size).amax(2)


def _spread(per_group: Tensor, columns: int, size: int) -> Tensor:
    """[rows, groups] to [rows, columns]."""
    return per_group.repeat_interleave(size, dim=1)[:, :columns]


def _square_largest(values: Tensor, side: int) -> Tensor:
    """Largest absolute value of each square, [ceil(N / side), ceil(K / side)]."""
    outputs, columns = values.shape
    padded = F.pad(values.abs(), (0, -columns % side, 0, -outputs % side))
    down, across = (length // side for length in padded.shape)
    return padded.reshape(down, side, across, side).amax((1, 3))


def _square_spread(scale: Tensor, like: Tensor, side: int) -> Tensor:
    """One scale per square to one per value of `like` [N, K]."""
    return scale.repeat_interleave(side, dim=0).repeat_interleave(side, dim=1)[: like.shape[0], : like.shape[1]]
