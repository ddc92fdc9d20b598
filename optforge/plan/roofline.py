"""Predicts the time of a workload on hardware that need not be there: the roofline of its published peaks.

Each operation takes the longest of its arithmetic at the dense peak, its bytes at the memory bandwidth, and one kernel
launch; operations follow one another. No efficiency factor is applied, so the result is an upper bound on speed: no
implementation beats it, good ones come near it (the share is MFU or MBU). It is always labelled `predicted`. Method:
Williams, Waterman, Patterson, Roofline, CACM 2009.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from optforge.measure.size import weight_bytes
from optforge.measure.utilization import peak
from optforge.plan.operations import Counted, Example, Load, Operation, cache_bytes, count, sized_for
from optforge.spec import Hardware, Json, Scheme

BASIS = "roofline at the published peaks, an upper bound on speed"

LAUNCH_US = {"nvidia": 2.0, "amd": 2.0}
"""Shortest time of one kernel inside a captured graph, microseconds. Our assumption, below the 2.5 us that one RMS norm took
in a captured graph on an H200 (docs/hardware.md). Devices that run one compiled program (XLA, CPU) are charged none."""

EAGER_LAUNCH_US = 5.0
"""The same where the host launches every kernel. Our assumption: CUDA launches take the host 4 to 6 us."""

FALLBACK = {"bf16": ("fp16",), "fp16": ("bf16",), "fp32": ("bf16",)}
"""What multiplies in place of a run dtype that the hardware has no peak for: T4 has no bf16; TPUs have bf16 alone, and XLA's
default precision for fp32 products there is one bf16 pass."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of operation in one call of the workload."""

    kind: str
    dtype: str
    """Dtype of the products; `none` for look-ups."""
    count: int
    """Kernels."""
    flops: float
    bytes: float
    latency_ms: float | None
    bound: str | None
    """`memory`, `arithmetic` or `launch`."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one call of a workload would take on a target at its published peaks. None means unknown."""

    label: str = "predicted"
    basis: str = BASIS
    hardware: str
    known: bool
    reason: str | None = None
    """Why there is no time: what the profile lacks, or which size is unknown."""
    latency_ms: float | None = None
    tokens_per_s: float | None = None
    items_per_s: float | None = None
    bound: str | None = None
    """What most of the time goes to: `memory`, `arithmetic` or `launch`."""
    arithmetic_ms: float | None = None
    """All arithmetic at the peak of its dtype, were it the only limit."""
    memory_ms: float | None = None
    """All bytes at the memory bandwidth, were it the only limit."""
    launch_ms: float | None = None
    """All kernels at `launch_us` each, were it the only limit."""
    launch_us: float | None = None
    kernels: int | None = None
    flops: float | None = None
    bytes: float | None = None
    weight_bytes: int | None = None
    kv_cache_bytes: int | None = None
    fits: bool | None = None
    """Whether weights and KV cache are within the memory. Activations and the runtime come on top, so True promises little."""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load_of(workload: Any, family: str | None = None) -> Load:
    """The size of a configured workload (`forward`, `prefill`, `decode`) from its fields.

    Args:
        workload: the checked dataclass.
        family: the model's family; `module` runs its example as it is, whatever the batch size says.

    Raises:
        TypeError: a workload of another kind, whose size nobody declared here.
    """
    kind, batch = str(workload.kind), int(workload.batch_size)
    if kind == "decode":
        return Load(kind=kind, batch=batch, context=int(workload.context), forwards=int(workload.new_tokens))
    if kind == "prefill":
        return Load(kind=kind, batch=batch, tokens_per_call=int(workload.prompt_tokens))
    if kind == "forward":
        return Load(kind=kind, batch=None if family == "module" else batch, tokens_per_call=int(workload.sequence))
    raise TypeError(f"the roofline does not know workloads of kind {kind!r}")


def predict(
    module: nn.Module,
    load: Load,
    hardware: Hardware,
    *,
    dtype: str,
    schemes: Mapping[str, Scheme] | None = None,
    example: Example | None = None,
    captured: bool = True,
) -> Prediction:
    """The time of one call of the workload on `hardware`, from the module tree alone.

    Args:
        module: the model as it would run, quantized or not, on meta or real; weights are not read.
        load: the workload's size.
        hardware: the target's profile.
        dtype: the run's dtype, `fp32`, `fp16` or `bf16`.
        schemes: module name -> scheme that it would have, in place of the one it has.
        example: one forward pass's arguments, for models whose sizes do not follow from tokens (convolutions).
        captured: kernels are replayed from a captured graph; otherwise the host launches each.
    """
    load = sized_for(load, module, example)
    counted = count(module, load, dtype=dtype, schemes=schemes, example=example)
    priced = [_price(operation, hardware, dtype, captured) for operation in counted.operations]
    rows = _rows(priced, load.forwards)
    weights, cache = weight_bytes(module) if schemes is None else None, cache_bytes(module, load, dtype)
    needed = None if weights is None else weights + (cache or 0)
    sized = Prediction(
        hardware=hardware.name,
        known=False,
        reason=_unknown(counted, priced, hardware),
        kernels=sum(row.count for row in rows),
        flops=sum(row.flops for row in rows),
        bytes=sum(row.bytes for row in rows),
        weight_bytes=weights,
        kv_cache_bytes=cache,
        fits=needed <= hardware.memory_bytes if needed is not None and hardware.memory_bytes else None,
        rows=rows,
        notes=counted.notes + sorted({item.note for item in priced if item.note}),
    )
    return sized if sized.reason else _timed(sized, priced, load, _launch_us(hardware, captured))


