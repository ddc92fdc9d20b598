"""Convolutions whose weight is quantized, and their inputs as the rows of a product.

The weight [out, in / groups, height, width] is stored flat, [N, K], like a linear's, and dequantized before each convolution:
that saves memory and no time, since no kernel here convolves integers. Activations are not rounded.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.kernels.quantized import Quantized


class QuantizedConv2d(Quantized, nn.Conv2d):
    """An `nn.Conv2d` that convolves with what its storage stands for, in the input's dtype."""

    operator = "aten::convolution, weight dequantized"

    def forward(self, input: Tensor) -> Tensor:
        """input [B, in, H, W] to [B, out, H', W'], in input's dtype."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        result: Tensor = self._conv_forward(input, self._kernel(input.dtype), bias)
        return result

    def _kernel(self, dtype: torch.dtype) -> Tensor:
        return self.dequantize().to(dtype).reshape(self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def trial(self, rows: int, draw: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sizes = [(size - 1) * step + 2 for size, step in zip(self.kernel_size, self.dilation, strict=True)]
        x = torch.randn(rows, self.in_channels, *sizes, generator=draw).to(device=self.weight.device, dtype=dtype)
        found = QuantizedConv2d.forward(self, x).float()  # not a subclass's, which may pad first
        weight = self.dequantize().reshape(self.groups, -1, self.columns)
        flat = torch.einsum("grk,gnk->rgn", patches(self, x.float()), weight).flatten(1)
        flat = flat if self.bias is None else flat + self.bias.float()
        return found.permute(0, 2, 3, 1).reshape(flat.shape), flat

    @property
    def columns(self) -> int:
        return self.in_channels // self.groups * self.kernel_size[0] * self.kernel_size[1]


@cache
def quantized_class(cls: type[nn.Conv2d]) -> type[QuantizedConv2d]:
    """The quantized class of a convolution class: below a subclass with a forward of its own, so that its `super().forward` is ours."""
    if cls is nn.Conv2d:
        return QuantizedConv2d
    return type(f"Quantized{cls.__name__}", (cls, QuantizedConv2d), {"__module__": cls.__module__})


def hands_on(cls: type[nn.Conv2d]) -> bool:
    """Whether the class's forward reaches `nn.Conv2d`'s and does not read the weight itself."""
    for base in cls.__mro__:
        if base is nn.Conv2d:
            return True
        for method in (base.__dict__.get("forward"), base.__dict__.get("_conv_forward")):
            code = getattr(method, "__code__", None)
            if code is not None and ("weight" in code.co_names or "__class__" not in code.co_freevars):
                return False
    return False


def patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Input [B, in, H, W] as the rows that each group's weights are multiplied with: [groups, B * H' * W', K]."""
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
        padding: tuple[int, ...] = (0, 0)
    else:
        padding = conv.padding
    columns = F.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride)  # [B, in * kernel, positions]
    batch, inputs, positions = columns.shape
    grouped = columns.reshape(batch, conv.groups, inputs // conv.groups, positions)
    return grouped.permute(1, 0, 3, 2).flatten(1, 2)
