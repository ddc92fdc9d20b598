"""Products of a training in fp8, forward and backward, by torchao's Float8Linear: weights, gradients and states stay as they are.

Each product casts its operands with scales found in the call (Micikevicius and others, FP8 formats for deep learning, 2022): one for a
whole tensor, or one for each row, which costs more time and loses less. Casting is work that a small product does not pay
back, so layers below `smallest` keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from optforge.errors import PlanError, Problem
from optforge.measure.size import nbytes, weight_bytes
from optforge.measure.utilization import has_units
from optforge.select import original_name, select
from optforge.spec import Hardware, Json
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Touched

if TYPE_CHECKING:
    from torch import nn

ALIGNED = 16
"""Widths that fp8 products take are multiples of it."""
BACKENDS = ("nvidia", "cpu")
"""Devices that torchao's training runs on; on a CPU its arithmetic is emulated."""


class Scaling(Enum):
    tensor = "tensor"
    row = "row"
    none = "none"


RECIPES = {Scaling.tensor: "tensorwise", Scaling.row: "rowwise"}
"""torchao's names."""


@dataclass(frozen=True, kw_only=True)
class Fp8Training:
    """Which linears multiply in fp8, and how their operands are scaled."""

    kind: ClassVar[str] = "fp8_training"
    phase: ClassVar[Phase] = Phase.QUANTIZE

    scaling: Scaling = Scaling.tensor
    """tensor: one scale for each operand; row: one for each row of it; none: products stay as they are."""
    smallest: int = 1 << 20
    """Fewest weights of a layer that multiplies in fp8."""
    targets: list[str] = field(default_factory=lambda: ["Linear"])
    """Selectors of linears."""
    ignore: list[str] = field(default_factory=list)
    """Selectors of linears that are left as they are."""
    ignore_extra: list[str] = field(default_factory=list)
    """Added to ignore, where replacing its list would lose the recipe's entries."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """It needs a training, torchao, and a device that torchao trains on."""
        where = f"step {ctx.step}"
        if ctx.workload != "train":
            what = f"fp8_training is about a training's products, and the workload is {ctx.workload}"
            yield Problem(where=where, what=what, fix="use quantize/fp8_dynamic for inference, or type workload=train")
        if self.scaling is Scaling.none:
            return
        if ctx.device.backend not in BACKENDS:
            what = f"torchao trains in fp8 on NVIDIA GPUs, and the device is {ctx.device.name}"
            yield Problem(where=where, what=what, fix=f"drop it with '~steps.{ctx.step}'")
        try:
            _torchao()
        except ImportError as error:
            yield Problem(where=where, what=f"fp8 training needs torchao ({error})", fix="pip install torchao")

    def lower(self, target: Hardware) -> Lowered | None:
        """Where the target has no fp8 matrix units, products stay as they are."""
        if self.scaling is Scaling.none or (has_units(target, "fp8") and target.backend == "nvidia"):
            return None
        lacks = "has no fp8 matrix units" if not has_units(target, "fp8") else "is no NVIDIA GPU, and torchao trains in fp8 on those alone"
        return Lowered(
            requested=self.scaling.name,
            runs_as="none",
            transform=replace(self, scaling=Scaling.none),
            reason=f"{target.name} {lacks}: products stay in the dtype of the weights",
        )

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Puts a Float8Linear in the place of each chosen linear, over the same parameters.

        Raises:
            PlanError: no linear is large enough.
            SelectorError: an entry matches nothing.
        """
        receipt = Receipt(total_bytes=weight_bytes(model))
        emulate = ctx.device.backend != "nvidia"
        decisions: dict[str, Json] = {"scaling": self.scaling.name, "emulate": emulate, "layers": []}
        for name, module in self._chosen(model, ctx, receipt).items():
            decisions["layers"].append(original_name(name))
            size = sum(nbytes(parameter) for parameter in module.parameters(recurse=False))
            what = "products as they are" if self.scaling is Scaling.none else f"fp8 products, a scale for each {self.scaling.name}"
            receipt.touched.append(Touched(name=original_name(name), what=what, bytes_before=size, bytes_after=size))
        if not receipt.touched and not receipt.skipped:
            raise PlanError(Problem(where=f"step {ctx.step}", what="no linear is chosen", fix=f"widen steps.{ctx.step}.targets"))
        if emulate and self.scaling is not Scaling.none and receipt.touched:
            receipt.notes.append(f"{ctx.device.name} has no fp8 products for training: torchao emulates their rounding, which takes longer")
        receipt.decisions = decisions
        receipt.bytes_before = receipt.bytes_after = sum(touched.bytes_before for touched in receipt.touched)
        self.replay(model, receipt)
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """The same layers, over the parameters that lie there."""
        if receipt.decisions["scaling"] == Scaling.none.name or not receipt.decisions["layers"]:
            return
        kind, config = _torchao()
        settings = replace(config.from_recipe_name(RECIPES[Scaling[receipt.decisions["scaling"]]]), emulate=receipt.decisions["emulate"])
        for name in receipt.decisions["layers"]:
            old = model.get_submodule(name)
            new = kind.from_float(old, config=settings)
            for parameter, own in zip(new.parameters(), old.parameters(), strict=True):
                parameter.requires_grad_(own.requires_grad)
            model.set_submodule(name, new.train(old.training))

    def _chosen(self, model: nn.Module, ctx: Context, receipt: Receipt) -> dict[str, nn.Linear]:
        """Plain linears that are large and even enough; the others' reasons are noted."""
        from torch import nn

        ignore = [*self.ignore, *self.ignore_extra]
        found = select(model, self.targets, ignore, step=ctx.step, eligible=lambda _, module: isinstance(module, nn.Linear))
        receipt.ignored = found.ignored
        chosen: dict[str, nn.Linear] = {}
        for name, module in found.chosen.items():
            assert isinstance(module, nn.Linear)
            why = self._unfit(module)
            if why is None:
                chosen[name] = module
            else:
                receipt.skipped[original_name(name)] = why
        return chosen

    def _unfit(self, module: nn.Linear) -> str | None:
        from torch import nn

        if type(module) is not nn.Linear:
            return f"{type(module).__name__} is not a plain nn.Linear"
        if module.in_features % ALIGNED or module.out_features % ALIGNED:
            return f"widths {module.in_features} and {module.out_features} are not both multiples of {ALIGNED}"
        count = module.in_features * module.out_features
        if count < self.smallest:
            return f"{count:,} weights are fewer than smallest ({self.smallest:,}): casting would cost more than it saves"
        return None


def _torchao() -> tuple[Any, Any]:
    """Float8Linear and its config."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear, Float8LinearConfig
