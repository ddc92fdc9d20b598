"""Weights that a module reads itself instead of having a layer multiply them, quantized: experts kept as one 3-D parameter, the input
projection of `nn.MultiheadAttention`.

The parameter keeps its name and holds integers; scales stand beside it (`gate_up_proj`, `gate_up_proj_scale`). What the module's own code
then finds under the name is a `Stored`: indexing it brings back those entries alone (an expert that a token goes to), and any function of
PyTorch that is given it gets the whole weight. The class of the module is a subclass made for it, so its forward stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from optforge.kernels.formats import OCP, Fp8Format
from optforge.kernels.quantized import CHANNEL_STEP, dequantize, store
from optforge.schemes import ENTRIES, SCHEMES
from optforge.spec import Scheme

BESIDE = {"weight": "", "weight_scale": "_scale", "weight_zero_point": "_zero_point", "weight_global_scale": "_global_scale"}
"""Name in a quantized layer -> what is added to the parameter's own name here."""
OF_ALL = "weight_global_scale"


@dataclass(frozen=True)
class Rows:
    """What is to be known of stored rows to bring them back (`kernels.quantized.dequantize` reads it as it reads a layer)."""

    scheme: Scheme
    fp8_format: str
    columns: int

    @property
    def group_size(self) -> int:
        return self.scheme.group_size or -(-self.columns // CHANNEL_STEP) * CHANNEL_STEP


class Stored:
    """A float weight [..., A, B] for the code that reads it; B is the dimension whose values share scales."""

    def __init__(self, owner: QuantizedParameters, name: str) -> None:
        self._owner, self._name = owner, name

    @property
    def shape(self) -> torch.Size:
        own = self._owner.columns[self._name]
        return torch.Size((*self._tensors()["weight"].shape[:-1], own))

    @property
    def dtype(self) -> torch.dtype:
        return self._owner.value_dtype

    @property
    def device(self) -> torch.device:
        return self._tensors()["weight"].device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def dequantize(self) -> Tensor:
        """The whole weight."""
        return self._back(self._tensors())

    def __getitem__(self, at: Any) -> Tensor:
        """Entries of the first dimension, or whatever else an index picks of the whole."""
        first = isinstance(at, int | slice) or (isinstance(at, Tensor) and not at.is_floating_point() and at.dtype is not torch.bool)
        if not first or self.dim() < 3:
            return self.dequantize()[at]
        return self._back({name: tensor if name == OF_ALL else tensor[at] for name, tensor in self._tensors().items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dequantize(), name)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, Stored) else value

        given = tree_map(plain, (args, kwargs or {}), is_leaf=lambda value: isinstance(value, Stored))
        return function(*given[0], **given[1])

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: self._owner._parameters.get(self._name + suffix) for name, suffix in BESIDE.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _back(self, tensors: Mapping[str, Tensor]) -> Tensor:
        leading = tensors["weight"].shape[:-1]
        columns = self._owner.columns[self._name]
        flat = {name: tensor if name == OF_ALL else tensor.reshape(-1, tensor.shape[-1]) for name, tensor in tensors.items()}
        values = dequantize(Rows(self._owner.scheme, self._owner.fp8_format, columns), flat)
        return values.reshape(*leading, columns).to(self._owner.value_dtype)


class QuantizedParameters(nn.Module):
    """Mixed into the class of a module some of whose parameters are quantized."""

    scheme: Scheme
    quantized_by: str
    fp8_format: str
    columns: dict[str, int]
    """Quantized parameter -> B, which packed storage does not tell."""
    value_dtype: torch.dtype
    """The dtype that the module computes in."""

    operator = "weight dequantized"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Scales keep their dtype, and the module's own dtype follows a cast."""
        beside = [f"{name}{suffix}" for name in self.columns for suffix in BESIDE.values()]
        exempt = {id(self._parameters.get(name)) for name in beside}
        device = next(iter(self.parameters())).device
        self.value_dtype = fn(torch.empty(0, dtype=self.value_dtype, device=device)).dtype

        def keep(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if id(tensor) in exempt and result.dtype is not tensor.dtype else result

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped


def _read(name: str, owner: QuantizedParameters) -> Stored:
    return Stored(owner, name)


@cache
def _class_of(cls: Any, names: tuple[str, ...]) -> type[QuantizedParameters]:
    """The subclass of `cls` under whose `names` its code finds a `Stored`."""
    properties = {name: property(partial(_read, name)) for name in names}
    return type(f"Quantized{cls.__name__}", (QuantizedParameters, cls), {"__module__": cls.__module__, **properties})


def scheme_of_parameters(scheme: Scheme) -> Scheme:
    """The scheme that such a weight is stored under: nothing rounds the activations that it meets, and squares become rows."""
    name = ENTRIES[scheme.name].weight_only or scheme.name
    name = "fp8_weight" if SCHEMES[name].granularity == "block" else name
    return scheme if name == scheme.name else SCHEMES[name]


def quantize_parameters_(
    module: nn.Module, names: Sequence[str], scheme: Scheme, fmt: Fp8Format = OCP, *, step: str
) -> QuantizedParameters:
    """Quantizes parameters [..., A, B] of `module` in place, along B, and hands it back; on meta it does so to the structure alone."""
    scheme = scheme_of_parameters(scheme)
    weights = {name: module._parameters[name] for name in names}
    columns = {}
    for name, weight in weights.items():
        assert weight is not None
        columns[name] = weight.shape[-1]
        with torch.no_grad():
            stored = store(weight.detach().reshape(-1, weight.shape[-1]), scheme, fmt)
        for key, tensor in stored.items():
            if tensor is not None:
                shaped = tensor if key == OF_ALL else tensor.reshape(*weight.shape[:-1], tensor.shape[-1])
                module._parameters[name + BESIDE[key]] = nn.Parameter(shaped.contiguous(), requires_grad=False)
    dtype = next(weight.dtype for weight in weights.values() if weight is not None)
    cls: Any = type(module)
    module.__class__ = _class_of(cls, tuple(names))
    assert isinstance(module, QuantizedParameters)
    module.scheme, module.quantized_by, module.fp8_format = scheme, step, fmt.name
    module.columns, module.value_dtype = columns, dtype
    return module
