"""Rotates what flows through a decoder, so that rounding loses less and the unrounded model computes the same.

A few channels of the residual stream are far larger than the others, and a scale that covers them is coarse for all. An orthogonal
matrix spreads them evenly. RMS norms do not notice it once their weights are folded into the layers behind them, so the embedding and
whatever writes to the stream are multiplied by the matrix, whatever reads it by its transpose, and nothing is left to do as the model
runs. QuaRot (Ashkboos and others, 2024, section 3) and SpinQuant (Liu and others, 2024, section 2) without training: their rotations
R1 and R2; those that need products as the model runs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import Problem
from optforge.spec import Hardware
from optforge.transforms.base import Context, Lowered, Phase, Receipt

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Rotate:
    """Which rotations are folded into the weights."""

    kind: ClassVar[str] = "rotate"
    phase: ClassVar[Phase] = Phase.FUSE

    heads: bool = True
    """Values are rotated within each head as well, against the output projection of the attention."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """Rotations are for rounding: a training is refused, since they freeze what they fold into."""
        if ctx.workload == "train":
            what = "rotations make weights easier to round, and fold norms into weights that training would pull apart"
            yield Problem(where=f"step {ctx.step}", what=what, fix=f"drop it with '~steps.{ctx.step}', or type workload=prefill")

    def lower(self, target: Hardware) -> Lowered | None:
        """The rotated model is an ordinary one: it runs wherever the model does."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Rotates in place; a head that is tied to the embedding gets a weight of its own, since the final norm is folded into it.

        Raises:
            PlanError: the model is rotated already, or something reads or writes its stream that a rotation cannot be folded into.
            StepError: the example's output changed by more than rounding explains.
        """
        from optforge.transforms.rotate.rewrite import rewrite

        return rewrite(model, ctx, heads=self.heads)

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """Heads of their own where `apply` made them; everything else is values."""
        from optforge.transforms.rotate.rewrite import rebuild

        rebuild(model, receipt.decisions)
