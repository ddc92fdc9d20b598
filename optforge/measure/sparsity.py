"""Exact zeros of weights: where a pruning step left them, and whether later steps kept every one.

A weight may by then be stored in another way (quantized, compressed), so zeros are looked for in what it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def dense(module: nn.Module) -> Tensor | None:
    """The weight that a layer stands for, outputs first; None where it has none, or holds only a part of it (sharded)."""
    stands_for = getattr(module, "dequantize", None)
    weight = stands_for() if callable(stands_for) else getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or type(weight.data) is not Tensor:
        return None
    return weight.detach().t() if not callable(stands_for) and is_conv1d(module) else weight.detach()


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's layer: a class of that name with a two-dimensional weight [K, N] and, if any, a bias [N]."""
    if isinstance(module, nn.Linear) or not any(cls.__name__ == "Conv1D" for cls in type(module).__mro__):
        return False
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Zeros:
    """Where a weight is exactly zero: one bit an element, on the CPU."""

    shape: tuple[int, ...]
    bits: Tensor
    count: int

    @classmethod
    def of(cls, weight: Tensor) -> Zeros:
        found = weight == 0
        return cls(shape=tuple(weight.shape), bits=_packed(found).cpu(), count=int(found.sum()))

    def filled(self, weight: Tensor) -> int:
        """How many of these zeros are none in `weight`; all of them where its shape is another one."""
        if tuple(weight.shape) != self.shape:
            return self.count
        where = _unpacked(self.bits.to(weight.device), weight.numel()).reshape(weight.shape)
        return int((where & (weight != 0)).sum())


def zeros(model: nn.Module, names: Iterable[str]) -> dict[str, Zeros]:
    """The zeros of each named layer."""
    found = {name: dense(model.get_submodule(name)) for name in names}
    return {name: Zeros.of(weight) for name, weight in found.items() if weight is not None}


def filled(model: nn.Module, kept: Mapping[str, Zeros]) -> dict[str, tuple[int, int]]:
    """Layer -> (zeros that are none any more, zeros that there were), for layers that lost some."""
    lost = {}
    for name, before in kept.items():
        weight = dense(model.get_submodule(name))
        if weight is not None and (count := before.filled(weight)):
            lost[name] = (count, before.count)
    return lost


def share(model: nn.Module, names: Iterable[str]) -> float | None:
    """Exact zeros as a share of all elements of the named layers; None without such layers."""
    weights = [weight for name in names if (weight := dense(model.get_submodule(name))) is not None]
    total = sum(weight.numel() for weight in weights)
    return sum(int((weight == 0).sum()) for weight in weights) / total if total else None


def _packed(flags: Tensor) -> Tensor:
    """bool [...] to uint8 [ceil(elements / 8)]."""
    flat = torch.nn.functional.pad(flags.flatten(), (0, -flags.numel() % 8)).reshape(-1, 8)
    out = torch.zeros(flat.shape[0], dtype=torch.uint8, device=flat.device)
    for bit in range(8):
        out |= flat[:, bit].to(torch.uint8) << bit
    return out


def _unpacked(bits: Tensor, elements: int) -> Tensor:
    """uint8 to bool [elements]."""
    return torch.stack([(bits >> bit) & 1 for bit in range(8)], dim=1).flatten()[:elements].bool()
