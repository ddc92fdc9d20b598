"""What rounding each layer costs, for every layer and scheme at once: the second-order term of the divergence of the outputs.

Measuring each layer by itself takes a pass of the model for every layer and scheme. To second order one backward pass serves them
all. With e the change of a layer's output and J the Jacobian of the logits, the mean KL divergence of the model's predictions is
half the mean of e^T J^T F J e, where F = E[(grad log p)(grad log p)^T] is the Fisher information of the softmax (the first-order
term is zero; Martens, New insights and perspectives on the natural gradient method, JMLR 21, 2020, section 5). A label drawn from
the model's own prediction gives an unbiased sample: g, the gradient of its log-probability at the layer's output, and (g . e)^2 / 2.

Errors of different positions are taken as independent, which leaves out the cross terms and lowers the variance of the sum by
the number of positions. Absolute values are therefore estimates; `choose` uses their proportions alone and measures the whole.
A model without class probabilities is given random signs in place of labels: the same sum is then its squared relative error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optforge.calibrate.samples import to
from optforge.kernels.dispatch import decompose
from optforge.measure.mode import evaluating
from optforge.models.base import Example, Tell

Costs = dict[str, dict[str, float]]
"""Layer -> scheme -> estimated KL in nats per position, or squared relative error."""
Rounded = Mapping[str, Mapping[str, nn.Module]]
"""Scheme -> name -> the layer under that scheme."""
HALF_SCALE = 1024.0
"""What gradients are multiplied by in fp16, whose smallest normal number is 6e-5."""


@dataclass(kw_only=True)
class Seen:
    """Sums over all samples: of each layer and scheme."""

    second: Costs = field(default_factory=dict)
    """Of (g . e)^2 over positions, with labels drawn from the prediction."""
    first: Costs = field(default_factory=dict)
    """Of g . e over positions, with the true labels: minus the change of the log-likelihood to first order."""
    noise: Costs = field(default_factory=dict)
    signal: dict[str, float] = field(default_factory=dict)
    """Energy of the change, and of the layer's output: for SQNR."""
    positions: int = 0
    labelled: int = 0
    """Positions with a true label."""
    energy: float = 0.0
    """Of the outputs, where there are no classes."""

    def costs(self) -> Costs:
        """The estimated cost of each layer and scheme."""
        if self.energy:
            return {name: {scheme: value / self.energy for scheme, value in own.items()} for name, own in self.second.items()}
        scale = 2.0 * max(self.positions, 1)
        return {name: {scheme: value / scale for scheme, value in own.items()} for name, own in self.second.items()}


def observe(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    rounded: Rounded,
    examples: Sequence[Example],
    *,
    device: torch.device,
    classes: bool,
    labels: Callable[[Example], Tensor | None] | None = None,
    seed: int = 0,
    tell: Tell | None = None,
    title: str = "quality cost of each layer",
) -> Seen:
    """Runs each sample forwards and backwards once (twice with `labels`) through the model as it is.

    Args:
        model: on `device`; nothing in it is changed.
        layers: what is considered, by name; each maps a tensor to a tensor.
        rounded: scheme -> name -> the same layer under that scheme.
        examples: arguments of one pass each.
        classes: the outputs are logits over classes; else they are compared as they are.
        labels: gives the true classes of a sample, flat and with -1 where there is none, in the order of the positions; for `Seen.first`.
        seed: of the labels drawn.
    """
    seen = Seen()
    draw = torch.Generator(device=device).manual_seed(seed)
    scale = HALF_SCALE if any(p.dtype is torch.float16 for p in model.parameters()) else 1.0
    with evaluating(model), _frozen(model), torch.inference_mode(False), torch.enable_grad(), decompose():
        for index, example in enumerate(examples):
            if tell is not None:
                tell(title, index / len(examples))
            args, kwargs = to(example, device)
            true = labels(example) if labels is not None else None
            for truth in (None,) if true is None else (None, true.to(device)):
                with _watched(layers, rounded, seen, first=truth is not None, scale=scale):
                    outputs = model(*args, **kwargs)
                    score = _score(outputs, draw, seen, classes=classes, truth=truth)
                    torch.autograd.backward([score * scale])
    if tell is not None:
        tell(title, 1.0)
    return seen


def _score(outputs: Any, draw: torch.Generator, seen: Seen, *, classes: bool, truth: Tensor | None) -> Tensor:
    """The scalar whose gradient is looked at: the log-probability of drawn or true classes, or the outputs with random signs."""
    if not classes:
        leaves = [leaf.float() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        seen.energy += sum(float(leaf.detach().square().sum()) for leaf in leaves)
        seen.positions += 1
        signs = [torch.randint(0, 2, leaf.shape, generator=draw, device=leaf.device) * 2 - 1 for leaf in leaves]
        return sum((leaf * sign).sum() for leaf, sign in zip(leaves, signs, strict=True))  # type: ignore[return-value]  # of tensors
    logits: Tensor = getattr(outputs, "logits", outputs)
    log_probs = torch.log_softmax(logits.reshape(-1, logits.shape[-1]).float(), -1)
    if truth is not None:
        known = truth >= 0
        seen.labelled += int(known.sum())
        return log_probs[known].gather(-1, truth[known][:, None]).sum()
    seen.positions += log_probs.shape[0]
    drawn = torch.multinomial(log_probs.detach().exp(), 1, generator=draw)
    return log_probs.gather(-1, drawn).sum()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient while it is open: only those of the layers' outputs are looked at."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@contextmanager
def _watched(layers: Mapping[str, nn.Module], rounded: Rounded, seen: Seen, *, first: bool, scale: float) -> Iterator[None]:
    """While open, every call of a layer adds to `seen` as soon as its gradient is known, so that nothing outlives its turn."""

    def hook(name: str) -> Callable[..., Tensor]:
        def called(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if not output.requires_grad:  # before the first of them nothing asks for a gradient
                output = output.detach().requires_grad_().clone()
            x, y = args[0].detach(), output.detach()
            output.register_hook(lambda grad: _add(seen, name, rounded, (x, y, grad), first=first, scale=scale))  # type: ignore[no-untyped-call]  # torch ships it untyped
            return output

        return called

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(hook(name)).remove)
        yield


def _add(seen: Seen, name: str, rounded: Rounded, at: tuple[Tensor, Tensor, Tensor], *, first: bool, scale: float) -> None:
    x, y, grad = at
    with torch.no_grad():
        found = grad.reshape(-1, grad.shape[-1]).float() / scale
        if not first:
            seen.signal[name] = seen.signal.get(name, 0.0) + float(y.float().square().sum())
        for scheme, others in rounded.items():
            if name not in others:
                continue
            error = (others[name](x).float() - y.float()).reshape(found.shape)
            along = (found * error).sum(-1)
            if first:
                _sum(seen.first, name, scheme, float(along.sum()))
            else:
                _sum(seen.second, name, scheme, float(along.double().square().sum()))
                _sum(seen.noise, name, scheme, float(error.square().sum()))


def _sum(table: Costs, name: str, scheme: str, value: float) -> None:
    own = table.setdefault(name, {})
    own[scheme] = own.get(scheme, 0.0) + value
