"""HQQ: scales and zero points that fit most weights of a group well, found without data.

Badri and Shaji, "Half-quadratic quantization of large machine learning models", 2023. The error is measured by the sum of
|W - Wq|^p with p below 1, which lets a few large weights be far off. Half-quadratic splitting takes turns: an error matrix by
shrinkage, then the parameters of the grid by least squares on what is left. The paper moves the zero point, a real number there;
our storage holds whole zero points, so the scale is moved as well, and the zero point rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels import rounding
from optforge.kernels.formats import Fp8Format
from optforge.spec import Scheme
from optforge.transforms.quantize.clip import LEAST, STEPS
from optforge.transforms.quantize.grids import Grid, Solved, group_size, in_groups

POWER = 0.7
"""The p of the paper's published code."""
ROUNDS, SHARPNESS, GROWTH = 20, 10.0, 1.01
"""Turns, the first weight of the quadratic term, and what it grows by, as in the paper's published code."""


def solve(weight: Tensor, scheme: Scheme, fmt: Fp8Format) -> Solved:
    """weight [N, K]; an int4 scheme, symmetric or not. Each group keeps the best grid that a turn gave, the one of rounding to
    nearest among them."""
    size, columns = group_size(scheme, weight.shape[1]), weight.shape[1]
    values = in_groups(weight.float(), size)
    real = in_groups(torch.ones_like(weight, dtype=torch.float32), size)
    best = Grid.of(weight, scheme, fmt)
    least = _distance(values, best, size, real)
    for step in range(1, STEPS):  # a start in a narrower range each, since the turns only find the minimum next to their start
        tried = Grid.of(weight, scheme, fmt, 1 - step * (1 - LEAST) / STEPS)
        best, least = _better(best, least, tried, _distance(values, tried, size, real))
    grid, sharpness = best, SHARPNESS
    for _ in range(ROUNDS):
        grid = _turn(values, real, grid, sharpness)
        best, least = _better(best, least, grid, _distance(values, grid, size, real))
        sharpness *= GROWTH
    assert best.columns == columns
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


def _distance(values: Tensor, grid: Grid, size: int, real: Tensor) -> Tensor:
    """Sum of |W - Wq|^p of each group, [N, groups]."""
    zero = None if grid.zero is None else grid.zero[:, :, None]
    off = (values - grid.nearest(values, grid.scale[:, :, None], zero)) * real
    return (off.abs() ** POWER).sum(2)


def _better(best: Grid, least: Tensor, tried: Grid, found: Tensor) -> tuple[Grid, Tensor]:
    """The better of two grids, group by group."""
    at = found < least
    zero = None if best.zero is None or tried.zero is None else torch.where(at, tried.zero, best.zero)
    grid = Grid(scheme=best.scheme, fmt=best.fmt, columns=best.columns, scale=torch.where(at, tried.scale, best.scale), zero=zero)
    return grid, torch.where(at, found, least)
