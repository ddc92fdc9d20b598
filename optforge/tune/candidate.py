"""One recipe that is tried, and what became of it, as plain data that tune.json holds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from optforge.spec import Json, Ratio

WAITING, REFUSED, PRUNED, MEASURED, MISSED, FAILED = "waiting", "refused", "pruned", "measured", "missed", "failed"
HAND_WRITTEN, SEARCHED, AS_LOADED = "recipe", "search", "as_loaded"


@dataclass(kw_only=True)
class Refusal:
    """A problem of a plan, as plain data."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(kw_only=True)
class Foreseen:
    """What the plan says before anything is measured; None is unknown. Times are predicted, bytes of weights are counted."""

    refused: list[Refusal] = field(default_factory=list)
    latency_ms: float | None = None
    low_ms: float | None = None
    """The fast end of the error band; None where no calibration was measured for the device."""
    high_ms: float | None = None
    fits: bool | None = None
    total_bytes: float | None = None
    memory_bytes: int | None = None
    weight_bytes: int | None = None
    seconds: float = 0.0


@dataclass(kw_only=True)
class Figures:
    """What one job measured of a candidate."""

    ratio: Ratio | None = None
    """How many times faster than the model as loaded; None where that does not fit the device."""
    latency_ms: float | None = None
    tokens_per_s: float | None = None
    items_per_s: float | None = None
    peak_memory_bytes: int | None = None
    weight_bytes: int | None = None
    quality: dict[str, float] = field(default_factory=dict)
    """Fields of `spec.QualityResult` that have a value; empty where quality was not measured."""
    quality_reason: str | None = None


@dataclass(kw_only=True)
class Result:
    """One measurement of a candidate: the rung of successive halving and the job."""

    rung: int
    job: int
    figures: Figures


@dataclass(kw_only=True)
class Candidate:
    """A recipe that is tried."""

    name: str
    origin: str
    """recipe (somebody wrote it), search, or as_loaded (no steps)."""
    steps: dict[str, dict[str, Json]]
    limits: dict[str, float] = field(default_factory=dict)
    source: str = ""
    """The file it came from, or from whose limits it took its own."""
    params: dict[str, str] | None = None
    trial: int | None = None
    """Its number in Optuna's study."""
    state: str = WAITING
    why: str = ""
    """One line: why it was refused, pruned, or failed, or which limits it missed."""
    foreseen: Foreseen = field(default_factory=Foreseen)
    results: list[Result] = field(default_factory=list)
    tried: int = -1
    """The highest rung that was started; above that of the last result where the job did not end in time."""
    final: Ratio | None = None
    """How many times faster than the model as loaded in the final round."""

    @property
    def key(self) -> str:
        """The same for the same steps and limits, whatever their name."""
        return hashlib.sha256(json.dumps([self.steps, self.limits], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def figures(self) -> Figures | None:
        """Of the longest measurement, which carries the quality of the first, since only that one measures it."""
        return self.results[-1].figures if self.results else None

    @property
    def ratio(self) -> Ratio | None:
        """Of the final round, else of the longest measurement."""
        return self.final or (self.figures.ratio if self.figures else None)
