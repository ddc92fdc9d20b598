"""The quality of a whole assignment, measured: how much of the recipe's limits it uses up.

The samples are those of calibration, which no figure of the report is taken on. On a few thousand tokens the change of
perplexity is known to a few tenths of a percent, no better; its expectation on text that the model itself finds likely is the KL
divergence, which is known far better; and room is left for the scatter of the figure that the run will be held to (`cautious`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from optforge.calibrate.samples import LANGUAGE, Samples, Taken
from optforge.measure.language import LanguageQuality
from optforge.measure.limits import LIMITS
from optforge.measure.quality import ClassifierQuality, ModuleQuality
from optforge.spec import QualityResult

Z = 1.0
"""Scatter that is left to the run's own figure: where a limit is all used up, the run misses it one time in six. More would leave
room unused that a uniform scheme, judged by the run alone, takes."""


class Judge(Protocol):
    """See `measure.quality.Judge`."""

    def prepare(self) -> None: ...

    def evaluate(self, module: nn.Module) -> tuple[QualityResult, str | None]: ...


def judge_of(baseline: nn.Module, samples: Samples, taken: Taken, device: torch.device) -> Judge:
    """Judges modules against `baseline` on the samples that were taken. `prepare` has been called."""
    family = samples.loaded.family
    judge: Judge
    if family == LANGUAGE:
        ids = torch.cat([example[1]["input_ids"].flatten() for example in taken.examples])
        window = taken.examples[0][1]["input_ids"].numel()
        judge = LanguageQuality(baseline=baseline, ids=ids, window=window, device=device)
    elif family == "image_classifier":
        inputs = [example[0][0] for example in taken.examples]
        judge = ClassifierQuality(baseline, lambda: iter([(one, None) for one in inputs]), device)
    else:
        judge = _Worst([ModuleQuality(baseline, example, device) for example in taken.examples])
    judge.prepare()
    return judge


class _Worst:
    """Several samples of a module of no known task: the worst of them counts."""

    def __init__(self, judges: Sequence[ModuleQuality]) -> None:
        self.judges = judges

    def prepare(self) -> None:
        for judge in self.judges:
            judge.prepare()

    def evaluate(self, module: nn.Module) -> tuple[QualityResult, str | None]:
        found = [judge.evaluate(module) for judge in self.judges]
        return max(found, key=lambda one: math.inf if one[0].relative_error is None else one[0].relative_error)


def cautious(result: QualityResult, *, floor: float = 0.0, tokens: int = 0) -> QualityResult:
    """The same with what the loss is to be expected to rise by, on other text, in place of what was measured here.

    Over n tokens a measured change scatters by sqrt(2 KL / n): where text is as the model predicts it, the log-ratio of two close
    predictions has a variance of twice their divergence. Expected is the KL, or what was measured where that is larger by more
    than its scatter. On top comes `Z` times the scatter of the figure that the run will take.

    Args:
        floor: the KL that any change makes, however small, since in bf16 every later sum is rounded anew: two such models are
            apart from one another, and neither is the worse for it.
        tokens: that the run takes its figure on; 0: of what was measured and the KL the larger, without regard to scatter.
    """
    if result.kl is None or result.perplexity_increase is None:
        return result
    kl = min(result.kl, 700.0)
    measured = math.log1p(max(result.perplexity_increase, -0.999))
    scatter = math.sqrt(2 * kl / result.count) if tokens and result.count else 0.0
    expected = max(0.0, kl - floor, measured - scatter) + (Z * math.sqrt(2 * kl / tokens) if tokens else 0.0)
    loss = math.log(result.baseline_perplexity) if result.baseline_perplexity else 0.0
    increase = expected / loss if loss > 0 else result.loss_increase
    return replace(result, perplexity_increase=math.expm1(expected), loss_increase=increase)


def strain(result: QualityResult, broken: str | None, limits: Mapping[str, float]) -> float:
    """The largest share of a limit that is used up: 1 is just within, above 1 misses. Infinite where outputs are not finite.

    A greatest value counts by itself over the limit, an agreement by what is missing to 1, decibels as powers of noise. A limit on
    a figure that is not measured here (a metric of the user's) is not seen.
    """
    if broken is not None:
        return math.inf
    found = [0.0]
    for name, bound in limits.items():
        limit = LIMITS.get(name)
        value = None if limit is None else getattr(result, limit.field, None)
        if limit is None or value is None:
            continue
        if name == "min_sqnr_db":
            found.append(10 ** ((bound - value) / 10))
        elif limit.least:
            found.append((1 - value) / max(1 - bound, 1e-12))
        else:
            found.append(value / max(bound, 1e-12))
    return max(found)


def words(result: QualityResult) -> str:
    """`KL 0.0031, perplexity +0.27%`: what there is of it."""
    parts = []
    if result.kl is not None:
        parts.append(f"KL {result.kl:.3g}")
    if result.perplexity_increase is not None:
        parts.append(f"perplexity {result.perplexity_increase:+.2%}")
    if result.agreement is not None:
        parts.append(f"agreement {result.agreement:.1%}")
    if result.relative_error is not None:
        parts.append(f"relative error {result.relative_error:.3g}")
    return ", ".join(parts)
