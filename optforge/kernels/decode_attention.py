"""Attention of one new token over a static cache, split over the context so that a long one fills the device.

q [B, H, 1, D] in bf16, fp16 or fp32; keys, values [B, G, L, D] with H a multiple of G, in q's dtype or in 8 bits with fp32 scales
[B, G, L, 1] (`kernels.kv_cache.Format`); length int64 [1] or [], on the device: the first `length` places hold tokens, the new one
among them. y [B, 1, H D] in q's dtype, as the output projection reads it. length = 0 gives zeros.

    y = softmax(q k^T * scale) v over the places below length

The heads of one group are one tile, so that keys and values are read once. Each program takes a part of the context and keeps its
largest score, the sum of its weights and their mix; who comes last puts the parts of its group together, in their order, so the
result does not depend on who that was. The cache is read as it is stored: 8 bits become bf16 in registers, and scales multiply
scores and weights, never keys and values.

Source: Dao et al., Flash-Decoding for long-context inference, 2023; the online softmax is that of Milakov and Gimelshein, 2018.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optforge.kernels.dispatch import define_operator, nbytes, takes_kernel
from optforge.kernels.rotary import CACHES, cache_format

__all__ = ["CACHES", "decode_attention"]


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    length: Tensor,
    *,
    scale: float,
    storage: str = "plain",
) -> Tensor:
    """The attention of the module's docstring. `storage` is one of `CACHES`; nothing waits for the device to tell the length."""
    if takes_kernel(q):
        y: Tensor = torch.ops.optforge.decode_attention(q, keys, values, key_scales, value_scales, length, scale, storage)
        return y
    return _reference(q, keys, values, key_scales, value_scales, length, scale, storage)


def _reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    length: Tensor,
    scale: float,
    storage: str,
) -> Tensor:
    """Reads the whole cache and masks what lies beyond the length."""
    batch, heads, _, width = q.shape
    groups, places = keys.shape[1], keys.shape[2]
    if storage != "plain":
        assert key_scales is not None and value_scales is not None
        form = cache_format(storage)
        keys, values = form.back(keys, key_scales, torch.float32), form.back(values, value_scales, torch.float32)
    beyond = torch.arange(places, device=q.device) >= length
    queries = q.float().reshape(batch, groups, heads // groups, width) * scale
    scores = (queries @ keys.float().transpose(2, 3)).masked_fill(beyond, float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(beyond, 0.0)  # zeros too where nothing is held
    held = values.float().masked_fill(beyond[:, None], 0.0)  # what nothing was written to may be NaN
    return (weights @ held).to(q.dtype).reshape(batch, 1, heads * width)


def _launch(q: Tensor, *arguments: Any) -> Tensor:
    from optforge.kernels.split_attention import launch  # Triton exists on Linux only

    return launch(q, *arguments)


def _fake(q: Tensor, *arguments: Any) -> Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1] * q.shape[3])


def _flops(q: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], *rest: Any, **named: Any) -> int:
    """As PyTorch counts attention: both products over every place of the cache, since the length is known to the device alone."""
    return 2 * q[0] * q[1] * keys[2] * (q[3] + values[3])


def _moved(q: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, *rest: Any) -> int:
    """With a full cache."""
    return 2 * nbytes(q) + nbytes(keys, values, key_scales, value_scales)


define_operator(
    "decode_attention",
    "(Tensor q, Tensor keys, Tensor values, Tensor? key_scales, Tensor? value_scales, Tensor length, float scale, str storage) -> Tensor",
    cuda=_launch,
    reference=_reference,
    fake=_fake,
    flops=_flops,
    moved=_moved,
)
