"""Removes channels between the linears of an MLP: rows of those that make them, columns of the one that reads them.

Which linears belong together is found by how data flows in one pass: a linear's output that reaches one other linear through
operators that work on each channel alone (activations, products of gate and up), and nothing else. So it holds for any model
family. Each group loses those channels that add least to the reader's output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optforge.errors import PlanError, Problem
from optforge.masks import fold_masks_, said
from optforge.measure.size import weight_bytes
from optforge.measure.sparsity import is_conv1d
from optforge.select import original_name, select
from optforge.transforms.base import Context, Receipt
from optforge.transforms.fuse.flow import example_of, outputs
from optforge.transforms.fuse.packing import PackedPart
from optforge.transforms.prune.importance import contributions
from optforge.transforms.prune.shrink import MARK, Cuts, receipt_of
from optforge.transforms.prune.survey import refusals

if TYPE_CHECKING:
    from optforge.transforms.prune import Prune

ACTIVATIONS = "silu gelu relu sigmoid tanh leaky_relu elu hardtanh hardswish hardsigmoid softplus mish threshold native_dropout"
ARITHMETIC = "mul add sub div neg pow square sqrt rsqrt exp abs erf clamp clamp_min maximum minimum"
POINTWISE = frozenset(f"{ACTIVATIONS} {ARITHMETIC}".split())
SAME = frozenset(["view", "_unsafe_view", "reshape", "clone", "detach", "alias", "_to_copy", "to", "unsqueeze", "squeeze", "expand"])
"""Keep the channels where they are as long as the last dimension stays."""
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim")
"""What a config calls the number of channels."""


def apply(model: nn.Module, options: Prune, ctx: Context) -> Receipt:
    """Removes channels in place; see `Prune.apply`. While planning, the last of each group."""
    notes = said(fold_masks_(model))
    receipt = Receipt(total_bytes=weight_bytes(model), notes=notes)
    groups = _groups(model, ctx)
    everything = len(groups)
    _ignored(model, groups, options, ctx, receipt)
    readers = {name: model.get_submodule(name) for name in groups}
    problems = list(refusals(readers, ctx.step)) + [problem for name in groups if (problem := _again(readers[name], name, ctx))]
    if problems:
        raise PlanError(*problems)
    counts = {name: _count(_inputs(module), options) for name, module in readers.items()}
    for name in [name for name, count in counts.items() if count == _inputs(readers[name])]:
        receipt.skipped[name] = f"of {counts[name]} channels none goes: round_to is {options.round_to}"
        del groups[name], readers[name]
    if not groups:
        raise PlanError(_nothing(receipt, ctx))
    scores: Mapping[str, Tensor] = {}
    if not ctx.planning:
        scores, note = contributions(model, readers, options, ctx)
        notes.append(note)
    cuts = Cuts()
    widths = {(_inputs(readers[name]), counts[name]) for name in groups}
    for name, makers in groups.items():
        kept = torch.arange(counts[name])
        if name in scores:
            kept = scores[name].argsort(descending=True, stable=True)[: counts[name]].sort().values.cpu()
        cuts.inputs[name] = kept
        cuts.outputs.update(dict.fromkeys(makers, kept))
    if len(widths) == 1 and len(groups) == everything:
        ((before, after),) = widths
        config = getattr(model, "config", None)
        cuts.config = {key: after for key in WIDTHS if getattr(config, key, None) == before}
    return receipt_of(model, cuts, "channels", ctx, receipt)


def _count(channels: int, options: Prune) -> int:
    """How many stay."""
    kept = channels - round(channels * options.sparsity)
    return min(channels, -(-max(kept, 1) // options.round_to) * options.round_to)


def _inputs(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0] if is_conv1d(module) else weight.shape[1])


def _again(reader: nn.Module, name: str, ctx: Context) -> Problem | None:
    step = vars(reader).get(MARK, {}).get("channels")
    if step is None:
        return None
    what = f"channels of {name} were removed already (step {step})"
    return Problem(where=f"step {ctx.step}", what=what, fix=f"raise steps.{step}.sparsity, and drop this step")


def _ignored(model: nn.Module, groups: dict[str, list[str]], options: Prune, ctx: Context, receipt: Receipt) -> None:
    """Leaves out the groups of which `ignore` covers a linear."""
    members = {name for reader, makers in groups.items() for name in (reader, *makers)}
    ignore = [*options.ignore, *options.ignore_extra]
    if not ignore or not groups:
        return
    ids = {id(model.get_submodule(name)) for name in members}
    owners = {id(part.pack.linear) for name in members if isinstance(part := model.get_submodule(name), PackedPart)}
    chosen = select(model, ["re:.*"], ignore, step=ctx.step, eligible=lambda _, module: id(module) in ids | owners)
    receipt.ignored = chosen.ignored
    left = {id(model.get_submodule(name)) for name in chosen.ignored}
    for reader, makers in list(groups.items()):
        if any(id(_holder(model.get_submodule(name))) in left for name in (reader, *makers)):
            del groups[reader]


def _holder(module: nn.Module) -> nn.Module:
    return module.pack.linear if isinstance(module, PackedPart) else module


def _nothing(receipt: Receipt, ctx: Context) -> Problem:
    reasons = "; ".join(dict.fromkeys(receipt.skipped.values()))
    what = (
        "no linear of this model is read by one other linear alone, channel by channel" if not reasons and not receipt.ignored else reasons
    )
    fix = f"drop it with '~steps.{ctx.step}', or prune layers, heads or single weights"
    return Problem(where=f"step {ctx.step}", what=what or "all of its channels are ignored", fix=fix)


def _groups(model: nn.Module, ctx: Context) -> dict[str, list[str]]:
    """Reader -> the linears that make its channels."""
    flow = _Flow(model)
    with flow.watched(model):
        found = outputs(model, example_of(model, ctx), ctx)
    flow.leak(found)
    groups = {}
    for reader, makers in flow.readers.items():
        sound = makers and not makers & flow.leaked and all(flow.read_by[maker] == {reader} for maker in makers)
        if (
            sound
            and flow.calls[reader] == 1
            and all(flow.calls[maker] == 1 and flow.width[maker] == flow.takes[reader] for maker in makers)
        ):
            groups[reader] = sorted(makers)
    return groups


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves its metaclass hook untyped
    """Follows the outputs of linears through operators that leave each channel to itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        packed = {id(part.pack.linear) for part in model.modules() if isinstance(part, PackedPart)}
        self.linears = {
            original_name(path): module
            for path, module in model.named_modules()
            if (isinstance(module, nn.Linear | PackedPart) or is_conv1d(module)) and id(module) not in packed
        }
        self.tags: dict[int, tuple[Tensor, frozenset[str]]] = {}
        """id -> the tensor, which is held so that no other gets its id, and the linears whose channels it carries."""
        self.leaked: set[str] = set()
        self.read_by: dict[str, set[str]] = defaultdict(set)
        self.readers: dict[str, frozenset[str]] = {}
        self.calls: dict[str, int] = defaultdict(int)
        self.width: dict[str, int] = {}
        self.takes: dict[str, int] = {}
        self.inside = 0

    def watched(self, model: nn.Module) -> Any:
        """A context in which the mode is on while `model` runs, and its linears are followed."""
        from contextlib import ExitStack

        stack = ExitStack()

        def enter(*_: Any) -> None:
            self.__enter__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped

        def leave(*_: Any) -> None:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped

        handles = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]
        for name, linear in self.linears.items():
            handles += [
                linear.register_forward_pre_hook(lambda _, args, name=name: self._enter(name, args)),
                linear.register_forward_hook(lambda _, __, output, name=name: self._leave(name, output)),
            ]
        for handle in handles:
            stack.callback(handle.remove)
        return stack

    def leak(self, tensors: Any) -> None:
        """What these tensors carry is needed as a whole."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                self.leaked |= self._tag(leaf)

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor):
            self.readers[name] = self._tag(x)
            self.takes[name] = x.shape[-1]
            for maker in self.readers[name]:
                self.read_by[maker].add(name)
        self.calls[name] += 1
        self.inside += 1

    def _leave(self, name: str, output: Any) -> None:
        self.inside -= 1
        if isinstance(output, Tensor):
            self.width[name] = output.shape[-1]
            self.tags[id(output)] = (output, frozenset([name]))

    def _tag(self, tensor: Tensor) -> frozenset[str]:
        found = self.tags.get(id(tensor))
        return found[1] if found is not None else frozenset()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        carried = frozenset().union(*(self._tag(tensor) for tensor in given))
        if carried:
            self._follow(func._schema.name.partition("::")[2].rstrip("_"), given, carried, result)
        return result

    def _follow(self, name: str, given: list[Tensor], carried: frozenset[str], result: Any) -> None:
        mixes = [tensor for tensor in given if not self._tag(tensor) and tensor.numel() > 1]
        width = next(tensor.shape[-1] for tensor in given if self._tag(tensor))
        stays = isinstance(result, Tensor) and result.dim() > 0 and result.shape[-1] == width
        if name not in POINTWISE | SAME or mixes or not stays:
            self.leaked |= carried
        elif isinstance(result, Tensor):
            self.tags[id(result)] = (result, carried)
