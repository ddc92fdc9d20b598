"""Attention as the workloads run it: causal over a prompt, masked over a static cache, and its backward pass.

Prefill hands grouped heads to PyTorch's attention; on a CPU `fuse/decoder` takes this package's grouped products instead.
Decode over a static cache brings a mask, and with a mask transformers repeats keys and values to the query's heads first.
Queries, keys and values of a prompt were written just before; the cache of a decoding step was not, so calls cycle through
several.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels import attention as _operators  # noqa: F401 - defines optforge::grouped_attention
from optforge.measure.machine.case import TORCH, Case, random
from optforge.measure.machine.clock import Call
from optforge.measure.machine.point import ATTENTION, BACKWARD

SDPA = "aten.scaled_dot_product_attention"
SMOLLM2, LLAMA_1B, LLAMA_8B = (9, 3, 64), (32, 8, 64), (32, 8, 128)
"""(query heads, key/value heads, head size)."""


def prefill(device: torch.device) -> Iterator[Case]:
    """Causal attention of prompts."""
    cpu = device.type == "cpu"
    lengths = (256, 512, 64, 128, 1024) if cpu else (512, 2048, 128, 1024, 4096, 64, 256)
    for tokens in lengths:
        for batch in (1, 4) if cpu else (1, 4, 16):
            for heads in (SMOLLM2,) if cpu else (LLAMA_8B, LLAMA_1B, SMOLLM2):
                for dtype in ("bf16", "fp32") if cpu and batch == 1 else ("bf16",):
                    yield _causal(device, batch, tokens, heads, dtype)
                    if cpu:
                        yield _grouped(device, batch, tokens, heads, dtype)


def decode(device: torch.device) -> Iterator[Case]:
    """One query per sequence over a static cache, with a mask."""
    cpu = device.type == "cpu"
    for length in (160, 288, 544, 1056) if cpu else (544, 160, 1056, 2080, 4128):
        for batch in (1, 4, 8) if cpu else (1, 4, 16, 64):
            for heads in (SMOLLM2,) if cpu else (LLAMA_8B, LLAMA_1B, SMOLLM2):
                yield _masked(device, batch, length, heads, "bf16")


def backward(device: torch.device) -> Iterator[Case]:
    """The backward pass of causal attention, through autograd; queries, keys and values in the model's heads."""
    if device.type == "cpu":
        return
    for batch, tokens in ((4, 4096), (1, 4096), (4, 2048), (8, 512)):
        for heads in (LLAMA_1B, LLAMA_8B):
            case = _causal(device, batch, tokens, heads, "bf16")
            yield Case(
                kind=ATTENTION,
                name=SDPA,
                dtype="bf16",
                size=case.size,
                detail="causal",
                phase=BACKWARD,
                flops=2.5 * case.flops,
                bytes=2.0 * case.bytes,
                make=lambda copies, batch=batch, tokens=tokens, heads=heads: [_backward(device, batch, tokens, heads)],
            )


def _operands(
    device: torch.device, batch: int, queries: int, keys: int, heads: tuple[int, int, int], dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Laid out as a layer's projections leave them: [batch, tokens, heads, width], heads moved forward as a view."""
    query, group, width = heads
    shapes = ((batch, queries, query, width), (batch, keys, group, width), (batch, keys, group, width))
    q, k, v = (random(shape, TORCH[dtype], device).transpose(1, 2) for shape in shapes)
    return q, k, v


def _causal(device: torch.device, batch: int, tokens: int, heads: tuple[int, int, int], dtype: str) -> Case:
    def make(copies: int) -> list[Call]:
        q, k, v = _operands(device, batch, tokens, tokens, heads, dtype)
        return [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])]

    return _case(SDPA, batch, tokens, tokens, heads, dtype, "causal", make)


def _grouped(device: torch.device, batch: int, tokens: int, heads: tuple[int, int, int], dtype: str) -> Case:
    def make(copies: int) -> list[Call]:
        q, k, v = _operands(device, batch, tokens, tokens, heads, dtype)
        return [lambda: torch.ops.optforge.grouped_attention(q, k, v, heads[2] ** -0.5)]

    return _case("optforge.grouped_attention", batch, tokens, tokens, heads, dtype, "causal", make)


def _masked(device: torch.device, batch: int, length: int, heads: tuple[int, int, int], dtype: str) -> Case:
    query, _, width = heads
    repeated = (query, query, width)
    cache = 2.0 * batch * query * length * width * TORCH[dtype].itemsize

    def make(copies: int) -> list[Call]:
        q = random((batch, query, 1, width), TORCH[dtype], device)
        mask = (torch.arange(length, device=device) < length - 16).expand(batch, 1, 1, length)
        caches = [tuple(random((batch, query, length, width), TORCH[dtype], device) for _ in "kv") for _ in range(copies)]
        return [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask) for k, v in caches]  # type: ignore[misc]  # as in products

    return _case(SDPA, batch, 1, length, repeated, dtype, "masked", make, cold=cache)


def _case(
    name: str, batch: int, queries: int, keys: int, heads: tuple[int, int, int], dtype: str, detail: str, make: object, cold: float = 0.0
) -> Case:
    query, group, width = heads
    pairs = queries * keys - (queries * (queries - 1) / 2 if detail == "causal" else 0)
    return Case(
        kind=ATTENTION,
        name=name,
        dtype=dtype,
        size=(batch, query, group, queries, keys, width),
        detail=detail,
        flops=4.0 * batch * query * width * pairs,
        bytes=float(TORCH[dtype].itemsize * batch * width * (2 * query * queries + 2 * group * keys)),
        cold=cold,
        make=make,  # type: ignore[arg-type]  # a function of this file
    )


def _backward(device: torch.device, batch: int, tokens: int, heads: tuple[int, int, int]) -> Call:
    leaves = [tensor.detach().requires_grad_() for tensor in _operands(device, batch, tokens, tokens, heads, "bf16")]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=heads[0] != heads[1])
    grown = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grown, retain_graph=True)
