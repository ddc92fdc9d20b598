"""Factories as a user would write them."""

from __future__ import annotations

import torch
from torch import nn


def linear(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))


def with_example(width: int = 3) -> tuple[nn.Module, torch.Tensor]:
    return linear(width), torch.ones(4, width)


def on_meta(width: int = 3) -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(width, 2)


def with_nan() -> nn.Module:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight[0, 1] = float("nan")
    return module


def text() -> str:
    return "no module"
