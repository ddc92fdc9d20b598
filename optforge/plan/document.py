"""What plan.json holds: one `Study` for each recipe and target that was asked for, as plain data.

Nothing in it was measured in this run. None is written as null and means unknown; a figure is never guessed. Nothing here
imports torch, so that views and the schema need none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optforge.errors import Problem
from optforge.plan.kernels import KernelReport
from optforge.report.codec import plain
from optforge.spec import Downgrade, Json

SCHEMA_VERSION = 1
PLANNED, REFUSED = "planned", "refused"
STATUSES = (PLANNED, REFUSED)
GAIN, NO_GAIN, REGRESSION, DOES_NOT_FIT, UNKNOWN = "gain", "no_gain", "regression", "does_not_fit", "unknown"
OUTCOMES = (GAIN, NO_GAIN, REGRESSION, DOES_NOT_FIT, UNKNOWN)
LABEL = "predicted"
LOOKED_UP = "an embedding is looked up and not multiplied"
"""The reason of weights that quantization misses at no cost in time."""


@dataclass(kw_only=True)
class Refusal:
    """One problem for which there is no plan."""

    where: str
    what: str
    fix: str = ""

    @classmethod
    def of(cls, problem: Problem) -> Refusal:
        return cls(where=problem.where, what=problem.what, fix=problem.fix)

    def __str__(self) -> str:
        return str(Problem(where=self.where, what=self.what, fix=self.fix))


@dataclass(kw_only=True)
class Missed:
    """Weights of one kind that a quantize step neither changed nor was told to ignore."""

    pattern: str
    """Dotted name; of several, with each layer's number as `*`."""
    count: int
    shape: list[int]
    dtype: str
    bytes: int
    """Of all `count` parameters."""
    share: float
    """Of the bytes of all weights before the step."""
    reason: str


@dataclass(kw_only=True)
class Skipped:
    """Modules that a step selected and left, for one reason."""

    reason: str
    names: list[str]


@dataclass(kw_only=True)
class StepPlan:
    """One step as it will run."""

    name: str
    use: str
    """The option that runs on the target."""
    requested: str
    """The option as written."""
    phase: str
    moved: str | None = None
    """Why it runs elsewhere than it was written."""
    touched: int = 0
    """Modules that it changes."""
    became: dict[str, int] = field(default_factory=dict)
    """What modules become -> how many."""
    skipped: list[Skipped] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Modules that the recipe says to leave."""
    unmatched: list[str] = field(default_factory=list)
    """Selectors that matched nothing."""
    share: float | None = None
    """Of the bytes of all weights: those of the modules that it changes."""
    bytes_before: int = 0
    bytes_after: int = 0
    weight_bytes: int = 0
    """Of all weights after the step."""
    missed: list[Missed] = field(default_factory=list)
    """Largest first; empty for steps that do not quantize."""
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class FitRow:
    """Bytes on each device at the peak of one call, for one row of the plan."""

    name: str
    devices: int = 1
    parts: dict[str, float] = field(default_factory=dict)
    """weights, kv_cache, activations, gradients, optimizer, workspace, runtime: bytes; a part that does not exist is left out."""
    total_bytes: float | None = None
    fits: bool | None = None
    """None where the memory of the device, or a part, is unknown."""
    spare_bytes: float | None = None
    """Memory of one device less `total_bytes`; below zero it is what is missing."""
    at: str = ""
    """Where in the pass the peak is, or why there are no bytes."""


@dataclass(kw_only=True)
class Change:
    """A change of the run after which it fits."""

    override: str
    """What to add to the command; not yet quoted for a shell."""
    what: str
    total_bytes: float | None = None


@dataclass(kw_only=True)
class Fit:
    """Whether the run fits the memory of each device."""

    label: str = LABEL
    memory_bytes: int | None = None
    """Of one device; None is unknown."""
    devices: int = 1
    rows: list[FitRow] = field(default_factory=list)
    """The model as loaded, then after each step; the last is the run's."""
    fits: bool | None = None
    reason: str | None = None
    """Why it is unknown whether it fits."""
    changes: list[Change] = field(default_factory=list)
    """Where it does not fit, the smallest first."""
    degrees: list[FitRow] = field(default_factory=list)
    """The last row over 1, 2, 4 and 8 devices, by tensor parallelism and by FSDP."""
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class SpeedRow:
    """The time of one call, predicted. `low` and `high` are the ends of the error band."""

    name: str
    mode: str
    """`eager`, `compiled`, or `captured` (replayed from a captured graph)."""
    devices: int = 1
    latency_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    ideal_ms: float | None = None
    """At the published peaks: no implementation is faster."""
    partial: bool = False
    """`latency_ms` is a lower bound, since the work of some operators is unknown."""
    tokens_per_s: float | None = None
    items_per_s: float | None = None
    """Rates are of all devices together."""
    mfu: float | None = None
    mbu: float | None = None
    bound: str | None = None
    """What most of the time goes to: `memory`, `arithmetic`, `launch`, `links`."""
    kernels: int | None = None
    flops: float | None = None
    bytes: float | None = None
    vs_previous: float | None = None
    """Times faster than the row above."""
    vs_reference: float | None = None
    """Times faster than the compiled baseline (the eager one where the recipe does not compile)."""
    outcome: str | None = None
    """Of `vs_reference`: `gain`, `no_gain` or `regression`; None for the baselines and where it is unknown."""
    reason: str | None = None
    """Why there is no time."""


