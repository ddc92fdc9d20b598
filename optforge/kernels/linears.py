"""Quantized layers: subclasses of `nn.Linear`, `nn.Conv2d` and `nn.Embedding` with plain integer parameters.

A layer becomes quantized by `layer.__class__ = ...`: it keeps its place, its name and its bias. `weight` is an integer
parameter (int8 [N, K]; fp8 as its bits in uint8 [N, K]; 4 bits two per byte in uint8 [N, ceil(K / 2)]) and the scales are parameters
beside it (see `kernels.quantized`). This file holds the linears and the call that turns a layer of any kind into its quantized one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optforge.kernels.blocks import block_product
from optforge.kernels.convolutions import QuantizedConv2d, quantized_class
from optforge.kernels.dispatch import decomposing
from optforge.kernels.embeddings import QuantizedEmbedding, share_
from optforge.kernels.formats import OCP, Fp8Format
from optforge.kernels.fp8_dynamic import fp8_dynamic
from optforge.kernels.fp8_weight import fp8_weight
from optforge.kernels.int4_weight import int4_weight
from optforge.kernels.int8_dynamic import int8_dynamic, int8_static
from optforge.kernels.int8_weight import int8_weight
from optforge.kernels.quantized import CHANNEL_STEP, INPUT_SCALES, Quantized, store, with_input_scales
from optforge.schemes import ENTRIES, SCHEMES
from optforge.spec import Scheme

__all__ = ["CHANNEL_STEP", "LINEARS", "Quantized", "QuantizedConv2d", "QuantizedEmbedding", "QuantizedLinear", "quantize_", "share_"]


class QuantizedLinear(Quantized, nn.Linear):
    """A linear whose weight is quantized; subclasses say how it multiplies."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] to [..., N], in input's dtype."""
        rows = input.reshape(-1, self.in_features)
        differentiates = torch.is_grad_enabled() and rows.requires_grad and not decomposing()
        product: Tensor = _Frozen.apply(rows, self) if differentiates else self._product(rows)  # type: ignore[no-untyped-call]  # PyTorch's
        return product.reshape(*input.shape[:-1], self.out_features)

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def trial(self, rows: int, draw: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, self.in_features, generator=draw)
        if self.scheme.static:  # within what calibration saw
            scale, offset = (self._parameters.get(name) for name in INPUT_SCALES)
            assert scale is not None and self.scheme.activation_dtype is not None
            x = x / x.abs().max() * TRIED[self.scheme.activation_dtype] * scale.cpu() + (0 if offset is None else offset.cpu())
        x = x.to(device=self.weight.device, dtype=dtype)
        expected = nn.functional.linear(x.float(), self.dequantize(), None if self.bias is None else self.bias.float())
        return self(x).float(), expected

    @property
    def columns(self) -> int:
        return self.in_features


class _Frozen(torch.autograd.Function):
    """A product with a quantized weight, whose kernels have no gradient: that of the input is the incoming one times the dequantized
    weight, made anew in the backward pass and not kept (Dettmers and others, QLoRA, 2023, section 3). The weight has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: QuantizedLinear) -> Tensor:
        ctx.module = module
        return module._product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad @ ctx.module.dequantize().to(grad.dtype), None


TRIED = {"int8": 127.0, "fp8": 240.0}
"""Steps of a static scheme within which every format's inputs stay."""


class Int8WeightLinear(QuantizedLinear):
    operator = "optforge::int8_weight"

    def _product(self, x: Tensor) -> Tensor:
        return int8_weight(x, self.weight, self.weight_scale, self.bias)


class Int8DynamicLinear(QuantizedLinear):
    operator = "int8_dynamic"

    def _product(self, x: Tensor) -> Tensor:
        assert self.weight_sum is not None
        return int8_dynamic(x, self.weight, self.weight_scale, self.weight_sum, self.bias)


