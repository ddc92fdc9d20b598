"""Whether a changed training learns as the unchanged one does: losses over the same data, within what a seed alone changes.

Two trainings of one model that differ in nothing but the order of the data end at different losses. How far apart they are is the
band that a third training is judged by: a limit without it would call noise a fault, or a fault noise. Two seeds are a small
sample of that noise, so the limit has a floor as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optforge.distributed.world import gather
from optforge.measure import limits as limits_
from optforge.spec import LossCurve, QualityResult, TrainingResult
from optforge.training.trainer import Trainer

if TYPE_CHECKING:
    from torch import nn

BANDS = 2.0
"""Distances between the baseline's two seeds that a candidate may lie above the baseline."""
FLOOR = 0.005
"""Share of the baseline's loss that it may lie above in any case: two seeds may come out alike by chance."""
LAST = 0.25
"""Share of the steps whose mean loss stands in where nothing was held out."""
OWN_LIMIT = "max_loss_increase"
"""The recipe's limit that replaces the band."""

Begin = Callable[["nn.Module", int], Trainer]
"""Begins a training of a module in the order of the data that a seed gives."""


@dataclass(kw_only=True)
class LossQuality:
    """Judges trainings against the baseline's. Every module that it is given is trained and left so."""

    begin: Begin
    held_out: Callable[[nn.Module], float] | None
    """Mean loss over batches that are never trained on; None where there are none."""
    steps: int
    seed: int
    data_name: str
    limits: Mapping[str, float]
    baseline: LossCurve | None = None
    other: LossCurve | None = None
    notes: list[str] = field(default_factory=list)

    def prepare(self, fresh: Callable[[], nn.Module]) -> None:
        """Trains the baseline twice, each time from the weights as loaded: in the run's order of the data and in another."""
        self.baseline = self.curve(fresh(), self.seed)
        self.other = self.curve(fresh(), self.seed + 1)
        if not all(math.isfinite(loss) for loss in self.baseline.losses):
            self.notes.append("the loss of the baseline's own training is not finite: lower workload.learning_rate")
        elif self.baseline.held_out is not None and not self.baseline.held_out < (self.baseline.held_out_before or math.inf):
            self.notes.append(
                f"{self.steps} steps of the baseline did not lower the loss on held-out data ({self.baseline.held_out_before:.4f} to "
                f"{self.baseline.held_out:.4f}): that a recipe learns as it does says little; more workload.steps or another learning_rate"
            )

    def evaluate(self, module: nn.Module) -> QualityResult:
        """Trains `module` over the baseline's data in the baseline's order and says how its loss compares."""
        return self.judged(self.curve(module, self.seed))

    def judged(self, own: LossCurve) -> QualityResult:
        """How a training's losses compare with the baseline's."""
        assert self.baseline is not None and self.other is not None, "prepare() comes first"
        found, expected, other = figure(own), figure(self.baseline), figure(self.other)
        band = abs(expected - other)
        allowed = self.limits[OWN_LIMIT] * abs(expected) if OWN_LIMIT in self.limits else max(BANDS * band, FLOOR * abs(expected))
        result = TrainingResult(
            own=own,
            baseline=self.baseline,
            other_seed=self.other,
            difference=found - expected,
            band=band,
            limit=allowed,
        )
        quality = QualityResult(
            cross_entropy=found,
            baseline_cross_entropy=expected,
            loss_increase=found / expected - 1.0 if expected > 0 else None,
            data=self.data_name,
            training=result,
        )
        quality.missed = [*self._broken(result), *limits_.missed(quality, self.limits)]
        return quality

    def curve(self, module: nn.Module, seed: int) -> LossCurve:
        """Trains a module and reads its losses, on the device until the end."""
        import torch

        torch.manual_seed(seed)
        before = self.held_out(module) if self.held_out is not None else None
        trainer = self.begin(module, seed)
        own = torch.stack([trainer.step().float() for _ in range(self.steps)]).tolist()
        losses = [math.fsum(step) / len(step) for step in zip(*gather(own), strict=True)]  # of devices with batches of their own
        after = self.held_out(module) if self.held_out is not None else None
        return LossCurve(seed=seed, losses=losses, held_out_before=before, held_out=after)

    def _broken(self, result: TrainingResult) -> list[str]:
        """What the losses themselves miss."""
        bad = next((step for step, loss in enumerate(result.own.losses, start=1) if not math.isfinite(loss)), None)
        if bad is not None:
            return [f"the loss of step {bad} is {result.own.losses[bad - 1]}"]
        difference, limit, band = result.difference, result.limit, result.band
        assert difference is not None and limit is not None and band is not None
        if OWN_LIMIT in self.limits or difference <= limit:
            return []
        return [
            f"after {len(result.own.losses)} steps the loss lies {difference:.4f} nats above the baseline's, over the limit of {limit:.4f} "
            f"(two seeds of the baseline lie {band:.4f} apart)"
        ]


def figure(curve: LossCurve) -> float:
    """The loss that a training is judged by: on held-out data, else the mean of its last steps."""
    if curve.held_out is not None:
        return curve.held_out
    last = curve.losses[-max(1, round(LAST * len(curve.losses))) :]
    return math.fsum(last) / len(last)
