"""A limit and an interval make a verdict: missed or passed only where the whole interval lies on one side.

Between them it is undecided. A gate that guesses there raises false alarms until nobody listens to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optforge.errors import EXIT_LIMIT, EXIT_OK
from optforge.gate.limits import ABSOLUTE, RELATIVE, Limit
from optforge.gate.statistics import Estimate
from optforge.report import figures

PASSED, MISSED, UNDECIDED = "passed", "missed", "undecided"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of one limit."""

    limit: str
    verdict: str
    found: str
    """The figure or the change, with its interval, as a reader expects it."""
    detail: str = ""
    """What it was taken from: both medians, how many runs."""
    change: Estimate | None = None

    def __str__(self) -> str:
        return f"{self.verdict:<9}  {self.limit}: {self.found}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All limits of one gate."""

    title: str
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    """What to know that decides nothing: a shared device, other versions."""
    strict: bool = False
    """Whether undecided counts as missed."""
    facts: dict[str, str] = field(default_factory=dict)
    """What was compared: commands, versions, device."""

    def fails(self, finding: Finding) -> bool:
        return finding.verdict == MISSED or (self.strict and finding.verdict == UNDECIDED)

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if self.fails(finding)]

    @property
    def exit_code(self) -> int:
        return EXIT_LIMIT if self.failed else EXIT_OK


def hold(limit: Limit, found: Estimate, detail: str = "") -> Finding:
    """The verdict on `found`, which is what the limit is about: a change, a difference, or the figure itself.

    An interval of no width, as that of a count, is always decided.
    """
    inside = found.high <= limit.bound if limit.upper else found.low >= limit.bound
    outside = found.low > limit.bound if limit.upper else found.high < limit.bound
    verdict = PASSED if inside else MISSED if outside else UNDECIDED
    return Finding(limit=limit.text, verdict=verdict, found=shown(limit, found), detail=detail, change=found)


def shown(limit: Limit, found: Estimate) -> str:
    """`+10.2% (95% interval +8.1% to +12.4%)`."""

    def text(value: float) -> str:
        if limit.kind == RELATIVE:
            return f"{100 * value:+.2f}%"
        plain = figures.named(limit.path, value) if limit.kind == ABSOLUTE else f"{value:+.4g}"
        return figures.named(unit_of(limit.path), value) if plain == f"{value:.4g}" else plain

    if found.low == found.high:
        return text(found.value)
    return f"{text(found.value)} (95% interval {text(found.low)} to {text(found.high)})"


def unit_of(path: str) -> str:
    """The part of a path that names its unit: `latency_ms` of `latency_ms.p50`."""
    parts = path.split(".")
    return parts[0] if parts[-1] in ("p50", "p90", "mean", "stdev") else parts[-1]


def summary(judgement: Judgement) -> str:
    """`2 of 3 limits missed`, the last line of a gate."""
    findings: Sequence[Finding] = judgement.findings
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in (MISSED, UNDECIDED, PASSED)}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{judgement.title}: {told} of {len(findings)} limit{'s' if len(findings) != 1 else ''}"
