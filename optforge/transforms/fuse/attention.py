"""Gives a decoder of transformers the grouped attention of `optforge.kernels.attention`, on CPUs, for this instance alone.

transformers looks its attention up by the name in the model's own config, so choosing another name changes no class and
no other model. The function computes what the name says for plain causal attention only; where a call brings a mask of its
own (padding, a sliding window, a static cache), dropout, or needs nothing causal, transformers' own SDPA runs, as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optforge.errors import StepError
from optforge.kernels import dispatch
from optforge.kernels.attention import grouped_attention
from optforge.transforms.base import Context

NAME = "optforge_grouped"
_SDPA = "sdpa"
TOLERANCE = 3e-2
"""Of the norm of one layer's output; scores that are rounded to bf16 move it by 1e-3 to 1e-2."""
_differences: list[float] | None = None


def suits(model: nn.Module, ctx: Context) -> str | None:
    """Why the model keeps its attention, or None where the grouped form takes over."""
    if ctx.device.backend != "cpu":
        return f"attention stays SDPA: its kernels are the faster ones on {ctx.device.name}"
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return None if found == _SDPA else "attention stays as it is: the model is none of transformers' with SDPA"


def use_(model: nn.Module) -> None:
    """Makes the model look up the grouped attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, _forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[_SDPA])
    model.config = copy.deepcopy(model.config)  # callers build several models from one config
    for child in model.modules():
        if isinstance(getattr(child, "config", None), type(model.config)):
            child.config = model.config
    model.config._attn_implementation = NAME  # type: ignore[union-attr]  # a transformers model, by `suits`


def verify(run: Callable[[], Any], step: str) -> None:
    """Runs the model once and compares every layer's attention with PyTorch's on the same inputs.

    Layer by layer, because the rest of a network amplifies what one rounding of scores in bf16 changes.

    Raises:
        StepError: a layer's result is further off than rounding explains.
    """
    global _differences  # noqa: PLW0603 - what the function below reports to; None outside of this one
    _differences = []
    try:
        run()
        worst = max(_differences, default=0.0)
    finally:
        _differences = None
    if not worst <= TOLERANCE:
        raise StepError(f"step {step}: grouped attention differs from PyTorch's by {worst:.1e} of its norm in one layer")


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: heads first in, [B, T, H, D] out."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if _one_row(query, key, attention_mask, options):
        return one_row_attention(query, key, value, attention_mask, options.get("scaling") or query.shape[-1] ** -0.5), None
    plain = (
        dispatch.on_cpu(query)
        and attention_mask is None
        and query.shape[2] == key.shape[2]
        and query.shape[2] > 1
        and not options.get("dropout")
    )
    causal = options.get("is_causal")
    if not plain or not (getattr(module, "is_causal", True) if causal is None else causal) or options.get("softcap"):
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return out
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    grouped = grouped_attention(query, key, value, scale).transpose(1, 2).contiguous()
    if _differences is not None:
        _differences.append(_difference(grouped, sdpa_attention_forward(module, query, key, value, None, **options)[0]))
    return grouped, None


def _one_row(query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether this is one query over a cache, in a program that is compiled for a CPU."""
    if not torch.compiler.is_compiling() or dispatch.decomposing() or not dispatch.on_cpu(query) or query.shape[2] != 1:
        return False
    return not options.get("dropout") and not options.get("softcap") and (mask is None or mask.shape[1] == 1)


def one_row_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of one query over a cache, as sums that a compiler makes loops of.

    query [B, H, 1, D], key and value [B, G, L, D] with H a multiple of G; mask None or [B or 1, 1, 1, L], bool (true: seen) or
    added to the scores; out [B, 1, H, D] in query's dtype. Scores, softmax and sums are fp32, so that nothing is rounded on the
    way. Uncompiled it would write out every product: call it in a compiled program only.
    """
    batch, heads, _, width = query.shape
    groups, length = key.shape[1], key.shape[2]
    query = (query.float() * scale).view(batch, groups, heads // groups, 1, width)
    scores = (query * key.float()[:, :, None]).sum(-1)
    if mask is not None:
        seen = mask.view(-1, 1, 1, length)
        scores = scores.masked_fill(~seen, float("-inf")) if seen.dtype is torch.bool else scores + seen
    mixed = (scores.softmax(-1)[..., None] * value.float()[:, :, None]).sum(-2)
    return mixed.view(batch, 1, heads, -1).to(value.dtype)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
