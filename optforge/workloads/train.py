"""Train: one step of a language model on real tokens: forward, loss, backward, optimizer.

The loss is the model's own, next token by next token, so that its memory and time are those of a user's loop. Gradients
are dropped at the start of a step and not zeroed, and the optimizer is PyTorch's fused one where the device has it: it
needs no temporary copies. Its state has the dtype of the weights, as PyTorch makes it; `model.dtype=fp32` gives fp32 states.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from optforge.data.base import DataSource
from optforge.errors import Problem
from optforge.measure.size import nbytes
from optforge.measure.work import count_flops, read_bytes
from optforge.models.base import Loaded
from optforge.workloads.base import begin_pass, example_ids, not_positive, token_ids, too_long

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LEARNING_RATE = 1e-4
"""Of both optimizers: a usual one for AdamW. Time and memory do not depend on it."""
FUSED = ("cpu", "cuda")
"""Devices whose optimizers PyTorch has as one kernel."""


class Optimizer(Enum):
    adamw = "adamw"
    sgd = "sgd"


STATES = {Optimizer.adamw: 2, Optimizer.sgd: 0}
"""Numbers that an optimizer keeps for each weight: AdamW the running means of the gradient and of its square."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """One optimizer step over `accumulate` batches of `batch_size` sequences."""

    kind: ClassVar[str] = "train"
    families: ClassVar[tuple[str, ...]] = ("causal_lm",)
    uses_cache: ClassVar[bool] = False

    batch_size: int = 1
    """Sequences in one forward and backward pass, on each device that has a batch of its own."""
    sequence: int = 512
    """Tokens of each sequence, real ones from the data set."""
    accumulate: int = 1
    """Batches whose gradients are added up before the optimizer moves the weights."""
    optimizer: Optimizer = Optimizer.adamw
    """adamw, or sgd without momentum, which keeps no state."""

    def check(self, loaded: Loaded) -> Iterator[Problem]:
        yield from not_positive("workload", batch_size=self.batch_size, accumulate=self.accumulate)
        if self.sequence < 2:
            yield Problem(where="workload.sequence", what=f"must be 2 or more, is {self.sequence}", fix="workload.sequence=512")
        if loaded.family not in self.families:
            yield Problem(where="workload", what=f"train runs language models, not {loaded.family}", fix="workload=forward")
            return
        if "labels" not in inspect.signature(type(loaded.module).forward).parameters:
            what = f"{type(loaded.module).__name__}.forward takes no labels, so it has no loss to train on"
            yield Problem(where="workload", what=what, fix="workload=forward")
        yield from too_long(loaded, "sequence", self.sequence)

    def example(self, loaded: Loaded, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {"input_ids": example_ids(loaded, device), "use_cache": False}

    def prepare(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int = 0) -> TrainWork:
        """Token ids on `device`, int64, shape [accumulate * batch_size, sequence]."""
        ids = token_ids(loaded, data, (self.accumulate * self.batch_size, self.sequence), device, seed)
        return TrainWork(ids=ids, calls=self.accumulate, optimizer=self.optimizer)

    def state_bytes(self, weight_bytes: int) -> int:
        """Bytes that the optimizer keeps for trained weights of `weight_bytes`."""
        return STATES[self.optimizer] * weight_bytes

    def update_bytes(self, weight_bytes: int) -> tuple[int, int]:
        """Bytes that one update reads (weights, gradients, states) and writes (weights, states)."""
        states = self.state_bytes(weight_bytes)
        return 2 * weight_bytes + states, weight_bytes + states


@dataclass(kw_only=True)
class TrainWork:
    """Tokens on the device, and per module an optimizer with its state."""

    ids: Tensor
    calls: int
    """Forward and backward passes in one step."""
    optimizer: Optimizer
    unit: str = "tokens"
    _optimizers: WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def units(self) -> int:
        return self.ids.numel()

    def ready(self, module: nn.Module) -> None:
        """A fresh optimizer for the module's weights as they are now; its state is made by the first step."""
        import torch

        trained = _trained(module)
        if not trained:
            raise ValueError(f"{type(module).__name__} has no weights that ask for a gradient")
        kind = {Optimizer.adamw: torch.optim.AdamW, Optimizer.sgd: torch.optim.SGD}[self.optimizer]
        self._optimizers[module] = kind(trained, lr=LEARNING_RATE, fused=self.ids.device.type in FUSED)

    def run(self, module: nn.Module) -> Tensor:
        """One step; the mean loss of its batches, without a gradient, shape [].

        Gradients are left on the weights until the next step begins, as an optimizer leaves them.
        """
        if module not in self._optimizers:
            self.ready(module)
        optimizer = self._optimizers[module]
        optimizer.zero_grad(set_to_none=True)
        losses = [self._pass(module, ids) for ids in self.ids.chunk(self.calls)]
        optimizer.step()
        return sum(losses[1:], losses[0])

    def once(self, module: nn.Module) -> Tensor:
        """Forward and backward of one batch, without the update; its share of the loss."""
        for parameter in module.parameters():
            parameter.grad = None
        return self._pass(module, self.ids.chunk(self.calls)[0])

    def kept(self, module: nn.Module) -> tuple[Tensor, ...]:
        return ()

    def _pass(self, module: nn.Module, ids: Tensor) -> Tensor:
        import torch

        with _training(module), torch.enable_grad():
            begin_pass(ids.device)
            loss: Tensor = module(input_ids=ids, labels=ids, use_cache=False).loss / self.calls
            loss.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        return loss.detach()

    def flops(self, module: nn.Module) -> int | None:
        """Operations of one step: each product of the forward pass has two of its size in the backward pass, one for the
        gradient of its input and one for that of its weight. Attention in full; the update is no product."""
        import torch

        forward = count_flops(module, lambda call: call(input_ids=torch.zeros(self.ids.shape, dtype=torch.int64), use_cache=False))
        return None if forward is None else 3 * forward

    def bytes(self, module: nn.Module) -> int | None:
        """Per batch the weights forward and backward and the gradients written (from the second batch on, read too); then
        the update. Activations are left out, since a device with room enough in its caches would never write them."""
        weights = sum(nbytes(parameter) for parameter in _trained(module))
        reads = 2 * self.calls * read_bytes(module, self.ids.numel() // self.calls)
        gradients = (2 * self.calls - 1) * weights
        update = (3 + 2 * STATES[self.optimizer]) * weights
        return reads + gradients + update


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Training mode (dropout, batch statistics) while it is open; each module's own mode afterwards."""
    modes = {child: child.training for child in module.modules()}
    module.train()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode
