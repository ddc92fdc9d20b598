"""One product for several linears, under the names that the model's own code calls.

The packed linear is a child of the same parent and owns the weights. Each former linear becomes a `PackedPart` without
parameters: the first one called computes the whole product, the others hand out their slice of it. The result is held
only while the parent's forward runs and only for the very same input tensor, so a call from elsewhere, with another
input, from another thread or after an exception is computed anew and can never get a stale slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.select import PARTS
from optforge.spec import Json
from optforge.training.settings import join_masters_
from optforge.transforms.mixed import Mixed, mix_


class Pack:
    """The packed linear of a parent, by name, so that whoever replaces or reclasses it is followed; and what its last
    product was."""

    def __init__(self, parent: nn.Module, name: str, parts: int) -> None:
        self.parent, self.name, self.parts = parent, name, parts
        self.active = False
        self.held: tuple[Tensor, Tensor] | None = None
        self.handed_out = 0

    @property
    def linear(self) -> nn.Linear:
        linear: nn.Linear = getattr(self.parent, self.name)
        return linear

    def slice(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Columns `start:stop` of the product with `x` [..., in], shape [..., stop - start]."""
        if not self.active:
            return self._rows(x, start, stop)
        held = self.held
        if held is None:
            held = (x, self.linear(x))
            self.held, self.handed_out = held, 0
        elif held[0] is not x:
            return self._rows(x, start, stop)
        self.handed_out += 1
        if self.handed_out == self.parts:
            self.held = None
        return held[1][..., start:stop]

    def _rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The product of one part alone. A linear that is no longer plain keeps its rows in a form of its own, so its
        whole product is sliced."""
        linear = self.linear
        if type(linear) is not nn.Linear:
            whole: Tensor = linear(x)
            return whole[..., start:stop]
        return F.linear(x, linear.weight[start:stop], None if linear.bias is None else linear.bias[start:stop])

    def close(self) -> None:
        self.active, self.held = False, None


class PackedPart(nn.Module):
    """Stands where a linear stood: the same call, the same output, no parameters."""

    def __init__(self, pack: Pack, start: int, stop: int) -> None:
        super().__init__()
        self.pack, self.start, self.stop = pack, start, stop

    def forward(self, x: Tensor) -> Tensor:
        return self.pack.slice(x, self.start, self.stop)

    @property
    def in_features(self) -> int:
        return self.pack.linear.in_features

    @property
    def out_features(self) -> int:
        return self.stop - self.start

    @property
    def weight(self) -> Tensor:
        """The part's rows, for models whose code reads the weight or its dtype; of a quantized linear, its integers."""
        return self.pack.linear.weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        bias = self.pack.linear.bias
        return None if bias is None else bias[self.start : self.stop]

    def extra_repr(self) -> str:
        return f"{self.pack.name}[..., {self.start}:{self.stop}]"


class _HoldsPacks(Mixed):
    """Mixed into the parent's class: products may be held while its forward runs, and are dropped whatever ends it."""

    _optforge_packs: list[Pack]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for pack in self._optforge_packs:
            pack.active = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc] # the class it is mixed into has it
        finally:
            for pack in self._optforge_packs:
                pack.close()


def pack_(parent: nn.Module, name: str, parts: Sequence[str]) -> nn.Linear:
    """Packs the linears `parts` of `parent` (same input width, dtype and device, bias or none) into one, in place.

    The packed linear has weight [sum of out, in] with the parts' rows in the order of `parts`.
    """
    linears = [parent.get_submodule(part) for part in parts]
    weights = [linear.get_parameter("weight") for linear in linears]
    biases = [linear.bias for linear in linears]
    rows, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    packed = nn.Linear(columns, rows, bias=biases[0] is not None, device="meta", dtype=weights[0].dtype)
    trains = weights[0].requires_grad
    packed.weight = nn.Parameter(torch.cat([weight.detach() for weight in weights]), requires_grad=trains)
    join_masters_(packed.weight, weights)
    if biases[0] is not None:
        packed.bias = nn.Parameter(torch.cat([linear.get_parameter("bias").detach() for linear in linears]), requires_grad=trains)
        join_masters_(packed.bias, [linear.get_parameter("bias") for linear in linears])
    packed.train(parent.training)
    setattr(packed, PARTS, tuple(parts))
    pack = Pack(parent, name, len(parts))
    start = 0
    for part, weight in zip(parts, weights, strict=True):
        setattr(parent, part, PackedPart(pack, start, start + weight.shape[0]).train(parent.training))
        start += weight.shape[0]
    parent.add_module(name, packed)
    parent.__dict__.setdefault("_optforge_packs", []).append(pack)
    mix_(parent, _HoldsPacks)
    return packed


def joined_name(parts: Sequence[str], taken: nn.Module) -> str:
    """`qkv_proj` for q_proj, k_proj, v_proj; `gate_up_proj` for gate_proj, up_proj; otherwise the names with '_' between."""
    tails = {part.rpartition("_")[2] for part in parts}
    stems = [part.rpartition("_")[0] for part in parts]
    name = "_".join(parts)
    if len(tails) == 1 and all(stems):
        name = ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + "_" + tails.pop()
    return name if not hasattr(taken, name) else f"{name}_packed"


def replay(model: nn.Module, decisions: dict[str, Json]) -> None:
    """Packs what a receipt's decisions name."""
    for parent, name, parts in decisions["packs"]:
        pack_(model.get_submodule(parent), name, parts)
