"""Runs that were measured before, for what no model of a machine can predict: quality, and recipes that were slow.

`conf/recorded/runs.yaml` holds them, each with the committed file that it was read from. A plan quotes them and
computes nothing from them: quality does not carry over from one model to another, so the model is always named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from optforge import config, safe_yaml
from optforge.plan.document import Recorded
from optforge.report import figures

LOW, HIGH = 0.01, 0.05
"""Increase of the perplexity, or drop of the top-1 accuracy, up to which a risk is called low, and from which high: a
convention of ours."""


@cache
def runs() -> tuple[Mapping[str, Any], ...]:
    """Every recorded run, as the data file has it."""
    found = safe_yaml.read(config.conf_dir() / "recorded" / "runs.yaml")
    assert isinstance(found, list)
    return tuple(found)


def recorded(*, schemes: Sequence[str], recipe: str, model: str, device: str, backend: str = "") -> list[Recorded]:
    """The runs that say something of this plan, those of the same model first, then those on the same device.

    Args:
        schemes: options, as they run on the target, that change the numbers: `quantize/fp8_weight`, `precision/bf16`.
        recipe, model, device: names.
        backend: the target's; a run of the same recipe on a device of that family is taken for its speed, whatever its quality.
    """
    found = [
        Recorded(
            **{key: value for key, value in run.items() if key != "words"},
            same_model=run["model"] == model,
        )
        for run in runs()
        if run["scheme"] in schemes and (_has_quality(run) or (run["recipe"] == recipe and _backend(run) == backend))
    ]
    return sorted(found, key=lambda run: (not run.same_model, run.device != device))


def _backend(run: Mapping[str, Any]) -> str:
    return config.hardware(run["device"]).backend


def _has_quality(run: Mapping[str, Any]) -> bool:
    return run["perplexity_increase"] is not None or run["top1_drop"] is not None


def quality(found: Sequence[Recorded], *, schemes: Sequence[str], model: str, recipe: str = "") -> str:
    """The risk in words: the worst recorded run of the same model, else of the same recipe, else of any, which is named."""
    if not schemes:
        return "no step changes the precision of the numbers"
    judged = [run for run in found if _loss(run) is not None]
    if not judged:
        return f"unknown: no recorded run of {', '.join(_short(scheme) for scheme in schemes)}"
    own = [run for run in judged if run.same_model]
    worst = max(own or [run for run in judged if run.recipe == recipe] or judged, key=lambda run: _loss(run) or 0.0)
    where = f"{_short(worst.scheme)} on {worst.model} ({worst.device}, {worst.date})"
    other = "" if own else f"; no recorded run on {model}, so yours may differ"
    return f"{_risk(_loss(worst) or 0.0)}: {_loss_text(worst)} for {where}{other}"


def speed(found: Sequence[Recorded], *, recipe: str, workload: str) -> list[Recorded]:
    """Recorded runs of this recipe and workload that were timed."""
    return [run for run in found if run.speedup is not None and (run.recipe, run.workload) == (recipe, workload)]


def _loss(run: Recorded) -> float | None:
    return run.perplexity_increase if run.perplexity_increase is not None else run.top1_drop


def _loss_text(run: Recorded) -> str:
    if run.perplexity_increase is not None:
        return f"perplexity {figures.percent(run.perplexity_increase, signed=True)}"
    agreed = f", {figures.percent(run.agreement)} of answers agree" if run.agreement is not None else ""
    return f"top-1 {figures.percent(0.0 - (run.top1_drop or 0.0), signed=True)}{agreed}"


def _risk(loss: float) -> str:
    return "low" if loss <= LOW else "high" if loss >= HIGH else "moderate"


def _short(scheme: str) -> str:
    return scheme.partition("/")[2]
