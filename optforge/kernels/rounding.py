"""Round-to-nearest arithmetic: weights and activations to int8, int4 and fp8, and back.

Plain PyTorch in fp32, so that it runs on every device, on meta, under export, and fused by Inductor. All kernels and all
references take their meaning of a stored weight from here. Weights are [N, K] (N outputs, K inputs), activations
[rows, K]. A scale is never zero: a row of zeros gets the smallest normal float and comes back as exact zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels.formats import Fp8Format

TINY = torch.finfo(torch.float32).tiny
INT4_BIAS = 8
"""What a symmetric int4 value is stored with added to it, so that a nibble is unsigned."""


def int8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per output channel: int8 [N, K] in -127..127 and fp32 scales [N, 1] (absmax / 127)."""
    values = weight.float()
    scale = (values.abs().amax(1, keepdim=True) / 127).clamp_min(TINY)
    return torch.round(values / scale).clamp(-127, 127).to(torch.int8), scale


def int4_weight(weight: Tensor, group_size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Int4 in groups of `group_size` along K; the last group is shorter where K is not a multiple.

    Returns:
        uint8 [N, ceil(K / 2)], two values per byte, the even column in the low nibble; fp32 scales [N, groups];
        integer zero points as uint8 [N, groups], or None when symmetric (a nibble then stands for value + 8).
    """
    grouped = _groups(weight.float(), group_size)
    if symmetric:
        scale = (grouped.abs().amax(2, keepdim=True) / 7).clamp_min(TINY)
        stored = torch.round(grouped / scale).clamp(-7, 7) + INT4_BIAS
        zero = None
    else:
        low, high = grouped.amin(2, keepdim=True).clamp(max=0), grouped.amax(2, keepdim=True).clamp(min=0)
        scale = ((high - low) / 15).clamp_min(TINY)
        zero = torch.round(-low / scale).clamp(0, 15)
        stored = (torch.round(grouped / scale) + zero).clamp(0, 15)
        zero = zero.squeeze(2).to(torch.uint8)
    nibbles = stored.flatten(1)[:, : weight.shape[1]].to(torch.uint8)
    return pack_int4(nibbles), scale.squeeze(2), zero


def fp8_weight(weight: Tensor, fmt: Fp8Format, *, per_channel: bool) -> tuple[Tensor, Tensor]:
    """fp8 as its bits: uint8 [N, K] and fp32 scales [N, 1], or [1, 1] for one scale (absmax / largest value)."""
    values = weight.float()
    absmax = values.abs().amax(1, keepdim=True) if per_channel else values.abs().amax().reshape(1, 1)
    scale = (absmax / fmt.maximum).clamp_min(TINY)
    return to_fp8(values / scale, fmt).view(torch.uint8), scale


def to_fp8(values: Tensor, fmt: Fp8Format) -> Tensor:
    """fp32 values to fp8, saturating; -0 becomes 0, since its byte is NaN in FNUZ."""
    return (values.clamp(-fmt.maximum, fmt.maximum) + 0.0).to(fmt.dtype)


def pack_int4(nibbles: Tensor) -> Tensor:
    """uint8 [N, K] with values 0..15 to uint8 [N, ceil(K / 2)]; an odd last column is paired with 0."""
    if nibbles.shape[1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    """uint8 [N, ceil(columns / 2)] to uint8 [N, columns] with values 0..15."""
    return torch.stack((packed & 0xF, packed >> 4), dim=2).flatten(1)[:, :columns]


def from_int4(packed: Tensor, scale: Tensor, zero: Tensor | None, columns: int, group_size: int, dtype: torch.dtype) -> Tensor:
    """What int4 storage stands for, in `dtype` [N, columns]; the product with the scale is made in fp32."""
    nibbles = unpack_int4(packed, columns).float()
    offset = INT4_BIAS if zero is None else _spread(zero, columns, group_size).float()
    return ((nibbles - offset) * _spread(scale, columns, group_size)).to(dtype)


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric int8 per row: int8 [rows, K], fp32 scales [rows, 1] and fp32 offsets [rows, 1].

    `x` is close to `scale * stored + offset`. The offset is a whole number of steps, so that 0 is exact: in a row with one
    huge value nearly all others lie within a step of 0, and their errors would add up instead of cancelling. Two of the
    255 steps are given up, and nothing has to be clamped.
    """
    values = x.float()
    low = values.amin(1, keepdim=True).clamp(max=0)
    span = (values.amax(1, keepdim=True).clamp(min=0) - low).clamp_min(253 * TINY)
    steps = 253 / span
    zero = torch.round(-127 - low * steps)
    scale = span * (1 / 253)
    return (torch.round(values * steps) + zero).to(torch.int8), scale, -zero * scale


def int8_range(low: float, high: float) -> tuple[float, float]:
    """Scale and offset of int8 inputs that lie between `low` and `high`: as `int8_rows`, with 0 exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max(high - low, 253 * TINY) / 253
    return scale, (round(low / scale) + 127) * scale


def fp8_rows(x: Tensor, fmt: Fp8Format, *, per_row: bool) -> tuple[Tensor, Tensor]:
    """fp8 activations [rows, K] and fp32 scales [rows, 1], or [1, 1] for one scale over the whole input."""
    values = x.float()
    absmax = values.abs().amax(1, keepdim=True) if per_row else values.abs().amax().reshape(1, 1)
    scale = (absmax / fmt.maximum).clamp_min(TINY)
    return to_fp8(values / scale, fmt), scale


def _groups(values: Tensor, group_size: int) -> Tensor:
    """[N, K] to [N, groups, group_size], the last group filled with zeros, which widen no range."""
    short = -values.shape[1] % group_size
    return torch.nn.functional.pad(values, (0, short)).reshape(values.shape[0], -1, group_size)


def _spread(per_group: Tensor, columns: int, group_size: int) -> Tensor:
    """[N, groups] to [N, columns]."""
    return per_group.repeat_interleave(group_size, dim=1)[:, :columns]
