"""Finds where a factor on each input of a linear layer can be folded into what comes before it, by trying.

AWQ and SmoothQuant divide a layer's inputs by scales and multiply its weight by them. The division costs nothing where whatever
makes the inputs can do it: the weight of a norm, or the rows of a linear whose outputs reach the layer through nothing but sums over
tokens and products with other values (v before o, up before down). Which operation that is shows when the block runs once more with
factors that are powers of two: floating-point numbers carry them exactly, so the layer's inputs come out multiplied by precisely
these factors, or the operation is not the one. So no name of any model family is needed, and heads that several queries share,
packed linears and norms that add one to their weight are found like the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optforge.calibrate.walk import Block
from optforge.kernels.linears import Quantized
from optforge.models.base import Example
from optforge.select import PARTS

NORM, NORM_FROM_ONE, ROWS = "norm", "norm_from_one", "rows"
"""What carries the factors: a norm's weight, one that is stored less one (Gemma's), or rows of a linear."""
NEAR = 0.02
"""Largest distance of the logarithm (base 2) of a factor that came through from a whole number."""
SAME = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest relative change of a block's output that folding may make: the rounding of what it moves."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """An operation that can carry a factor for each of its channels, and the linears whose inputs carry it then."""

    source: str
    """Its path within the block."""
    kind: str
    start: int
    stop: int
    """The rows that are channels, of a linear that holds others too."""
    readers: tuple[str, ...]
    channels: Tensor | None = None
    """int64 [K]: the channel that each input of the readers is made of; None where it is their own."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    def spread(self, factors: Tensor) -> Tensor:
        """Factors of the channels [size] to those of the readers' inputs [K]."""
        return factors if self.channels is None else factors[self.channels.to(factors.device)]


@dataclass(kw_only=True)
class Flow:
    """One pass through a block: which linears read the very same tensor, how large their inputs are, and what came out."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """The tensor that each linear was given; those that were called once."""
    sizes: dict[str, Tensor] = field(default_factory=dict)
    """Sum of the absolute values of each input column, fp64 [K]."""
    order: list[str] = field(default_factory=list)
    """Linears and norms as they were called."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """The output of each module with a weight of one dimension."""
    outputs: list[Tensor] = field(default_factory=list)

    def groups(self) -> list[tuple[str, ...]]:
        """Linears that read the same tensor."""
        found: dict[int, list[str]] = {}
        for path, x in self.inputs.items():
            found.setdefault(id(x), []).append(path)
        return [tuple(paths) for paths in found.values()]


def flow(block: Block, call: Example) -> Flow:
    """Runs a block on one sample and watches."""
    seen, calls = Flow(), dict[str, int]()
    with ExitStack() as stack:
        for path, module in block.module.named_modules():
            if is_linear(module):
                stack.callback(module.register_forward_pre_hook(_linear_hook(seen, calls, path)).remove)
            elif is_norm(module):
                stack.callback(module.register_forward_hook(_norm_hook(seen, path)).remove)
        result = block.run(call)
    seen.inputs = {path: x for path, x in seen.inputs.items() if calls[path] == 1}
    seen.outputs = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return seen


def is_linear(module: nn.Module) -> bool:
    """A linear layer with a weight of two dimensions, GPT-2's transposed one included."""
    weight = module._parameters.get("weight")
    named = isinstance(module, nn.Linear) or any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    return named and weight is not None and weight.dim() == 2


def is_norm(module: nn.Module) -> bool:
    """A module whose only parameters are a weight of one dimension and perhaps a bias of the same size."""
    own = {name: each for name, each in module._parameters.items() if each is not None}
    sizes = {each.shape for each in own.values()}
    return "weight" in own and own.keys() <= {"weight", "bias"} and len(sizes) == 1 and own["weight"].dim() == 1 and not module._modules


def find(block: Block, call: Example, wanted: Mapping[str, nn.Module], shared: set[int]) -> tuple[list[Fold], dict[str, str]]:
    """The folds for every linear of `wanted` (by path within the block), and why there is none for the others.

    Args:
        call: one sample's arguments; a channel that is zero all over it cannot be told.
        shared: ids of parameters that several modules hold, which cannot be scaled for one of them.
    """
    before = flow(block, call)
    folds, refused = [], {}
    for group in before.groups():
        if not any(path in wanted for path in group):
            continue
        fold = _of_group(block, call, before, group, shared)
        if isinstance(fold, str):
            refused.update({path: fold for path in group if path in wanted})
        elif holds(block, call, before, [fold]):
            folds.append(fold)
        else:
            reason = f"{fold.source} is also read by something else than linear layers"
            refused.update({path: reason for path in group if path in wanted})
    for path in wanted:
        if path not in before.inputs:
            refused[path] = "it is not called exactly once in a pass"
    return folds, refused


