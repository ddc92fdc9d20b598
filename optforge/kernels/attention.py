"""Causal grouped-query attention as two plain products per block of queries, for CPUs.

q [B, H, T, D], k and v [B, G, T, D] with H a multiple of G, in bf16, fp16 or fp32; out [B, H, T, D] in q's dtype. The heads of
one group are multiplied as one matrix, so that keys are not repeated, and a block of queries is multiplied only with the
keys that it may see. Scores are rounded to the inputs' dtype, the softmax over them is fp32 inside. The result lies in memory
as [B, T, H, D], which is how the next layer reads it.

PyTorch's fused CPU kernel multiplies one head and a few queries at a time, which small heads cannot fill (docs/log.md has
both times). On a GPU its kernels win, and this is not used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels import dispatch

QUERIES = 128
"""Queries in a block: of 32, 64, 128, 256 and 1,024 the fastest at 256 and at 1,024 tokens (docs/log.md)."""


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale, causal) v; query i sees keys 0 to i. Within `dispatch.decompose` PyTorch's own attention."""
    if dispatch.decomposing():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    result: Tensor = torch.ops.optforge.grouped_attention(q, k, v, scale)
    return result


def _blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    batch, heads, tokens, width = q.shape
    groups = k.shape[1]
    together = heads // groups
    keys, values = k.reshape(batch * groups, tokens, width).transpose(1, 2), v.reshape(batch * groups, tokens, -1)
    queries = (q * scale).reshape(batch * groups, together, tokens, width)
    later = q.new_full((min(QUERIES, tokens), min(QUERIES, tokens)), float("-inf")).triu(1)
    out = q.new_empty(batch, tokens, groups, together, values.shape[-1])
    for begin in range(0, tokens, QUERIES):
        end = min(begin + QUERIES, tokens)
        rows = end - begin
        scores = torch.bmm(queries[:, :, begin:end].reshape(batch * groups, together * rows, width), keys[:, :, :end])
        scores = scores.view(batch * groups, together, rows, end)
        scores[..., begin:].add_(later[:rows, :rows])
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.bmm(weights.view(batch * groups, together * rows, end), values[:, :end])
        out[:, begin:end] = mixed.view(batch, groups, together, rows, -1).permute(0, 3, 1, 2, 4)
    return out.view(batch, tokens, heads, -1).transpose(1, 2)


def _fake(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)


def _flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *rest: object, **named: object) -> int:
    """As PyTorch counts attention: both products over every pair of query and key."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


dispatch.define_plain("grouped_attention", "(Tensor q, Tensor k, Tensor v, float scale) -> Tensor", cpu=_blocks, fake=_fake, flops=_flops)
