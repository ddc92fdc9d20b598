"""Measures a whole machine: its peaks, its overheads, and as many points as a budget of seconds allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from optforge.measure.machine import attention, convolutions, elementwise, overheads, peaks, products
from optforge.measure.machine.case import Case, again, cache_bytes, copies, flows
from optforge.measure.machine.clock import Call, Clock, HostClock, Timed, clock_for
from optforge.measure.machine.point import Overheads, Peaks, Point

Tell = Callable[[str], Any]
LONGEST_S = {"cpu": 0.15, "cuda": 0.03}
"""Cases whose call would take longer at the peaks are left out: at that size a product runs at its best rate anyway."""
MOST_BYTES = {"cpu": 1.5e9, "cuda": 1.2e10}
"""Cases that hold more memory are left out."""
NOISY, USELESS = 0.3, 1.0
"""Spread above which a point is measured again, and above which it is left out if it still spreads so."""
LEAST_SHARE = 0.25
"""On a CPU a point whose work is less than this share of its time is left out: the rest is the launch, and its noise."""
SMALLEST_SHARE = 0.02
"""On CUDA the smallest kernels take what an empty one takes; this much of it counts as work, since a time of zero has no logarithm."""


@dataclass(kw_only=True)
class Survey:
    """What was measured, and what was not."""

    peaks: Peaks
    overheads: Overheads
    points: list[Point] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Title and reason of each case without a point."""
    seconds: float = 0.0


def quick(device: torch.device, tell: Tell) -> Survey:
    """Peaks and overheads alone, in under a minute. Call it within a backend's session."""
    begun = time.perf_counter()
    found = peaks.peaks(device, tell)
    tell("overheads of the host")
    return Survey(peaks=found, overheads=overheads.overheads(device), seconds=time.perf_counter() - begun)


def survey(device: torch.device, tell: Tell, *, budget_s: float, only: str = "") -> Survey:
    """Peaks, overheads and points; the kinds of cases take turns, so that a short budget leaves some of each.

    Args:
        budget_s: seconds after which no further case begins; what is left out then is told in `left_out`.
        only: cases whose title holds this text.
    """
    begun = time.perf_counter()
    result = quick(device, tell)
    surveyor = _Surveyor(device, result)
    count = 0
    for case in (case for case in cases(device) if only in case.title):
        if time.perf_counter() - begun > budget_s:
            result.left_out.append(f"{case.title}: no time left")
            continue
        count += 1
        if count % 20 == 1:
            tell(f"operator {count}, {time.perf_counter() - begun:.0f} of at most {budget_s:.0f} s: {case.title}")
        found = surveyor.measured(case)
        if isinstance(found, Point):
            result.points.append(found)
        else:
            result.left_out.append(f"{case.title}: {found}")
    result.seconds = time.perf_counter() - begun
    return result


def cases(device: torch.device) -> Iterator[Case]:
    """Every case for the device, the kinds in turns."""
    cuda = device.type == "cuda"
    layers = (
        (*products.LLAMA_8B, *products.LLAMA_1B, *products.SMOLLM2)
        if cuda
        else (*products.SMOLLM2, *products.LLAMA_1B[:5], *products.LLAMA_8B[1:2])
    )
    sources: list[Iterator[Case]] = [
        products.products(device, layers, products.ROWS if cuda else products.CPU_ROWS),
        products.classifier(device, (1, 8, 32)),
        products.batched(device),
        attention.prefill(device),
        attention.decode(device),
        attention.repeats(device),
        elementwise.fused(device),
        convolutions.convolutions(device),
        elementwise.eager(device),
        elementwise.batch_norms(device),
        elementwise.paddings(device),
        elementwise.lookups(device),
        elementwise.choices(device),
        elementwise.updates(device),
    ]
    if cuda:
        sources += [products.gradients(device, products.LLAMA_1B, (16384, 8192)), attention.backward(device)]
    for turn in zip_longest(*sources):
        yield from (case for case in turn if case is not None)


class _Surveyor:
    """Measures cases one by one, against what is known of the machine."""

    def __init__(self, device: torch.device, known: Survey) -> None:
        self.device, self.known = device, known
        self.clock: Clock = clock_for(device)
        self.direct, self.program = overheads.direct_call(device), overheads.direct_program(device)
        self.cache = cache_bytes(device)

    def measured(self, case: Case) -> Point | str:
        """The point, or why there is none."""
        if (refused := self._refused(case)) is not None:
            return refused
        try:
            timed = self._timed(self._spaced(case, self._calls(case)), self.clock if case.captures else HostClock(device=self.device))
        except (RuntimeError, NotImplementedError) as error:  # an operator that this build or device lacks is said, the rest is measured
            return str(error).strip().splitlines()[0]
        if timed.spread > USELESS:
            return f"its rounds spread by {timed.spread:.1f} of their median: the machine was busy"
        work = timed.seconds - self._launch(case)
        if work < LEAST_SHARE * timed.seconds and self.device.type == "cpu":
            return "its time is that of its launch"
        return Point(
            kind=case.kind,
            name=case.name,
            dtype=case.dtype,
            size=case.size,
            detail=case.detail,
            phase=case.phase,
            bytes=case.bytes,
            seconds=max(work, SMALLEST_SHARE * timed.seconds),
            spread=timed.spread,
        )

    def _calls(self, case: Case) -> list[Call]:
        """The calls of a cycle, each on operands of its own as far as a model's would be."""
        flowing = flows(case, self.device)
        if not case.cold and not flowing:
            return case.make(1)
        room = MOST_BYTES[self.device.type] - case.bytes - case.extra
        many = min(copies(case, self.cache), max(1, int(room // max(case.cold or case.bytes, 1))))
        return again(case.make(1), many) if flowing else case.make(many)

    def _refused(self, case: Case) -> str | None:
        """Why a case is not measured at all, or None."""
        if (ideal := self._ideal(case)) > LONGEST_S[self.device.type]:
            return f"would take {ideal:.2g} s at the peak"
        if case.bytes + case.extra > MOST_BYTES[self.device.type]:
            return f"needs {(case.bytes + case.extra) / 1e9:.1f} GB"
        return None

    def _ideal(self, case: Case) -> float:
        peaks = self.known.peaks
        return max(case.flops / peaks.flops.get(case.dtype, peaks.flops["fp32"]), case.bytes / peaks.bandwidth_bytes_per_s)

    def _spaced(self, case: Case, calls: list[Call]) -> list[Call]:
        """The calls, each followed by the smallest kernel where they are to run apart."""
        if not case.apart:
            return calls
        between = torch.ones(1, device=self.device)

        def spaced(call: Call) -> None:
            call()
            between.add_(1.0)

        return [partial(spaced, call) for call in calls]

    def _timed(self, calls: list[Call], clock: Clock) -> Timed:
        with torch.no_grad():
            timed = clock.time(calls)
            return min(timed, clock.time(calls), key=lambda one: one.spread) if timed.spread > NOISY else timed

    def _launch(self, case: Case) -> float:
        """What of a case's time is launching it, and is predicted apart."""
        known = self.known.overheads
        if self.device.type == "cuda":
            return (1 + case.apart) * known.captured_kernel
        return self.program if case.compiled else self.direct
