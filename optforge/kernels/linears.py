"""Quantized layers: `nn.Linear` subclasses with plain integer parameters.

A linear becomes quantized by `linear.__class__ = ...`: it keeps its place, its name and its bias. `weight` is an integer
parameter (int8 [N, K]; fp8 as its bits in uint8 [N, K]; int4 two per byte in uint8 [N, ceil(K / 2)]) and the scales are
fp32 parameters beside it. Integer storage, because a cast of the whole model, FSDP2's mixed precision among them, turns
float8 parameters into bf16 without a word; parameters and not a tensor subclass, because FSDP2 and tensor parallelism
shard parameters (both measured, see the design of quantized weights in docs/quantization.md). Scales stay fp32 whatever
the model is cast to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optforge.kernels import rounding
from optforge.kernels.formats import FORMATS, OCP, Fp8Format
from optforge.kernels.fp8_dynamic import fp8_dynamic
from optforge.kernels.fp8_weight import fp8_weight
from optforge.kernels.int4_weight import int4_weight
from optforge.kernels.int8_dynamic import int8_dynamic
from optforge.kernels.int8_weight import int8_weight
from optforge.spec import Scheme

CHANNEL_STEP = 512
"""Longest step along K of any kernel: a group of a multiple of it never ends within a step."""


class Quantized(nn.Module):
    """What a quantized linear and a quantized embedding share: the storage, and scales that stay fp32."""

    scheme: Scheme
    quantized_by: str
    """Name of the step that quantized it."""
    fp8_format: str
    """Key of `formats.FORMATS`; meaningful where `scheme.weight_dtype` is fp8."""
    weight: Tensor
    weight_scale: nn.Parameter
    weight_zero_point: nn.Parameter | None
    weight_sum: nn.Parameter | None

    STORED: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_zero_point", "weight_sum")

    def stored(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that together stand for the weight, by local name."""
        return ((name, self._parameters[name]) for name in self.STORED if self._parameters.get(name) is not None)  # type: ignore[misc]  # None is filtered

    def dequantize(self) -> Tensor:
        """The weight that the storage stands for, fp32 [N, K]."""
        return _dequantize(self, self.weight, self.weight_scale, getattr(self, "weight_zero_point", None))

    @property
    def columns(self) -> int:
        """K, which packed storage does not tell."""
        raise NotImplementedError

    @property
    def group_size(self) -> int:
        """Columns that share an int4 scale. One scale per channel is one group, as long as the longest step along K needs."""
        return self.scheme.group_size or -(-self.columns // CHANNEL_STEP) * CHANNEL_STEP

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`nn.Module._apply` with scales and sums exempt from a change of dtype (moves and `to_empty` pass)."""
        exempt = {id(parameter) for name, parameter in self.stored() if name != "weight"}

        def keep(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if id(tensor) in exempt and result.dtype is not tensor.dtype else result

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped


class QuantizedLinear(Quantized, nn.Linear):
    """A linear whose weight is quantized; subclasses say how it multiplies."""

    operator: ClassVar[str]
    """What multiplies on a device with kernels, as receipts name it."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] to [..., N], in input's dtype."""
        rows = input.reshape(-1, self.in_features)
        return self._product(rows).reshape(*input.shape[:-1], self.out_features)

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def columns(self) -> int:
        return self.in_features

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme.name}"


class Int8WeightLinear(QuantizedLinear):
    operator = "optforge::int8_weight"

    def _product(self, x: Tensor) -> Tensor:
        return int8_weight(x, self.weight, self.weight_scale, self.bias)


class Int8DynamicLinear(QuantizedLinear):
    operator = "int8_dynamic"

    def _product(self, x: Tensor) -> Tensor:
        assert self.weight_sum is not None
        return int8_dynamic(x, self.weight, self.weight_scale, self.weight_sum, self.bias)


class Int4WeightLinear(QuantizedLinear):
    operator = "optforge::int4_weight"

    def _product(self, x: Tensor) -> Tensor:
        return int4_weight(x, self.weight, self.weight_scale, self.weight_zero_point, self.bias, self.group_size)


class Fp8WeightLinear(QuantizedLinear):
    operator = "optforge::fp8_weight"

    def _product(self, x: Tensor) -> Tensor:
        return fp8_weight(x, self.weight, self.weight_scale, self.bias, self.fp8_format)


class Fp8DynamicLinear(QuantizedLinear):
    operator = "aten::_scaled_mm"

    def _product(self, x: Tensor) -> Tensor:
        per_row = self.scheme.activation_granularity == "row"
        return fp8_dynamic(x, self.weight, self.weight_scale, self.bias, self.fp8_format, per_row=per_row)


