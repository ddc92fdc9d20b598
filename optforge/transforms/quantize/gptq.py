"""GPTQ: rounds a weight column by column and lets the columns that are left make up for each error.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate post-training quantization for generative pre-trained transformers", 2022,
algorithm 1. The layer's squared output error over its inputs is `tr(D G Dt)`, with G the mean of x xT and D the change of the
weight; with U the upper Cholesky factor of the inverse of G, rounding column j by e is best answered by moving each later column k
by `-e U[j, k] / U[j, j]`. Columns with the largest inputs come first (act-order), while each group's scale is the one of its own
neighbouring columns, as it is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels.formats import Fp8Format
from optforge.spec import Scheme
from optforge.transforms.quantize.clip import shrunk
from optforge.transforms.quantize.grids import Grid, Solved, error

BLOCK = 128
"""Columns whose errors are held back before they reach all the columns after them."""
MOST_DAMPING = 1.0
"""Share of the mean diagonal that is added to it at most; beyond that the statistics say nothing of how columns depend."""
LEAST_RAISED = 1e-3
"""What a damping of 0 is raised to first."""


def solve(
    weight: Tensor,
    gram: Tensor,
    scheme: Scheme,
    fmt: Fp8Format,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    clip: bool = True,
    block: int = BLOCK,
) -> Solved:
    """Never further from the layer's output over these inputs than rounding to nearest: a row that would be is rounded.

    Weights that are exactly zero stay so, so that a pruned pattern is kept; what that costs is made up for like any rounding.

    Args:
        weight: [N, K], any float dtype.
        gram: [K, K], the mean of x xT over the layer's inputs; its dtype (fp32 or fp64) is that of the arithmetic.
        damping: share of the mean diagonal that is added to the diagonal; raised tenfold up to `MOST_DAMPING` while the matrix
            cannot be factorized.
        act_order: columns in the order of falling mean square of their inputs; otherwise in their own.
        clip: ranges are shrunk first where that lessens the error (`clip.shrunk`).
        block: columns per block; changes the rounding of sums alone.
    """
    values = weight.to(gram.dtype)
    plain = Grid.of(weight, scheme, fmt)
    nearest = plain.round(weight)
    diagonal = gram.diagonal()
    dead = diagonal == 0
    factored = _factor(gram, dead, damping, act_order)
    if factored is None:
        why = f"its inputs' second moments cannot be factorized even with damping {MOST_DAMPING:g}"
        return Solved(grid=plain, weight=nearest, failed=why)
    upper, order, used = factored
    grid = Grid.of(weight, scheme, fmt, shrunk(weight, gram, scheme, fmt)) if clip else plain
    found = _columns(values, upper, order, grid, block)
    better = error(found - values, gram) <= error(nearest - values, gram)
    chosen = torch.where(better[:, None], found.float(), nearest)
    return Solved(grid=grid.rows(better, plain), weight=chosen, damping=used)


def _factor(gram: Tensor, dead: Tensor, damping: float, act_order: bool) -> tuple[Tensor, Tensor, float] | None:
    """The upper Cholesky factor of the inverse in the order of the columns, that order, and the damping that it took.

    With J the reversal, J G J = L Lt gives G = R Rt for the upper R = J L J, so the factor of the inverse is the inverse of R:
    one factorization and one triangular solve. Inputs that are always zero tie no columns together; they are given the mean
    diagonal, so that their weights are rounded and nothing else.
    """
    diagonal = gram.diagonal()
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(gram), device=gram.device)
    matrix = gram[order][:, order].clone()
    matrix.diagonal()[dead[order]] = mean
    while damping <= MOST_DAMPING:
        damped = matrix.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not int(failed):
            identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            if bool(upper.isfinite().all()):
                return upper, order, damping
        damping = max(10 * damping, LEAST_RAISED)
    return None


def _columns(weight: Tensor, upper: Tensor, order: Tensor, grid: Grid, block: int) -> Tensor:
    """Rounds the columns in `order`; [N, K] in the weight's own order. Works on the transpose, whose columns are contiguous."""
    left_KN = weight.t()[order].contiguous()
    kept_KN = (weight != 0).t()[order]
    result_KN = torch.empty_like(left_KN)
    scale, zero = grid.spread()
    scales, zeros = (None if each is None else each.to(weight.dtype).expand_as(weight).t()[order].contiguous() for each in (scale, zero))
    assert scales is not None
    errors_KN = torch.empty_like(left_KN[:block])
    pivots = upper.diagonal().tolist()
    columns = len(left_KN)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        for at in range(start, stop):
            column = left_KN[at]
            rounded = grid.nearest(column, scales[at], None if zeros is None else zeros[at]) * kept_KN[at]
            result_KN[at] = rounded
            off = (column - rounded) / pivots[at]
            errors_KN[at - start] = off
            if at + 1 < stop:
                left_KN[at + 1 : stop].addr_(upper[at, at + 1 : stop], off, alpha=-1)
        if stop < columns:
            left_KN[stop:].addmm_(upper[start:stop, stop:].t(), errors_KN[: stop - start], alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(columns, device=order.device)
    return result_KN[back].t().contiguous()