def speedup(before: Prediction | Mapping[str, Json], after: Prediction | Mapping[str, Json]) -> float | None:
    """How many times faster `after` is predicted to be; None where either time is unknown."""
    first, second = (item.latency_ms if isinstance(item, Prediction) else item.get("latency_ms") for item in (before, after))
    return first / second if first and second else None


@dataclass(frozen=True)
class _Priced:
    """An operation with its three limits, in seconds; None where the profile lacks the figure."""

    operation: Operation
    dtype: str
    arithmetic: float | None
    memory: float | None
    launch: float
    note: str | None

    @property
    def known(self) -> bool:
        return self.arithmetic is not None and self.memory is not None

    @property
    def seconds(self) -> float:
        return max(self.arithmetic or 0.0, self.memory or 0.0, self.launch)

    @property
    def bound(self) -> str:
        limits = {"memory": self.memory or 0.0, "arithmetic": self.arithmetic or 0.0, "launch": self.launch}
        return max(limits, key=lambda name: limits[name])


def product_dtype(hardware: Hardware, scheme: Scheme | None, dtype: str) -> str | None:
    """The dtype in which `hardware` multiplies: the scheme's activations where it has units for them, else the run's dtype.

    Weight-only schemes, and schemes whose units are missing, multiply in the run's dtype (or its `FALLBACK`). None where the
    profile has no peak for any of them.
    """
    wanted = [scheme.activation_dtype] if scheme and scheme.activation_dtype else []
    return next((name for name in (*wanted, dtype, *FALLBACK.get(dtype, ())) if peak(hardware, name) is not None), None)


def _price(operation: Operation, hardware: Hardware, dtype: str, captured: bool) -> _Priced:
    bandwidth = hardware.bandwidth_bytes_per_s
    memory = operation.bytes / bandwidth if bandwidth else None
    launch = _launch_us(hardware, captured) * 1e-6
    if not operation.flops:
        return _Priced(operation, "none", 0.0, memory, launch, None)
    product = product_dtype(hardware, operation.scheme, dtype)
    limit = peak(hardware, product) if product else None
    if limit is None:
        return _Priced(operation, dtype, None, memory, launch, None)
    asked = operation.scheme.activation_dtype if operation.scheme else None
    note = None
    if product != (asked or dtype):
        note = f"{hardware.name} has no {asked or dtype} matrix units: those products are counted at its {product} peak"
    return _Priced(operation, str(product), operation.flops / limit, memory, launch, note)


def _launch_us(hardware: Hardware, captured: bool) -> float:
    launched = LAUNCH_US.get(hardware.backend)
    return 0.0 if launched is None else launched if captured else EAGER_LAUNCH_US


def _unknown(counted: Counted, priced: list[_Priced], hardware: Hardware) -> str | None:
    """Why no time can be predicted, or None."""
    if counted.unknown:
        return counted.unknown
    if not priced:
        return "the model has no operation that the roofline knows"
    if not hardware.peak_flops and not hardware.bandwidth_bytes_per_s:
        return f"the profile {hardware.name} has no published peaks"
    if not hardware.bandwidth_bytes_per_s:
        return f"the profile {hardware.name} has no memory bandwidth"
    missing = sorted({item.dtype for item in priced if not item.known})
    return f"the profile {hardware.name} has no peak for {', '.join(missing)} products" if missing else None


def _timed(sized: Prediction, priced: list[_Priced], load: Load, launch_us: float) -> Prediction:
    """The prediction with its times."""
    seconds = load.forwards * sum(item.seconds for item in priced)
    items = load.forwards * (load.batch or 1)
    return replace(
        sized,
        known=True,
        latency_ms=1e3 * seconds,
        tokens_per_s=items * load.tokens_per_call / seconds if load.sequence else None,
        items_per_s=None if load.sequence else items / seconds,
        bound=_largest(priced),
        arithmetic_ms=1e3 * load.forwards * sum(item.arithmetic or 0.0 for item in priced),
        memory_ms=1e3 * load.forwards * sum(item.memory or 0.0 for item in priced),
        launch_ms=1e-3 * load.forwards * len(priced) * launch_us,
        launch_us=launch_us,
    )


def _largest(priced: Iterable[_Priced]) -> str:
    """The limit that most of the time goes to."""
    spent: dict[str, float] = {}
    for item in priced:
        spent[item.bound] = spent.get(item.bound, 0.0) + item.seconds
    return max(spent, key=lambda name: spent[name])


def _rows(priced: list[_Priced], forwards: int) -> list[Row]:
    """Operations of one kind and product dtype together, over all forward passes of a call."""
    groups: dict[tuple[str, str], list[_Priced]] = {}
    for item in priced:
        groups.setdefault((item.operation.kind, item.dtype), []).append(item)
    return [
        Row(
            kind=kind,
            dtype=dtype,
            count=len(items) * forwards,
            flops=forwards * sum(item.operation.flops for item in items),
            bytes=forwards * sum(item.operation.bytes for item in items),
            latency_ms=1e3 * forwards * sum(item.seconds for item in items) if all(item.known for item in items) else None,
            bound=_largest(items) if all(item.known for item in items) else None,
        )
        for (kind, dtype), items in groups.items()
    ]
