"""Attention as the workloads run it: causal over a prompt, masked over a static cache, and its backward pass.

Prefill hands grouped heads to PyTorch's attention; on a CPU `fuse/decoder` takes this package's grouped products instead.
Decode over a static cache brings a mask, and with a mask transformers repeats keys and values to the query's heads first.
Queries, keys and values of a prompt were written just before; the cache of a decoding step was not, so calls cycle through
several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels import attention as _operators  # noqa: F401 - defines optforge::grouped_attention
from optforge.measure.machine.case import Case, random, warm
from optforge.measure.machine.clock import Call
from optforge.measure.machine.point import ATTENTION, BACKWARD, BACKWARD_PRODUCTS, COPY, compiled_name
from optforge.pretrained import torch_dtype

SDPA, GROUPED = "aten.scaled_dot_product_attention", "optforge.grouped_attention"
UNSEEN = 16
"""Last positions of a cache that the mask hides."""


@dataclass(frozen=True)
class Shape:
    """Query heads, key/value heads, head size; sequences, queries and keys of each."""

    heads: int
    groups: int
    width: int
    batch: int = 1
    queries: int = 1
    keys: int = 1
    dtype: str = "bf16"

    def operands(self, device: torch.device) -> tuple[Tensor, ...]:
        """q, k, v as a layer's projections leave them: [batch, tokens, heads, width], heads moved forward as a view."""
        sizes = ((self.queries, self.heads), (self.keys, self.groups), (self.keys, self.groups))
        return tuple(
            random((self.batch, tokens, heads, self.width), torch_dtype(self.dtype), device).transpose(1, 2) for tokens, heads in sizes
        )

    def case(self, name: str, detail: str, make: Callable[[int], list[Call]], *, cold: float = 0.0) -> Case:
        seen = self.queries * self.keys - (self.queries * (self.queries - 1) / 2 if detail == "causal" else 0)
        moved = self.batch * self.width * (2 * self.heads * self.queries + 2 * self.groups * self.keys)
        return Case(
            kind=ATTENTION,
            name=name,
            dtype=self.dtype,
            size=(self.batch, self.heads, self.groups, self.queries, self.keys, self.width),
            detail=detail,
            flops=4.0 * self.batch * self.heads * self.width * seen,
            bytes=float(torch_dtype(self.dtype).itemsize * moved),
            cold=cold,
            make=make,
        )


SMOLLM2, LLAMA_1B, LLAMA_8B = Shape(9, 3, 64), Shape(32, 8, 64), Shape(32, 8, 128)


def prefill(device: torch.device) -> Iterator[Case]:
    """Causal attention of prompts."""
    cpu = device.type == "cpu"
    for tokens in (256, 512, 64, 128, 1024) if cpu else (512, 2048, 128, 1024, 4096, 64, 256):
        for batch in (1, 4) if cpu else (1, 4, 16):
            for model in (SMOLLM2,) if cpu else (LLAMA_8B, LLAMA_1B, SMOLLM2):
                for dtype in ("bf16", "fp32") if cpu and batch == 1 else ("bf16",):
                    shape = replace(model, batch=batch, queries=tokens, keys=tokens, dtype=dtype)
                    yield shape.case(SDPA, "causal", warm(_causal, partial(shape.operands, device)))
                    if cpu:
                        yield shape.case(GROUPED, "causal", warm(_grouped, partial(shape.operands, device)))


def decode(device: torch.device) -> Iterator[Case]:
    """One query per sequence over a static cache, with a mask; keys and values repeated to the query's heads."""
    cpu = device.type == "cpu"
    for length in (160, 288, 544, 1056) if cpu else (544, 160, 1056, 2080, 4128):
        for batch in (1, 4, 8) if cpu else (1, 4, 16, 64):
            for model in (SMOLLM2,) if cpu else (LLAMA_8B, LLAMA_1B, SMOLLM2):
                shape = replace(model, groups=model.heads, batch=batch, keys=length)
                cache = 2.0 * batch * shape.heads * length * shape.width * torch_dtype(shape.dtype).itemsize
                yield shape.case(SDPA, "masked", partial(_masked, shape, device), cold=cache)


def repeats(device: torch.device) -> Iterator[Case]:
    """The copy that repeats a layer's cached keys or values to the query's heads, out of memory that was not just read."""
    cpu = device.type == "cpu"
    for length in (160, 544, 1056) if cpu else (544, 160, 1056, 2080):
        for batch in (1, 4, 8) if cpu else (1, 4, 16, 64):
            for model in (SMOLLM2,) if cpu else (LLAMA_8B, LLAMA_1B):
                read = 2.0 * batch * model.groups * length * model.width
                size = (batch, model.groups, model.heads // model.groups, length, model.width)
                moved = read * (1 + size[2])
                for name, compiled in (("aten.clone", False), (compiled_name("aten.clone"), True)):
                    make = partial(_repeated, size, device, compiled)
                    yield Case(kind=COPY, name=name, dtype="bf16", size=size, bytes=moved, cold=read, compiled=compiled, make=make)


def backward(device: torch.device) -> Iterator[Case]:
    """The backward pass of causal attention, through autograd."""
    for batch, tokens in ((4, 4096), (1, 4096), (4, 2048), (8, 512)):
        for model in (LLAMA_1B, LLAMA_8B):
            shape = replace(model, batch=batch, queries=tokens, keys=tokens)
            case = shape.case(SDPA, "causal", partial(_backward, shape, device))
            # autograd runs it on the stream of the forward pass, which is not the captured one
            yield replace(case, phase=BACKWARD, flops=BACKWARD_PRODUCTS * case.flops, bytes=2 * case.bytes, captures=False)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result: Tensor = torch.ops.optforge.grouped_attention(q, k, v, q.shape[-1] ** -0.5)
    return result


def _masked(shape: Shape, device: torch.device, copies: int) -> list[Call]:
    mask = (torch.arange(shape.keys, device=device) < shape.keys - UNSEEN).expand(shape.batch, 1, 1, shape.keys)
    q, k, v = (tensor.contiguous() for tensor in shape.operands(device))  # as transformers' repeated copies lie
    return [partial(F.scaled_dot_product_attention, q, k.clone(), v.clone(), mask) for _ in range(copies)]


def _repeated(size: tuple[int, ...], device: torch.device, compiled: bool, copies: int) -> list[Call]:
    batch, groups, _, length, width = size
    caches = [random((batch, groups, 1, length, width), torch.bfloat16, device) for _ in range(copies)]
    if not compiled:
        return [partial(torch.clone, cache.expand(size), memory_format=torch.contiguous_format) for cache in caches]
    torch._dynamo.reset()  # programs of one function are limited in number, and beyond it the function runs eagerly
    program = torch.compile(lambda cache: cache.expand(size).clone(memory_format=torch.contiguous_format), dynamic=False)
    return [partial(program, cache) for cache in caches]


def _backward(shape: Shape, device: torch.device, copies: int) -> list[Call]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in shape.operands(device))
    with torch.enable_grad():
        out = _causal(q, k, v)
    grown = random(tuple(out.shape), out.dtype, device)

    def call() -> Any:
        return torch.autograd.grad(out, (q, k, v), grown, retain_graph=True)

    return [call]
