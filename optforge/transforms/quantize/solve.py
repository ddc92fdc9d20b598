"""Decides the stored values of one layer: what an algorithm makes of a weight and of what is known of its inputs.

`solve` touches no module, so that whoever compares schemes or measures sensitivity can ask it for any layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optforge.calibrate.statistics import Columns, Gram
from optforge.kernels.formats import Fp8Format
from optforge.spec import Scheme
from optforge.transforms.quantize import gptq, hqq
from optforge.transforms.quantize.algorithms import Algorithm
from optforge.transforms.quantize.clip import shrunk
from optforge.transforms.quantize.grids import Grid, Solved


class Inputs:
    """What is remembered of a layer's inputs: their second moments, and how large each column is."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.gram, self.columns = Gram(columns, device), Columns(columns, device)

    def add(self, x: Tensor) -> None:
        """x [..., K]."""
        self.gram.add(x)
        self.columns.add(x)

    @property
    def known(self) -> Known:
        return Known(
            gram=self.gram.matrix, absolute=self.columns.mean_absolute, largest=self.columns.largest.clone(), rows=self.gram.rows
        )


@dataclass(frozen=True, kw_only=True)
class Known:
    """Statistics of a layer's inputs, fp32: mean of x xT [K, K]; mean and largest absolute value of each column [K]."""

    gram: Tensor
    absolute: Tensor
    largest: Tensor
    rows: int
    """How many inputs they are of; 0: no sample reached the layer."""

    def divided(self, scales: Tensor) -> Known:
        """Of the inputs divided by `scales` [K]."""
        gram = self.gram / scales[:, None] / scales[None, :]
        return Known(gram=gram, absolute=self.absolute / scales, largest=self.largest / scales, rows=self.rows)


def solve(
    weight: Tensor,
    known: Known | None,
    scheme: Scheme,
    fmt: Fp8Format,
    algorithm: Algorithm,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    clip: bool = True,
) -> Solved:
    """The values that a weight is stored with; `.stored` are the tensors.

    Args:
        weight: [N, K], any float dtype; for awq, already multiplied by its scales.
        known: of the inputs that the layer is given, divided by the same scales. gptq and awq need it.
        scheme: one that has a grid (`algorithms.has_grid`).
    """
    if algorithm is Algorithm.hqq:
        return hqq.solve(weight, scheme, fmt)
    if algorithm is Algorithm.gptq:
        assert known is not None, "gptq needs statistics of the inputs"
        return gptq.solve(weight, known.gram, scheme, fmt, damping=damping, act_order=act_order, clip=clip)
    share = shrunk(weight, known.gram, scheme, fmt) if algorithm is Algorithm.awq and clip and known is not None else 1.0
    grid = Grid.of(weight, scheme, fmt, share)
    return Solved(grid=grid, weight=grid.round(weight))
