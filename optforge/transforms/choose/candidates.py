"""The candidates: the model with every layer rounded under each scheme, as the quantize step itself would do it.

Each is an alias of the model, so that it takes memory for the rounded weights alone. What one scheme cannot hold it leaves with a
reason, which goes into the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from optforge.errors import PlanError, Problem, UserError
from optforge.kernels.linears import Quantized
from optforge.measure.size import weight_bytes
from optforge.share import alias
from optforge.spec import Hardware
from optforge.transforms.base import Context, Receipt
from optforge.transforms.quantize import Misfit, Quantize, Tied


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """One scheme on every layer that it fits."""

    scheme: str
    step: Quantize
    model: nn.Module
    receipt: Receipt
    layers: Mapping[str, nn.Module]
    """The rounded layers by name."""
    saved: Mapping[str, int]
    """Bytes that the model takes less by each of them; below zero for a head that shared its weight and no longer does."""
    weight_bytes: int
    """Of all parameters of the model."""


def native(steps: Mapping[str, Quantize], target: Hardware) -> tuple[dict[str, Quantize], dict[str, str]]:
    """The steps that the target runs as written, and for each other one the reason."""
    lowered = {scheme: step.lower(target) for scheme, step in steps.items()}
    left = {scheme: one.reason for scheme, one in lowered.items() if one is not None}
    return {scheme: step for scheme, step in steps.items() if scheme not in left}, left


def uniforms(model: nn.Module, steps: Mapping[str, Quantize], ctx: Context) -> tuple[dict[str, Uniform], dict[str, str]]:
    """Each scheme applied to an alias of `model`, and for each scheme that fits no layer the reason.

    Raises:
        UserError: no scheme can be applied; the problems of the first.
    """
    found: dict[str, Uniform] = {}
    refused: dict[str, UserError] = {}
    left: dict[str, str] = {}
    for scheme, step in steps.items():
        copy = alias(model)
        try:
            receipt = step.apply(copy, ctx)
        except UserError as error:
            refused[scheme], left[scheme] = error, error.problems[0].what
            continue
        # a head that no longer shares the embedding's weight takes memory of its own
        untied = set(receipt.decisions.get("ties", {})) if step.tied is Tied.untie else set()
        before = {one.name: 0 if one.name in untied else one.bytes_before for one in receipt.touched if one.bytes_before}
        saved = {one.name: before[one.name] - one.bytes_after for one in receipt.touched if one.name in before}
        layers = {name: module for name in saved if isinstance(module := copy.get_submodule(name), Quantized)}
        if not layers:
            left[scheme] = "; ".join(dict.fromkeys(receipt.skipped.values())) or "it fits no layer"
            continue
        found[scheme] = Uniform(
            scheme=scheme, step=step, model=copy, receipt=receipt, layers=layers, saved=saved, weight_bytes=weight_bytes(copy)
        )
    if not found and refused:
        raise next(iter(refused.values()))
    return found, left


def rewrite(model: nn.Module, assigned: Mapping[str, str], steps: Mapping[str, Quantize], ctx: Context) -> Receipt:
    """Rounds each layer of `assigned` under its scheme, in place: one quantize step for each scheme that occurs."""
    total = weight_bytes(model)
    receipt = Receipt(total_bytes=total, decisions={"parts": []})
    for scheme, names in by_scheme(assigned).items():
        part = exactly(steps[scheme], names).apply(model, ctx)
        receipt.touched += part.touched
        receipt.notes += [note for note in part.notes if note not in receipt.notes]
        for operator, count in part.kernels.items():
            receipt.kernels[operator] = receipt.kernels.get(operator, 0) + count
        receipt.decisions["parts"].append(part.decisions)
    receipt.bytes_before = sum(one.bytes_before for one in receipt.touched)
    receipt.bytes_after = sum(one.bytes_after for one in receipt.touched)
    return receipt


def exactly(step: Quantize, names: Iterable[str]) -> Quantize:
    """The same step for these layers alone."""
    targets = [f"re:{re.escape(name)}" for name in names]
    return replace(step, targets=targets, ignore=[], ignore_extra=[], on_misfit=Misfit.skip, strict=False)


def by_scheme(assigned: Mapping[str, str]) -> dict[str, list[str]]:
    """Scheme -> the layers that take it."""
    found: dict[str, list[str]] = {}
    for name, scheme in assigned.items():
        found.setdefault(scheme, []).append(name)
    return found


def nothing_fits(left: Mapping[str, str], ctx: Context) -> PlanError:
    """Why there is nothing to choose from."""
    reasons = "; ".join(f"{scheme}: {reason}" for scheme, reason in left.items())
    fix = f"name other schemes in steps.{ctx.step}.schemes, or drop the step with '~steps.{ctx.step}'"
    return PlanError(Problem(where=f"step {ctx.step}", what=f"no scheme fits a layer of this model ({reasons})", fix=fix))
