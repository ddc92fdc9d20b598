"""The loss of a language model straight from its last hidden states, without logits of the whole batch.

4 x 4,096 tokens over a vocabulary of 128,256 are 2.1 billion logits: 4.2 GB in bf16, and twice that again where the loss is
taken in fp32. Computed a chunk of tokens at a time (kernels.linear_cross_entropy), with the gradients made while the
chunk is there, none of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from optforge.errors import PlanError, Problem, StepError
from optforge.kernels.linear_cross_entropy import linear_cross_entropy
from optforge.measure.mode import evaluating
from optforge.measure.size import weight_bytes
from optforge.select import original_name
from optforge.spec import Hardware
from optforge.training.loss import takes_labels
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Touched
from optforge.transforms.mixed import Mixed, mix_

SCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale")
"""Keys of configs whose models change logits after the head."""
TOLERANCE = 2e-2
"""Largest relative difference to the model's own loss on the example; bf16 logits are good to 1 part in 256."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Head and loss as one."""

    kind: ClassVar[str] = "loss"
    phase: ClassVar[Phase] = Phase.FUSE

    ignore_index: int = -100
    """Label of tokens that do not count."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """It needs a training."""
        if ctx.workload != "train":
            what = f"this is the loss of a training, and the workload is {ctx.workload}"
            yield Problem(where=f"step {ctx.step}", what=what, fix=f"type workload=train, or drop it with '~steps.{ctx.step}'")

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target; without a kernel in plain PyTorch."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Changes what the model does with labels; without labels it gives logits as before.

        Raises:
            PlanError: the model's loss is not that of a plain head over its hidden states, with the reason.
            StepError: the loss on the example is another.
        """
        receipt = Receipt(total_bytes=weight_bytes(model))
        if isinstance(model, _HeadLoss):
            receipt.notes.append("head and loss are one already")
            return receipt
        why = _unfit(model)
        if why is not None:
            raise PlanError(Problem(where=f"step {ctx.step}", what=why, fix=f"drop it with '~steps.{ctx.step}'"))
        name = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())  # type: ignore[operator]  # _unfit asked for it
        before = None if ctx.planning or ctx.example is None else _loss(model, ctx.example)
        _replay(model, self.ignore_index)
        if before is not None and ctx.example is not None:
            after = _loss(model, ctx.example)
            if not abs(after - before) <= TOLERANCE * abs(before):
                raise StepError(f"step {ctx.step}: the loss on the example changed from {before:.4f} to {after:.4f}")
        size = weight_bytes(model.get_submodule(name))
        receipt.touched = [Touched(name=original_name(name), what="loss in chunks of tokens", bytes_before=size, bytes_after=size)]
        receipt.bytes_before = receipt.bytes_after = size
        receipt.kernels["optforge::linear_cross_entropy"] = 1
        receipt.decisions = {"ignore_index": self.ignore_index}
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """The same change."""
        _replay(model, receipt.decisions["ignore_index"])


class _HeadLoss(Mixed):
    """Mixed into a language model of transformers: with labels it gives the loss and no logits."""

    _optforge_ignore_index: int

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the class it is mixed into has it
        from transformers.modeling_outputs import CausalLMOutputWithPast

        output = self.base_model(*args, **kwargs)  # type: ignore[attr-defined]  # as above
        hidden, weight = output[0], self.get_output_embeddings().weight  # type: ignore[attr-defined]  # as above
        kind = hidden.device.type if hidden.device.type != "meta" else "cpu"
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        loss = linear_cross_entropy(hidden[:, :-1], weight, labels[:, 1:].contiguous(), ignore_index=self._optforge_ignore_index)
        return CausalLMOutputWithPast(loss=cast(torch.FloatTensor, loss))


def _replay(model: nn.Module, ignore_index: int) -> None:
    model.__dict__["_optforge_ignore_index"] = ignore_index
    mix_(model, _HeadLoss)


def _unfit(model: nn.Module) -> str | None:
    """Why the model's loss cannot be taken from its hidden states."""
    find, base = getattr(model, "get_output_embeddings", None), getattr(model, "base_model", model)
    head = find() if callable(find) else None
    if head is None or base is model or not takes_labels(model):
        return "it takes a language model of transformers, with a head over its hidden states and a loss of its own"
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__name__}, and the loss is taken from a plain nn.Linear"
    if head.bias is not None:
        return "the head has a bias"
    config = getattr(model, "config", None)
    found = [key for key in SCALED if getattr(config, key, None) not in (None, 1, 1.0)]
    return f"the model changes its logits after the head ({', '.join(found)})" if found else None


def _loss(model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> float:
    args, kwargs = example
    with evaluating(model):
        return float(model(*args, labels=kwargs["input_ids"] if "input_ids" in kwargs else args[0], **kwargs).loss)
