"""One small forward pass, watched: what reads what, and whether a rewrite changed the result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optforge.errors import PlanError, Problem, StepError
from optforge.transforms.base import Context

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative change of an output, as the ratio of norms, that reordered sums can explain."""


def example_of(model: nn.Module, ctx: Context) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The context's example, or for a language model of transformers eight token ids.

    Raises:
        PlanError: there is neither.
    """
    if ctx.example is not None:
        return ctx.example
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if getattr(model, "main_input_name", None) == "input_ids" and vocabulary:
        device = next(model.parameters()).device
        return (), {"input_ids": torch.arange(8, device=device).remainder(vocabulary)[None]}
    raise PlanError(
        Problem(
            where=f"step {ctx.step}",
            what="how data flows through this model shows only when it runs, and there is no input to run it on",
            fix="give example=(inputs,), the arguments of one forward pass",
        )
    )


def outputs(model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]], ctx: Context) -> list[Tensor]:
    """The floating tensors that one forward pass returns.

    Raises:
        PlanError: the pass fails, as it does on meta when the model reads values on the host.
    """
    args, kwargs = example
    # Versions of tensors, by which writes in place are seen, are not counted in inference mode. Fake tensors, because
    # transformers reads values on the host unless it sees that it is being traced.
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    fake = FakeTensorMode(allow_non_fake_inputs=True) if on_meta else nullcontext()
    guess = _Guess() if on_meta else nullcontext()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    with torch.inference_mode(False), torch.no_grad(), fake, guess:
        try:
            result = model(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not ctx.planning:
                raise
            what = f"the model does not run on its example without weights: {str(error).splitlines()[0]}"
            raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix="drop this step for this model")) from error
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


class _Guess(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves its metaclass hook untyped
    """Lets data flow through an operator without a fake implementation, as if it returned something like its first input."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:  # its subclass, but for an operator that `torch.library.custom_op` made
            if not isinstance(error, UnsupportedOperatorException) and "no fake impl registered" not in str(error):
                raise
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if not given or len(func._schema.returns) != 1:
                raise
            return torch.empty_like(given[0])


def hold_equal(before: list[Tensor], after: list[Tensor], ctx: Context) -> None:
    """Compares outputs up to the order of sums; on meta, their shapes and dtypes.

    Raises:
        StepError: they differ.
    """
    shapes = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in (before, after)]
    if shapes[0] != shapes[1]:
        raise StepError(f"step {ctx.step}: the example's outputs changed shape or dtype, from {shapes[0]} to {shapes[1]}")
    for old, new in zip(before, after, strict=True):
        if old.is_meta:
            continue
        change = float((new.double() - old.double()).norm() / old.double().norm().clamp_min(1e-30))
        if not change <= TOLERANCE.get(old.dtype, 5e-2):
            raise StepError(
                f"step {ctx.step}: the example's output changed by {change:.1e} of its norm; the rewrite is wrong for this model"
            )
