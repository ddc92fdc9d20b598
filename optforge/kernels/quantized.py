"""What all quantized layers share: a weight as plain integer parameters, how it is stored, and what it stands for.

Integer storage, because a cast of the whole model, FSDP2's mixed precision among them, turns float8 parameters into bf16 without a
word; parameters and not a tensor subclass, because FSDP2 and tensor parallelism shard parameters (both measured, see
docs/quantization.md). Scales stay fp32 whatever the model is cast to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from optforge.kernels import blocks, rounding
from optforge.kernels.formats import FORMATS, Fp8Format
from optforge.spec import Scheme

CHANNEL_STEP = 512
"""Longest step along K of any kernel: a group of a multiple of it never ends within a step."""
INPUT_SCALES = ("input_scale", "input_offset")
"""Parameters of a static scheme, fp32 [1] each; calibration fills them."""

Stored = Mapping[str, Tensor | None]
"""The parameters of a quantized weight by name."""


class StoredAs(Protocol):
    """What must be known of stored rows to bring them back."""

    @property
    def scheme(self) -> Scheme: ...
    @property
    def fp8_format(self) -> str: ...
    @property
    def columns(self) -> int: ...
    @property
    def group_size(self) -> int: ...


class Quantized(nn.Module):
    """The storage of a weight [N, K], and scales that stay fp32. A convolution's K is input channels of a group times kernel."""

    scheme: Scheme
    quantized_by: str
    """Name of the step that quantized it."""
    fp8_format: str
    """Key of `formats.FORMATS`; meaningful where `scheme.weight_dtype` is fp8 under fp32 scales."""
    weight: Tensor
    weight_scale: nn.Parameter
    weight_zero_point: nn.Parameter | None
    weight_global_scale: nn.Parameter | None
    weight_sum: nn.Parameter | None
    input_scale: nn.Parameter | None
    input_offset: nn.Parameter | None

    STORED: ClassVar[tuple[str, ...]] = (
        "weight",
        "weight_scale",
        "weight_zero_point",
        "weight_global_scale",
        "weight_sum",
        *INPUT_SCALES,
    )
    operator: ClassVar[str]
    """What multiplies on a device with kernels, as receipts name it."""

    def stored(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that together stand for the weight (and for the scales of its inputs), by local name."""
        return ((name, self._parameters[name]) for name in self.STORED if self._parameters.get(name) is not None)  # type: ignore[misc]  # None is filtered

    def hold(self, stored: Stored) -> None:
        """Registers what is stored in place of the parameters that were there; `bias` is kept, last."""
        bias = self._parameters.get("bias")
        self._parameters.clear()
        for name, tensor in stored.items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor.contiguous(), requires_grad=False))
        self.register_parameter("bias", bias)

    def dequantize(self) -> Tensor:
        """The weight that the storage stands for, fp32 [N, K]."""
        return dequantize(self, dict(self.stored()))

    def trial(self, rows: int, draw: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What the layer makes of some input, and what plain fp32 arithmetic on its dequantized weight makes of it, both fp32."""
        raise NotImplementedError

    @property
    def columns(self) -> int:
        """K, which packed storage does not tell."""
        raise NotImplementedError

    @property
    def group_size(self) -> int:
        """Columns that share an int4 scale. One scale per channel is one group, as long as the longest step along K needs."""
        return self.scheme.group_size or -(-self.columns // CHANNEL_STEP) * CHANNEL_STEP

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme.name}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`nn.Module._apply` with scales and sums exempt from a change of dtype (moves and `to_empty` pass)."""
        exempt = {id(parameter) for name, parameter in self.stored() if name != "weight"}

        def keep(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if id(tensor) in exempt and result.dtype is not tensor.dtype else result

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped


def dequantize(module: StoredAs, stored: Stored) -> Tensor:
    """fp32 [rows, K] that some stored rows of `module` stand for."""
    scheme, weight, scale = module.scheme, stored["weight"], stored["weight_scale"]
    assert weight is not None and scale is not None
    if blocked(scheme):
        return blocks.dequantize(weight, scale, stored.get("weight_global_scale"), module.columns, scheme, module.fp8_format)
    if scheme.weight_dtype == "int4":
        return rounding.from_int4(weight, scale, stored.get("weight_zero_point"), module.columns, module.group_size, torch.float32)
    if scheme.weight_dtype == "fp8":
        return weight.view(FORMATS[module.fp8_format].dtype).float() * scale
    return weight.float() * scale


def store(weight: Tensor, scheme: Scheme, fmt: Fp8Format) -> dict[str, Tensor | None]:
    """The parameters of a weight [N, K] rounded to nearest, in the order of `Quantized.STORED`; scales of inputs hold nothing yet."""
    if blocked(scheme):
        return dict(blocks.store(weight, scheme, fmt.name))
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


def with_input_scales(stored: Stored, scheme: Scheme, scales: Mapping[str, Tensor] | None, like: Tensor) -> dict[str, Tensor | None]:
    """What is stored and, of a static scheme, the scales of its inputs: `scales`, or room for them where nothing is known yet."""
    if not scheme.static:
        return dict(stored)
    names = INPUT_SCALES if scheme.activation_dtype == "int8" else INPUT_SCALES[:1]
    room = {name: torch.ones(1, dtype=torch.float32, device=like.device) for name in names}
    return dict(stored) | {name: room[name] if scales is None else scales[name].to(like.device) for name in names}


def blocked(scheme: Scheme) -> bool:
    """Whether `kernels.blocks` stores it: squares, or groups whose scales are a byte."""
    return scheme.granularity == "block" or scheme.scale_dtype != "fp32"
