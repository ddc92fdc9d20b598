"""What a quantize step will change and what it leaves, with the reason: decided before the first layer is touched.

All refusals of one kind are raised together, so that a user corrects a recipe once and not layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.utils import parametrize

from optforge.errors import PlanError, Problem
from optforge.kernels.convolutions import hands_on
from optforge.kernels.linears import Quantized
from optforge.kernels.parameters import QuantizedParameters
from optforge.measure.size import nbytes, weight_bytes
from optforge.select import original_name, select

if TYPE_CHECKING:
    from optforge.transforms.quantize import Quantize

OUT_IN, IN_OUT, CONV2D, EMBEDDING = "out_in", "in_out", "conv2d", "embedding"
"""How a layer stores its weight: [N, K] as `nn.Linear`, [K, N] as GPT-2's Conv1D, [N, ...] of which all but N are inputs, or a row for
each index."""


ATTENTION_INPUTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Parameters of `nn.MultiheadAttention`, of which it has the first or the other three."""


@dataclass(kw_only=True)
class Survey:
    """Names to what will happen to them. `ties` maps a linear to the names of the modules that share its weight."""

    layers: dict[str, nn.Module] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    ties: dict[str, list[str]] = field(default_factory=dict)
    policy: str = "skip"
    skipped: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    total_bytes: int = 0
    own: dict[str, list[str]] = field(default_factory=dict)
    """Modules whose code reads weights itself, to the local names of those: experts, attention of PyTorch."""

    def leave(self, name: str, reason: str) -> None:
        """Takes a layer out of what will be changed."""
        self.skipped[name] = reason
        for table in (self.layers, self.layouts, self.ties, self.own):
            table.pop(name, None)


def survey(model: nn.Module, options: Quantize, step: str) -> Survey:
    """Chooses, sorts and refuses.

    Raises:
        SelectorError: an entry matches nothing.
        PlanError: see `Quantize.apply`.
    """
    ignore = [*options.ignore, *options.ignore_extra]
    chosen = select(model, _targets(model, options.targets), ignore, step=step, eligible=_has_weight)
    refused = _refused(chosen.chosen, step)
    result = Survey(ignored=chosen.ignored, unmatched=chosen.unmatched, policy=options.tied.name, total_bytes=weight_bytes(model))
    readers = _read_by_others(model)
    shared = _sharers(model)
    for name, module in chosen.chosen.items():
        result.own.update(_own_weights(name, module) if name not in refused else {})
    for name, module in chosen.chosen.items():
        if name in refused or name in result.own:
            continue
        weight = _weight(module)
        partners = [other for other in shared[id(weight)] if other != name]
        if layout_of(module) == EMBEDDING and options.tied.name == "both" and not chosen.chosen.keys().isdisjoint(partners):
            continue  # the head's storage serves it
        reason = readers.get(id(module)) or _misfit(module, options) or _tie(model, partners, options.tied.name)
        if reason:
            result.skipped[name] = reason
            continue
        result.layers[name] = module
        result.layouts[name] = layout_of(module)
        if partners:
            result.ties[name] = partners
    problems = [*dict.fromkeys(refused.values()), *_groups(model, result, options, step)]
    left = {**dict(_experts(model, ignore, result.total_bytes, step)), **dict(_attention_inputs(model, ignore, step))}
    result.skipped.update({name: why for name, why in left.items() if name.rpartition(".")[0] not in result.own})
    if options.strict:
        problems += [
            Problem(where=f"step {step}, {name}", what=f"strict: true, and it stays unquantized: {why}")
            for name, why in result.skipped.items()
        ]
    if problems:
        raise PlanError(*problems)
    return result


def out_in(module: nn.Module, layout: str) -> Tensor:
    """A layer's weight as [N, K]."""
    weight = _weight(module).detach()
    return weight.t() if layout == IN_OUT else weight.flatten(1) if layout == CONV2D else weight


def layout_of(module: nn.Module) -> str:
    """How a layer that has one of the four layouts stores its weight."""
    if isinstance(module, nn.Conv2d | nn.Embedding):
        return CONV2D if isinstance(module, nn.Conv2d) else EMBEDDING
    return IN_OUT if _is_conv1d(module) else OUT_IN


def _targets(model: nn.Module, targets: list[str]) -> list[str]:
    """`targets`, and of the default ones only those that the model has, since most models have no Conv1D."""
    from optforge.transforms.quantize import DEFAULT_TARGETS

    if tuple(targets) != DEFAULT_TARGETS:
        return targets
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return [target for target in targets if target in classes] or targets


