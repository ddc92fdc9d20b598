"""HQQ: scales and zero points fitted to the weights alone, while a few large weights may be far off.

Badri and Shaji, "Half-quadratic quantization of large machine learning models", 2023. Half-quadratic splitting takes turns: an error
matrix by the shrinkage that belongs to the sum of |W - Wq|^p with p below 1, then the parameters of the grid by least squares on what
is left. The paper moves the zero point, a real number there. Our storage holds whole zero points, with which nothing would move, so
here the scale moves too; and since the sum with p below 1 then prefers scales that cut half of the range off (SmolLM2's perplexity went
from 24 to 158), each group keeps the turn with the least squared error, the grid of rounding to nearest among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels import rounding
from optforge.kernels.formats import Fp8Format
from optforge.spec import Scheme
from optforge.transforms.quantize.grids import Grid, Solved, group_size, in_groups

POWER = 0.7
"""The p of the paper's published code."""
ROUNDS, SHARPNESS, GROWTH = 20, 10.0, 1.01
"""Turns, the first weight of the quadratic term, and what it grows by, as in the paper's published code."""


def solve(weight: Tensor, scheme: Scheme, fmt: Fp8Format) -> Solved:
    """weight [N, K]; an int4 scheme, symmetric or not. Each group keeps the best grid that a turn gave, the one of rounding to
    nearest among them."""
    size = group_size(scheme, weight.shape[1])
    values, real = in_groups(weight.float(), size), in_groups(torch.ones_like(weight, dtype=torch.float32), size)
    best = grid = Grid.of(weight, scheme, fmt)
    least, sharpness = _distance(values, grid), SHARPNESS
    for _ in range(ROUNDS):
        grid = _turn(values, real, grid, sharpness)
        best, least = _better(best, least, grid, _distance(values, grid))
        sharpness *= GROWTH
    return Solved(grid=best, weight=best.round(weight))


def _turn(values: Tensor, real: Tensor, grid: Grid, sharpness: float) -> Grid:
    """One turn; `values` [N, groups, size]. The weights are scaled by their spread, on which the sharpness depends."""
    scale, zero = grid.scale[:, :, None], None if grid.zero is None else grid.zero[:, :, None]
    rounded = grid.nearest(values, scale, zero)
    spread = values.abs().amax(2, keepdim=True).clamp_min(rounding.TINY)
    off = (values - rounded) / spread
    size = off.abs().clamp_min(1e-8)
    kept = spread * off.sign() * (size - size ** (POWER - 1) / sharpness).clamp_min(0)
    wanted = (values - kept) * real
    steps = torch.round(rounded / scale)
    below = (steps * steps * real).sum(2)
    moved = (steps * wanted).sum(2) / below.clamp_min(1)
    new_scale = torch.where((below > 0) & (moved > 0), moved, grid.scale).clamp_min(rounding.TINY)
    if zero is None:
        return Grid(scheme=grid.scheme, fmt=grid.fmt, columns=grid.columns, scale=new_scale)
    count = real.sum(2).clamp_min(1)
    new_zero = torch.round(((steps + zero) * real - wanted / new_scale[:, :, None] * real).sum(2) / count).clamp(0, 15)
    return Grid(scheme=grid.scheme, fmt=grid.fmt, columns=grid.columns, scale=new_scale, zero=new_zero)


def _distance(values: Tensor, grid: Grid) -> Tensor:
    """Squared error of each group, [N, groups]."""
    zero = None if grid.zero is None else grid.zero[:, :, None]
    return (values - grid.nearest(values, grid.scale[:, :, None], zero)).square().sum(2)


def _better(best: Grid, least: Tensor, tried: Grid, found: Tensor) -> tuple[Grid, Tensor]:
    """The better of two grids, group by group."""
    at = found < least
    zero = None if best.zero is None or tried.zero is None else torch.where(at, tried.zero, best.zero)
    grid = Grid(scheme=best.scheme, fmt=best.fmt, columns=best.columns, scale=torch.where(at, tried.scale, best.scale), zero=zero)
    return grid, torch.where(at, found, least)
