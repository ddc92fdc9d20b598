"""The Triton kernel behind `decode_attention`: one token's heads of a group against one part of the context, then the parts together.

Parts are of the context that is there, not of the cache's room: a short context in a long cache still fills the device. The last
part of a group to be done puts all of them together, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from optforge.kernels import configurations
from optforge.kernels.configurations import KINDS, PACKED, Shape
from optforge.kernels.launches import FP8, INT8

if TYPE_CHECKING:  # the compiler's own processes have no use for PyTorch
    from torch import Tensor

_INT8, _FP8 = tl.constexpr(INT8), tl.constexpr(FP8)
_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)
"""Stands for no score yet: finite, so that the difference of two of them is no NaN."""
_LIFT = tl.constexpr(2.0**60)

HEADS = 16
"""Fewest rows of a tile of heads: the matrix units take no fewer."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _numbers(stored, dtype: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """What is stored, in `dtype`; fp8 by its bits, times 2^-120 (FNUZ 2^-119) in bf16 and over `half_factor` in fp16."""
    if KIND == _FP8:
        bits = stored.to(tl.uint16)
        shift: tl.constexpr = 7 if dtype == tl.float16 else 4
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << shift)).to(dtype, bitcast=True)
    elif KIND == _INT8:  # noqa: RET505 - Triton compiles what follows a return
        return stored.to(tl.float32).to(dtype)
    else:
        return stored


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def attention_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915 - one launch of pointers and tiles
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, length_ptr, y_ptr, mix_ptr, top_ptr, sum_ptr, count_ptr,
    H, G, D, L, stride_qb, stride_qh, stride_kb, stride_kg, stride_kl, stride_vb, stride_vg, stride_vl, scale, factor,
    KIND: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid: (B G, SPLIT). TOGETHER heads share a group; `factor` is what fp8 bits are off by, beside 2^60."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    both, part = tl.program_id(0), tl.program_id(1)
    b, g = (both // G).to(tl.int64), (both % G).to(tl.int64)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    LIFTED: tl.constexpr = KIND == _FP8 and dtype == tl.bfloat16
    offs_h, offs_d, offs_l = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_L)
    in_h, in_d = offs_h < TOGETHER, offs_d < D
    length = tl.minimum(tl.load(length_ptr).to(tl.int32), L)
    each = tl.cdiv(tl.cdiv(length, BLOCK_L), SPLIT) * BLOCK_L
    q_at = b * stride_qb + (g * TOGETHER + offs_h)[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(q_ptr + q_at, mask=in_h[:, None] & in_d[None, :], other=0.0)
    if LIFTED:
        q = (q.to(tl.float32) * _LIFT).to(dtype)
    if WIDE:
        q = q.to(tl.float32)
    keys = keys_ptr + b * stride_kb + g * stride_kg
    values = values_ptr + b * stride_vb + g * stride_vg
    scales = both.to(tl.int64) * L
    top = tl.full((BLOCK_H,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    mix = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, length), BLOCK_L):
        places = start + offs_l
        there = places < length
        held = there[:, None] & in_d[None, :]
        k = tl.load(keys + places.to(tl.int64)[:, None] * stride_kl + offs_d[None, :], mask=held, other=0)
        v = tl.load(values + places.to(tl.int64)[:, None] * stride_vl + offs_d[None, :], mask=held, other=0)
        k, v = _numbers(k, dtype, KIND), _numbers(v, dtype, KIND)
        if WIDE:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2E * factor)
        if KIND == _INT8 or KIND == _FP8:  # noqa: PLR1714, SIM109 - Triton compiles no `in`
            scores *= tl.load(key_scales_ptr + scales + places, mask=there, other=0.0)[None, :]
        scores = tl.where(there[None, :], scores, _LOWEST)
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.where(there[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        if KIND == _INT8 or KIND == _FP8:  # noqa: PLR1714, SIM109 - as above
            weights *= tl.load(value_scales_ptr + scales + places, mask=there, other=0.0)[None, :]
        if LIFTED:
            weights *= _LIFT
        mix = tl.dot(weights.to(v.dtype), v, mix * shrink[:, None], input_precision="ieee")
        top = higher
    last = True
    if SPLIT > 1:
        pairs = tl.num_programs(0)
        within = offs_h[:, None] * BLOCK_D + offs_d[None, :]
        one = part * pairs + both
        tl.store(mix_ptr + one * BLOCK_H * BLOCK_D + within, mix)
        tl.store(top_ptr + one * BLOCK_H + offs_h, top)
        tl.store(sum_ptr + one * BLOCK_H + offs_h, total)
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + both, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            top = tl.full((BLOCK_H,), _LOWEST, tl.float32)
            total = tl.zeros((BLOCK_H,), dtype=tl.float32)
            mix = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
            for index in range(SPLIT):
                one = index * pairs + both
                part_top = tl.load(top_ptr + one * BLOCK_H + offs_h, cache_modifier=".cg")
                higher = tl.maximum(top, part_top)
                shrink, grow = tl.exp2(top - higher), tl.exp2(part_top - higher)
                total = total * shrink + tl.load(sum_ptr + one * BLOCK_H + offs_h, cache_modifier=".cg") * grow
                part_mix = tl.load(mix_ptr + one * BLOCK_H * BLOCK_D + within, cache_modifier=".cg")
                mix = mix * shrink[:, None] + part_mix * grow[:, None]
                top = higher
            tl.store(count_ptr + both, 0)
    if last:
        out = mix * (factor / tl.where(total > 0.0, total, 1.0))[:, None]
        at = b * H * D + (g * TOGETHER + offs_h)[:, None] * D + offs_d[None, :]
        tl.store(y_ptr + at, out.to(y_ptr.dtype.element_ty), mask=in_h[:, None] & in_d[None, :])


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    length: Tensor,
    scale: float,
    storage: str,
    config: configurations.Config | None = None,
) -> Tensor:
    """y [B, 1, H D]; arguments as `decode_attention` has them.

    Args:
        config: instead of the one that `configurations.chosen` gives; for tuning and tests.
    """
    import torch

    from optforge.kernels.devices import device_of
    from optforge.kernels.formats import FORMATS
    from optforge.kernels.semaphores import semaphores

    batch, heads, _, width = q.shape
    groups, places = keys.shape[1], keys.shape[2]
    y = torch.empty((batch, 1, heads * width), dtype=q.dtype, device=q.device)
    if not batch:
        return y
    q = q if q.stride(3) == 1 else q.contiguous()
    assert keys.stride(3) == values.stride(3) == 1, "a head's numbers lie one after another"
    kind = KINDS[storage]
    if config is None:
        config = configurations.chosen(shape_of(q, keys, storage), device_of(q))
    factor = 1.0
    if kind == FP8:  # in bf16 the bits are 2^(bias - 127) of the number, of which 2^60 meets q and the weights
        exact = FORMATS[storage].half_factor
        factor = exact if q.dtype is torch.float16 else exact * 2.0 ** (127 - 15 - 60)
    together = heads // groups
    block_h, block_d = max(HEADS, triton.next_power_of_2(together)), max(16, triton.next_power_of_2(width))
    split, pairs = config["SPLIT"], batch * groups
    mix = top = total = counts = length
    if split > 1:
        mix = torch.empty(split * pairs * block_h * block_d, dtype=torch.float32, device=q.device)
        top, total = (torch.empty(split * pairs * block_h, dtype=torch.float32, device=q.device) for _ in range(2))
        counts = semaphores(q, keys, pairs)
    if key_scales is not None and value_scales is not None:
        assert key_scales.is_contiguous() and value_scales.is_contiguous(), "scales of a cache lie as they were made"
    scales = [q if t is None else t for t in (key_scales, value_scales)]
    tile = {name: value for name, value in config.items() if name != "CONVERT"}
    early = {"launch_pdl": True} if tile["PDL"] else {}
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        KERNELS["attention_kernel"][(pairs, split)](
            q,
            keys,
            values,
            *scales,
            length,
            y,
            mix,
            top,
            total,
            counts,
            heads,
            groups,
            width,
            places,
            *q.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            scale,
            factor,
            KIND=kind,
            TOGETHER=together,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            WIDE=q.device.type == "cpu" or q.dtype is torch.float32,
            **tile,
            **early,
        )
    return y


def shape_of(q: Tensor, keys: Tensor, storage: str) -> Shape:
    """What a configuration is chosen by: `rows` are sequences times groups, `outputs` places of the cache, `columns` a head's width."""
    from optforge.kernels.devices import DTYPES

    return Shape(
        operator="decode_attention",
        form=storage,
        dtype=DTYPES[q.dtype],
        rows=q.shape[0] * keys.shape[1],
        outputs=keys.shape[2],
        columns=q.shape[3],
    )


KERNELS: dict[str, Any] = {"attention_kernel": attention_kernel}

__all__ = ["KERNELS", "PACKED", "attention_kernel", "launch", "shape_of"]
