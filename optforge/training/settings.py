"""How a model is trained, as the steps of a recipe have decided; kept on the model, where whoever trains it finds it.

A transform that changes no weight and no forward pass, but the way they are trained (autocast, master weights, the
optimizer), writes here. Nothing else reads a recipe to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "optforge_training"
"""Attribute of a model that a step gave settings to."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a recipe says of the training; the defaults are those of a plain loop."""

    autocast: str | None = None
    """`bf16` or `fp16`: products run in it under `torch.autocast`, weights keep their dtype."""
    masters: bool = False
    """The optimizer holds fp32 copies of weights in a lower precision, and rounds them to the weights after each update."""
    stochastic: bool = False
    """Updates of weights in bf16 are rounded up or down at random, in proportion to what is rounded off."""
    optimizer: str | None = None
    """Name of an optimizer in `training.optimizers`; None takes the workload's."""
    offload: bool = False
    """States and fp32 weights lie in the host's memory, and the update runs there."""


def settings_of(module: nn.Module) -> Settings:
    """The settings that steps have left on a model."""
    found: Settings = vars(module).get(NAME, Settings())
    return found


def settle_(module: nn.Module, **changes: Any) -> Settings:
    """Changes some of a model's settings."""
    module.__dict__[NAME] = replace(settings_of(module), **changes)
    return settings_of(module)


MASTER = "optforge_master"
"""Attribute of a parameter that was cast to a lower precision: its fp32 values, until an optimizer takes them over."""


def keep_master_(parameter: nn.Parameter, values: Tensor) -> None:
    """Remembers the fp32 values that a parameter had before it was cast."""
    setattr(parameter, MASTER, values)


def master_of(parameter: nn.Parameter) -> Tensor | None:
    """The fp32 values that a parameter had; None where it was never cast, or they were taken already."""
    found: Tensor | None = getattr(parameter, MASTER, None)
    return found


def join_masters_(joined: nn.Parameter, parts: Sequence[nn.Parameter]) -> None:
    """Keeps the fp32 values of parameters that were made one."""
    import torch

    masters = [master for part in parts if (master := master_of(part)) is not None]
    if masters and len(masters) == len(parts):
        keep_master_(joined, torch.cat(masters))


def drop_masters_(module: nn.Module) -> None:
    """Lets go of fp32 values that no optimizer will take: those of frozen weights."""
    for parameter in module.parameters():
        if not parameter.requires_grad and master_of(parameter) is not None:
            delattr(parameter, MASTER)


def take_master(parameter: nn.Parameter) -> Tensor:
    """The fp32 values of a parameter, on its device; from now on they are the taker's alone."""
    found = master_of(parameter)
    if found is None:
        return parameter.detach().float()
    delattr(parameter, MASTER)
    return found.detach().to(parameter.device)