def _has_weight(name: str, module: nn.Module) -> bool:
    kinds = nn.Linear | nn.Conv2d | nn.Embedding | QuantizedParameters
    return isinstance(module, kinds) or _is_conv1d(module) or bool(_own_weights(name, module))


def _own_weights(name: str, module: nn.Module) -> dict[str, list[str]]:
    """Parameters that the module's code reads itself, by the module that holds them; empty for a layer that multiplies its weight."""
    if isinstance(module, nn.MultiheadAttention):
        inputs = [key for key in ATTENTION_INPUTS if module._parameters.get(key) is not None]
        return {name: inputs, _join(name, "out_proj"): ["weight"]}
    if isinstance(module, nn.modules.conv._ConvNd | Quantized | QuantizedParameters):
        return {}
    experts = [key for key, parameter in module._parameters.items() if parameter is not None and _holds_experts(parameter)]
    return {name: experts} if experts else {}


def _holds_experts(parameter: Tensor) -> bool:
    """Whether it looks like the weights of several experts: a matrix for each entry of its first dimension."""
    return parameter.dim() == 3 and parameter.is_floating_point() and min(parameter.shape) > 1


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's layer: a class of that name with a two-dimensional weight [K, N] and, if any, a bias [N]."""
    if isinstance(module, nn.Linear) or not any(cls.__name__ == "Conv1D" for cls in type(module).__mro__):
        return False
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[1:])


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _refused(chosen: dict[str, nn.Module], step: str) -> dict[str, Problem]:
    """Layers that rounding must not touch, whatever the options, each with its problem; layers of one problem share it."""
    layers: dict[tuple[str, str], list[str]] = {}
    for name, module in chosen.items():
        if isinstance(module, Quantized | QuantizedParameters):
            what = f"already {module.scheme.weight_dtype} (step {module.quantized_by})"
            layers.setdefault((what, "choose other layers by targets or ignore, or drop one of the steps"), []).append(name)
        elif kind := _parametrised(module):
            layers.setdefault((f"parametrised by {kind[0]}", kind[1]), []).append(name)
    told = {}
    for (what, fix), names in layers.items():
        problem = Problem(where=f"step {step}", what=f"{counted(names)} {'is' if len(names) == 1 else 'are'} {what}", fix=fix)
        told.update(dict.fromkeys(names, problem))
    return told


def counted(names: list[str]) -> str:
    """`layer a`, `layers a, b`, or `layers a, b, c, d and 44 more`."""
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"layer{'s' if len(names) > 1 else ''} {', '.join(names[:4])}{rest}"


def _parametrised(module: nn.Module) -> tuple[str, str] | None:
    """What computes the weight of `module` from other tensors, and the call that folds it; None for a plain weight."""
    if parametrize.is_parametrized(module):
        lists = module.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        kinds = ", ".join(
            sorted({type(one).__name__.lstrip("_") for entry in lists.values() if isinstance(entry, nn.ModuleList) for one in entry})
        )
        return kinds, "fold it first: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
    if "weight_orig" in module._parameters:
        if "weight_mask" in module._buffers:
            return "a pruning mask", "fold it first: torch.nn.utils.prune.remove(layer, 'weight')"
        return "spectral norm", "fold it first: torch.nn.utils.remove_spectral_norm(layer)"
    if "weight_g" in module._parameters:
        return "weight norm", "fold it first: torch.nn.utils.remove_weight_norm(layer)"
    return None


def _read_by_others(model: nn.Module) -> dict[int, str]:
    """id of each linear whose weight its parent reads past the linear's own `forward`, with the reason to leave it."""
    found = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            found[id(module.out_proj)] = "nn.MultiheadAttention reads its weight itself and never calls it"
        if isinstance(module, nn.TransformerEncoderLayer):
            for linear in (module.linear1, module.linear2):
                found[id(linear)] = "nn.TransformerEncoderLayer reads its weight itself on its fast path"
    return found


def _misfit(module: nn.Module, options: Quantize) -> str | None:
    """Why this layer cannot be stored or multiplied under the scheme, apart from group sizes."""
    weight = _weight(module)
    if _forwards_otherwise(module):
        return f"its class {type(module).__name__} has a forward of its own"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "it renormalizes its rows in place (max_norm)"
    if reason := _unstorable(weight):
        return reason
    multiplied = options.scheme.name in ("fp8_dynamic", "fp8_static") and not isinstance(module, nn.Conv2d | nn.Embedding)
    if multiplied and (weight.shape[0] % 16 or weight.shape[1] % 16):
        return f"its weight is {_shape(weight)}, not a multiple of 16 both ways, which the fp8 product needs"
    return None


