"""The optimizer of a training, as a step of the recipe: it changes no weight, but memory and time of every update.

AdamW keeps two numbers for each weight. In fp32 they are twice the model's own bytes; in 8 bits, with one scale for each block of
256, half a bf16 model's (Dettmers and others, 8-bit optimizers via block-wise quantization, 2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import PlanError, Problem
from optforge.measure.size import nbytes, weight_bytes
from optforge.select import original_name
from optforge.spec import Hardware
from optforge.training import optimizers
from optforge.training.settings import settings_of, settle_
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Touched

if TYPE_CHECKING:
    from torch import nn


class Name(Enum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    sgd = "sgd"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Which optimizer moves the weights."""

    kind: ClassVar[str] = "optimizer"
    phase: ClassVar[Phase] = Phase.MEMORY

    name: Name = Name.adamw
    """adamw: PyTorch's, one kernel for all weights; adamw_8bit: torchao's, states in 8 bits; sgd: without momentum, no state."""

    offload: bool = False
    """States and fp32 weights lie in the host's memory and are updated there: the device holds weights and gradients alone."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """It needs a training; states in 8 bits need torchao, and offloading needs a host apart from the device."""
        where = f"step {ctx.step}"
        if ctx.workload != "train":
            what = f"an optimizer belongs to a training, and the workload is {ctx.workload}"
            yield Problem(where=where, what=what, fix=f"type workload=train, or drop it with '~steps.{ctx.step}'")
        if self.offload and ctx.target.backend == "cpu":
            what = "offload moves states to the host's memory, and the target is the host"
            yield Problem(where=where, what=what, fix=f"steps.{ctx.step}.offload=false")
        if self.name is Name.adamw_8bit:
            try:
                optimizers.eight_bit()
            except PlanError as error:
                yield from error.problems

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Leaves word on the model for whoever trains it.

        Raises:
            PlanError: offloaded states beside stochastic rounding, which keeps nothing in fp32 to offload.
        """
        receipt = Receipt(total_bytes=weight_bytes(model), decisions={"name": self.name.value, "offload": self.offload})
        known = settings_of(model)
        if self.offload and known.stochastic:
            what = "offload keeps fp32 weights on the host, and stochastic rounding keeps none"
            fix = f"use precision/bf16_masters, or type steps.{ctx.step}.offload=false"
            raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=fix))
        if (known.optimizer, known.offload) == (self.name.value, self.offload):
            receipt.notes.append(f"{self.name.value} moves the weights already")
            return receipt
        settle_(model, optimizer=self.name.value, offload=self.offload)
        settings, seen = settings_of(model), set[int]()
        for path, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
            seen.update(id(parameter) for parameter in own)
            if own:
                size = sum(nbytes(parameter) for parameter in own)
                states = sum(optimizers.state_bytes(parameter, self.name.value, settings) for parameter in own)
                what = f"{self.name.value}, states on the host" if self.offload else f"{self.name.value}, {states:,} bytes of states"
                receipt.touched.append(Touched(name=original_name(path), what=what, bytes_before=size, bytes_after=size))
        receipt.bytes_before = receipt.bytes_after = sum(touched.bytes_before for touched in receipt.touched)
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """Leaves the same word."""
        settle_(model, optimizer=receipt.decisions["name"], offload=receipt.decisions["offload"])
