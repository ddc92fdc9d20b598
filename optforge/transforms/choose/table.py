"""The table behind a choice: each layer, its candidates with what was measured of them, which it took and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torch import nn

from optforge.spec import Json
from optforge.transforms.base import Context
from optforge.transforms.choose.candidates import Uniform
from optforge.transforms.choose.costs import Costs
from optforge.transforms.choose.times import Site, Time


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One scheme for one layer. What was not measured is None."""

    microseconds: float | None
    """Of one call."""
    speedup: float | None
    """How many times faster than the layer as it is; `low` and `high` are the ends of its 95% interval."""
    low: float | None
    high: float | None
    cost: float | None
    """Estimated, see costs.py."""
    saved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer."""

    layer: str
    shape: list[int]
    """Of its weight as it is."""
    calls: int
    """In one pass of the workload."""
    rows: int
    """Of its input in each call."""
    microseconds: float | None
    """Of one call of the layer as it is."""
    candidates: dict[str, Candidate] = field(default_factory=dict)
    choice: str | None = None
    """None: it stays as it is."""
    reason: str = ""


Timed = Mapping[str, Mapping[str, Time]]


def rows(
    layers: Mapping[str, nn.Module],
    sites: Mapping[str, Site],
    uniforms: Mapping[str, Uniform],
    *,
    timed: Timed,
    estimated: Costs,
    assigned: Mapping[str, str],
) -> list[Row]:
    """A row for each layer, in the order of the model."""
    found = []
    for name, module in layers.items():
        site, times = sites.get(name), timed.get(name, {})
        own = {scheme: _candidate(scheme, name, one, times, estimated) for scheme, one in uniforms.items() if name in one.layers}
        weight = module._parameters.get("weight")
        found.append(
            Row(
                layer=name,
                shape=[] if weight is None else list(weight.shape),
                calls=site.calls if site else 0,
                rows=0 if site is None else site.input.numel() // max(site.input.shape[-1], 1),
                microseconds=next((1e6 * time.before for time in times.values()), None),
                candidates=own,
                choice=assigned.get(name),
                reason=_reason(own, assigned.get(name), called=site is not None, was_timed=bool(timed)),
            )
        )
    return found


def _candidate(scheme: str, name: str, one: Uniform, times: Mapping[str, Time], estimated: Costs) -> Candidate:
    time = times.get(scheme)
    return Candidate(
        microseconds=None if time is None else 1e6 * time.seconds,
        speedup=None if time is None else time.ratio,
        low=None if time is None else time.low,
        high=None if time is None else time.high,
        cost=estimated.get(name, {}).get(scheme),
        saved_bytes=one.saved[name],
    )


def _reason(own: Mapping[str, Candidate], choice: str | None, *, called: bool, was_timed: bool) -> str:
    if not was_timed:
        return "of the bytes that it saves the cheapest in quality" if choice else "the limit on the weights holds without it"
    if not called:
        return "no pass of the workload calls it"
    timed = {scheme: one for scheme, one in own.items() if one.speedup is not None and one.low is not None}
    if choice:
        faster = [scheme for scheme, one in timed.items() if (one.speedup or 0) > (timed[choice].speedup or 0) and (one.low or 0) > 1]
        return f"{timed[choice].speedup:.2f}x faster here" + (f"; {', '.join(faster)} would be faster and costs more" if faster else "")
    if not timed:
        return "no candidate could be timed"
    best = max(timed, key=lambda scheme: timed[scheme].speedup or 0)
    if (timed[best].low or 0) <= 1.0:
        return f"no candidate is faster here: {best} {timed[best].speedup:.2f}x ({timed[best].low:.2f} to {timed[best].high:.2f})"
    return f"{best} would be {timed[best].speedup:.2f}x faster, and the limits on quality leave no room for it"


def describe(row: Row) -> dict[str, Json]:
    """The row as JSON."""
    return asdict(row)


def skipped(table: Sequence[Mapping[str, Json]]) -> dict[str, str]:
    """Layers that stay as they are, with the reason."""
    return {row["layer"]: row["reason"] for row in table if row["choice"] is None}


def summary(table: Sequence[Row], judged: Mapping[str, str], ctx: Context) -> list[str]:
    """What a reader wants to know first, a sentence each."""
    counts = Counter(row.choice for row in table)
    stays = counts.pop(None, 0)
    chosen = ", ".join(f"{scheme} on {count}" for scheme, count in counts.most_common())
    notes = [f"of {len(table)} layers: {chosen or 'none is rounded'}{f', {stays} stay as they are' if stays else ''}"]
    before, gain = times_of(table)
    if before:
        where = ctx.device.name + (
            "" if ctx.device.name == ctx.target.name else f", a stand-in for {ctx.target.name}: there it may be wrong"
        )
        notes.append(f"a pass spends {before / 1e3:.2f} ms in these layers, {gain / 1e3:.2f} ms less as chosen (measured apart on {where})")
    notes += [f"{what}: {words}" for what, words in judged.items()]
    return notes


def times_of(table: Sequence[Row]) -> tuple[float, float]:
    """Microseconds that a pass spends in the timed layers as they are, and how many of them the choice saves."""
    timed = [(row.calls, row.microseconds, row) for row in table if row.microseconds is not None]
    before = sum(calls * own for calls, own, _ in timed)
    chosen = [(calls, own, row.candidates[row.choice].microseconds) for calls, own, row in timed if row.choice is not None]
    return before, sum(calls * (own - time) for calls, own, time in chosen if time is not None)
