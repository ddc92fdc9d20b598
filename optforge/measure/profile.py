"""Profiles one call with PyTorch's profiler: the operators that took the time, and a trace to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from optforge.backends.base import Profile
from optforge.spec import Json

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

ROWS = 30


def profile(call: Callable[[], Any], activities: list[ProfilerActivity], synchronize: Callable[[], None], trace: str | None) -> Profile:
    """Runs `call` once under the profiler.

    Rows are the operators with most time of their own, on the device where one was recorded, else on the CPU:
    `name`, `calls`, `self_ms`, `share` of all own time. `trace` is the path of a Chrome trace (`.json` or `.json.gz`).
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    synchronize()
    with profiler(activities=activities, record_shapes=False) as session:
        call()
        synchronize()
    on_device = any(activity is not ProfilerActivity.CPU for activity in activities)
    rows = [_row(event, on_device) for event in session.key_averages()]
    total = sum(row["self_ms"] for row in rows) or 1.0
    rows.sort(key=lambda row: -row["self_ms"])
    operators = [{**row, "share": row["self_ms"] / total} for row in rows[:ROWS]]
    if trace is not None:
        session.export_chrome_trace(trace)
    return Profile(operators=operators, trace=trace)


def _row(event: Any, on_device: bool) -> dict[str, Json]:
    microseconds = event.self_device_time_total if on_device else event.self_cpu_time_total
    return {"name": event.key, "calls": event.count, "self_ms": microseconds / 1e3}