def _unstorable(weight: Tensor) -> str | None:
    """Why there is nothing to round in this tensor."""
    if weight.numel() == 0:
        return f"it has no elements: its weight is {_shape(weight)}"
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not a floating-point dtype to round from"
    if type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data).__name__}, a tensor with a representation of its own"
    return None


def _forwards_otherwise(module: nn.Module) -> bool:
    """Whether a subclass does something else with its weight than the class that is replaced."""
    if isinstance(module, nn.Conv2d):
        return not hands_on(type(module))
    base = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    return isinstance(module, base) and type(module).forward is not base.forward


def _tie(model: nn.Module, partners: list[str], policy: str) -> str | None:
    """Why a linear that shares its weight is left as it is; None where the policy says how to go on."""
    if not partners or policy == "untie":
        return None
    names = ", ".join(partners)
    if policy == "skip":
        return f"its weight is tied to {names} (tied: skip; untie or both would quantize it)"
    for name in partners:
        partner = model.get_submodule(name)
        if type(partner).forward is not nn.Embedding.forward or getattr(partner, "max_norm", None) is not None:
            return f"its weight is tied to {name}, which is no plain nn.Embedding (tied: both)"
    return None


def _sharers(model: nn.Module) -> dict[int, list[str]]:
    """id of each parameter -> names of the modules that hold it."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(original_name(path))
    return _Default(found)


class _Default(dict[int, list[str]]):
    def __missing__(self, key: int) -> list[str]:
        return []


def _groups(model: nn.Module, result: Survey, options: Quantize, step: str) -> list[Problem]:
    """Applies `on_misfit` to every layer whose width the group size does not divide: skips it, or gives the problem."""
    size = options.group_size
    if size is None or options.on_misfit.name == "pad":
        return []
    misfits: dict[tuple[str, str], list[str]] = {}
    widths = [(name, out_in(module, result.layouts[name]).shape[1]) for name, module in result.layers.items()]
    for name, keys in result.own.items():
        tensors = model.get_submodule(name)._parameters
        widths += [(name, tensor.shape[-1]) for key in keys if (tensor := tensors[key]) is not None]
    for name, columns in widths:
        if columns % size == 0:
            continue
        what, fix = f"group_size {size} does not divide its K={columns}", _fitting(columns)
        if options.on_misfit.name == "skip":
            result.leave(name, f"{what}; {fix}")
        else:
            misfits.setdefault((what, fix), []).append(name)
    return [Problem(where=f"step {step}, {counted(names)}", what=what, fix=fix) for (what, fix), names in misfits.items()]


def _fitting(columns: int) -> str:
    from optforge.transforms.quantize import GROUP_SIZES

    sizes = [str(size) for size in reversed(GROUP_SIZES) if columns % size == 0]
    return f"sizes that fit: {', '.join(sizes)}" if sizes else "no size fits: name it in ignore, or use on_misfit: pad"


def _experts(model: nn.Module, ignore: list[str], total_bytes: int, step: str) -> Iterator[tuple[str, str]]:
    """Weights kept as one 3-D parameter (mixture-of-experts layers), which no linear layer reads."""
    owners: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        plain = not isinstance(module, nn.modules.conv._ConvNd | Quantized | QuantizedParameters)
        if plain and any(p is not None and p.dim() == 3 and p.is_floating_point() for p in module._parameters.values()):
            owners[original_name(path)] = module
    for name, module in _not_ignored(model, owners, ignore, step).items():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3:
                share = nbytes(parameter) / max(total_bytes, 1)
                what = f"a 3-D parameter {_shape(parameter)}, {share:.0%} of the model's bytes: no target of the step"
                yield _join(name, key), f"{what} (name its module or class in targets)"


def _attention_inputs(model: nn.Module, ignore: list[str], step: str) -> Iterator[tuple[str, str]]:
    """The input projections of `nn.MultiheadAttention`, which are bare parameters."""
    owners: dict[str, nn.Module] = {}
    owners.update((original_name(path), module) for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))
    for name, module in _not_ignored(model, owners, ignore, step).items():
        for key in ATTENTION_INPUTS:
            if module._parameters.get(key) is not None and not isinstance(module, QuantizedParameters):
                yield _join(name, key), "a bare parameter of nn.MultiheadAttention, which is no target of the step"


def _not_ignored(model: nn.Module, owners: dict[str, nn.Module], ignore: list[str], step: str) -> dict[str, nn.Module]:
    """Those of `owners` that `ignore` does not cover; the root module cannot be ignored by name."""
    ids = {id(module) for module in owners.values()}
    names = [name for name in owners if name]
    inside = select(model, names, ignore, step=step, eligible=lambda name, module: id(module) in ids, strict=False).chosen if names else {}
    return inside | {name: module for name, module in owners.items() if not name}


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
