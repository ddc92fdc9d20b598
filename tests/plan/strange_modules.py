"""Modules that a plan must tell the truth about, as a user's factories would make them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Tensor]


class Experts(nn.Module):
    """Four experts in two tensors, and a router (the module of case B10)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(4, 128, 64))
        self.down = nn.Parameter(torch.empty(4, 64, 64))
        self.router = nn.Linear(64, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        hidden = torch.einsum("bk,enk->ben", x, self.gate_up)
        return torch.einsum("be,ben,ekn->bk", share, hidden[..., :64], self.down)


def experts() -> Made:
    return nn.Sequential(nn.Linear(64, 64, bias=False), Experts()), torch.ones(8, 64)


class Widths(nn.Module):
    """Linears of the widths of case B32, each on its own part of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.by_width = nn.ModuleDict({str(width): nn.Linear(width, 64) for width in (192, 8640, 50)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x[:, : layer.in_features]) for layer in self.by_width.values()]).sum(0)


def widths() -> Made:
    return Widths(), torch.ones(2, 8640)


def classifier() -> Made:
    """15 outputs, which no fp8 product takes (case B29)."""
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 15)), torch.ones(4, 32)


@torch.library.custom_op("strange::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    """An operator that says nothing of its outputs."""
    return x + 1


class Mystery(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(mystery(self.first(x)))
        return made


def custom() -> Made:
    return Mystery(), torch.ones(8, 64)


def alone() -> nn.Module:
    """A module, and nothing to run it on."""
    return nn.Linear(64, 64)
