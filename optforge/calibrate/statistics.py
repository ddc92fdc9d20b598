"""What is remembered of a layer's inputs over all samples, in fp32 on the layer's own device."""

from __future__ import annotations

import torch
from torch import Tensor


class Gram:
    """The mean of x xT over all input rows: half the Hessian of a linear layer's squared output error (Frantar and others, GPTQ,
    2022, section 3). `rows` counts them; 0 means that no sample reached the layer."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """x [..., K], any float dtype."""
        rows = x.reshape(-1, x.shape[-1]).float()
        self.total.addmm_(rows.T, rows)
        self.rows += rows.shape[0]

    @property
    def matrix(self) -> Tensor:
        """fp32 [K, K]; zeros where there was no row."""
        return self.total / max(self.rows, 1)


class Columns:
    """Mean square, mean and largest absolute value of each input column: fp32 [K] each."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.squares, self.sums, self.largest = (torch.zeros(columns, dtype=torch.float32, device=device) for _ in range(3))
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """x [..., K], any float dtype."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if not rows.shape[0]:
            return
        self.squares += rows.square().sum(0)
        sizes = rows.abs()
        self.sums += sizes.sum(0)
        torch.maximum(self.largest, sizes.amax(0), out=self.largest)
        self.rows += rows.shape[0]

    @property
    def mean_square(self) -> Tensor:
        return self.squares / max(self.rows, 1)

    @property
    def mean_absolute(self) -> Tensor:
        return self.sums / max(self.rows, 1)
