"""Predicts the time of a workload on hardware that need not be there, kernel by kernel.

Each kernel of the traced graph takes its roofline at the published peaks (`price`), divided by the efficiency that such
kernels were measured to reach where there is a calibration; the host adds what it takes to launch them. Without a
calibration the result is an upper bound on speed: good implementations come near it. It is always labelled `predicted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from optforge.measure.utilization import mbu, mfu
from optforge.plan.fusion import kernels
from optforge.plan.graph import CAPTURED, COMPILED, EAGER, UNKNOWN, Graph, Kernel
from optforge.plan.price import LAUNCH
from optforge.plan.schemes import with_schemes
from optforge.plan.summary import Priced, Row, alike, largest, rows, top
from optforge.spec import DTYPES, Hardware, Json, Scheme

if TYPE_CHECKING:
    from optforge.plan.calibration import Band, Calibration

BASIS = "roofline at the published peaks, an upper bound on speed"

HOST_US = {"nvidia": 5.0, "amd": 5.0}
"""Time of the host to launch one kernel, without a calibration. Our assumption: CUDA launches take the host 4 to 6 us."""

BEHIND = ("nvidia", "amd")
"""Backends whose devices run behind the host, so that only the slower of the two counts."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one call of a workload would take on a target. None means unknown."""

    label: str = "predicted"
    basis: str = BASIS
    hardware: str
    mode: str
    known: bool
    reason: str | None = None
    """Why there is no time: what the profile lacks, or why the graph is not whole."""
    partial: bool = False
    """`latency_ms` is a lower bound: the work of some operators, which `notes` names, is unknown."""
    latency_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    """Ends of the error band: nine of ten predictions of such workloads were no farther off."""
    band: Band | None = None
    """How far predictions were from measurements; None without a calibration."""
    ideal_ms: float | None = None
    """All kernels at the published peaks, without launches: no implementation by these kernels is faster."""
    tokens_per_s: float | None = None
    items_per_s: float | None = None
    mfu: float | None = None
    """Share of the peak of the run's dtype; causal attention counts the half that is needed."""
    mbu: float | None = None
    """Share of the memory bandwidth that weights and KV cache, each read once a pass, need."""
    bound: str | None = None
    """What most of the time goes to: `memory`, `arithmetic`, `launch` (the host, or kernels too small) or `links`."""
    arithmetic_ms: float | None = None
    """All arithmetic at the peak of its dtype, were it the only limit."""
    memory_ms: float | None = None
    """All bytes at the memory bandwidth, were it the only limit."""
    launch_ms: float | None = None
    """Time of the host, were it the only limit; in a captured graph, and on devices with one program, the gaps between kernels."""
    kernels: int | None = None
    flops: float | None = None
    bytes: float | None = None
    weight_bytes: int | None = None
    kv_cache_bytes: int | None = None
    fits: bool | None = None
    """Whether weights and KV cache are within the memory. Activations and the runtime come on top, so True promises little."""
    rows: list[Row] = field(default_factory=list)
    top: list[dict[str, Json]] = field(default_factory=list)
    """The costliest kernels, equal ones together: name, module (numbers as `*`), count, share of the kernels' time, latency_ms,
    bound, flops, bytes."""
    notes: list[str] = field(default_factory=list)


