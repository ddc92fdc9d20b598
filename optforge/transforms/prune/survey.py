"""What a step that zeroes single weights will change and what it leaves, with the reason: decided before the first weight changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.utils import parametrize

from optforge.errors import PlanError, Problem
from optforge.kernels.linears import Quantized
from optforge.measure.size import weight_bytes
from optforge.measure.sparsity import is_conv1d
from optforge.select import original_name, select

if TYPE_CHECKING:
    from optforge.transforms.prune import Prune

BARE = 2
"""Dimensions from which on a parameter that no layer of a known kind holds is named."""


@dataclass(kw_only=True)
class Survey:
    """Names to what will happen to them."""

    layers: dict[str, nn.Module] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    total_bytes: int = 0


def survey(model: nn.Module, options: Prune, step: str) -> Survey:
    """Chooses, sorts and refuses.

    Raises:
        SelectorError: an entry matches nothing.
        PlanError: a targeted layer is quantized, or its weight is computed from other tensors; all are told together.
    """
    ignore = [*options.ignore, *options.ignore_extra]
    chosen = select(model, _targets(model, options.targets), ignore, step=step, eligible=_is_prunable)
    problems = list(refusals(chosen.chosen, step))
    if problems:
        raise PlanError(*problems)
    found = Survey(ignored=chosen.ignored, unmatched=chosen.unmatched, total_bytes=weight_bytes(model))
    holders = _holders(model)
    for name, module in chosen.chosen.items():
        others = [other for other in holders.get(id(weight_of(module)), []) if other != name]
        reason = f"its weight is tied to {', '.join(others)}" if others else _misfit(module, options)
        if reason:
            found.skipped[name] = reason
        else:
            found.layers[name] = module
    found.skipped.update(_bare(model))
    return found


def refusals(layers: dict[str, nn.Module], step: str) -> Iterator[Problem]:
    """Layers whose weights cannot be reached, whatever the options."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, module in layers.items():
        if isinstance(module, Quantized):
            what = f"already {module.scheme.weight_dtype} (step {module.quantized_by}): a mask cannot reach its weight"
            reasons.setdefault((what, f"prune first: write {step} before {module.quantized_by}"), []).append(name)
        elif computed := _computed(module):
            reasons.setdefault((f"parametrised by {computed[0]}", f"fold it first: {computed[1]}"), []).append(name)
    for (what, fix), names in reasons.items():
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield Problem(where=f"step {step}, {shown}", what=f"the weight is {what}", fix=fix)


def weight_of(module: nn.Module) -> nn.Parameter:
    """The weight of a linear or a convolution."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def rows(module: nn.Module, weight: Tensor) -> Tensor:
    """A layer's weight as [N, K], one row an output; of a convolution the input channels are innermost, as its products read them."""
    if weight.dim() > 2:
        return weight.flatten(2).transpose(1, 2).flatten(1)
    return weight.t() if is_conv1d(module) else weight


def unrowed(module: nn.Module, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `rows`: a weight of `shape`."""
    if len(shape) > 2:
        return matrix.reshape(shape[0], -1, shape[1]).transpose(1, 2).reshape(shape).contiguous()
    return (matrix.t() if is_conv1d(module) else matrix).contiguous()


def _is_prunable(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d) or is_conv1d(module)


def _targets(model: nn.Module, targets: list[str]) -> list[str]:
    """`targets`, and of the default ones only those that the model has."""
    from optforge.transforms.prune import DEFAULT_TARGETS

    if tuple(targets) != DEFAULT_TARGETS:
        return targets
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return [target for target in targets if target in classes] or targets


def _computed(module: nn.Module) -> tuple[str, str] | None:
    """What computes the weight of `module` from other tensors, and the call that folds it; None for a plain weight."""
    if parametrize.is_parametrized(module):
        lists = module.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        kinds = sorted({type(one).__name__.lstrip("_") for each in lists.values() if isinstance(each, nn.ModuleList) for one in each})
        return ", ".join(kinds), "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
    if "weight_orig" in module._parameters:
        return "spectral norm", "torch.nn.utils.remove_spectral_norm(layer)"
    if "weight_g" in module._parameters:
        return "weight norm", "torch.nn.utils.remove_weight_norm(layer)"
    return None


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """id of each parameter -> names of the modules that hold it."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(original_name(path))
    return found


def _misfit(module: nn.Module, options: Prune) -> str | None:
    """Why this layer is left as it is."""
    weight = weight_of(module)
    if weight.numel() == 0:
        return "it has no elements"
    if not weight.is_floating_point() or weight.dtype.itemsize < 2 or type(weight.data) is not Tensor:
        return "its weight is no plain floating-point tensor"
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return f"its class {type(module).__name__} has a forward of its own"
    if isinstance(module, nn.Conv2d) and options.method.name != "magnitude" and (module.groups > 1 or module.padding_mode != "zeros"):
        return f"a convolution with groups or a padding of its own has no single input matrix, which {options.method.name} needs"
    if options.pattern is not None:
        of = options.pattern.value[1]
        inputs = weight.shape[0] if is_conv1d(module) else weight.shape[1]
        if inputs % of:
            return f"{options.pattern.name} needs inputs in groups of {of}, and it has {inputs}"
    return None


def _bare(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Weights that no layer of a known kind holds: experts kept as one parameter, the inputs of `nn.MultiheadAttention`."""
    known = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd, Quantized)
    for path, module in model.named_modules():
        if isinstance(module, known) or is_conv1d(module) or parametrize.is_parametrized(module):
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() >= BARE and parameter.is_floating_point():
                name = f"{original_name(path)}.{key}" if path else key
                yield name, f"a bare parameter of {type(module).__name__}, not a linear layer or a convolution"
