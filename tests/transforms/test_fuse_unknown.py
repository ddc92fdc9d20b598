"""An operator that says nothing of its output on meta does not keep the rest of a model from being fused in a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import GPU

from optforge.transforms.base import Context
from optforge.transforms.fuse import Fuse

LIBRARY = torch.library.Library("optfuse", "DEF")
LIBRARY.define("silent(Tensor x) -> Tensor")
LIBRARY.impl("silent", lambda x: x.clone(), "CPU")


@torch.library.custom_op("optfuse::mute", mutates_args=())
def mute(x: Tensor) -> Tensor:
    return x.clone()


class Block(nn.Module):
    def __init__(self, silent: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.silent = silent
        self.left, self.right = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.silent(self.left(x))
        return y + self.right(x).repeat(1, 2)


class Net(nn.Module):
    def __init__(self, silent: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(silent), Block(silent)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("silent", [torch.ops.optfuse.silent, mute], ids=["library", "custom_op"])
def test_siblings_are_packed_around_an_operator_without_a_fake(silent: Callable[[Tensor], Tensor]) -> None:
    model = Net(silent).to("meta").eval()
    ctx = Context(step="fuse", target=GPU, device=GPU, example=((torch.empty(3, 8, device="meta"),), {}))
    receipt = Fuse().apply(model, ctx)
    assert [touched.what for touched in receipt.touched] == ["packed from left, right"] * 2