def predict(
    graph: Graph,
    hardware: Hardware,
    *,
    mode: str,
    regions: Sequence[str] = ("",),
    schemes: Mapping[str, Scheme] | None = None,
    collectives: Sequence[Kernel] = (),
    calibration: Calibration | None = None,
    band: Band | None = None,
) -> Prediction:
    """The time of one call of the traced workload on `hardware`.

    Args:
        graph: one pass, from `plan.trace`; `graph.passes` of them make a call.
        hardware: the target's profile.
        mode: `eager`, `compiled`, or `captured` (compiled, and replayed from a captured graph).
        regions: dotted paths of the modules that are compiled, each by itself; `""` is the whole model.
        schemes: path of a linear -> the scheme that it would have, to ask what quantizing would bring without doing it.
        collectives: communication of one pass, kernels of kind `collective` with their bytes on the wire. It is added to the rest:
            none of it is taken to overlap with arithmetic.
        calibration: measured efficiencies and overheads; None predicts the bound.
        band: how far predictions of such workloads were off, from the calibration.
    """
    assert mode in (EAGER, COMPILED, CAPTURED), mode
    asked = with_schemes(graph, schemes, hardware) if schemes else graph
    listed = [*kernels(asked, compiled=mode != EAGER, regions=regions), *collectives]
    priced = alike(listed, hardware, () if mode == EAGER else regions, calibration)
    sized = _sized(asked, priced, hardware, mode)
    if sized.reason:
        return sized
    timed = _timed(sized, asked, priced, _costs(hardware, mode, calibration), len(regions))
    timed = _with_shares(timed, asked, priced, hardware)
    return timed if calibration is None else _with_source(timed, priced, calibration, band)


def speedup(before: Prediction | Mapping[str, Json], after: Prediction | Mapping[str, Json]) -> float | None:
    """How many times faster `after` is predicted to be; None where either time is unknown."""
    first, second = (item.latency_ms if isinstance(item, Prediction) else item.get("latency_ms") for item in (before, after))
    return first / second if first and second else None


@dataclass(frozen=True)
class _Costs:
    """Seconds beside the kernels' own, in one mode on one device."""

    eager_kernel: float = 0.0
    """Of the host, for each kernel outside of a compiled region."""
    compiled_kernel: float = 0.0
    region: float = 0.0
    gap: float = 0.0
    """Of the device, for each kernel."""
    behind: bool = False
    """The device runs behind the host: only the slower of the two counts."""


def _costs(hardware: Hardware, mode: str, calibration: Calibration | None) -> _Costs:
    """A captured graph is launched at once, and XLA runs a whole pass as one program: there the host launches no kernel."""
    behind = hardware.backend in BEHIND
    if hardware.backend == "xla":
        return _Costs()
    if calibration is None:
        host = HOST_US.get(hardware.backend, 0.0) * 1e-6
        return _Costs(eager_kernel=host, compiled_kernel=0.0 if mode == CAPTURED else host, behind=behind)
    known = calibration.overheads
    return _Costs(
        eager_kernel=known.eager_operator,
        compiled_kernel=0.0 if mode == CAPTURED else known.compiled_kernel,
        region={EAGER: 0.0, COMPILED: known.compiled_region, CAPTURED: known.compiled_region + known.call}[mode],
        gap=known.captured_kernel,
        behind=behind,
    )


def _sized(graph: Graph, priced: Sequence[Priced], hardware: Hardware, mode: str) -> Prediction:
    """All that does not depend on the time, and the reason where there is none."""
    known = all(item.price.missing is None for item in priced)
    weights, cache = graph.bytes_of("parameter", "buffer"), graph.bytes_of("cache") or None
    needed = weights + (cache or 0)
    unknown = list(dict.fromkeys(f"{item.name} ({item.why})" if item.why else item.name for item in graph.unknown_operators()))
    partial = [f"the time is a lower bound: the work of {', '.join(unknown)} is unknown"] if unknown else []
    return Prediction(
        hardware=hardware.name,
        mode=mode,
        known=False,
        reason=_unknown(graph, priced, hardware),
        partial=bool(unknown),
        kernels=graph.passes * sum(item.count for item in priced),
        flops=graph.passes * sum(item.count * item.kernel.flops for item in priced),
        bytes=graph.passes * sum(item.count * item.kernel.bytes for item in priced),
        weight_bytes=weights,
        kv_cache_bytes=cache,
        fits=needed <= hardware.memory_bytes if hardware.memory_bytes else None,
        rows=rows(priced, graph.passes),
        top=top(priced, graph.passes) if known and graph.unknown is None else [],
        notes=[*graph.notes, *partial, *sorted({item.price.note for item in priced if item.price.note})],
    )


