"""Which weights go: the least important ones of a layer, of each row, or of each group of neighbours.

Scores are [N, K], one row an output. What is NaN is never important, so it is the first to go; what is zero already stays so.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count(elements: int, sparsity: float) -> int:
    """How many of so many elements become zero."""
    return round(elements * sparsity)


def smallest(score: Tensor, sparsity: float) -> Tensor:
    """bool [N, K]: the share `sparsity` of the whole matrix with the smallest scores."""
    return _marked(_known(score).reshape(1, -1), count(score.numel(), sparsity)).reshape(score.shape)


def smallest_of_rows(score: Tensor, sparsity: float) -> Tensor:
    """bool [N, K]: the same share of every row."""
    return _marked(_known(score), count(score.shape[1], sparsity))


def smallest_of_groups(score: Tensor, zeros: int, of: int) -> Tensor:
    """bool [N, K]: `zeros` of each `of` neighbours in a row. K is a multiple of `of`."""
    return _marked(_known(score).reshape(-1, of), zeros).reshape(score.shape)


def satisfied(zero: Tensor, zeros: int, of: int) -> Tensor:
    """bool [groups]: whether each group of `of` neighbours has `zeros` zeros or more; `zero` is bool [N, K]."""
    return zero.reshape(-1, of).sum(1) >= zeros


def _known(score: Tensor) -> Tensor:
    return torch.nan_to_num(score.float(), nan=-1.0, posinf=torch.inf)


def _marked(score: Tensor, number: int) -> Tensor:
    """bool: the `number` smallest of each row; of equal ones the first."""
    mask = torch.zeros_like(score, dtype=torch.bool)
    if number:
        mask.scatter_(1, score.argsort(dim=1, stable=True)[:, :number], True)
    return mask
