"""Decides the stored values of one layer: what an algorithm makes of a weight and of what is known of its inputs.

`solve` touches no module, so that whoever compares schemes or measures sensitivity can ask it for any layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optforge.kernels.formats import Fp8Format
from optforge.spec import Scheme
from optforge.transforms.quantize import gptq, hqq
from optforge.transforms.quantize.algorithms import Algorithm
from optforge.transforms.quantize.clip import shrunk
from optforge.transforms.quantize.grids import Grid, Solved


class Inputs:
    """What is remembered of a layer's inputs: their second moments, and how large each column is."""

    def __init__(self, columns: int, groups: int, device: torch.device) -> None:
        self.grams = torch.zeros(groups, columns, columns, dtype=torch.float32, device=device)
        self.sizes = torch.zeros(columns, dtype=torch.float64, device=device)
        self.low, self.high = torch.zeros(columns, device=device), torch.zeros(columns, device=device)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """x [groups, rows, K], any float dtype: a linear has one group, a grouped convolution inputs of its own in each."""
        if not x.shape[1]:
            return
        rows = x.float()
        self.grams.baddbmm_(rows.transpose(1, 2), rows)
        flat = rows.flatten(0, 1)
        self.sizes += flat.abs().sum(0)
        torch.minimum(self.low, flat.amin(0), out=self.low)
        torch.maximum(self.high, flat.amax(0), out=self.high)
        self.rows += rows.shape[1]

    @property
    def known(self) -> Known:
        count = max(self.rows, 1)
        absolute = (self.sizes / (count * len(self.grams))).float()
        return Known(grams=self.grams / count, absolute=absolute, low=self.low, high=self.high, rows=self.rows)


@dataclass(frozen=True, kw_only=True)
class Known:
    """Statistics of a layer's inputs, fp32: the mean of x xT of each group [groups, K, K]; of each column [K] the mean absolute value
    and the range, which always holds 0."""

    grams: Tensor
    absolute: Tensor
    low: Tensor
    high: Tensor
    rows: int
    """How many inputs they are of; 0: no sample reached the layer."""

    @property
    def gram(self) -> Tensor:
        """[K, K], of a layer whose outputs all read the same inputs."""
        assert len(self.grams) == 1
        return self.grams[0]

    @property
    def largest(self) -> Tensor:
        """The largest absolute value of each column."""
        return torch.maximum(-self.low, self.high)

    def group(self, at: int) -> Known:
        return replace(self, grams=self.grams[at : at + 1])

    def divided(self, scales: Tensor) -> Known:
        """Of the inputs divided by `scales` [K]."""
        grams = self.grams / scales[:, None] / scales[None, :]
        return replace(self, grams=grams, absolute=self.absolute / scales, low=self.low / scales, high=self.high / scales)


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
