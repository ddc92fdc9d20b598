"""What the host adds to the time of the kernels, by the slope of time over the number of operators in small modules.

A slope needs no idle reference: whatever one call costs once (entering `forward`, the last synchronization) is the same at
both ends and falls out. The modules are so small that their arithmetic takes next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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


def overheads(device: torch.device) -> Overheads:
    """All of them, measured in about ten seconds, most of it compiling. Call it within a backend's session."""
    few, many = _stack(FEW, device), _stack(MANY, device)
    x = torch.randn(1, WIDTH, device=device)
    with torch.no_grad():
        operators = _operators(many, x) - _operators(few, x)
        eager = (host_seconds(lambda: many(x), device) - host_seconds(lambda: few(x), device)) / operators
        blocks = MANY - FEW
        whole = _slope(device, lambda count: _whole(count, device), x) / blocks
        kernel = whole / COMPILED_KERNELS
        region = max(0.0, _slope(device, lambda count: _regions(count, device), x) / blocks - whole)
        captured = _captured(device) if device.type == "cuda" else 0.0
        call = _replay(device) if device.type == "cuda" else 0.0
    return Overheads(eager_operator=eager, compiled_kernel=kernel, captured_kernel=captured, compiled_region=region, call=call)


def direct_call(device: torch.device) -> float:
    """Seconds of the smallest operator called straight from Python, which every point on a CPU holds besides its work."""
    x = torch.ones(1, device=device)
    return host_seconds(lambda: torch.add(x, x), device)


def _stack(count: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(_Block() for _ in range(count))).to(device).eval()


def _whole(count: int, device: torch.device) -> nn.Module:
    """All blocks as one compiled program."""
    module = _stack(count, device)
    compile_(module, CompileOptions(dynamic=False))
    return module


def _regions(count: int, device: torch.device) -> nn.Module:
    """Each block compiled by itself, sharing one program, as `compile` with `scope: block` does it."""
    module, family = _stack(count, device), Family()
    for block in module.children():
        compile_(block, CompileOptions(dynamic=False, family=family))
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


def _operators(module: nn.Module, x: Tensor) -> int:
    with _Counter() as counter:
        module(x)
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
