"""Seconds of one call out of a cycle of calls: a plain loop on a CPU, a captured graph on CUDA.

The calls of a cycle do the same on tensors of their own. A model reads each weight once a pass; one small weight read again
and again would come from the cache and look many times faster than it is in the model. On CUDA the calls are captured and
replayed, so that the host's launches do not set the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from optforge.measure.timing import no_collection

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of one call, the median over rounds, and (90th - 10th percentile) / median."""

    seconds: float
    spread: float


class Clock(Protocol):
    """Times a cycle of calls."""

    def time(self, calls: Sequence[Call]) -> Timed:
        """Seconds of one of `calls`, which run one after the other, again and again."""
        ...


def clock_for(device: torch.device) -> Clock:
    return GraphClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """Reads the host's clock around whole cycles, from an idle device to an idle device."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    round_s: float = 0.012
    """Least length of a round."""
    least_rounds: int = 5
    budget_s: float = 0.12
    """Seconds after which no further round begins, once the least are done."""

    def time(self, calls: Sequence[Call]) -> Timed:
        with no_collection(first=False):
            self._seconds(calls, 1)
            cycles = max(1, math.ceil(self.round_s / max(self._seconds(calls, 1), 1e-9)))
            begun = time.perf_counter()
            samples: list[float] = []
            while len(samples) < self.least_rounds or time.perf_counter() - begun < self.budget_s:
                samples.append(self._seconds(calls, cycles) / (cycles * len(calls)))
        return summary(samples)

    def _seconds(self, calls: Sequence[Call], cycles: int) -> float:
        _synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(cycles):
            _cycle(calls)
        _synchronize(self.device)
        return time.perf_counter() - begin


@dataclass(frozen=True)
class GraphClock:
    """Captures the calls in a CUDA graph and reads the host's clock around replays of it."""

    device: torch.device
    capture_s: float = 4e-4
    """Least time of a graph, against the time that launching it takes."""
    most_calls: int = 400
    round_s: float = 1.5e-3
    rounds: int = 7

    def time(self, calls: Sequence[Call]) -> Timed:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch ships it untyped
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with no_collection(first=False), torch.cuda.stream(stream):
            _cycle(calls)  # kernels are chosen, compiled and given their workspaces outside of the capture
            _cycle(calls)
            once = self._seconds(lambda: _cycle(calls), 1) / len(calls)
            count = min(self.most_calls, max(len(calls), math.ceil(self.capture_s / once)))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for index in range(count):
                    calls[index % len(calls)]()
            replays = max(2, math.ceil(self.round_s / max(self._seconds(graph.replay, 1), 1e-9)))
            samples = [self._seconds(graph.replay, replays) / count for _ in range(self.rounds)]
        del graph
        return summary(samples)

    def _seconds(self, call: Call, times: int) -> float:
        """Seconds of each of `times` calls, from an idle device to an idle device."""
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begin) / times


def host_seconds(call: Call, device: torch.device, *, budget_s: float = 0.1) -> float:
    """Seconds of one call as the host sees it, launches included: the median over rounds of at least 5 ms."""

    def round_(times: int) -> float:
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(times):
            call()
        _synchronize(device)
        return (time.perf_counter() - begin) / times

    with no_collection(first=False):
        round_(3)
        times = max(1, math.ceil(5e-3 / max(round_(1), 1e-9)))
        begun, samples = time.perf_counter(), [round_(times) for _ in range(5)]
        while time.perf_counter() - begun < budget_s:
            samples.append(round_(times))
    return float(np.median(samples))


def summary(samples: Sequence[float]) -> Timed:
    low, median, high = np.quantile(samples, (0.1, 0.5, 0.9))
    return Timed(seconds=float(median), spread=float((high - low) / median))


def _cycle(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