def _unknown(graph: Graph, priced: Sequence[Priced], hardware: Hardware) -> str | None:
    """Why no time can be predicted, or None."""
    if graph.unknown:
        return graph.unknown
    if not any(item.kernel.kind != UNKNOWN for item in priced):
        return "the model has no operation that the roofline knows"
    if not hardware.peak_flops and not hardware.bandwidth_bytes_per_s:
        return f"the profile {hardware.name} has no published peaks"
    missing = sorted({item.price.missing for item in priced if item.price.missing})
    return f"the profile {hardware.name} has {'; '.join(missing)}" if missing else None


def _timed(sized: Prediction, graph: Graph, priced: Sequence[Priced], costs: _Costs, regions: int) -> Prediction:
    """The prediction with its times."""
    gaps = costs.gap * sum(item.count for item in priced)
    host = costs.region * regions + sum(item.count * (costs.eager_kernel if item.eager else costs.compiled_kernel) for item in priced)
    device = gaps + sum(item.seconds for item in priced)
    waits = costs.behind and host > device
    seconds = graph.passes * (max(device, host) if costs.behind else device + host)
    rate = graph.units / seconds
    return replace(
        sized,
        known=True,
        latency_ms=1e3 * seconds,
        ideal_ms=1e3 * graph.passes * sum(item.count * item.price.ideal for item in priced),
        tokens_per_s=rate if graph.unit == "tokens" else None,
        items_per_s=rate if graph.unit == "items" else None,
        bound=LAUNCH if waits else largest(priced, gaps if costs.behind else gaps + host),
        arithmetic_ms=1e3 * graph.passes * sum(item.count * (item.price.arithmetic or 0.0) for item in priced),
        memory_ms=1e3 * graph.passes * sum(item.count * (item.price.memory or 0.0) for item in priced),
        launch_ms=1e3 * graph.passes * (host + gaps),
    )


def _with_shares(timed: Prediction, graph: Graph, priced: Sequence[Priced], hardware: Hardware) -> Prediction:
    """Adds the shares of the hardware's peaks, as a run counts them."""
    assert timed.latency_ms is not None
    seconds = timed.latency_ms / 1e3
    dtype = _run_dtype(priced)
    needed = graph.passes * _fewest_bytes(graph)
    return replace(timed, mfu=mfu(timed.flops, seconds, hardware, dtype) if dtype else None, mbu=mbu(needed, seconds, hardware))


def _run_dtype(priced: Sequence[Priced]) -> str | None:
    """The dtype that the model runs in: that of most unquantized arithmetic."""
    spent = {dtype: sum(item.count * item.kernel.flops for item in priced if item.kernel.dtype == dtype) for dtype in DTYPES}
    return max(spent, key=lambda dtype: spent[dtype]) if any(spent.values()) else None


def _fewest_bytes(graph: Graph) -> float:
    """Bytes of weights, buffers and KV cache that one pass reads or writes, each at most once."""
    kept = {key: value.bytes for key, value in graph.values.items() if value.role in ("parameter", "buffer", "cache")}
    touched: dict[int, float] = {}
    for operator in graph.operators:
        for access in (*operator.reads, *operator.writes):
            if access.key in kept:
                touched[access.key] = touched.get(access.key, 0.0) + access.bytes
    return sum(min(size, kept[key]) for key, size in touched.items())


def _with_source(timed: Prediction, priced: Sequence[Priced], calibration: Calibration, band: Band | None) -> Prediction:
    """Says where the figures come from and what was never measured, and adds the error band."""
    notes = [*timed.notes, *calibration.unmeasured(item.kernel for item in priced if item.kernel.kind != UNKNOWN)]
    timed = replace(timed, basis=calibration.told(), notes=notes)
    if band is None or timed.latency_ms is None:
        return timed
    low, high = timed.latency_ms * max(0.0, 1 - band.p90_error), timed.latency_ms * (1 + band.p90_error)
    return replace(timed, band=band, low_ms=low, high_ms=high)
