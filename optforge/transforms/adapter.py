"""Trains a small change of each linear while its own weight stays as it is, quantized or not.

A linear's weight W [N, K] is frozen; beside it lie two factors whose product, of rank r, is added to what it computes:
y = W x + (alpha / r) up (down x) (Hu and others, LoRA, 2021, section 4.1). Frozen weights have no gradients and no optimizer states,
and may be stored in a few bits (Dettmers and others, QLoRA, 2023, section 3; `kernels.linears` says what their gradient is).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.errors import PlanError, Problem
from optforge.kernels.linears import QuantizedLinear
from optforge.measure.size import nbytes, weight_bytes
from optforge.select import original_name, select
from optforge.spec import Hardware, Json
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Touched
from optforge.transforms.mixed import Mixed, mix_

DOWN, UP = "lora_down", "lora_up"
"""Parameters of a changed linear, fp32: [rank, K] and [N, rank]."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Which linears get a change, and of which rank."""

    kind: ClassVar[str] = "adapter"
    phase: ClassVar[Phase] = Phase.MEMORY

    rank: int = 16
    """Of each change; a linear narrower than that gets the rank it can have."""
    alpha: float = 32.0
    """The change is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["Linear"])
    """Selectors of linears."""
    ignore: list[str] = field(default_factory=list)
    """Selectors of linears that are left as they are, and frozen too."""
    ignore_extra: list[str] = field(default_factory=list)
    """Added to ignore, where replacing its list would lose the recipe's entries."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """It needs a training, and a positive rank."""
        where = f"step {ctx.step}"
        if ctx.workload != "train":
            what = f"adapters are trained, and the workload is {ctx.workload}"
            yield Problem(where=where, what=what, fix=f"type workload=train, or drop it with '~steps.{ctx.step}'")
        if self.rank < 1:
            yield Problem(where=where, what=f"rank must be at least 1, is {self.rank}", fix=f"steps.{ctx.step}.rank=16")

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Adds the factors to each chosen linear and freezes everything else, in place.

        Raises:
            PlanError: there is no linear to change.
            SelectorError: an entry matches nothing.
        """
        ignore = [*self.ignore, *self.ignore_extra]
        chosen = select(model, self.targets, ignore, step=ctx.step, eligible=lambda _, module: isinstance(module, nn.Linear))
        receipt = Receipt(total_bytes=weight_bytes(model), ignored=chosen.ignored)
        if not chosen.chosen:
            raise PlanError(Problem(where=f"step {ctx.step}", what="no linear is chosen", fix=f"widen steps.{ctx.step}.targets"))
        draw = torch.Generator().manual_seed(ctx.seed)
        decisions: dict[str, Json] = {"alpha": self.alpha, "rank": {}}
        for name, module in chosen.chosen.items():
            if isinstance(module, _Lora):
                receipt.skipped[original_name(name)] = "it has an adapter already"
                continue
            assert isinstance(module, nn.Linear)
            before, rank = _size(module), min(self.rank, module.in_features, module.out_features)
            _attach(module, rank, self.alpha, draw)
            decisions["rank"][original_name(name)] = rank
            what = f"lora, rank {rank}, over {'a quantized' if isinstance(module, QuantizedLinear) else 'the frozen'} weight"
            dtypes = {DOWN: "float32", UP: "float32"}
            touched = Touched(name=original_name(name), what=what, bytes_before=before, bytes_after=_size(module), dtypes=dtypes)
            receipt.touched.append(touched)
        if receipt.touched:
            _freeze(model)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        receipt.notes.append(f"{trained:,} weights are trained, in fp32; all others are frozen")
        receipt.bytes_before = sum(touched.bytes_before for touched in receipt.touched)
        receipt.bytes_after = sum(touched.bytes_after for touched in receipt.touched)
        receipt.decisions = decisions
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """The same linears get factors of the same rank, and everything else is frozen."""
        draw = torch.Generator().manual_seed(0)
        for name, rank in receipt.decisions["rank"].items():
            module = model.get_submodule(name)
            assert isinstance(module, nn.Linear)
            _attach(module, rank, receipt.decisions["alpha"], draw)
        _freeze(model)


class _Lora(Mixed):
    """Mixed into a linear's class: its change is added to what it computes."""

    _optforge_scale: float

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] to [..., N], in input's dtype."""
        base: Tensor = super().forward(input)  # type: ignore[misc]  # the class it is mixed into has it
        down, up = (self._parameters[name].to(base.dtype) for name in (DOWN, UP))  # type: ignore[attr-defined]  # as above
        return base + F.linear(F.linear(input.to(base.dtype), down), up) * self._optforge_scale


def _attach(module: nn.Linear, rank: int, alpha: float, draw: torch.Generator) -> None:
    """Factors whose product is zero: `down` is random, `up` is not moved yet."""
    device = module.weight.device
    down = torch.randn(rank, module.in_features, generator=draw) / math.sqrt(module.in_features)
    module.register_parameter(DOWN, nn.Parameter(down.to(device)))
    module.register_parameter(UP, nn.Parameter(torch.zeros(module.out_features, rank, device=device)))
    module.__dict__["_optforge_scale"] = alpha / rank
    mix_(module, _Lora)


def _freeze(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameter.requires_grad_(isinstance(module, _Lora) and name in (DOWN, UP))


def _size(module: nn.Module) -> int:
    return sum(nbytes(parameter) for parameter in module.parameters(recurse=False))