class QuantizedEmbedding(Quantized, nn.Embedding):
    """An embedding that shares the quantized storage of the head it is tied to; looks rows up, then dequantizes them."""

    value_dtype: torch.dtype
    """The dtype of the rows it hands out: the model's own, which integer storage no longer tells."""

    def forward(self, input: Tensor) -> Tensor:
        """Indices [...] to rows [..., K] in `value_dtype`."""
        at = input.flatten()
        scale = self.weight_scale if self.weight_scale.shape[0] == 1 else self.weight_scale[at]
        zero = getattr(self, "weight_zero_point", None)
        rows = _dequantize(self, self.weight[at], scale, None if zero is None else zero[at])
        return rows.to(self.value_dtype).reshape(*input.shape, self.embedding_dim)

    @property
    def columns(self) -> int:
        return self.embedding_dim

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.value_dtype = fn(torch.empty(0, dtype=self.value_dtype, device=self.weight.device)).dtype
        return super()._apply(fn, recurse)


LINEARS: dict[str, type[QuantizedLinear]] = {
    "int8_weight": Int8WeightLinear,
    "int8_dynamic": Int8DynamicLinear,
    "int4_weight": Int4WeightLinear,
    "fp8_weight": Fp8WeightLinear,
    "fp8_dynamic": Fp8DynamicLinear,
}
"""Scheme name -> the class of its layers."""


def quantize_(
    module: nn.Module, weight: Tensor, scheme: Scheme, fmt: Fp8Format = OCP, *, step: str, stored: Mapping[str, Tensor | None] | None = None
) -> QuantizedLinear:
    """Turns `module` into a quantized linear in place and hands it back; on meta it does so to the structure alone.

    Args:
        module: an `nn.Linear`, or a layer with the same meaning and a transposed weight (GPT-2's Conv1D).
        weight: its weight as [N, K], any float dtype; read, never written.
        scheme: one of `LINEARS` by name, with its granularity and group size.
        fmt: the 8-bit float of the target.
        step: the step's name, remembered for whoever quantizes it again.
        stored: the parameters by name, where something else than rounding to nearest has decided them; `weight` then gives its
            shape alone.
    """
    outputs, columns = weight.shape
    with torch.no_grad():
        stored = _store(weight.detach().contiguous(), scheme, fmt) if stored is None else stored
    bias = module._parameters.get("bias")
    module.__class__ = LINEARS[scheme.name]
    assert isinstance(module, QuantizedLinear)
    module.in_features, module.out_features = columns, outputs
    module._parameters.clear()
    for name, tensor in stored.items():
        module.register_parameter(name, nn.Parameter(tensor.contiguous(), requires_grad=False) if tensor is not None else None)
    module.register_parameter("bias", bias)
    module.scheme, module.fp8_format, module.quantized_by = scheme, fmt.name, step
    return module


def share_(embedding: nn.Embedding, linear: QuantizedLinear) -> None:
    """Makes `embedding` look its rows up in the quantized storage of `linear`, as one set of parameters."""
    value_dtype = embedding.weight.dtype
    embedding.__class__ = QuantizedEmbedding
    assert isinstance(embedding, QuantizedEmbedding)
    embedding._parameters.clear()
    for name in Quantized.STORED:
        if name in linear._parameters and name != "weight_sum":
            embedding.register_parameter(name, linear._parameters[name])
    embedding.scheme, embedding.fp8_format, embedding.quantized_by = linear.scheme, linear.fp8_format, linear.quantized_by
    embedding.value_dtype = value_dtype


def _dequantize(module: Quantized, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """fp32 [rows, K] that some stored rows of `module` stand for."""
    if module.scheme.weight_dtype == "int4":
        return rounding.from_int4(weight, scale, zero, module.columns, module.group_size, torch.float32)
    if module.scheme.weight_dtype == "fp8":
        return weight.view(FORMATS[module.fp8_format].dtype).float() * scale
    return weight.float() * scale


def _store(weight: Tensor, scheme: Scheme, fmt: Fp8Format) -> dict[str, Tensor | None]:
    """The parameters of a quantized weight by name, in the order of `Quantized.STORED`."""
    if scheme.weight_dtype == "int4":
        packed, scale, zero = rounding.int4_weight(weight, scheme.group_size or weight.shape[1], symmetric=scheme.symmetric)
        return {"weight": packed, "weight_scale": scale, "weight_zero_point": zero}
    if scheme.weight_dtype == "fp8":
        bits, scale = rounding.fp8_weight(weight, fmt, per_channel=scheme.granularity == "channel")
        return {"weight": bits, "weight_scale": scale}
    values, scale = rounding.int8_weight(weight)
    if scheme.activation_dtype is None:
        return {"weight": values, "weight_scale": scale}
    return {"weight": values, "weight_scale": scale, "weight_sum": values.sum(1, dtype=torch.int32).float() * scale.flatten()}
