"""Measures one row on any backend: compile first and apart, then memory, then time, then energy.

The order matters. The first calls compile and are counted as compile time, never as latency; memory is read over calls
of the candidate alone, with every counter reset before; time is taken in alternating rounds; energy over a stretch of
the candidate alone, long enough for the counter to move.
"""

from __future__ import annotations

import time

from optforge.backends.base import Backend, Candidate
from optforge.distributed.world import agree
from optforge.measure import compiles, timing
from optforge.spec import Measure, Measurement

ENERGY_S = 1.0
"""Energy counters move every 20 to 100 ms; over a second that is a few percent."""


def measure(backend: Backend, candidate: Candidate, baseline: Candidate | None, options: Measure) -> Measurement:
    """Time, memory, compiles and energy of `candidate`.

    `peak_memory_bytes` is the allocator's peak where the device counts one, else the process's, less the bytes that
    are resident for the baseline's sake alone (`Candidate.resident_bytes`). `energy_j` is joules of one call, the
    device's idle draw included. Throughput, weight bytes and shares of the peak are the caller's to add.
    """
    compiled = compiles.first_calls(candidate.call, backend.synchronize)
    if baseline is not None:
        compiles.first_calls(baseline.call, backend.synchronize)
    memory = _memory(backend, candidate)
    samples = timing.time_rounds(candidate, baseline, synchronize=backend.synchronize, options=options)
    latency = timing.summary(samples.samples_s)
    peak = memory["allocated"] if memory.get("allocated") is not None else memory.get("process")
    if peak is not None and baseline is not None:
        peak -= baseline.resident_bytes
    measured = Measurement(
        latency_ms=latency,
        compile_time_s=compiled.seconds,
        compiles=compiled.graphs,
        graph_breaks=compiled.graph_breaks,
        graph_break_reasons=compiled.reasons,
        recompile_limit_hit=compiled.limit_hit,
        sizes_seen=compiled.sizes,
        peak_memory_bytes=peak,
        memory=memory,
        energy_j=_energy(backend, candidate, options.max_s),
        samples_s=samples.samples_s,
        baseline_samples_s=samples.baseline_samples_s,
        steady=samples.steady,
    )
    return agree(measured)  # ranks that judged by figures of their own would go different ways


def _memory(backend: Backend, candidate: Candidate) -> dict[str, int | None]:
    """Peaks over one call of the candidate, after a call that brought its caches in."""
    candidate.call()
    backend.synchronize()
    backend.reset_memory()
    candidate.call()
    backend.synchronize()
    return backend.memory()


def _energy(backend: Backend, candidate: Candidate, max_s: float) -> float | None:
    """Joules of one call, over at least one call and about a second; None where the device has no counter."""
    backend.synchronize()
    begin = backend.energy_j()
    if begin is None:
        return None
    calls, deadline = 0, time.perf_counter() + min(ENERGY_S, max_s)
    while calls == 0 or agree(time.perf_counter() < deadline):
        candidate.call()
        backend.synchronize()
        calls += 1
    end = backend.energy_j()
    return None if end is None else (end - begin) / calls