class Int8StaticLinear(QuantizedLinear):
    operator = "int8_static"

    def _product(self, x: Tensor) -> Tensor:
        assert self.weight_sum is not None and self.input_scale is not None and self.input_offset is not None
        return int8_static(x, self.weight, self.weight_scale, self.weight_sum, self.bias, self.input_scale, self.input_offset)


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


class Fp8StaticLinear(QuantizedLinear):
    operator = "aten::_scaled_mm"

    def _product(self, x: Tensor) -> Tensor:
        return fp8_dynamic(x, self.weight, self.weight_scale, self.bias, self.fp8_format, per_row=True, input_scale=self.input_scale)


class BlockLinear(QuantizedLinear):
    operator = "aten::mm, weight dequantized"

    def _product(self, x: Tensor) -> Tensor:
        whole = self._parameters.get("weight_global_scale")
        return block_product(x, self.weight, self.weight_scale, whole, self.bias, self.scheme, self.fp8_format)


LINEARS: dict[str, type[QuantizedLinear]] = {
    "int8_weight": Int8WeightLinear,
    "int8_dynamic": Int8DynamicLinear,
    "int8_static": Int8StaticLinear,
    "int4_weight": Int4WeightLinear,
    "fp8_weight": Fp8WeightLinear,
    "fp8_dynamic": Fp8DynamicLinear,
    "fp8_static": Fp8StaticLinear,
} | {name: BlockLinear for name, entry in ENTRIES.items() if not entry.kernel}
"""Scheme name -> the class of its layers."""


def scheme_of(module: nn.Module, scheme: Scheme) -> Scheme:
    """The scheme under which a layer of this kind is stored: only linears round their activations, so that a convolution or an
    embedding takes the weight-only scheme of the same storage (an embedding with one scale per row instead of squares)."""
    if not isinstance(module, nn.Conv2d | nn.Embedding):
        return scheme
    name = ENTRIES[scheme.name].weight_only or scheme.name
    if SCHEMES[name].granularity == "block":
        name = "fp8_weight"
    return scheme if name == scheme.name else SCHEMES[name]


def quantize_(
    module: nn.Module,
    weight: Tensor,
    scheme: Scheme,
    fmt: Fp8Format = OCP,
    *,
    step: str,
    stored: Mapping[str, Tensor | None] | None = None,
    input_scales: Mapping[str, Tensor] | None = None,
) -> Quantized:
    """Turns `module` into a quantized layer in place and hands it back; on meta it does so to the structure alone.

    Args:
        module: an `nn.Linear`, a layer with the same meaning and a transposed weight (GPT-2's Conv1D), an `nn.Conv2d`, or an
            `nn.Embedding`.
        weight: its weight as [N, K], any float dtype; read, never written.
        scheme: one of `LINEARS` by name, with its granularity and group size; `scheme_of` says what the layer takes of it.
        fmt: the 8-bit float of the target.
        step: the step's name, remembered for whoever quantizes it again.
        stored: the parameters by name, where something else than rounding to nearest has decided them; `weight` then gives its
            shape alone.
        input_scales: of a static scheme, `input_scale` and (int8) `input_offset`, fp32 [1] each; None leaves room for them.
    """
    outputs, columns = weight.shape
    scheme = scheme_of(module, scheme)
    with torch.no_grad():
        stored = store(weight.detach().contiguous(), scheme, fmt) if stored is None else stored
        stored = with_input_scales(stored, scheme, input_scales, weight)
    if isinstance(module, nn.Embedding):
        value_dtype, module.__class__ = module.weight.dtype, QuantizedEmbedding
        assert isinstance(module, QuantizedEmbedding)
        module.value_dtype = value_dtype
    elif isinstance(module, nn.Conv2d):
        module.__class__ = quantized_class(type(module))  # type: ignore[arg-type]  # nn.Module's type is hashable, whatever the stubs say
    else:
        module.__class__ = LINEARS[scheme.name]
        assert isinstance(module, QuantizedLinear)
        module.in_features, module.out_features = columns, outputs
    assert isinstance(module, Quantized)
    module.hold(stored)
    module.scheme, module.fp8_format, module.quantized_by = scheme, fmt.name, step
    return module
