"""What the host adds to the time of the kernels, by the slope of time over the number of operators in small modules.

A slope needs no idle reference: whatever one call costs once (entering `forward`, the last synchronization) is the same at
both ends and falls out. The modules are so small that their arithmetic takes next to nothing. What a host adds outside of
compiled code depends on how models are written, so it is measured on a tiny decoder of transformers: bare modules in a row
would take half as long for each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from optforge.backends.base import CompileOptions
from optforge.compiling import Family, compile_
from optforge.measure.machine.clock import GraphClock, host_seconds
from optforge.measure.machine.point import Overheads

WIDTH = 32
FEW, MANY = 4, 24
"""Blocks at the two ends of a slope."""


class _Block(nn.Module):
    """A decoder's layer without attention: a norm, two linears, a gate, a sum; small enough to cost its launches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm
        gate, up = self.up(normed).chunk(2, -1)
        total: Tensor = x + self.down(F.silu(gate) * up)
        return total


COMPILED_KERNELS = 4
"""Kernels of a compiled `_Block`: the norm, two products, the gate; the sum joins the next block's norm."""


LAYERS = (2, 10)
"""Layers of the tiny decoders at the two ends of a slope."""
TOKENS = 8
LAYER_KERNELS = 8
"""Kernels of a decoder's layer that Inductor does not write: seven products and attention."""


def overheads(device: torch.device) -> Overheads:
    """All of them, measured in about twenty seconds, most of it compiling. Call it within a backend's session."""
    x = torch.randn(1, WIDTH, device=device)
    with torch.no_grad():
        eager = eager_operator(device)
        kernel = _slope(device, lambda count: _whole(count, device), x) / (MANY - FEW) / COMPILED_KERNELS
        region = max(0.0, _layer(device, kernel))
        captured = _captured(device) if device.type == "cuda" else 0.0
        call = _replay(device) if device.type == "cuda" else 0.0
    return Overheads(eager_operator=eager, compiled_kernel=kernel, captured_kernel=captured, compiled_region=region, call=call)


def eager_operator(device: torch.device) -> float:
    """Seconds of one operator of a decoder that nothing compiled; views are part of what the others cost."""
    few, many = (_decoder(count, device) for count in LAYERS)
    ids = _ids(device)
    operators = _operators(many, ids) - _operators(few, ids)
    return (_of_decoder(many, ids) - _of_decoder(few, ids)) / operators


def _layer(device: torch.device, kernel: float) -> float:
    """Seconds of entering one layer that is compiled by itself, without launching its kernels."""
    ids = _ids(device)
    metrics.reset()
    few = _of_decoder(_compiled_layers(LAYERS[0], device), ids)
    written = metrics.generated_kernel_count  # of the one program that all layers share; a cached program is not counted
    many = _of_decoder(_compiled_layers(LAYERS[1], device), ids)
    return (many - few) / (LAYERS[1] - LAYERS[0]) - kernel * (LAYER_KERNELS + written)


def _compiled_layers(count: int, device: torch.device) -> nn.Module:
    """A tiny decoder whose layers share one compiled program, as `compile` with `scope: block` has them."""
    module, family = _decoder(count, device), Family()
    for layer in module.model.layers:  # type: ignore[union-attr]  # the decoder's layers
        compile_(layer, CompileOptions(dynamic=False, family=family))
    return module


def _decoder(count: int, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=count,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    module: nn.Module = LlamaForCausalLM(made)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    return module.to(device).eval()


def _ids(device: torch.device) -> Tensor:
    return torch.arange(TOKENS, device=device).reshape(1, TOKENS)


def _of_decoder(module: nn.Module, ids: Tensor) -> float:
    return host_seconds(lambda: module(input_ids=ids, use_cache=False, logits_to_keep=1), ids.device)


def direct_call(device: torch.device) -> float:
    """Seconds of the smallest operator called straight from Python, which every point on a CPU holds besides its work."""
    x = torch.ones(1, device=device)
    return host_seconds(lambda: torch.add(x, x), device)


def direct_program(device: torch.device) -> float:
    """Seconds of the smallest program of Inductor's called straight from Python: far less than entering a decoder's layer, whose
    guards are many."""
    x = torch.ones(1, device=device)
    program = torch.compile(lambda value: value + 1.0)
    with torch.no_grad():
        return host_seconds(lambda: program(x), device)


def _stack(count: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(_Block() for _ in range(count))).to(device).eval()


def _whole(count: int, device: torch.device) -> nn.Module:
    """All blocks as one compiled program."""
    module = _stack(count, device)
    compile_(module, CompileOptions(dynamic=False))
    return module


def _slope(device: torch.device, make: Callable[[int], nn.Module], x: Tensor) -> float:
    """Seconds of MANY blocks less those of FEW."""
    few, many = make(FEW), make(MANY)
    return host_seconds(lambda: many(x), device) - host_seconds(lambda: few(x), device)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships it untyped
    """Counts operators that do work: views, which move nothing, are part of what the others cost."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _operators(module: nn.Module, ids: Tensor) -> int:
    with _Counter() as counter:
        module(input_ids=ids, use_cache=False, logits_to_keep=1)
    return int(counter.count)


def _captured(device: torch.device) -> float:
    """Seconds of the smallest kernel in a captured graph, each waiting for the one before."""
    x = torch.ones(1, device=device)
    return GraphClock(device).time([lambda: x.add_(1.0)]).seconds


def _replay(device: torch.device) -> float:
    """Seconds of replaying a graph of one small kernel, less the kernel."""
    x, graph = torch.ones(1, device=device), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as above
    with torch.cuda.stream(stream):
        x.add_(1.0)
        with torch.cuda.graph(graph, stream=stream):
            x.add_(1.0)
    return max(0.0, host_seconds(graph.replay, device) - _captured(device))
