"""An operator that says nothing of its output on meta does not keep the rest of a model from being fused in a plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from toys import GPU

from optforge.transforms.base import Context
from optforge.transforms.fuse import Fuse

LIBRARY = torch.library.Library("optfuse", "DEF")
LIBRARY.define("silent(Tensor x) -> Tensor")
LIBRARY.impl("silent", lambda x: x.clone(), "CPU")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.optfuse.silent(self.left(x))
        return y + self.right(x).repeat(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_siblings_are_packed_around_an_operator_without_a_fake() -> None:
    model = Net().to("meta").eval()
    ctx = Context(step="fuse", target=GPU, device=GPU, example=((torch.empty(3, 8, device="meta"),), {}))
    receipt = Fuse().apply(model, ctx)
    assert [touched.what for touched in receipt.touched] == ["packed from left, right"] * 2
