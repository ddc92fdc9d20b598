"""Counts what the compiler did during some calls: graphs, breaks with their places, recompiles, limits hit.

A compiled model can be slower than the eager one without an error: a graph break splits it, a new size compiles it
again, and after eight sizes PyTorch gives up on the frame and runs it uncompiled. All of that is in Dynamo's own
counters; this reads them before and after, and times the compiling calls apart from the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from optforge.distributed.world import agree

MAX_CALLS = 64
"""Calls after which a candidate that still compiles on each call is taken as it is."""
_LIMIT = "recompile limit exceeded"
_SIZE = re.compile(r"tensor '(?P<name>.+)' size mismatch at index (?P<dim>\d+)\. expected (?P<old>\d+), actual (?P<new>\d+)")


@dataclass(kw_only=True)
class Compiles:
    """What the compiler has done since a point in time."""

    graphs: int = 0
    """Graphs compiled; each graph break and each recompile adds one."""
    graph_breaks: int = 0
    reasons: list[str] = field(default_factory=list)
    """`file:line: reason` of each distinct graph break, in the order seen."""
    recompiles: list[str] = field(default_factory=list)
    """The guard that failed, for each recompile that PyTorch kept a record of."""
    sizes: dict[str, list[int]] = field(default_factory=dict)
    """`tensor, dimension` -> sizes that were compiled for or asked for, where a size was what forced a recompile."""
    limit_hit: bool = False
    """PyTorch gave up on a frame after `torch._dynamo.config.recompile_limit` recompiles; it now runs uncompiled."""
    seconds: float | None = None
    """Wall time of the calls that compiled; None when none did."""

    def describe_limit(self) -> str:
        """See the function of this name."""
        return describe_limit(self.sizes)


def describe_limit(sizes: Mapping[str, Sequence[int]]) -> str:
    """The warning for a limit that was hit, with the sizes seen."""
    seen = "; ".join(f"{where}: {', '.join(map(str, found))}" for where, found in sizes.items())
    return f"the recompile limit was hit and later calls ran uncompiled (sizes seen: {seen or 'none recorded'})"


@contextmanager
def watch() -> Iterator[Compiles]:
    """Yields a record that `update` or leaving the context fills with what the compiler did meanwhile."""
    watcher = _Watcher()
    try:
        yield watcher.record
    finally:
        watcher.update()


def first_calls(call: Callable[[], Any], synchronize: Callable[[], None]) -> Compiles:
    """Runs `call` until a call compiles nothing, and says what was compiled and how long the compiling calls took.

    A call that compiles nothing at first sight (an eager module, or one compiled before) is run once.
    """
    watcher = _Watcher()
    spent = 0.0
    for _ in range(MAX_CALLS):
        before = watcher.activity()
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        if agree(watcher.activity() == before):
            break
        spent += time.perf_counter() - begin
    watcher.update()
    watcher.record.seconds = spent or None
    return watcher.record


class _Watcher:
    """The state of Dynamo's counters at one time, and the difference to now."""

    def __init__(self) -> None:
        from torch._dynamo.utils import counters, get_compilation_metrics, graph_break_reasons

        self._counters, self._breaks, self._metrics = counters, graph_break_reasons, get_compilation_metrics
        self.record = Compiles()
        self._before = self._counts()
        self._known_breaks = len(graph_break_reasons)
        self._known_ids = {id(metric) for metric in get_compilation_metrics()}
        # keeps the records alive, so that a new one cannot reuse the identity of an old one
        self._known = get_compilation_metrics()

    def _counts(self) -> dict[str, int]:
        """Monotone totals: graphs, graph breaks, limits hit, frames looked at."""
        counters = self._counters
        limits = sum(count for group in ("unimplemented", "graph_break") for text, count in counters[group].items() if _LIMIT in text)
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "limits": limits,
            "frames": counters["frames"]["total"],
        }

    def activity(self) -> tuple[int, ...]:
        """Changes whenever a call made the compiler do something."""
        return tuple(self._counts().values())

    def update(self) -> None:
        record, now = self.record, self._counts()
        record.graphs = now["graphs"] - self._before["graphs"]
        record.graph_breaks = now["breaks"] - self._before["breaks"]
        record.limit_hit = now["limits"] > self._before["limits"]
        record.reasons = list(dict.fromkeys(_reason(found) for found in self._breaks[self._known_breaks :]))
        found = [metric for metric in self._metrics() if id(metric) not in self._known_ids]
        record.recompiles = [metric.recompile_reason for metric in found if metric.recompile_reason]
        record.sizes = _sizes(record.recompiles)


def _reason(found: Any) -> str:
    """`file:line: first line of the reason` of one of Dynamo's graph break records."""
    text = str(found.reason).strip().splitlines()[0]
    if not found.user_stack:
        return text
    frame = found.user_stack[-1]
    return f"{frame.filename}:{frame.lineno}: {text}"


def _sizes(recompiles: list[str]) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = {}
    for match in filter(None, map(_SIZE.search, recompiles)):
        seen = sizes.setdefault(f"{match['name']}, dimension {match['dim']}", [])
        seen.extend(size for size in (int(match["old"]), int(match["new"])) if size not in seen)
    return sizes
