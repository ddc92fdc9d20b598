"""The loss of a language model's head without its logits: product, softmax and gradients of a chunk of tokens at a time.

hidden [T, K], weight [V, K] in bf16, fp16 or fp32, targets int64 [T] (`ignore_index` where a token does not count); the mean loss,
fp32 []. A chunk's logits take at most `CHUNK_BYTES`; its gradients are made in their place while they are there, so that forward and
backward together multiply three times, as with full logits, and keep none.

    loss = mean over counted t of  log sum_v exp(z[t, v]) - z[t, target[t]],   z = hidden @ weight.T
    dz[t, v] = (softmax(z[t])[v] - (v == target[t])) / counted

Logits are rounded to hidden's dtype, as a head gives them; everything after is fp32. The weight's gradient is summed over chunks in
fp32. On a GPU the row step is a Triton kernel, elsewhere plain PyTorch. Where no token counts, the loss is NaN, as PyTorch's is.

Source: the chunked form is that of Hsu et al., Liger Kernel, 2024, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optforge.kernels.dispatch import LIBRARY, decomposing, define_operator

CHUNK_BYTES = 256 * 2**20
"""Most bytes of logits that are held at a time."""

RowStep = Callable[[Tensor, Tensor, Tensor, int, bool], Tensor]
"""f(logits [rows, V], targets [rows], 1 / counted fp32 [], ignore_index, grads) -> losses fp32 [rows]; logits become gradients."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The mean loss of the module's docstring, differentiable in hidden and weight; within `dispatch.decompose` plain PyTorch's.

    Args:
        hidden: [T, K] or [..., K], with targets [T] or [...].
    """
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if decomposing():
        logits = torch.nn.functional.linear(flat, weight).float()
        return torch.nn.functional.cross_entropy(logits, wanted, ignore_index=ignore_index)
    grads = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor = torch.ops.optforge.linear_cross_entropy(flat, weight, wanted, ignore_index, grads)[0]
    return loss


def chunk_rows(tokens: int, vocabulary: int, element_bytes: int) -> int:
    """Tokens in a chunk: a multiple of 16 where there are so many."""
    rows = max(1, CHUNK_BYTES // max(1, vocabulary * element_bytes))
    return min(tokens, rows // 16 * 16 or rows)


def _chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, grads: bool, step: RowStep
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and the gradients of hidden and weight (empty without `grads`)."""
    tokens = hidden.shape[0]
    inverse = 1 / (targets != ignore_index).sum().float()
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if grads else hidden.new_empty(0)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if grads else None
    rows = chunk_rows(tokens, weight.shape[0], hidden.element_size())
    for begin in range(0, tokens, max(rows, 1)):
        end = min(begin + rows, tokens)
        logits = hidden[begin:end] @ weight.t()
        losses[begin:end] = step(logits, targets[begin:end], inverse, ignore_index, grads)
        if grad_weight is not None:  # logits are gradients by now
            grad_hidden[begin:end] = logits @ weight
            grad_weight += logits.t() @ hidden[begin:end]
    loss = losses.sum() * inverse
    return loss, grad_hidden, weight.new_empty(0) if grad_weight is None else grad_weight.to(weight.dtype)


def plain_step(logits: Tensor, targets: Tensor, inverse: Tensor, ignore_index: int, grads: bool) -> Tensor:
    """The row step in plain PyTorch."""
    values = logits.float()
    counted = targets != ignore_index
    at = torch.where(counted, targets, 0).unsqueeze(1)
    normalizer = torch.logsumexp(values, 1, keepdim=True)
    losses = (normalizer - values.gather(1, at)).squeeze(1)
    if grads:
        gradient = torch.exp(values - normalizer)
        gradient.scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32))
        logits.copy_(torch.where(counted.unsqueeze(1), gradient * inverse, 0.0))
    return torch.where(counted, losses, 0.0)


def _reference(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, grads: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _chunked(hidden, weight, targets, ignore_index, grads, plain_step)


def _launch(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, grads: bool) -> tuple[Tensor, Tensor, Tensor]:
    from optforge.kernels.cross_entropy_kernel import step  # Triton exists on Linux only

    return _chunked(hidden, weight, targets, ignore_index, grads, step)


def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, grads: bool) -> tuple[Tensor, Tensor, Tensor]:
    made = (torch.empty_like(hidden), torch.empty_like(weight)) if grads else (hidden.new_empty(0), weight.new_empty(0))
    return hidden.new_empty((), dtype=torch.float32), *made


def _flops(hidden: tuple[int, ...], weight: tuple[int, ...], targets: Any, ignore_index: int, grads: bool, **rest: Any) -> int:
    """One product for the loss, two more for the gradients."""
    return 2 * hidden[0] * hidden[1] * weight[0] * (3 if grads else 1)


def _moved(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, grads: bool = False) -> int:
    """What is given, and the gradients; logits need no memory of the device's own."""
    given = hidden.numel() * hidden.element_size() + weight.numel() * weight.element_size()
    return given * (2 if grads else 1) + targets.numel() * 8 + 4


define_operator(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, bool grads) -> (Tensor, Tensor, Tensor)",
    cuda=_launch,
    reference=_reference,
    fake=_fake,
    flops=_flops,
    moved=_moved,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor, Tensor, None, None, None]:
    """The gradients that the forward pass made, times what comes from above."""
    grad_hidden, grad_weight = ctx.saved_tensors
    return grad_hidden * grad, grad_weight * grad, None, None, None


torch.library.register_autograd("optforge::linear_cross_entropy", _backward, setup_context=_keep, lib=LIBRARY)
