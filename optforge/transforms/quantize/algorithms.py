"""Which algorithm decides the stored values, what each needs, and which schemes it fits. Imports no torch: `check` runs anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from optforge.errors import Problem
from optforge.schemes import SCHEMES
from optforge.spec import Scheme

if TYPE_CHECKING:
    from optforge.transforms.base import Context
    from optforge.transforms.quantize import Quantize

GRIDS = {"int4": ("group", "channel"), "int8": ("channel",), "fp8": ("channel", "tensor")}
"""Weight dtype -> granularities whose scales `grids.Grid` can hold, for gptq and awq."""


class Algorithm(Enum):
    rtn = "rtn"
    gptq = "gptq"
    awq = "awq"
    hqq = "hqq"


class Uncalibrated(Enum):
    keep = "keep"
    error = "error"


def has_grid(scheme: Scheme) -> bool:
    """Whether the scheme's storage is one scale (and zero point) for each group, row or weight."""
    return scheme.granularity in GRIDS.get(scheme.weight_dtype, ())


def walks(options: Quantize) -> bool:
    """Whether blocks are decided one by one on samples."""
    return options.algorithm in (Algorithm.gptq, Algorithm.awq) or options.smooth is not None


def needs_data(options: Quantize) -> bool:
    """Whether the step runs calibration samples."""
    return walks(options) or SCHEMES[options.scheme.name].static


def check(options: Quantize, ctx: Context) -> Iterator[Problem]:
    """Algorithms that do not fit the scheme, numbers out of their range, and data that nothing can be calibrated on."""
    where, scheme, algorithm = f"step {ctx.step}", options.to_scheme(), options.algorithm
    if algorithm is not Algorithm.rtn and not has_grid(scheme):
        fits = ", ".join(sorted(name for name, other in SCHEMES.items() if has_grid(other)))
        what = f"{algorithm.name} cannot decide the scales of {scheme.name}"
        yield Problem(where=where, what=what, fix=f"write steps.{ctx.step}.algorithm=rtn, or use a scheme of {fits}")
    elif algorithm is Algorithm.hqq and scheme.weight_dtype != "int4":
        what = f"hqq moves zero points and scales of int4 weights; {scheme.name} has 8 bits, whose rounding leaves it nothing to gain"
        yield Problem(where=where, what=what, fix=f"write steps.{ctx.step}.algorithm=rtn or gptq, or use quantize/int4_weight")
    yield from _smooth(options, scheme, where, ctx.step)
    if options.samples < 1 or options.sample_tokens < 1:
        what = f"samples {options.samples} of sample_tokens {options.sample_tokens} are nothing to calibrate on"
        yield Problem(where=where, what=what, fix="write positive numbers")
    if not 0 <= options.damping <= 1:
        what = f"damping {options.damping:g} is no share of the mean diagonal"
        yield Problem(where=where, what=what, fix="write a number from 0 to 1, such as 0.01")
    reason = ctx.samples.reason_against if ctx.samples is not None and needs_data(options) else None
    if reason is not None:
        wanted = scheme.name if scheme.static else algorithm.name if options.smooth is None else "smooth"
        without = f"use=quantize/{scheme.weight_dtype}_dynamic" if scheme.static else "algorithm=rtn"
        fix = f"data=wikipedia, calibration.factory=package.module:callable, or steps.{ctx.step}.{without}"
        yield Problem(where=where, what=f"{wanted} needs data to calibrate on, and {reason}", fix=fix)


def _smooth(options: Quantize, scheme: Scheme, where: str, step: str) -> Iterator[Problem]:
    if options.smooth is None:
        return
    if not 0 <= options.smooth <= 1:
        yield Problem(where=where, what=f"smooth {options.smooth:g} is not from 0 to 1", fix="0.5 is usual, null is none")
    if scheme.activation_dtype is None:
        what = f"smooth makes activations easier to round, and {scheme.name} rounds none"
        yield Problem(where=where, what=what, fix=f"write steps.{step}.smooth=null, or use quantize/int8_dynamic")
    elif options.algorithm is Algorithm.awq:
        yield Problem(where=where, what="awq searches the scales that smooth would set", fix=f"write steps.{step}.smooth=null")
