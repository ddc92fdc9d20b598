"""The Triton kernel behind `rotary_append`: one program for one head of one token, queries, keys and values alike.

A head's numbers are read twice, as they are and with the halves of their rotated part exchanged, which the cache serves; so the
rotation is a multiply and an add of whole tiles. What a program writes depends on which head it is: a query to the result, a key or
a value to its place in the cache, rounded to 8 bits under its own scale where the cache is stored so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from optforge.kernels.row_kernels import _fp8_bits

if TYPE_CHECKING:  # the compiler's own processes have no use for PyTorch
    from torch import Tensor

PLAIN, TO_INT8, TO_FP8 = 0, 1, 2
"""How the cache is stored (the kernel's FORM)."""

_FP8 = tl.constexpr(TO_FP8)
_TINY = tl.constexpr(2.0**-126)
_ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a number below 2^22 and taken off again, it leaves the nearest whole number, ties to even."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _keep(  # type: ignore[no-untyped-def]  # pointers and tiles
    values, at, scale_at, in_d, cache_ptr, scales_ptr, FORM: tl.constexpr, BIAS: tl.constexpr, MAXIMUM: tl.constexpr
):  # fmt: skip
    """Writes one head of one token into the cache, as `kv_cache.Format.round` defines it."""
    if FORM == 0:
        tl.store(cache_ptr + at, values.to(cache_ptr.dtype.element_ty), mask=in_d)
    else:
        scale = tl.maximum(tl.max(tl.where(in_d, tl.abs(values), 0.0), 0) / MAXIMUM, _TINY)
        steps = tl.div_rn(values, tl.zeros_like(values) + scale)
        if FORM == _FP8:
            tl.store(cache_ptr + at, _fp8_bits(steps, BIAS, MAXIMUM), mask=in_d)
        else:
            whole = tl.minimum(tl.maximum((steps + _ROUNDS) - _ROUNDS, -127.0), 127.0)
            tl.store(cache_ptr + at, whole.to(tl.int32).to(tl.int8), mask=in_d)
        tl.store(scales_ptr + scale_at, scale)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def rotary_kernel(  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, cos_ptr, sin_ptr, positions_ptr, q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, q_norm_ptr, k_norm_ptr,
    T, H, G, D, R, stride_xb, stride_xt, stride_cb, stride_ct, stride_kb, stride_kg, stride_kl, stride_vb, stride_vg, stride_vl,
    stride_sb, stride_sg, eps, norm_offset,
    FORM: tl.constexpr, BIAS: tl.constexpr, MAXIMUM: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (B T, H + 2 G)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    head = tl.program_id(1)
    b, t = (token // T).to(tl.int64), token % T
    offs = tl.arange(0, BLOCK)
    in_d, in_r = offs < D, offs < R
    other = tl.where(offs < R // 2, offs + R // 2, offs - R // 2)
    row = x_ptr + b * stride_xb + t * stride_xt + head * D
    x = tl.load(row + offs, mask=in_d, other=0.0).to(tl.float32)
    crossed = tl.load(row + other, mask=in_r, other=0.0).to(tl.float32)
    if Q_NORM:  # noqa: SIM102 - one is compiled in, the other is asked of the device
        if head < H:
            inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            x = x * inverse * (tl.load(q_norm_ptr + offs, mask=in_d, other=0.0).to(tl.float32) + norm_offset)
            crossed = crossed * inverse * (tl.load(q_norm_ptr + other, mask=in_r, other=0.0).to(tl.float32) + norm_offset)
    if K_NORM:  # noqa: SIM102 - as above
        if (head >= H) & (head < H + G):
            inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            x = x * inverse * (tl.load(k_norm_ptr + offs, mask=in_d, other=0.0).to(tl.float32) + norm_offset)
            crossed = crossed * inverse * (tl.load(k_norm_ptr + other, mask=in_r, other=0.0).to(tl.float32) + norm_offset)
    angle = b * stride_cb + t * stride_ct + offs
    cos = tl.load(cos_ptr + angle, mask=in_r, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=in_r, other=0.0).to(tl.float32)
    turned = x * cos + tl.where(offs < R // 2, -crossed, crossed) * sin
    place = tl.load(positions_ptr + t).to(tl.int64)
    if head < H:
        tl.store(q_ptr + ((b * H + head) * T + t) * D + offs, turned.to(q_ptr.dtype.element_ty), mask=in_d)
    elif head < H + G:
        at = b * stride_kb + (head - H) * stride_kg + place * stride_kl + offs
        _keep(turned, at, b * stride_sb + (head - H) * stride_sg + place, in_d, keys_ptr, key_scales_ptr, FORM, BIAS, MAXIMUM)
    else:
        at = b * stride_vb + (head - H - G) * stride_vg + place * stride_vl + offs
        _keep(x, at, b * stride_sb + (head - H - G) * stride_sg + place, in_d, values_ptr, value_scales_ptr, FORM, BIAS, MAXIMUM)


def launch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    heads: int,
    storage: str,
    eps: float,
    norm_offset: float,
) -> Tensor:
    """The rotated queries [B, H, T, D]; the cache is written in place. Arguments as `rotary.rotary_append` has them."""
    import torch

    from optforge.kernels.formats import FORMATS

    batch, tokens, _ = qkv.shape
    groups, width = keys.shape[1], keys.shape[3]
    q = torch.empty((batch, heads, tokens, width), dtype=qkv.dtype, device=qkv.device)
    if not batch * tokens:
        return q
    qkv = qkv if qkv.stride(2) == 1 else qkv.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    assert keys.stride(3) == values.stride(3) == 1, "a head's numbers lie one after another"
    fp8 = FORMATS.get(storage)
    form = PLAIN if storage == "plain" else TO_FP8 if fp8 else TO_INT8
    scales = [qkv if t is None else t for t in (key_scales, value_scales)]
    if key_scales is not None and value_scales is not None:
        assert key_scales.is_contiguous() and value_scales.is_contiguous(), "scales of a cache lie as they were made"
    rotary = cos.shape[-1]
    strides = (
        *qkv.stride()[:2],
        0 if cos.shape[0] == 1 else cos.stride(0),
        cos.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        groups * keys.shape[2],
        keys.shape[2],
    )
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        KERNELS["rotary_kernel"][(batch * tokens, heads + 2 * groups)](
            qkv,
            cos,
            sin,
            positions,
            q,
            keys,
            values,
            *scales,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            tokens,
            heads,
            groups,
            width,
            rotary,
            *strides,
            eps,
            norm_offset,
            FORM=form,
            BIAS=fp8.bias if fp8 else 7,
            MAXIMUM=fp8.maximum if fp8 else 127.0,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            BLOCK=triton.next_power_of_2(width),
            PDL=0,
            num_warps=1,
        )
    return q


KERNELS: dict[str, Any] = {"rotary_kernel": rotary_kernel}
