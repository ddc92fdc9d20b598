"""The torch side: one pass of the workload over the model's structure, exported with every tensor abstract.

The skeleton lies on meta, so an 8B model takes no memory; the recipe's steps are replayed from their receipts, as when an
artifact is loaded; `kernels.dispatch.decompose` makes quantized layers trace as plain PyTorch. Inputs that a workload
holds become arguments of the program. A decode step gets its cache as arguments too and hands it back changed, as it
would run: XLA writes a donated cache in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from optforge.errors import PlanError, Problem
from optforge.kernels import dispatch
from optforge.xla.request import Request

META = torch.device("meta")


@dataclass(kw_only=True)
class Exported:
    """An exported pass. Its arguments are the program's own state, then `kept`, then `inputs`."""

    program: ExportedProgram
    kept: tuple[Tensor, ...] = ()
    """The KV cache on meta: read, and handed back with one more position."""
    inputs: tuple[Tensor, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


def export(request: Request) -> Exported:
    """The pass as ATen operators.

    Raises:
        PlanError: the workload keeps a cache that this cannot hand over.
    """
    start = time.perf_counter()
    loaded = request.model.skeleton()
    for transform, receipt in request.steps:
        transform.replay(loaded.module, receipt)
    module = loaded.module.requires_grad_(False)
    with dispatch.decompose(), torch.no_grad():
        work = request.workload.prepare(loaded, request.data, META)
        work.ready(module)
        kept = tuple(work.kept(module))
        built = time.perf_counter()
        if not kept:
            done = Exported(program=torch.export.export(_Pass(module, work), ()))
        else:
            inputs = _decode_inputs(work, module)
            done = Exported(program=torch.export.export(_DecodeStep(module), (*inputs, *kept)), kept=kept, inputs=inputs)
    done.seconds = {"structure": built - start, "export": time.perf_counter() - built}
    return done


class _Pass(nn.Module):
    """A workload's pass as a module. The work is no submodule and its tensors are no buffers: export lifts them to arguments."""

    def __init__(self, module: nn.Module, work: Any) -> None:
        super().__init__()
        self.module = module
        self.once: Callable[[nn.Module], Any] = work.once

    def forward(self) -> Any:
        return self.once(self.module)


class _DecodeStep(nn.Module):
    """One greedy token over a static cache whose tensors are arguments, because export refuses to change a captured tensor."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, token: Tensor, length: Tensor, *kept: Tensor) -> Tensor:
        """token int64 [batch, 1], length int64 [] (positions filled), kept keys and values of each layer in turn,
        [batch, kv_heads, positions, head_dim]. The next token, int64 [batch, 1]."""
        logits = self.module(input_ids=token, past_key_values=_cache(self.module.config, length, kept), use_cache=True).logits
        chosen: Tensor = logits[:, -1:].argmax(-1)
        return chosen


def _cache(config: Any, length: Tensor, kept: tuple[Tensor, ...]) -> Any:
    """transformers' static cache over given tensors: each layer is initialized by them and then filled with them."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=kept[0].shape[2])
    layers: list[Any] = cache.layers  # typed as any kind of layer; decode's check lets only static ones through
    for layer, keys, values in zip(layers, kept[::2], kept[1::2], strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.cumulative_length = keys, values, length.clone()
    return cache


def _decode_inputs(work: Any, module: nn.Module) -> tuple[Tensor, Tensor]:
    """The token and the filled length of a step.

    Raises:
        PlanError: the workload is not decode's kind, so that what it would run is not known here.
    """
    if not hasattr(work, "first"):
        what = f"{type(work).__name__} keeps a cache, and only decode's is known here"
        raise PlanError(Problem(where="workload", what=what))
    return work.first(module), torch.empty((), dtype=torch.int64, device=META)
