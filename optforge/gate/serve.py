"""Answers a coordinator that asks for one sample at a time, over the process's own stdin and stdout.

Two versions of a program cannot live in one process, and timing one after the other measures the machine's drift. So
each lives in a process of its own, and the coordinator lets them run in turns. Standard library only: the process may be
one of another environment.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

PROTOCOL = 1
"""Of the lines between the two; told first, since the two may come from two versions of OptForge."""


def answers() -> TextIO:
    """The stream that answers go to. Called first: what anything else prints goes to stderr from here on."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream


def tell(stream: TextIO, message: Mapping[str, Any]) -> None:
    """Writes one line of JSON."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def serve(
    stream: TextIO, calls: Mapping[str, Callable[[], Any]], *, synchronize: Callable[[], None], batch_s: float, ready: Mapping[str, Any]
) -> None:
    """Warms each call up, says `ready`, then answers each line that names a call with the seconds of one call of it.

    A sample is the mean over as many calls as fill `batch_s`, after one untimed call, because the other side has had the
    caches in between. Ends when stdin does, so that nothing outlives the coordinator.
    """
    counts = {name: _count(call, synchronize, batch_s) for name, call in calls.items()}
    with _no_collection():
        tell(stream, {"protocol": PROTOCOL, "ready": dict(ready)})
        for line in sys.stdin:
            name = line.strip()
            calls[name]()
            tell(stream, {"seconds": _seconds(calls[name], counts[name], synchronize) / counts[name]})


def _count(call: Callable[[], Any], synchronize: Callable[[], None], batch_s: float) -> int:
    """How many calls fill `batch_s`; doubling, since one short call reads as mostly clock."""
    call()
    count = 1
    while (seconds := _seconds(call, count, synchronize)) < batch_s:
        count = min(2 * count, math.ceil(1.1 * count * batch_s / max(seconds, 1e-9)))
    return count


def _seconds(call: Callable[[], Any], count: int, synchronize: Callable[[], None]) -> float:
    """Wall time of `count` calls, from an idle device to an idle device."""
    synchronize()
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter_ns() - begin) / 1e9


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
