"""Small optimized models that the export tests share: a tiny Llama and toys, fused and quantized as a run would do it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llamas import llama
from torch import nn
from toys import context

from optforge.backends.cpu import CpuBackend
from optforge.export import Subject
from optforge.export.inputs import inputs_for
from optforge.models.base import Loaded
from optforge.transforms.base import Context
from optforge.transforms.fuse import decoder
from optforge.transforms.quantize import Quantize, SchemeName

IDS = torch.arange(16).reshape(2, 8) + 40


def ready(example: Any = None) -> Context:
    """A context in which steps run for real, on the CPU."""
    return replace(context(example=example), backend=CpuBackend())


def optimized(scheme: str | None, *, fused: bool = True, dtype: torch.dtype = torch.float32, sizes: Any = None, **options: Any) -> Loaded:
    """A tiny Llama with q, k, v and gate, up packed, its linears under `scheme`."""
    loaded = llama(dtype=dtype, **(sizes or {}))
    ctx = ready(((), {"input_ids": IDS}))
    if fused:
        decoder.apply(loaded.module, [], ctx, regroup=True, loops=True)
    if scheme is not None:
        Quantize(scheme=SchemeName[scheme], ignore=["lm_head"], **options).apply(loaded.module, ctx)
    return loaded


def subject(loaded: Loaded, dtype: torch.dtype = torch.float32, sources: tuple[Path, ...] = (), **more: Any) -> Subject:
    device = torch.device("cpu")
    inputs = inputs_for(loaded, dtype, device)
    return Subject(module=loaded.module, family=loaded.family, dtype=dtype, inputs=inputs, sources=sources, **more)


def logits(module: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=ids, use_cache=False).logits
