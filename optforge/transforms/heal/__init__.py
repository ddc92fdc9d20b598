"""A short fine-tune after pruning: the weights that are left learn to make up for those that went.

On calibration samples, with the model as loaded as the teacher (or the next token as the target), by AdamW on fp32 copies.
Zeros stay zeros. The loss on samples that were not trained on is told before and after, whichever way it went.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import Problem
from optforge.spec import Hardware
from optforge.transforms.base import Context, Lowered, Phase, Receipt

if TYPE_CHECKING:
    from torch import nn


class Method(Enum):
    lora = "lora"
    full = "full"


class Loss(Enum):
    distill = "distill"
    next_token = "next_token"


class Kernel(Enum):
    auto = "auto"
    dense = "dense"
    sparse = "sparse"


@dataclass(frozen=True, kw_only=True)
class Heal:
    """What is trained, on what, and for how long."""

    kind: ClassVar[str] = "heal"
    phase: ClassVar[Phase] = Phase.PRUNE

    method: Method
    """lora: a low-rank change of each linear, folded in at the end; full: every weight."""
    loss: Loss = Loss.distill
    """distill: the outputs of the model as loaded (KL of logits); next_token: cross-entropy of a language model's text."""
    steps: int = 100
    """Updates of the weights."""
    learning_rate: float = 1e-4
    """The highest one: it rises over the first tenth of the steps and falls to zero by a cosine."""
    batch_size: int = 4
    """Samples of one update."""
    rank: int = 16
    """lora: rank of the change of each weight."""
    samples: int = 128
    """Calibration samples that are trained on, in turn."""
    held_out: int = 8
    """Further samples, on which the loss is told before and after."""
    sample_tokens: int = 512
    """Tokens of each, for language models."""
    targets: list[str] = field(default_factory=lambda: ["Linear"])
    """lora: selectors of the linears that are changed."""
    ignore: list[str] = field(default_factory=list)
    """Selectors of modules that are left as they are."""
    ignore_extra: list[str] = field(default_factory=list)
    """Added to `ignore`, where replacing its list would lose the recipe's entries."""
    kernel: Kernel = Kernel.auto
    """Of layers that a step before pruned 2:4, as for prune: auto, dense or sparse."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """Numbers that no training can run with."""
        where, typed = f"step {ctx.step}", f"steps.{ctx.step}"
        for name in ("steps", "batch_size", "rank", "samples", "held_out", "sample_tokens"):
            if getattr(self, name) < 1:
                yield Problem(where=where, what=f"{name} must be at least 1", fix=f"write {typed}.{name}=8")
        if self.learning_rate <= 0:
            yield Problem(
                where=where, what=f"learning_rate {self.learning_rate:g} is not positive", fix=f"write {typed}.learning_rate=1e-4"
            )
        yield from ctx.without_data()

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Trains in place, on new parameters.

        Raises:
            SelectorError: an entry matches nothing.
            PlanError: the model was healed already; nothing in it can be trained; or there is nothing to train on.
            DataError: there are too few samples.
            StepError: the loss is no number.
        """
        from optforge.transforms.heal import train

        return train.apply(model, self, ctx)

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """Shapes do not change; a sparse kernel's storage is rebuilt."""
        from optforge.transforms.heal import train

        train.replay(model, receipt.decisions)
