"""What reads and what writes the residual stream of a model, found by running its example once.

The stream is as wide as the embedding. Norms of that width read it, linears read what they give, and the other linears with that many
outputs write to it. Every parameter with a dimension of that size must be one of these, or the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from optforge.errors import PlanError, Problem
from optforge.kernels.quantized import Quantized
from optforge.select import original_name
from optforge.transforms.base import Context
from optforge.transforms.fuse.flow import example_of, outputs
from optforge.transforms.quantize.folds import is_norm

ROTATED = "optforge_rotated_by"
"""Attribute of an embedding: the step that rotated the stream it begins."""


@dataclass(kw_only=True)
class Stream:
    """Modules by name, each once."""

    width: int
    embeddings: dict[str, nn.Embedding] = field(default_factory=dict)
    norms: dict[str, nn.Module] = field(default_factory=dict)
    readers: dict[str, nn.Linear] = field(default_factory=dict)
    norm_of: dict[str, str] = field(default_factory=dict)
    """Reader -> the norm whose output it is given."""
    writers: dict[str, nn.Linear] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    """What the example gave before anything changed."""

    @property
    def tied(self) -> dict[str, list[str]]:
        """Readers that share their weight with embeddings -> those embeddings."""
        own = {
            name: [other for other, table in self.embeddings.items() if table.weight is reader.weight]
            for name, reader in self.readers.items()
        }
        return {name: others for name, others in own.items() if others}


def stream(model: nn.Module, ctx: Context) -> Stream:
    """
    Raises:
        PlanError: the model is rotated already, or a part of it stands in the way; all such parts are named.
    """
    seen = _Seen()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if not module._modules and module._parameters:
                stack.callback(module.register_forward_hook(seen.hook(original_name(path))).remove)
        found_outputs = outputs(model, example_of(model, ctx), ctx)
    modules = {original_name(path): module for path, module in model.named_modules()}
    embeddings = {path: each for path in seen.given if isinstance(each := modules[path], nn.Embedding)}
    problems = [
        _refusal(ctx, f"{path} is rotated already (step {getattr(each, ROTATED)})")
        for path, each in embeddings.items()
        if hasattr(each, ROTATED)
    ]
    widths = {each.embedding_dim for each in embeddings.values()}
    if problems or len(widths) != 1:
        what = f"its embeddings are {sorted(widths)} wide, not all as wide as one stream" if widths else "no embedding begins a stream"
        raise PlanError(*(problems or [_refusal(ctx, what)]))
    result = Stream(width=widths.pop(), embeddings=embeddings, outputs=found_outputs)
    _sort(result, modules, seen)
    problems = list(_in_the_way(result, model, modules, ctx))
    if problems:
        raise PlanError(*problems)
    return result


class _Seen:
    """Storages of what each module was given and gave; they are kept alive, so that none is used twice."""

    def __init__(self) -> None:
        self.given: dict[str, int] = {}
        self.gave: dict[int, str] = {}
        self.alive: list[Tensor] = []

    def hook(self, path: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                self.alive += [args[0], output]
                self.given[path] = args[0].untyped_storage()._cdata
                self.gave[output.untyped_storage()._cdata] = path

        return seen


def _sort(result: Stream, modules: dict[str, nn.Module], seen: _Seen) -> None:
    """Norms that linears read, those linears, and the other linears that give as much as the stream is wide."""
    linears = {path: each for path in seen.given if isinstance(each := modules[path], nn.Linear)}
    for path, linear in linears.items():
        before = seen.gave.get(seen.given[path])
        if before is not None and linear.in_features == result.width and _is_norm_of(modules[before], result.width):
            result.readers[path], result.norm_of[path], result.norms[before] = linear, before, modules[before]
    result.writers = {path: each for path, each in linears.items() if path not in result.readers and each.out_features == result.width}


def _is_norm_of(module: nn.Module, width: int) -> bool:
    weight = module._parameters.get("weight")
    return is_norm(module) and weight is not None and weight.numel() == width


def _in_the_way(result: Stream, model: nn.Module, modules: dict[str, nn.Module], ctx: Context) -> list[Problem]:
    """Everything that no rotation can be folded into."""
    handled = {id(each) for part in (result.embeddings, result.norms, result.readers, result.writers) for each in part.values()}
    reasons: dict[str, list[str]] = {}
    for path, module in modules.items():
        own = [key for key, each in module._parameters.items() if each is not None and result.width in each.shape]
        if own and id(module) not in handled:
            what = "norms that no linear layer reads" if is_norm(module) else "reads or writes the stream in a way that is not understood"
            reasons.setdefault(what, []).append(path or "the model itself")
    for path, module in {**result.readers, **result.writers}.items():
        if isinstance(module, Quantized):
            reasons.setdefault("quantized already: rotate first", []).append(path)
        elif type(module).forward is not nn.Linear.forward or not module.weight.is_floating_point() or is_parametrized(module):
            reasons.setdefault("no plain linear layers", []).append(path)
    for path, norm in result.norms.items():
        if isinstance(norm, nn.LayerNorm) or norm._parameters.get("bias") is not None:
            reasons.setdefault("norms that subtract a mean or add a bias, and a rotation would move both", []).append(path)
    users: dict[int, list[str]] = {}
    for path, module in modules.items():
        for each in module._parameters.values():
            if each is not None:
                users.setdefault(id(each), []).append(path)
    known = {*result.embeddings, *result.readers}
    for names in users.values():
        if len(names) > 1 and any(id(modules[name]) in handled for name in names) and not set(names) <= known:
            reasons.setdefault("share a weight that only some of them could have rotated", []).append(", ".join(names))
    return [_refusal(ctx, f"{_some(names)}: {what}") for what, names in reasons.items()]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _refusal(ctx: Context, what: str) -> Problem:
    return Problem(
        where=f"step {ctx.step}", what=f"the residual stream cannot be rotated: {what}", fix=f"drop the step with '~steps.{ctx.step}'"
    )


def rms_like(norm: nn.Module, width: int, device: torch.device) -> float | None:
    """What a norm's stored weight is less than the factor it means: 0, or 1 where it is stored less one (Gemma); None where the norm does
    more than divide by the root mean square and multiply."""
    weight = norm._parameters["weight"]
    assert weight is not None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, width, generator=draw).to(device=device, dtype=weight.dtype)
    expected = x.float() / x.float().square().mean(1, keepdim=True).sqrt()
    held = norm._parameters["weight"]
    try:
        for stored in (1.0, 0.0):
            norm._parameters["weight"] = nn.Parameter(torch.full_like(weight, stored), requires_grad=False)
            with torch.no_grad():
                found = norm(x).float()
            if bool((found - expected).norm() <= 2e-2 * expected.norm()):
                return 1 - stored
    finally:
        norm._parameters["weight"] = held
    return None