@dataclass(kw_only=True)
class Operator:
    """One of the costliest kernels of the whole recipe, equal ones together."""

    name: str
    module: str
    count: int
    share: float | None
    """Of the predicted time."""
    latency_ms: float | None
    bound: str | None
    flops: float
    bytes: float


@dataclass(kw_only=True)
class UnknownOperator:
    """An operator whose work nobody can count; the rest of the plan stands without it."""

    name: str
    module: str
    count: int
    why: str


@dataclass(kw_only=True)
class Source:
    """Where the efficiency of a prediction comes from."""

    name: str
    device: str
    exact: bool
    """Measured on the target itself; otherwise borrowed from the nearest device of its backend."""
    source: str


@dataclass(kw_only=True)
class Band:
    """How far predictions were from measurements, as fractions of the measured time."""

    median_error: float
    p90_error: float
    points: int
    source: str


@dataclass(kw_only=True)
class Speed:
    """The predicted time of the baselines and of each prefix of the recipe."""

    label: str = LABEL
    basis: str = ""
    known: bool = False
    reason: str | None = None
    rows: list[SpeedRow] = field(default_factory=list)
    reference: str | None = None
    """The row that `vs_reference` compares with."""
    passes: int = 1
    """Passes of the model in one call (decode: one for each new token)."""
    top: list[Operator] = field(default_factory=list)
    calibration: Source | None = None
    band: Band | None = None
    unknown: list[UnknownOperator] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Kernels:
    """The kernels that the recipe launches on the target, as far as they can be compiled without it."""

    rows: list[KernelReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not checked, and why."""


@dataclass(kw_only=True)
class Xla:
    """The program that XLA compiled ahead of time for the target, in XLA's own figures."""

    label: str = "predicted by XLA"
    known: bool = False
    reason: str | None = None
    figures: dict[str, Json] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Recorded:
    """A run that was measured before: what it says of quality and speed, and where it is written."""

    recipe: str
    scheme: str
    """The quantize option that ran, or the step that changed the numbers."""
    model: str
    device: str
    workload: str
    date: str
    source: str
    same_model: bool = False
    perplexity_increase: float | None = None
    top1_drop: float | None = None
    agreement: float | None = None
    kl: float | None = None
    speedup: float | None = None
    """Measured, against the compiled baseline."""


@dataclass(kw_only=True)
class Verdict:
    """What to expect, in words that a reader can act on."""

    outcome: str = UNKNOWN
    """One of OUTCOMES; it is about the recipe's goal."""
    sentence: str = ""
    bound: str = ""
    """What limits the gain, and to how much."""
    gain: float | None = None
    """Times better in the recipe's goal; `low` and `high` are the ends of the error band."""
    gain_low: float | None = None
    gain_high: float | None = None
    unit: str = "latency"
    """What `gain` is of: latency, memory or size."""
    at_equal_efficiency: float | None = None
    """The gain if both reach the same share of the peaks."""
    at_most: float | None = None
    """The gain if the recipe reached the peaks themselves."""
    measured: str = ""
    """What the same recipe and workload gained over the compiled baseline on devices of this family when they were measured."""
    fit: str = ""
    downgrade: str = ""
    quality: str = ""
    recorded: list[Recorded] = field(default_factory=list)
    command: str = ""
    """What to run next."""
    why: str = ""
    """Why the command differs from what was asked for."""
    instead: str = ""
    """A command that is predicted to be faster, where the target turned a step into something else."""
    instead_quality: str = ""
    """The risk of that, in words from recorded runs."""


@dataclass(kw_only=True)
class Study:
    """The plan of one recipe on one target."""

    status: str = PLANNED
    recipe: dict[str, Json] = field(default_factory=dict)
    target: dict[str, Json] = field(default_factory=dict)
    device: dict[str, Json] = field(default_factory=dict)
    model: dict[str, Json] = field(default_factory=dict)
    workload: dict[str, Json] = field(default_factory=dict)
    weight_bytes: int | None = None
    """Of the model as loaded."""
    steps: list[StepPlan] = field(default_factory=list)
    downgrades: list[Downgrade] = field(default_factory=list)
    fit: Fit | None = None
    speed: Speed | None = None
    kernels: Kernels | None = None
    """None where they were not asked for."""
    xla: Xla | None = None
    """None where the target is no TPU, or it was not asked for."""
    verdict: Verdict = field(default_factory=Verdict)
    refused: list[Refusal] = field(default_factory=list)
    """Why there is no plan; everything at once."""
    warnings: list[str] = field(default_factory=list)
    command: str = ""
    """What was asked for, for this recipe and target alone."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that each part of the plan took to make."""

    def describe(self) -> dict[str, Json]:
        """The plan as strict JSON values; a figure that is not finite is null."""
        described: dict[str, Json] = plain(self, [])
        return described


@dataclass(kw_only=True)
class PlanFile:
    """plan.json: every plan of one command, in the order in which they were asked for."""

    schema_version: int = SCHEMA_VERSION
    command: str = ""
    made: str = ""
    """Date and time, ISO 8601."""
    environment: dict[str, Json] = field(default_factory=dict)
    plans: list[Study] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = plain(self, [])
        return described
