"""A LightningModule of the user's own: its `training_step` is what is trained, its `forward` what other workloads run.

The module's own dataloader brings the batches. Nothing of Trainer runs: loggers, callbacks and strategies are the user's
loop, and a run of OptForge measures the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optforge import callables, checkpoint
from optforge.errors import ModelError, Problem
from optforge.models.base import Loaded, Tell, as_example
from optforge.pretrained import check_dtype, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor, nn

CALLS = ("training_step", "forward")


@dataclass(frozen=True, kw_only=True)
class LitModel:
    """`module(**arguments)` is a LightningModule."""

    module: str
    """package.module:Class, or a callable that returns a LightningModule."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    checkpoint: str | None = None
    """A checkpoint of Lightning (.ckpt) or a state dict; null keeps the weights that the class made."""
    call: str = "training_step"
    """training_step: a batch of the module's own train_dataloader to its loss, for workload=train; forward: its
    example_input_array to whatever it returns."""
    dtype: str = "fp32"
    """fp32, fp16 or bf16: floating-point weights are cast to it."""
    trust: bool = False
    """true: a pickled checkpoint may run code while it is read."""

    def check(self) -> Iterator[Problem]:
        yield from check_dtype(self.dtype)
        if ":" not in self.module:
            what = f"{self.module!r} is no class's name" if self.module else "is required and has no value"
            yield Problem(where="model.module", what=what, fix="write package.module:Class")
        if self.call not in CALLS:
            yield Problem(where="model.call", what=f"unknown call {self.call!r}", fix=f"one of {', '.join(CALLS)}")
        if self.checkpoint is not None and not Path(self.checkpoint).expanduser().is_file():
            yield Problem(where="model.checkpoint", what=f"{self.checkpoint} is not a file")

    def skeleton(self) -> Loaded:
        import torch

        loaded = self._loaded()
        loaded.module = loaded.module.to("meta")
        if loaded.example is not None:
            args, kwargs = loaded.example
            loaded.example = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return loaded

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        """Makes the module under the seed, fills in the checkpoint, and checks that every weight has finite values."""
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loaded = self._loaded()
        checkpoint.require_finite(loaded.module.state_dict().items(), self.module)
        loaded.digest = checkpoint.module_digest(loaded.module)
        return loaded

    def _loaded(self) -> Loaded:
        from lightning.pytorch import LightningModule

        lit = callables.resolve(self.module, "model.module")(**self.arguments)
        if not isinstance(lit, LightningModule):
            what = f"{self.module} gave {type(lit).__name__}, not a LightningModule"
            raise ModelError(Problem(where="model.module", what=what, fix="use model=module with model.factory for other modules"))
        notes = ["the weights are those that the class made"]
        if self.checkpoint is not None:
            path = Path(self.checkpoint).expanduser()
            checkpoint.fill_(lit, checkpoint.read(path, trust=self.trust), str(path))
            notes = []
        lit.to(torch_dtype(self.dtype))
        name = self.module.rpartition(":")[2]
        if self.call == "forward":
            example = as_example(lit.example_input_array)
            return Loaded(module=lit.eval(), family="module", name=name, example=example, notes=notes)
        batches = _batches(lit, 1)
        return Loaded(
            module=_step(lit).eval(),
            family="module",
            name=name,
            example=((batches[0],), {}),
            batches=lambda count: [((batch,), {}) for batch in _batches(lit, count)],
            notes=notes,
        )


def _batches(lit: Any, count: int) -> list[Any]:
    """The first batches of the module's own dataloader, fewer where it has fewer.

    Raises:
        ModelError: it has none.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        found = list(islice(iter(lit.train_dataloader()), count))
    except (MisconfigurationException, NotImplementedError, TypeError) as error:
        raise _no_batches(lit) from error
    if not found:
        raise _no_batches(lit)
    return found


def _no_batches(lit: Any) -> ModelError:
    what = f"{type(lit).__name__} has no train_dataloader that gives a batch"
    return ModelError(Problem(where="model.module", what=what, fix="define train_dataloader in it, or write model.call=forward"))


def _step(lit: Any) -> nn.Module:
    """A module whose forward is the LightningModule's training_step; its names are those of the LightningModule below `lit`."""
    from torch import nn

    class TrainingStep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lit = lit

        def forward(self, batch: Any) -> Tensor:
            found = self.lit.training_step(batch, 0)
            loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
            return loss

    return TrainingStep()
