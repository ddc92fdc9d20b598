"""What a recipe's `limits` may hold, and the sentence that is said when one is missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optforge.measure import own
from optforge.spec import Json, QualityResult


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A bound on one field of `QualityResult`: a greatest or a least allowed value."""

    field: str
    words: str
    """How the figure is called in the sentence."""
    least: bool = False
    form: str = ".4g"
    """Format of both numbers."""


LIMITS: Mapping[str, Limit] = {
    "max_kl": Limit(field="kl", words="KL of logits"),
    "max_perplexity_increase": Limit(field="perplexity_increase", words="perplexity", form="+.1%"),
    "max_loss_increase": Limit(field="loss_increase", words="loss", form="+.1%"),
    "max_top1_drop": Limit(field="top1_drop", words="drop of top-1", form=".1%"),
    "max_relative_error": Limit(field="relative_error", words="relative error"),
    "min_agreement": Limit(field="agreement", words="top-1 agreement", least=True, form=".1%"),
    "min_sqnr_db": Limit(field="sqnr_db", words="SQNR in dB", least=True, form=".1f"),
    "min_metric": Limit(field="metric", words="metric", least=True),
    "max_metric": Limit(field="metric", words="metric"),
    "max_metric_drop": Limit(field="metric_drop", words="metric's drop", form=".1%"),
}
METRICS = ("min_metric", "max_metric", "max_metric_drop")
"""Limits on the user's own metric. A number is about a bare figure; `{f1: 0.9}` about named ones, kept as `min_metric.f1`."""

SANITY: Mapping[str, float] = {"max_loss_increase": 0.5, "max_relative_error": 0.5}
"""Held in every run unless the recipe sets its own: a model beyond these is broken, not compressed.

A loss (nats) half as high again, or outputs whose error is half their size. Rounding SmolLM2 to int4 raises its loss by
7%; one scale that is wrong by 100 times doubles it.
"""


def missed(result: QualityResult, limits: Mapping[str, float]) -> list[str]:
    """Each limit that `result` misses, with both numbers; a limit on a figure that does not exist is missed too."""
    found = []
    for name, bound in {**SANITY, **limits}.items():
        limit, words = LIMITS[name.partition(".")[0]], words_of(name)
        value = value_of(result, name)
        if value is None:
            if name in limits:
                found.append(f"{words} could not be measured here, and {name} is set (recipe.limits.{name}=null drops it)")
        elif (value < bound) if limit.least else (value > bound):
            side = "under" if limit.least else "over"
            found.append(f"{words} {format(value, limit.form)} is {side} {name} {format(bound, limit.form.lstrip('+'))}")
    return found


def value_of(result: QualityResult, name: str) -> float | None:
    """The figure that the limit `name` is about; None where it was not measured."""
    key, _, figure = name.partition(".")
    if key not in METRICS:
        value: float | None = getattr(result, LIMITS[key].field)
        return value
    found = own.figure(result, figure)
    if found is None:
        return None
    return own.drop(found) if key == "max_metric_drop" else found["value"]


def words_of(name: str) -> str:
    """How the figure of the limit `name` is called in a sentence."""
    key, _, figure = name.partition(".")
    words = LIMITS[key].words
    return words.replace("metric", figure) if figure else words


def flat(limits: Mapping[str, Json]) -> dict[str, Json]:
    """Limits with those on named figures as one key each: `{min_metric: {f1: 0.9}}` becomes `{min_metric.f1: 0.9}`."""
    found: dict[str, Json] = {}
    for key, value in limits.items():
        if key in METRICS and isinstance(value, Mapping):
            found |= {f"{key}.{name}": bound for name, bound in value.items()}
        else:
            found[key] = value
    return found


def nested(limits: Mapping[str, Json]) -> dict[str, Json]:
    """As a recipe writes them: the reverse of `flat`."""
    found: dict[str, Json] = {}
    for key, value in limits.items():
        name, _, figure = key.partition(".")
        if figure:
            found.setdefault(name, {})[figure] = value
        else:
            found[key] = value
    return found
