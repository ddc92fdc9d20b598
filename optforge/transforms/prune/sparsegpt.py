"""SparseGPT: removes weights by their second-order cost, column by column, while the columns to come make up for the error.

After Frantar and Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", algorithm 1: with
H = X XT + damping and U the upper Cholesky factor of its inverse, a weight costs w^2 / U[c, c]^2, and the error of column c,
divided by U[c, c], is spread over the later columns by row c of U.

That decides each weight with what stands to its left alone. Once all zeros are known, the weights that are left are fitted once
more, all together: least squares on the same matrix, by conjugate gradients for all rows at a time (`refit`; not in the paper,
measured in docs/pruning.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optforge.transforms.prune import masks

STRONGEST_DAMPING = 1.0
"""Where a matrix stays singular even so, no inverse can be trusted."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The pruned weight, and the damping that it took."""

    weight: Tensor
    damping: float


def prune(
    weight: Tensor, gram: Tensor, *, sparsity: float, pattern: tuple[int, int] | None, damping: float, block_columns: int, rounds: int = 0
) -> Solved | None:
    """
    Args:
        weight: [N, K], any float dtype, finite; read, never written.
        gram: fp32 [K, K], the mean of x xT over the layer's inputs.
        sparsity: share of the zeros, of every block of columns; pattern: (2, 4) makes 2 of 4 neighbours zero instead.
        damping: share of the mean diagonal that is added to it; ten times as much after each failure, up to `STRONGEST_DAMPING`.
        block_columns: columns that one mask is chosen for; rounded to a multiple of the pattern's group.
        rounds: of `refit` at the end.

    Returns:
        The weight in fp32 with its zeros, or None where the matrix stays singular. Zeros of `weight` stay.
    """
    factored = _factor(gram, damping)
    if factored is None:
        return None
    upper, used = factored
    left, zero = weight.float().clone(), weight == 0
    left[:, gram.diagonal() == 0] = 0  # no input ever reached these columns
    columns, group = left.shape[1], pattern[1] if pattern else 1
    width = max(1, block_columns // group) * group
    done = 0
    for start in range(0, columns, width):
        stop = min(start + width, columns)
        wanted = masks.count(left.shape[0] * stop, sparsity) - done
        errors = _block(left[:, start:stop], zero[:, start:stop], upper[start:stop, start:stop], wanted, pattern)
        left[:, stop:] -= errors @ upper[start:stop, stop:]
        done += wanted
    if rounds:
        left = refit(left, weight, gram, damping=used, rounds=rounds)
    return Solved(weight=left, damping=used)


def refit(weight: Tensor, original: Tensor, gram: Tensor, *, damping: float, rounds: int) -> Tensor:
    """The weights whose outputs are nearest to those of `original`, with the zeros of `weight`: fp32 [N, K].

    Args:
        weight: fp32 [N, K], where to start; its zeros stay.
        original: [N, K]; gram: fp32 [K, K], as for `prune`.
        damping: share of the mean diagonal that pulls each weight to its original.
        rounds: of conjugate gradients with the diagonal as preconditioner (Hestenes and Stiefel 1952).
    """
    matrix = gram + damping * gram.diagonal().mean() * torch.eye(gram.shape[0], device=gram.device)
    kept = weight != 0
    found, scale = weight.clone(), matrix.diagonal().clamp_min(torch.finfo(torch.float32).tiny)
    residual = ((original.float() - found) @ matrix) * kept
    direction = residual / scale
    energy = (residual * direction).sum(1, keepdim=True)
    for _ in range(rounds):
        turned = (direction @ matrix) * kept
        curvature = (direction * turned).sum(1, keepdim=True)
        length = torch.where(curvature > 0, energy / curvature, 0.0)
        found += length * direction
        residual -= length * turned
        conditioned = residual / scale
        after = (residual * conditioned).sum(1, keepdim=True)
        direction = conditioned + torch.where(energy > 0, after / energy, 0.0) * direction
        energy = after
    return found * kept


def _block(left: Tensor, zero: Tensor, upper: Tensor, wanted: int, pattern: tuple[int, int] | None) -> Tensor:
    """Prunes one block in place; the errors [N, width], each divided by the diagonal, that the later columns make up for.

    `zero` [N, width] marks what is zero already; `upper` is the block of the factor on the diagonal.
    """
    diagonal, errors = upper.diagonal(), torch.zeros_like(left)
    gone = torch.zeros_like(zero)
    if pattern is None:
        score = (left / diagonal).square().masked_fill(zero, -1.0)
        gone = masks.smallest(score, wanted / score.numel()) | zero
    for column in range(left.shape[1]):
        if pattern is not None and column % pattern[1] == 0:
            part = slice(column, column + pattern[1])
            score = (left[:, part] / diagonal[part]).square().masked_fill(zero[:, part], -1.0)
            gone[:, part] = masks.smallest_of_groups(score, *pattern) | zero[:, part]
        error = torch.where(gone[:, column], left[:, column], 0.0) / diagonal[column]
        left[:, column:] -= error[:, None] * upper[column, column:]
        left[gone[:, column], column] = 0.0
        errors[:, column] = error
    return errors


def _factor(gram: Tensor, damping: float) -> tuple[Tensor, float] | None:
    """The upper Cholesky factor of the inverse, and the damping; None where it stays singular."""
    matrix = gram.double() if gram.device.type == "cpu" else gram.float()
    diagonal = matrix.diagonal()
    dead = (diagonal == 0).to(matrix.dtype)
    mean = diagonal.mean()
    if not bool(matrix.isfinite().all()) or not bool(mean > 0):
        return None
    while damping <= STRONGEST_DAMPING:
        damped = matrix + torch.diag(dead * mean + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed):
                return upper.float(), damping
        damping *= 10
    return None
