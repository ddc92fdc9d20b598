"""What is trained: fp32 tensors, and the weights that the model sees while they change.

The model itself is not touched until the end: it runs with other weights in place of its own (`torch.func.functional_call`).
Each of these is masked where the weight was zero, so the gradient of a pruned weight is zero too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(kw_only=True)
class Trained:
    """One weight of the model under training."""

    name: str
    original: nn.Parameter
    tensors: list[nn.Parameter]
    """What the optimizer changes: the weight itself in fp32, or the two factors of its change."""
    mask: Tensor | None
    """bool, where the weight is not zero; None where it has no zeros."""

    def value(self) -> Tensor:
        """The weight as the model sees it, in the model's dtype."""
        if len(self.tensors) == 1:
            found: Tensor = self.tensors[0]
        else:
            up, down = self.tensors
            found = self.original.detach().float() + up @ down
        if self.mask is not None:
            found = found * self.mask
        return found.to(self.original.dtype)


def full(parameters: dict[str, nn.Parameter]) -> list[Trained]:
    """Every weight itself."""
    return [
        Trained(name=name, original=parameter, tensors=[nn.Parameter(parameter.detach().float().clone())], mask=_mask(parameter))
        for name, parameter in parameters.items()
    ]


def lora(parameters: dict[str, nn.Parameter], rank: int, seed: int) -> list[Trained]:
    """A change of rank `rank` of each weight [N, K], zero at first (Hu and others 2021, "LoRA", section 4.1)."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for name, parameter in parameters.items():
        outputs, inputs = parameter.shape
        down = torch.randn(min(rank, outputs, inputs), inputs, generator=draw) / math.sqrt(inputs)
        up = torch.zeros(outputs, down.shape[0])
        tensors = [nn.Parameter(each.to(parameter.device)) for each in (up, down)]
        found.append(Trained(name=name, original=parameter, tensors=tensors, mask=_mask(parameter)))
    return found


def put(model: nn.Module, trained: list[Trained]) -> None:
    """Gives the model its new weights, wherever the old ones are held."""
    new = {id(each.original): nn.Parameter(each.value().detach(), requires_grad=each.original.requires_grad) for each in trained}
    for module, key in _slots(model):
        parameter = module._parameters[key]
        if id(parameter) in new:
            module._parameters[key] = new[id(parameter)]


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for key in module._parameters:
            yield module, key


def _mask(parameter: nn.Parameter) -> Tensor | None:
    """Of matrices alone: a bias or a norm that happens to be zero may change."""
    if parameter.dim() < 2:
        return None
    kept = parameter.detach() != 0
    return None if bool(kept.all()) else kept
