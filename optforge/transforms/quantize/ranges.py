"""The range of each layer's inputs over calibration samples: what a static scheme rounds activations by.

One scale for all inputs of a layer, from the smallest and the largest value that any sample gave it. The layers are observed as they
are before rounding, in one walk over the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from optforge.calibrate.walk import Block, walk
from optforge.errors import DataError, PlanError, Problem
from optforge.kernels.formats import Fp8Format, format_for
from optforge.kernels.linears import scheme_of
from optforge.kernels.rounding import TINY, int8_range
from optforge.spec import Scheme

if TYPE_CHECKING:
    from optforge.transforms.base import Context
    from optforge.transforms.quantize import Quantize

Scales = dict[str, Tensor]


class Range:
    """The smallest and the largest value seen; `low` is above `high` as long as nothing was."""

    def __init__(self) -> None:
        self.low, self.high = float("inf"), float("-inf")

    def add(self, x: Tensor) -> None:
        if x.numel():
            low, high = x.aminmax()
            self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    @property
    def seen(self) -> bool:
        return self.low <= self.high

    def scales(self, scheme: Scheme, fmt: Fp8Format) -> Scales:
        """`input_scale` and, of int8, `input_offset`: fp32 [1] each."""
        if scheme.activation_dtype == "int8":
            scale, offset = int8_range(self.low, self.high)
            return {"input_scale": torch.tensor([scale]), "input_offset": torch.tensor([offset])}
        return {"input_scale": torch.tensor([max(-self.low, self.high, TINY * fmt.maximum) / fmt.maximum])}


def static_scales(
    model: nn.Module, layers: Mapping[str, nn.Module], scheme: Scheme, options: Quantize, ctx: Context
) -> tuple[dict[str, Scales], dict[str, str], list[str]]:
    """What a static scheme needs of each layer: scales, the reasons of layers that get none, and notes for the receipt.

    Nothing at all for other schemes, and while planning, when there are no values to see.

    Raises:
        DataError: there is nothing to calibrate on.
        PlanError: with `uncalibrated: error`, a layer that no sample reaches.
    """
    wanted = {name: layer for name, layer in layers.items() if scheme_of(layer, scheme).static}
    if not wanted or ctx.planning or next(model.parameters()).is_meta:
        return {}, {}, []
    if ctx.samples is None:
        what = f"{scheme.name} needs data to find the scales of activations, and there is none here"
        raise DataError(Problem(where=f"step {ctx.step}", what=what, fix=f"use quantize/{scheme.weight_dtype}_dynamic"))
    assert ctx.backend is not None
    taken = ctx.samples.take(options.samples, tokens=options.sample_tokens, step=ctx.step)
    ranges = {name: Range() for name in wanted}

    def visit(block: Block) -> None:
        block.observe(block.inside(wanted), lambda name, x: ranges[name].add(x))

    walk(model, taken.examples, visit, device=ctx.backend.torch_device(), outside=wanted, tell=ctx.tell, title="ranges of activations")
    unseen = [name for name, found in ranges.items() if not found.seen]
    _refuse(unseen, options, ctx.step)
    why = "no calibration sample reaches it, so its activations have no scale (uncalibrated: keep)"
    fmt = format_for(ctx.target)
    scales = {name: found.scales(scheme, fmt) for name, found in ranges.items() if found.seen}
    return scales, dict.fromkeys(unseen, why), [taken.note]


def _refuse(unseen: Sequence[str], options: Quantize, step: str) -> None:
    if unseen and options.uncalibrated.name == "error":
        from optforge.transforms.quantize.survey import counted

        what = f"no calibration sample reaches {counted(list(unseen))}"
        raise PlanError(
            Problem(where=f"step {step}", what=what, fix="write uncalibrated: keep, name them in ignore, or give other samples")
        )
