"""Between a decoder's packed projection and its attention: rotary embedding, and keys and values written into a static cache.

qkv [B, T, (H + 2 G) D]: H heads of queries, G of keys, G of values, as a packed projection gives them, in bf16, fp16 or fp32. cos, sin
[B or 1, T, R] with R <= D: the first R numbers of a head are rotated, half against half (GPT-NeoX's order, which transformers uses),
the others pass. Optional RMSNorm of each head of queries and keys before that (Qwen 3). Arithmetic is fp32, rounded once.

    q'[:R/2] = q[:R/2] cos[:R/2] - q[R/2:R] sin[:R/2]
    q'[R/2:R] = q[R/2:R] cos[R/2:] + q[:R/2] sin[R/2:]

Cache: keys, values [B, G, L, D] in qkv's dtype, or 8 bits as `kernels.kv_cache.Format` stores them, with fp32 scales [B, G, L, 1].

Source: Su et al., RoFormer, 2021, section 3.4.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optforge.kernels.dispatch import define_operator, takes_kernel
from optforge.kernels.formats import FORMATS
from optforge.kernels.kv_cache import Format

CACHES = ("plain", "int8", *FORMATS)
"""How a cache is stored: in the model's dtype, or in 8 bits under a scale per token and head."""


def rotary_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    heads: int,
    storage: str = "plain",
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> Tensor:
    """Writes the new tokens into the cache in place, and hands out the rotated queries [B, H, T, D] in qkv's dtype.

    Args:
        positions: int64 [T], where in the cache the tokens go, the same for every sequence.
        heads: H; G follows from the cache.
        storage: of `CACHES`.
        q_norm, k_norm: [D] each, or None.
    """
    if takes_kernel(qkv):
        q: Tensor = torch.ops.optforge.rotary_append(
            qkv, cos, sin, positions, keys, values, key_scales, value_scales, q_norm, k_norm, heads, storage, eps, norm_offset
        )
        return q
    return _reference(qkv, cos, sin, positions, keys, values, key_scales, value_scales, q_norm, k_norm, heads, storage, eps, norm_offset)


def _reference(
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
    batch, tokens, _ = qkv.shape
    groups, width = keys.shape[1], keys.shape[3]
    apart = qkv.view(batch, tokens, heads + 2 * groups, width).transpose(1, 2).float()
    q = _rotated(_head_norm(apart[:, :heads], q_norm, eps, norm_offset), cos, sin).to(qkv.dtype)
    k = _rotated(_head_norm(apart[:, heads : heads + groups], k_norm, eps, norm_offset), cos, sin)
    for states, cache, scales in ((k, keys, key_scales), (apart[:, heads + groups :], values, value_scales)):
        _write(states, cache, scales, positions, storage)
    return q


def _write(states: Tensor, cache: Tensor, scales: Tensor | None, positions: Tensor, storage: str) -> None:
    if storage == "plain":
        cache.index_copy_(2, positions, states.to(cache.dtype))
        return
    assert scales is not None
    rounded, scale = cache_format(storage).round(states)
    cache.index_copy_(2, positions, rounded)
    scales.index_copy_(2, positions, scale)


def cache_format(storage: str) -> Format:
    """`kv_cache`'s name of a storage of 8 bits."""
    return Format("int8", "") if storage == "int8" else Format("fp8", storage)


def _head_norm(values: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    if weight is None:
        return values
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)


def _rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """values fp32 [B, H, T, D]."""
    rotary = cos.shape[-1]
    turned, rest = values[..., :rotary], values[..., rotary:]
    first, second = turned.chunk(2, -1)
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    found = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((found, rest), -1)


def _launch(qkv: Tensor, *arguments: Any) -> Tensor:
    from optforge.kernels.rotary_kernel import launch  # Triton exists on Linux only

    return launch(qkv, *arguments)


def _fake(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, *arguments: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[0], arguments[5], qkv.shape[1], keys.shape[3])


def _moved(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, *rest: Any
) -> int:
    """Reads the projection and the rotation, writes the queries and the new places of the cache."""
    batch, tokens, wide = qkv.shape
    groups, width = keys.shape[1], keys.shape[3]
    queries = batch * tokens * (wide - 2 * groups * width) * qkv.element_size()
    written = 2 * batch * tokens * groups * (width * keys.element_size() + (4 if key_scales is not None else 0))
    return qkv.numel() * qkv.element_size() + sum(t.numel() * t.element_size() for t in (cos, sin, positions)) + queries + written


def _flops(*arguments: Any, **rest: Any) -> int:
    """No product; PyTorch's counter leaves such work out."""
    return 0


define_operator(
    "rotary_append",
    "(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? key_scales,"
    " Tensor(d!)? value_scales, Tensor? q_norm, Tensor? k_norm, int heads, str storage, float eps, float norm_offset) -> Tensor",
    cuda=_launch,
    reference=_reference,
    fake=_fake,
    flops=_flops,
    moved=_moved,
)
