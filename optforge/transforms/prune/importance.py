"""What parts of a model do to its samples: how far a layer turns its input, how much a linear takes from each of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.calibrate.statistics import Columns
from optforge.calibrate.walk import Block, walk
from optforge.errors import PlanError, Problem
from optforge.measure.sparsity import dense
from optforge.transforms.base import Context

if TYPE_CHECKING:
    from optforge.calibrate.samples import Taken
    from optforge.transforms.prune import Prune


def contributions(model: nn.Module, layers: Mapping[str, nn.Module], options: Prune, ctx: Context) -> tuple[dict[str, Tensor], str]:
    """fp32 [K] of each layer: the mean square of what each input adds to the layer's outputs, and the sentence about the samples.

    That is the input's mean square times the squared norm of its weights.
    """
    taken = _taken(options, ctx)
    found: dict[str, Columns] = {}

    def visit(block: Block) -> None:
        inside = {name: layer for name, layer in block.inside(layers).items() if name not in found}
        for name, layer in inside.items():
            weight = dense(layer)
            assert weight is not None
            found[name] = Columns(weight.shape[1], block.device)
        block.observe(inside, lambda name, x: found[name].add(x))

    _walk(model, taken, visit, ctx, outside=layers)
    return {name: _contribution(layer, found[name]) for name, layer in layers.items()}, taken.note


def influences(model: nn.Module, blocks: Mapping[str, nn.Module], options: Prune, ctx: Context) -> tuple[dict[str, float], str]:
    """Block influence of each block: 1 - the mean cosine of its input and its output over all positions (Men and others 2024,
    "ShortGPT", section 2.2), and the sentence about the samples."""
    taken = _taken(options, ctx)
    sums = dict.fromkeys(blocks, 0.0)
    counts = dict.fromkeys(blocks, 0)

    def see(name: str, before: Tensor, after: Tensor) -> None:
        cosine = F.cosine_similarity(before.float(), after.float(), dim=-1)
        sums[name] += float((1 - cosine).sum())
        counts[name] += cosine.numel()

    def visit(block: Block) -> None:
        inside = {id(module) for module in block.module.modules()}
        with _states({name: module for name, module in blocks.items() if id(module) in inside and not counts[name]}, see):
            for call in block.calls:
                block.run(call)

    _walk(model, taken, visit, ctx)
    return {name: sums[name] / counts[name] if counts[name] else 0.0 for name in blocks}, taken.note


def _taken(options: Prune, ctx: Context) -> Taken:
    """
    Raises:
        PlanError: there is nothing to measure on.
    """
    if ctx.samples is None:
        what = f"{options.method.name} are chosen by what they do to samples, and there are none"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix="give data, or use prune/magnitude, which needs none"))
    return ctx.samples.take(options.samples, tokens=options.sample_tokens, step=ctx.step)


def _walk(model: nn.Module, taken: Taken, visit: Any, ctx: Context, outside: Mapping[str, nn.Module] | None = None) -> None:
    from optforge.select import repeated_blocks

    assert ctx.backend is not None
    within = {id(module) for block in repeated_blocks(model).values() for module in block.modules()}
    rest = {name: layer for name, layer in (outside or {}).items() if id(layer) not in within}
    device = ctx.backend.torch_device()
    walk(model, taken.examples, visit, device=device, outside=rest, tell=ctx.tell, title="measure importance")


def _contribution(layer: nn.Module, inputs: Columns) -> Tensor:
    weight = dense(layer)
    assert weight is not None
    return inputs.mean_square.to(weight.device) * weight.float().square().sum(0)


@contextmanager
def _states(blocks: Mapping[str, nn.Module], see: Any) -> Iterator[None]:
    """Tells `see` the first tensor that each block is given and gives."""

    def hook(name: str) -> Any:
        def seen(_: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
            before = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            after = output[0] if isinstance(output, tuple) else output
            if isinstance(after, Tensor) and after.shape == before.shape:
                see(name, before, after)

        return seen

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in blocks.items()]
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
