"""A training that can be stopped and gone on with: a module, its optimizer, its data, and one function that makes a step.

The module is trained in place. Gradients are let go at the end of a step, so that what lies on the device between two steps is
weights and states alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optforge.measure.mode import evaluating
from optforge.measure.size import nbytes
from optforge.training import optimizers
from optforge.training.loss import Objective
from optforge.training.optimizers import Rates
from optforge.training.settings import drop_masters_, settings_of
from optforge.training.stream import Batch, Stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a step is made."""

    optimizer: str = optimizers.ADAMW
    accumulate: int = 1
    """Batches whose gradients are added up before the optimizer moves the weights."""
    clip: float | None = None
    """Largest norm of all gradients together; longer ones are cut to it. None cuts nothing."""
    warmup: int = 0
    """Steps over which the learning rate rises to its value."""
    rates: Rates = field(default_factory=Rates)


class Trainer:
    """Trains one module. It holds the module weakly: whoever trains it keeps it."""

    def __init__(self, module: nn.Module, objective: Objective, stream: Stream, options: Options) -> None:
        """
        Args:
            module: put into training mode, and trained in place.

        Raises:
            ValueError: no weight of it asks for a gradient.
        """
        self._module = weakref.ref(module)
        self.objective, self.stream, self.options = objective, stream, options
        drop_masters_(module)
        self.settings = settings_of(module)
        self.parameters = trained(module)
        if not self.parameters:
            raise ValueError(f"{type(module).__name__} has no weights that ask for a gradient")
        self.optimizer = optimizers.make(self.parameters, options.optimizer, self.settings, options.rates)
        self.steps = 0
        """Updates made so far."""
        module.train()

    @property
    def module(self) -> nn.Module:
        found = self._module()
        assert found is not None, "whoever trains a module keeps it"
        return found

    def step(self) -> Tensor:
        """One update over the next batches; their mean loss, shape [], without a gradient. Never synchronizes."""
        import torch

        module, share = self.module, 1 / self.options.accumulate
        losses = [backward(module, self.objective, self.stream.next(), share) for _ in range(self.options.accumulate)]
        if self.options.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        if self.steps <= self.options.warmup:
            rise = min(1.0, (self.steps + 1) / (self.options.warmup + 1))
            optimizers.set_rate(self.optimizer, self.options.rates.learning_rate * rise)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return sum(losses[1:], losses[0])

    def held_bytes(self) -> dict[str, int]:
        """Bytes of weights, of all gradients at the fullest, and of the optimizer's states, as they are by now."""
        return {
            "weights": sum(nbytes(tensor) for tensor in {id(each): each for each in _tensors(self.module)}.values()),
            "gradients": sum(nbytes(parameter) for parameter in self.parameters),
            "optimizer": optimizers.held_bytes(self.optimizer),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the training goes on, but for the random state of dropout."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken.

        Raises:
            ValueError: the data or the global batch is another.
        """
        self.stream.load_state_dict(state["stream"])
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])


def backward(module: nn.Module, objective: Objective, batch: Batch, share: float = 1.0) -> Tensor:
    """Forward and backward pass of one batch; `share` of its loss, without a gradient."""
    import torch

    if any(parameter.is_cuda for parameter in itertools.islice(module.parameters(), 1)):
        # blocks that are compiled one by one would each be taken for a new pass, and overwrite what the one before has returned
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch ships it untyped
    with torch.enable_grad():
        with _cast(module):
            loss = objective(module, batch) * share
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    return loss.detach()


def held_out(module: nn.Module, objective: Objective, batches: Iterator[Batch]) -> float:
    """Mean loss over batches without training on them: no dropout, statistics of batch norms read and not written.

    Uncompiled, since it runs twice in a training and compiling for another mode takes longer than both.
    """
    import torch

    with evaluating(module), torch.compiler.set_stance("force_eager"), _cast(module):
        losses = [objective(module, batch).double() for batch in batches]
    return float(torch.stack(losses).mean())


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The weights that ask for a gradient, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def own_(module: nn.Module) -> nn.Module:
    """Gives the module storage of its own for every weight and buffer, which training writes to; ties stay."""
    import torch

    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        for child in module.modules():
            for parameter in child._parameters.values():
                if parameter is not None and id(parameter) not in copies:
                    copies[id(parameter)] = parameter.data = parameter.data.clone()
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    return module


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Training mode (dropout, batch statistics) while it is open; each module's own mode afterwards."""
    modes = {child: child.training for child in module.modules()}
    module.train()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode


@contextmanager
def _cast(module: nn.Module) -> Iterator[None]:
    """The autocast that the module's settings ask for."""
    import torch

    settings = settings_of(module)
    with ExitStack() as stack:
        if settings.autocast is not None:
            device = next((parameter.device.type for parameter in module.parameters()), "cpu")
            dtype: torch.dtype = getattr(torch, AUTOCAST[settings.autocast])
            stack.enter_context(torch.autocast(device if device != "meta" else "cpu", dtype=dtype))
        yield


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