def holds(block: Block, call: Example, before: Flow, folds: list[Fold]) -> bool:
    """Whether the block gives the same with factors folded in everywhere: nothing else reads what they are folded into."""
    modules = dict(block.module.named_modules())
    if not all(path in modules for fold in folds for path in (fold.source, *fold.readers)):
        return False
    with ExitStack() as stack:
        for fold in folds:
            factors = _random(fold.size, block.device)
            stack.enter_context(_multiplied(modules[fold.source], fold, factors))
            for path in fold.readers:
                stack.enter_context(_with(modules[path], scaled(modules[path], inputs=1 / fold.spread(factors))))
        after = flow(block, call)
    return same(before, after)


def same(before: Flow, after: Flow) -> bool:
    """Whether a block gave the same in both passes, up to the rounding of what was moved."""
    return all(_near(old, new) for old, new in zip(before.outputs, after.outputs, strict=True))


def _near(old: Tensor, new: Tensor) -> bool:
    change = (new.double() - old.double()).norm() / old.double().norm().clamp_min(1e-30)
    return bool(change <= SAME.get(old.dtype, 3e-2))


def _of_group(block: Block, call: Example, before: Flow, group: tuple[str, ...], shared: set[int]) -> Fold | str:
    """The fold for linears that read one tensor, or why there is none."""
    modules = dict(block.module.named_modules())
    for path in group:
        if isinstance(modules[path], Quantized) or _holds_any(modules[path], shared):
            return f"{path}, which reads the same inputs, cannot be scaled: it is quantized already or shares its weight"
    x = before.inputs[group[0]]
    columns = x.shape[-1]
    for path in reversed([path for path in before.norms if modules[path]._parameters["weight"].numel() == columns]):
        if before.norms[path] is x and not _holds_any(modules[path], shared):
            for kind in (NORM, NORM_FROM_ONE):
                fold = Fold(source=path, kind=kind, start=0, stop=columns, readers=group)
                if _comes_through(block, call, before, fold):
                    return fold
    earlier = before.order[: before.order.index(group[0])]
    for path in reversed([path for path in earlier if path in before.inputs and path not in group]):
        if isinstance(modules[path], Quantized) or _holds_any(modules[path], shared):
            continue
        for start, stop in _parts(block.module, path, columns):
            if columns % (stop - start) == 0:
                fold = Fold(source=path, kind=ROWS, start=start, stop=stop, readers=group)
                if _comes_through(block, call, before, fold):
                    return fold
                mapped = _mapped(block, call, before, fold)
                if mapped is not None:
                    return mapped
    return "nothing before it can carry a factor for each of its inputs"


