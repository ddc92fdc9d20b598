"""What each candidate scheme gains in time, layer by layer, on this device, with the rows that the workload gives the layer.

Layers of one shape are timed together and share the figure. A few of them run one after another in one program, compiled as
the run compiles a block, under each scheme and as they are, in rounds that take turns. One layer by itself, called again and
again, would find its weight in the cache, which in a real pass all the other layers have driven out: so as many weights are
gone through as the caches cannot hold, of the layers first and of copies after that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optforge.backends.base import Backend, Candidate
from optforge.measure import timing
from optforge.measure.size import nbytes
from optforge.spec import Measure
from optforge.transforms.base import Context

STACKED = 4
"""Layers in one program: enough to hide its call, few enough to compile in seconds."""
MOST_LAYERS = 512
CACHES_BYTES = 64 * 2**20
"""More than the last cache of what this runs on: 32 MB for two cores of an EPYC, 50 MB of an H200."""
OUT = 0.7
"""A candidate that is slower than this share of the layer's own speed is out of the running."""
OPTIONS = Measure(warmup=2, min_rounds=9, max_s=3.0, steady=0.01, batch_ms=10.0)
"""A shape is timed for some seconds; its compilation takes as long."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A layer as one pass of the workload finds it."""

    calls: int
    input: Tensor


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one call of a layer under a scheme and as it is, and the 95% interval of their ratio (above 1: faster)."""

    seconds: float
    before: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        return self.before / self.seconds


def sites(model: nn.Module, layers: Mapping[str, nn.Module], once: Callable[[nn.Module], Any]) -> dict[str, Site]:
    """Runs one pass of the workload; a layer that it does not call is missing."""
    calls: dict[str, int] = {}
    inputs: dict[str, Tensor] = {}
    ready = once(model)
    with _watched(layers, calls, inputs):
        ready()
    return {name: Site(calls=calls[name], input=inputs[name]) for name in inputs}


def shapes(layers: Mapping[str, nn.Module], found: Mapping[str, Site]) -> list[list[str]]:
    """Names of the called layers that do the same work, in the order of the model."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, site in found.items():
        own = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in layers[name].named_parameters(recurse=False)]
        key = (type(layers[name]), *own, tuple(site.input.shape), site.input.dtype, site.input.stride())
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def measure(
    names: Sequence[str],
    layers: Mapping[str, nn.Module],
    rounded: Mapping[str, Mapping[str, nn.Module]],
    found: Mapping[str, Site],
    ctx: Context,
) -> dict[str, Time]:
    """Times one group of `shapes` under every scheme that all of it has.

    Args:
        layers: as they are, by name.
        rounded: scheme -> name -> the layer under it.
    """
    assert ctx.backend is not None, "nothing is timed while planning"
    kinds = {scheme: others for scheme, others in rounded.items() if all(name in others for name in names)}
    if not kinds:
        return {}
    count = _count([others[names[0]] for others in kinds.values()], len(names), layers[names[0]])
    inputs = [found[names[index % len(names)]].input for index in range(count)]
    # a program at a time stays compiled; the baseline is the last, which `time_together` holds the others against
    calls = [_call(scheme, others, names, inputs, ctx) for scheme, others in (*kinds.items(), ("as it is", layers))]
    with torch.no_grad():
        result = _timed(calls, count, ctx.backend)
    ctx.backend.free()
    return result


def _timed(calls: Sequence[Candidate], count: int, backend: Backend) -> dict[str, Time]:
    """All calls but the last in rounds with the last; what is out of the running after a short look is not looked at for long."""
    *others, plain = calls
    short = replace(OPTIONS, warmup=1, min_rounds=3, max_s=0.0)
    looks, _ = timing.time_together(calls, synchronize=backend.synchronize, options=short)
    result = {one.name: _time(own, looks[-1], count) for one, own in zip(others, looks, strict=False)}
    running = [one for one in others if result[one.name].ratio > OUT]
    if running:
        *samples, before = timing.time_together([*running, plain], synchronize=backend.synchronize, options=OPTIONS)[0]
        result |= {one.name: _time(own, before, count) for one, own in zip(running, samples, strict=True)}
    return result


def _time(own: Sequence[float], before: Sequence[float], count: int) -> Time:
    ratio, base = timing.ratio(own, before), float(np.median(before)) / count
    return Time(seconds=base / ratio.value, before=base, low=ratio.low, high=ratio.high)


def _count(rounded: Sequence[nn.Module], layers: int, plain: nn.Module) -> int:
    """Layers to go through: enough that the smallest form of their weights does not fit a cache, in whole programs."""
    smallest = min(_bytes(module) for module in (*rounded, plain))
    wanted = min(MOST_LAYERS, math.ceil(CACHES_BYTES / max(smallest, 1)))
    if wanted <= STACKED:
        return wanted
    return math.ceil(wanted / STACKED) * STACKED


def _bytes(module: nn.Module) -> int:
    return sum(nbytes(parameter) for parameter in module.parameters(recurse=False))


def _call(scheme: str, layers: Mapping[str, nn.Module], names: Sequence[str], inputs: Sequence[Tensor], ctx: Context) -> Candidate:
    """Runs the group's layers once each, then copies of them."""
    own = [layers[name] for name in names[: len(inputs)]]
    own += [copy.deepcopy(own[index % len(own)]) for index in range(len(inputs) - len(own))]
    size = min(STACKED, len(inputs))
    stacks = [_Stack(own[start : start + size]) for start in range(0, len(own), size)]
    if ctx.compile is not None:
        ctx.compile.call(stacks)
    given = [tuple(inputs[start : start + size]) for start in range(0, len(own), size)]

    def run() -> None:
        for stack, xs in zip(stacks, given, strict=True):
            stack(*xs)

    return Candidate(name=scheme, call=run)


class _Stack(nn.Module):
    """Layers side by side in one program."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(f"layer{index}", layer)
        self.count = len(layers)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f"layer{index}")(inputs[index]) for index in range(self.count))


@contextmanager
def _watched(layers: Mapping[str, nn.Module], calls: dict[str, int], inputs: dict[str, Tensor]) -> Iterator[None]:
    """Counts the calls of each layer and keeps the first input of each."""

    def hook(name: str) -> Callable[..., None]:
        def called(_: nn.Module, args: tuple[Any, ...]) -> None:
            calls[name] = calls.get(name, 0) + 1
            if name not in inputs and args and isinstance(args[0], Tensor):
                inputs[name] = args[0].detach().clone()

        return called

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
