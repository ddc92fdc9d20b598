"""What every workload keeps to: inputs prepared once on the device, then one call that does the work once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from optforge.data.base import DataSource
from optforge.errors import Problem
from optforge.models.base import Loaded

if TYPE_CHECKING:
    import torch
    from torch import nn


@runtime_checkable
class Work(Protocol):
    """Prepared inputs on the device, ready to run any module of the same interface."""

    unit: str
    """`tokens` or `items`: what `units` counts."""
    units: int
    """Tokens or items that one call processes (decode: new tokens over the whole batch)."""
    calls: int
    """Forward passes in one call (decode: one per new token), for per-step figures."""

    def run(self, module: nn.Module) -> Any:
        """Does the work once, without gradients. Never synchronizes."""
        ...

    def flops(self, module: nn.Module) -> int | None:
        """Floating-point operations of one call on the unmodified module (may be on meta), products counted twice."""
        ...

    def bytes(self, module: nn.Module) -> int | None:
        """Fewest bytes that one call must read and write: weights as stored, KV cache, once per forward pass."""
        ...


@runtime_checkable
class Workload(Protocol):
    """A frozen dataclass of a workload's YAML keys."""

    kind: ClassVar[str]
    families: ClassVar[tuple[str, ...]]
    """Model families it runs."""
    uses_cache: ClassVar[bool]

    def check(self, loaded: Loaded) -> Iterator[Problem]:
        """What is wrong with this workload for this model (a skeleton will do)."""
        ...

    def example(self, loaded: Loaded, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of one small forward pass on `device` (meta while planning), for transforms that look at data flow."""
        ...

    def prepare(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int = 0) -> Work:
        """Inputs for the timed calls, on the device."""
        ...
