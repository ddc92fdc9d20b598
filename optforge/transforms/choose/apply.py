"""From the candidates to the rewritten model and its receipt, planned or measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from optforge.errors import PlanError, Problem
from optforge.measure.size import weight_bytes
from optforge.schemes import SCHEMES
from optforge.transforms.base import Context, Receipt
from optforge.transforms.choose import candidates
from optforge.transforms.choose.candidates import Uniform
from optforge.transforms.choose.choice import Choice
from optforge.transforms.choose.table import skipped

if TYPE_CHECKING:
    from optforge.transforms.choose import Choose


def apply(options: Choose, model: nn.Module, ctx: Context) -> Receipt:
    """See `Choose.apply`."""
    steps, left = candidates.native(options.steps(ctx.target), ctx.target)
    found, unfit = candidates.uniforms(model, steps, ctx) if steps else ({}, {})
    left |= unfit
    if not found:
        raise candidates.nothing_fits(left, ctx)
    _require_room(options, model, found, ctx)
    notes = [f"{scheme} is no candidate: {reason}" for scheme, reason in left.items()]
    return _planned(options, model, found, notes, ctx) if ctx.planning else _measured(options, model, found, notes, ctx)


def _measured(options: Choose, model: nn.Module, found: Mapping[str, Uniform], notes: list[str], ctx: Context) -> Receipt:
    if ctx.samples is None or ctx.once is None:
        what = "measures time and quality, and here is neither a workload nor data to do so"
        fix = "apply it with optforge run or optforge.optimize; a saved artifact loads without measuring"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=fix))
    made = Choice(options, model, found, ctx).made()
    receipt = candidates.rewrite(model, made["assigned"], {scheme: one.step for scheme, one in found.items()}, ctx)
    first = next(iter(found.values())).receipt
    receipt.skipped = {name: why for name, why in first.skipped.items() if name not in made["assigned"]} | skipped(made["table"])
    receipt.ignored, receipt.unmatched = first.ignored, first.unmatched
    receipt.notes = [*made["notes"], *notes, *receipt.notes]
    receipt.decisions |= {"table": made["table"], "made": made["made"]}
    return receipt


def _planned(options: Choose, model: nn.Module, found: Mapping[str, Uniform], notes: list[str], ctx: Context) -> Receipt:
    """Every layer under the likeliest scheme: a structure to size and to trace, and the bounds of what may come of it."""
    total, limit = weight_bytes(model), options.max_weight_bytes
    # in a decode of few rows the weights alone count: one that leaves activations alone is as fast and costs less quality
    likely = sorted(found.values(), key=lambda one: (SCHEMES[one.scheme].activation_dtype is None) != (ctx.workload == "decode"))
    chosen = next((one for one in likely if limit is None or one.weight_bytes <= limit), None)
    if chosen is None:  # only a mixture is small enough
        chosen = min(found.values(), key=lambda one: one.weight_bytes)
    receipt = candidates.rewrite(model, dict.fromkeys(chosen.layers, chosen.scheme), {chosen.scheme: chosen.step}, ctx)
    smallest = min(found.values(), key=lambda one: one.weight_bytes)
    most = total if limit is None else min(total, limit)
    receipt.skipped, receipt.ignored, receipt.unmatched = chosen.receipt.skipped, chosen.receipt.ignored, chosen.receipt.unmatched
    planned = f"planned as {chosen.scheme} on {len(chosen.layers)} layers: which of them take it, another scheme or none, the run measures"
    bounds = f"weights between {smallest.weight_bytes / 1e6:,.0f} MB (all {smallest.scheme}) and {most / 1e6:,.0f} MB"
    receipt.notes = [planned, bounds, *notes, *receipt.notes]
    return receipt


def _require_room(options: Choose, model: nn.Module, found: Mapping[str, Uniform], ctx: Context) -> None:
    """
    Raises:
        PlanError: the smallest assignment is larger than `max_weight_bytes`.
    """
    names = {name for one in found.values() for name in one.layers}
    mixed = weight_bytes(model) - sum(max(0, *(one.saved.get(name, 0) for one in found.values())) for name in names)
    smallest = min(mixed, *(one.weight_bytes for one in found.values()))  # a shared weight is in no layer's own saving
    limit = options.max_weight_bytes
    if limit is not None and smallest > limit:
        what = f"max_weight_bytes is {limit:,}, and the smallest choice takes {smallest:,}"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=f"steps.{ctx.step}.max_weight_bytes={smallest}"))