def _parts(root: nn.Module, path: str, columns: int) -> list[tuple[int, int]]:
    """The row ranges of a linear that could feed `columns` inputs, the likelier ones first: those of the linears that it is packed
    from, last first; else all of it, and where models hold v and up in one that they packed themselves (GPT-2, Phi-3)."""
    module = root.get_submodule(path)
    parent = root.get_submodule(path.rpartition(".")[0])
    ranges = [(getattr(parent, name).start, getattr(parent, name).stop) for name in getattr(module, PARTS, ())]
    if ranges:
        return ranges[::-1]
    weight = module._parameters["weight"]
    assert weight is not None
    rows = weight.shape[1 if _transposed(module) else 0]
    starts = (0, rows - columns, rows - (rows - columns) // 2)
    return [(start, rows) for start in dict.fromkeys(starts) if 0 <= start < rows]


def _comes_through(block: Block, call: Example, before: Flow, fold: Fold) -> bool:
    """Whether random factors on the channels arrive as they are."""
    factors = _random(fold.size, block.device)
    arrived = _arrived(block, call, before, fold, factors)
    if arrived is None or arrived.numel() != factors.numel():
        return False
    alive = arrived.isfinite()
    return bool(alive.any()) and torch.equal(arrived[alive], factors.log2().double()[alive])


def _mapped(block: Block, call: Example, before: Flow, fold: Fold) -> Fold | None:
    """The fold with the channel that each input is made of: each bit of the channel's number is sent as a factor of 1 or 2."""
    probe = _arrived(block, call, before, fold, _random(fold.size, block.device))
    if probe is None or not bool(probe.isfinite().all()) or not bool((probe != 0).any()):
        return None
    numbers = torch.arange(fold.size, device=block.device)
    channels = torch.zeros(probe.numel(), dtype=torch.int64, device=probe.device)
    for bit in range(max(1, (fold.size - 1).bit_length())):
        arrived = _arrived(block, call, before, fold, torch.exp2((numbers >> bit & 1).float()))
        if arrived is None or not bool(((arrived == 0) | (arrived == 1)).all()):
            return None
        channels += arrived.long() << bit
    if int(channels.max()) >= fold.size or len(set(channels.tolist())) < fold.size:
        return None  # rows that reach no input may do something else, as k does beside v
    return Fold(source=fold.source, kind=fold.kind, start=fold.start, stop=fold.stop, readers=fold.readers, channels=channels)


def _arrived(block: Block, call: Example, before: Flow, fold: Fold, factors: Tensor) -> Tensor | None:
    """Logarithms (base 2) of the factors that the readers' inputs carry when the channels carry `factors`, fp64 [K]; NaN where an
    input is always zero; None where they are no powers of two."""
    with _multiplied(block.module.get_submodule(fold.source), fold, factors):
        after = flow(block, call)
    path = fold.readers[0]
    if path not in after.sizes:
        return None
    ratio = (after.sizes[path] / before.sizes[path]).log2()
    silent = (before.sizes[path] == 0) & (after.sizes[path] == 0)
    if not bool(((ratio - ratio.round()).abs() <= NEAR)[~silent].all()):
        return None
    return torch.where(silent, torch.nan, ratio.round())


def _random(size: int, device: torch.device) -> Tensor:
    """Powers of two from 1/2 to 4, fp32 [size], the same in every call."""
    return torch.exp2(torch.randint(-1, 3, (size,), generator=torch.Generator().manual_seed(size)).float()).to(device)


def multiplied(module: nn.Module, fold: Fold, factors: Tensor, own: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The parameters of a fold's source with its channels multiplied by `factors`, in their own dtypes; `own` in place of its own."""
    weight, bias = _weight_and_bias(module, own)
    if fold.kind == ROWS:
        whole = torch.ones(weight.shape[1 if _transposed(module) else 0], device=weight.device)
        whole[fold.start : fold.stop] = factors
        return scaled(module, outputs=whole, own=own)
    one = 1.0 if fold.kind == NORM_FROM_ONE else 0.0
    result = {"weight": ((weight.float() + one) * factors - one).to(weight.dtype)}
    return result if bias is None else {**result, "bias": (bias.float() * factors).to(bias.dtype)}


def carried(module: nn.Module, fold: Fold, tensors: Mapping[str, Tensor], scales: Tensor, own: Mapping[str, Tensor] | None) -> Tensor:
    """What the channels are really divided by once a norm's weight is rounded to its dtype, fp32; `scales` for anything else.

    With these the layers behind the norm make up for its rounding exactly.
    """
    if fold.kind == ROWS:
        return scales
    one = 1.0 if fold.kind == NORM_FROM_ONE else 0.0
    old, new = _weight_and_bias(module, own)[0].float() + one, tensors["weight"].float() + one
    found = old / new
    return torch.where(found.isfinite() & (found > 0), found, scales)


def scaled(
    module: nn.Module, *, inputs: Tensor | None = None, outputs: Tensor | None = None, own: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The parameters of a linear with its input columns [K] and output rows [N] multiplied, in their own dtypes."""
    weight, bias = _weight_and_bias(module, own)
    values = weight.float()
    for factors, dim in ((inputs, 1), (outputs, 0)):
        if factors is not None:
            across = (dim == 1) != _transposed(module)
            values = values * (factors[None, :] if across else factors[:, None])
    result = {"weight": values.to(weight.dtype)}
    return result if bias is None or outputs is None else {**result, "bias": (bias.float() * outputs).to(bias.dtype)}


def _weight_and_bias(module: nn.Module, own: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    held = dict(module._parameters) | dict(own or {})
    weight = held["weight"]
    assert weight is not None
    return weight.detach(), held.get("bias")


def _transposed(module: nn.Module) -> bool:
    return not isinstance(module, nn.Linear)


def _holds_any(module: nn.Module, shared: set[int]) -> bool:
    return any(id(parameter) in shared for parameter in module._parameters.values() if parameter is not None)


def _multiplied(module: nn.Module, fold: Fold, factors: Tensor) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(_with(module, multiplied(module, fold, factors)))
    return stack


@contextmanager
def _with(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Other parameters for a while; the objects that were there come back."""
    before = {name: module._parameters[name] for name in tensors}
    for name, tensor in tensors.items():
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(before)


def _linear_hook(seen: Flow, calls: dict[str, int], path: str):  # type: ignore[no-untyped-def]  # what PyTorch takes for a hook
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            calls[path] = calls.get(path, 0) + 1
            seen.inputs[path] = args[0]
            seen.sizes[path] = args[0].detach().double().abs().flatten(0, -2).sum(0)
            seen.order.append(path)

    return hook


def _norm_hook(seen: Flow, path: str):  # type: ignore[no-untyped-def]  # what PyTorch takes for a hook
    def hook(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            seen.norms[path] = output

    return hook
