"""Trades time for memory in training: what a layer computes is not kept for the backward pass but computed again there.

`full` keeps a layer's inputs alone (Chen and others, Training deep nets with sublinear memory cost, 2016, section 4). `selective`
keeps the results of products and attention, which cost most to compute again, and drops the cheap rest (Korthikanti and
others, Reducing activation recomputation in large transformer models, 2022, section 5). Nothing changes in a pass without gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from optforge.errors import PlanError, Problem
from optforge.measure.size import weight_bytes
from optforge.select import original_name, repeated_blocks
from optforge.spec import Hardware, Json
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Touched
from optforge.transforms.mixed import Mixed, mix_

if TYPE_CHECKING:
    from collections.abc import Callable


class Mode(Enum):
    full = "full"
    selective = "selective"


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm")
"""Operators of ATen whose results `selective` keeps."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Which layers compute again, and what of each is kept."""

    kind: ClassVar[str] = "checkpointing"
    phase: ClassVar[Phase] = Phase.MEMORY

    mode: Mode = Mode.full
    """full: a layer's inputs alone are kept; selective: the results of products and attention too."""
    share: float = 1.0
    """Share of the repeated layers, the first ones; the others keep everything."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """It is about the backward pass, so it needs a training."""
        where = f"step {ctx.step}"
        if ctx.workload != "train":
            what = f"checkpointing saves memory of the backward pass, and the workload is {ctx.workload}"
            yield Problem(where=where, what=what, fix=f"type workload=train, or drop it with '~steps.{ctx.step}'")
        if not 0 < self.share <= 1:
            yield Problem(where=where, what=f"share must be above 0 and at most 1, is {self.share:g}", fix=f"steps.{ctx.step}.share=1.0")

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Changes how each repeated layer runs in a training; weights and names stay.

        Raises:
            PlanError: the model has no repeated layers.
        """
        blocks = list(repeated_blocks(model).items())
        if not blocks:
            what = "checkpointing works on repeated layers (an nn.ModuleList of one class), and the model has none"
            raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=f"drop it with '~steps.{ctx.step}'"))
        chosen = blocks[: ceil(self.share * len(blocks))]
        receipt = Receipt(total_bytes=weight_bytes(model))
        decisions: dict[str, Json] = {"mode": self.mode.name, "blocks": []}
        for path, block in chosen:
            if not _checkpoint(block, self.mode.name):
                receipt.skipped[original_name(path)] = "checkpointed already"
                continue
            size, what = weight_bytes(block), f"checkpointed, {self.mode.name}"
            decisions["blocks"].append(original_name(path))
            receipt.touched.append(Touched(name=original_name(path), what=what, bytes_before=size, bytes_after=size))
        receipt.bytes_before = receipt.bytes_after = sum(touched.bytes_before for touched in receipt.touched)
        receipt.decisions = decisions
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """The same layers run the same way."""
        for name in receipt.decisions["blocks"]:
            _checkpoint(model.get_submodule(name), receipt.decisions["mode"])


class _Full(Mixed):
    """Mixed into a layer's class: in training it keeps its inputs and computes the rest again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.training):  # type: ignore[attr-defined]  # the class it is mixed into has it
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the class it is mixed into has it
        if _traced(args):
            return checkpoint(super().forward, *args, use_reentrant=False, context_fn=_watched, **kwargs)  # type: ignore[misc]  # as above
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)  # type: ignore[misc]  # as above


class _Selective(Mixed):
    """As `_Full`, but what products and attention give is kept."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.training):  # type: ignore[attr-defined]  # the class it is mixed into has it
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the class it is mixed into has it
        context = _watched_and_kept if _traced(args) else _kept
        return checkpoint(super().forward, *args, use_reentrant=False, context_fn=context, **kwargs)  # type: ignore[misc]  # as above


MIXINS: dict[str, type[Mixed]] = {Mode.full.name: _Full, Mode.selective.name: _Selective}


def _checkpoint(block: nn.Module, mode: str) -> bool:
    """Changes one layer; False where it computes again already."""
    return not isinstance(block, tuple(MIXINS.values())) and mix_(block, MIXINS[mode])


def _policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = func._schema.name.partition("::")[2]
    kept = name in PRODUCTS or "attention" in name or func.namespace == "optforge"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _traced(args: Any) -> bool:
    """Whether a plan follows the pass on meta tensors."""
    return any(isinstance(each, torch.Tensor) and each.is_meta for each in args)


def _modes() -> list[Any]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped


def _watched() -> tuple[Any, Any]:
    """Contexts of the two passes on meta: what watches the first is put back for the second, since autograd takes it off."""
    modes = _modes()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for mode in modes if not _modes() else []:
                stack.enter_context(mode)
            yield

    return nullcontext(), again()


def _watched_and_kept() -> tuple[Any, Any]:
    first, second = _kept()
    _, again = _watched()
    return first, _Both(second, again)


class _Both:
    """Two contexts as one."""

    def __init__(self, *contexts: Any) -> None:
        self.contexts = contexts
        self.stack = ExitStack()

    def __enter__(self) -> None:
        for each in self.contexts:
            self.stack.enter_context(each)

    def __exit__(self, *error: Any) -> None:
        self.stack.close()


_kept: Callable[[], Any] = partial(create_selective_checkpoint_contexts, _policy)
