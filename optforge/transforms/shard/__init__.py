"""Splits a model over the devices of one mesh: tensor parallelism first, then FSDP, then copies that share gradients.

The step decides where every parameter goes and refuses what does not divide. While planning it changes nothing in the tree:
the decisions are for the plan (bytes, collectives and time per device). In a run each process keeps its own part (`spread`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from optforge.distributed import world
from optforge.errors import PlanError, Problem
from optforge.spec import Hardware, Json
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Touched

if TYPE_CHECKING:
    from torch import nn

    from optforge.transforms.shard.layout import Split


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Degrees of one device mesh; their product is the number of devices."""

    kind: ClassVar[str] = "shard"
    phase: ClassVar[Phase] = Phase.SHARD

    tensor: int = 1
    """Devices that share each product of a decoder layer: q/k/v/gate/up by columns, o/down by rows, embedding and head by
    vocabulary. Two all-reduces of the activations per layer."""
    fsdp: int = 1
    """Devices that each keep a slice of every parameter, gradient and optimizer state, and gather a layer when it runs."""
    data: int = 1
    """Copies of all that; training averages their gradients. Each copy, and each device of fsdp, has a batch of its own."""

    @property
    def devices(self) -> int:
        return self.tensor * self.fsdp * self.data

    def check(self, ctx: Context) -> Iterator[Problem]:
        """Degrees below 1, and more devices than the target has."""
        where = f"step {ctx.step}"
        degrees = asdict(self)
        for name, degree in degrees.items():
            if degree < 1:
                yield Problem(where=where, what=f"{name} must be 1 or more, is {degree}", fix=f"steps.{ctx.step}.{name}=1")
        have = ctx.target.devices
        if have is not None and min(degrees.values()) > 0 and self.devices > have:
            what = f"tensor {self.tensor} x fsdp {self.fsdp} x data {self.data} needs {self.devices} devices, {ctx.target.name} has {have}"
            yield Problem(where=where, what=what, fix=f"lower a degree, or type hardware.devices={self.devices}")

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Decides for every parameter; in a run, leaves this process its part of each.

        Raises:
            PlanError: heads, vocabulary, widths or quantization groups that the tensor degree does not divide, all of them; or
                the processes are not as many as the mesh has.
        """
        from optforge.measure.size import weight_bytes
        from optforge.transforms.shard import layout, misfits

        found = list(layout.splits(model))
        problems = misfits.problems(model, found, self.tensor, ctx.step)
        if problems:
            raise PlanError(*problems)
        receipt = Receipt(total_bytes=weight_bytes(model))
        groups, shared = layout.units(model)
        receipt.decisions = {"mesh": asdict(self), "parameters": self._parameters(found), "units": groups if self.fsdp > 1 else {}}
        receipt.notes += shared if self.fsdp > 1 else []
        if self.devices > 1:
            self._tell(found, receipt)
        # a run joins the others before any step, and is refused where there are none; alone, the step decides and divides nothing
        if self.devices > 1 and not ctx.planning and world.current() is not None:
            from optforge.transforms.shard.spread import spread_

            spread_(model, found, self, ctx)
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """Nothing to rebuild: on one device the tree is as it was."""

    def _parameters(self, found: list[Split]) -> dict[str, Json]:
        """Name -> how it is split: `as` (column, row, vocabulary, replicated) and the dimension of each degree, or null."""
        from optforge.transforms.shard.layout import dimension

        decided: dict[str, Json] = {}
        for split in found:
            for key, parameter in split.module._parameters.items():
                if parameter is not None:
                    name = f"{split.name}.{key}" if split.name else key
                    at = dimension(split, key) if self.tensor > 1 else None
                    rows = 0 if self.fsdp > 1 and parameter.dim() else None
                    decided[name] = {"as": split.role, "tensor": at, "fsdp": rows}
        return decided

    def _tell(self, found: list[Split], receipt: Receipt) -> None:
        """Touched modules with their bytes, each tensor once, and what stays whole although the tensor degree is above 1."""
        from optforge.measure.size import nbytes
        from optforge.transforms.shard.layout import REPLICATED, is_linear

        seen: set[int] = set()
        for split in found:
            own = [parameter for parameter in split.module._parameters.values() if parameter is not None]
            whole = split.role == REPLICATED and self.tensor > 1
            if whole and (is_linear(split.module) or any(parameter.dim() > 2 for parameter in own)):
                receipt.skipped[split.name] = f"its name does not tell how it splits: each of {self.tensor} devices holds all of it"
            if whole and self.devices == self.tensor:
                continue
            size = sum(nbytes(parameter) for parameter in own if id(parameter) not in seen)
            seen.update(id(parameter) for parameter in own)
            receipt.touched.append(Touched(name=split.name, what=self._what(split.role), bytes_before=size, bytes_after=size))
            receipt.bytes_before += size
            receipt.bytes_after += size

    def _what(self, role: str) -> str:
        """`column / 4, fsdp / 2`."""
        parts = [f"{role} / {self.tensor}" if role != "replicated" else "whole"] if self.tensor > 1 else []
        parts += [f"fsdp / {self.fsdp}"] if self.fsdp > 1 else []
        return ", ".join([*parts, *([f"{self.data} copies"] if self.data > 1 else [])])
