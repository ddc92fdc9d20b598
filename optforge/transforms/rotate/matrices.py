"""Orthogonal matrices that spread every direction over all others: Hadamard's where there is one, else a random one.

Sylvester's doubling, and Paley's two constructions from squares modulo a prime (Paley, "On orthogonal matrices", 1933, lemmas 2 and 4),
which together give every width that models have in practice.
"""

from __future__ import annotations

import torch
from torch import Tensor

HADAMARD, RANDOM = "hadamard", "random orthogonal"


def rotation(width: int, seed: int) -> tuple[Tensor, str]:
    """An orthogonal fp64 [width, width] and its kind. Rows have random signs, so that the constant vector is no axis of it."""
    draw = torch.Generator().manual_seed(seed)
    signs = (2 * torch.randint(0, 2, (width, 1), generator=draw) - 1).double()
    found = hadamard(width)
    if found is not None:
        return signs * found / width**0.5, HADAMARD
    upper: Tensor
    orthogonal, upper = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64))
    return orthogonal * upper.diagonal().sign(), RANDOM  # so that it is drawn evenly from all of them (Stewart, 1980)


def hadamard(width: int) -> Tensor | None:
    """A matrix [width, width] of 1 and -1 (fp64) whose rows are orthogonal, or None where these constructions give none."""
    if width in (1, 2):
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:width, :width]
    if width % 4:
        return None
    half = hadamard(width // 2)
    if half is not None:
        return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), half)
    if _is_prime(width - 1):  # 3 modulo 4, since the width is a multiple of 4
        return torch.eye(width, dtype=torch.float64) + _bordered(width - 1, -1)
    prime = width // 2 - 1
    if prime % 4 == 1 and _is_prime(prime):
        first, second = (torch.tensor(rows, dtype=torch.float64) for rows in ([[1, 1], [1, -1]], [[1, -1], [-1, -1]]))
        return torch.kron(_bordered(prime, 1), first) + torch.kron(torch.eye(prime + 1, dtype=torch.float64), second)
    return None


def _bordered(prime: int, below: int) -> Tensor:
    """[prime + 1, prime + 1]: 1 for each difference of indices that is a square modulo the prime, -1 for the others and 0 on the
    diagonal, under a row of ones and behind a column of `below`."""
    squares = {index * index % prime for index in range(1, prime)}
    kinds = torch.tensor([0 if index == 0 else 1 if index in squares else -1 for index in range(prime)], dtype=torch.float64)
    numbers = torch.arange(prime)
    result = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    result[0, 1:], result[1:, 0] = 1, below
    result[1:, 1:] = kinds[(numbers[:, None] - numbers[None]) % prime]
    return result


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
