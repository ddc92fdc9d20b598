"""What every transform keeps to: the order of phases, what it may know, and the receipt it must hand back.

A transform rewrites a live `nn.Module` in place and says exactly what it did. It also runs on meta tensors, so that
the plan can count and size its effect before any weight is loaded, and `replay` rebuilds the same structure from the
receipt alone, so that an artifact loads without repeating a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from optforge.errors import Problem
from optforge.spec import Hardware, Json

if TYPE_CHECKING:
    from torch import nn

    from optforge.backends.base import Backend
    from optforge.calibrate.samples import Samples
    from optforge.models.base import Tell


Search = Mapping[str, Mapping[str, Sequence[Json]] | None]
"""What `optforge tune` tries: pattern of option names (`*`, `int4_weight`) -> field -> values beside the option file's own; None: these
options are not tried.

A transform declares it as the class variable `search`; one without it takes no part, and `{}` offers its options as they are.
"""


class Phase(IntEnum):
    """The order in which steps run, whatever order they are written in."""

    PRECISION = 10
    FUSE = 20
    PRUNE = 30
    QUANTIZE = 40
    MEMORY = 50
    EXPORT = 60
    SHARD = 70
    COMPILE = 80


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """How a recipe compiles."""

    call: Callable[[Sequence[nn.Module]], None]
    """Compiles modules of one structure in place; they share programs."""
    options: Mapping[str, Json]
    """What decides the result, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a step may know about the run it is part of."""

    step: str
    """The step's name in the recipe; errors and receipts carry it."""
    target: Hardware
    """The hardware that the run is for."""
    device: Hardware
    """The hardware that the run executes on; the target itself when present, else a stand-in."""
    backend: Backend | None = None
    """The adapter of the device; None while planning, when nothing may touch a device."""
    workload: str = "forward"
    uses_cache: bool = False
    """The workload keeps a KV cache between calls."""
    seed: int = 0
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """Arguments of one small forward pass, on the model's device (meta while planning)."""
    samples: Samples | None = None
    """What a step may calibrate on; a plan asks it for nothing but `reason_against`. None where there is no data (an artifact is
    loaded)."""
    reference: nn.Module | None = None
    """The model as loaded, where it is at hand; shares what no step has replaced, and must not be changed."""
    tell: Tell | None = None
    """Is told the title of what takes long within a step, and the fraction of it that is done."""
    later: tuple[str, ...] = ()
    """The kinds of the steps after this one, in the order in which they run."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """The recipe's limits on quality."""
    once: Callable[[nn.Module], Callable[[], Any]] | None = None
    """Makes the workload ready for a module with the interface of this model, and returns one pass of it as a call; None while
    planning, and where nothing is timed."""
    compile: Compiler | None = None
    """Compiles single layers as the recipe's compile step would; None where it has none."""

    @property
    def planning(self) -> bool:
        return self.backend is None

    def without_data(self, instead: str | None = None) -> Iterator[Problem]:
        """The problem of a step that runs samples, where the run's data is nothing to calibrate on.

        Args:
            instead: what to type for a step that needs none.
        """
        reason = self.samples.reason_against if self.samples is not None else None
        if reason is not None:
            fix = "data=wikipedia, or calibration.factory=package.module:callable" + (f", or {instead}" if instead else "")
            yield Problem(where=f"step {self.step}", what=f"needs data to calibrate on, and {reason}", fix=fix)


@dataclass(frozen=True, kw_only=True)
class Touched:
    """One module that a step changed."""

    name: str
    what: str
    """What it became, in a few words: `int8_dynamic`, `packed from q_proj, k_proj, v_proj`."""
    bytes_before: int = 0
    bytes_after: int = 0
    dtypes: dict[str, str] = field(default_factory=dict)
    """Parameter name -> dtype after the step (`weight: int8`); the engine reads them again at the end."""


@dataclass(kw_only=True)
class Receipt:
    """What a step did. Zero modules touched is an error that the engine raises.

    `renamed` maps a new module path to the original paths it stands for. `decisions` is JSON and holds all that
    `replay` needs. `kernels` counts the operators that the step put in.
    """

    touched: list[Touched] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    renamed: dict[str, list[str]] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    total_bytes: int = 0
    """Bytes of all the model's parameters before the step; `bytes_before / total_bytes` is the share it covers."""
    decisions: dict[str, Json] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """What a target without the needed units turns a step into (`requested` and `runs_as` are option names)."""

    requested: str
    runs_as: str
    transform: Transform
    reason: str


@runtime_checkable
class Transform(Protocol):
    """One kind of optimization: a frozen, keyword-only, flat dataclass that holds no run state."""

    kind: ClassVar[str]
    phase: ClassVar[Phase]

    def check(self, ctx: Context) -> Iterator[Problem]:
        """What is wrong with this step here, each with its fix. Needs no device and no weights."""
        ...

    def lower(self, target: Hardware) -> Lowered | None:
        """The step that runs instead where `target` lacks the units for this one; None when it runs as written."""
        ...

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Rewrites `model` in place and says what it did; on meta tensors it does the same to the structure."""
        ...

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """Gives a fresh (meta) `model` the structure that `receipt` records, without values."""
        ...
