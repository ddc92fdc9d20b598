"""Holds a freshly quantized layer against its original: what is stored, and what its product gives on this device.

Rounding to nearest has a known largest error, so a layer that misses it was stored wrongly, and a product that misses the
dequantized weight's was computed wrongly (kernels that were silently off by a third at some group sizes are known).
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.errors import StepError
from optforge.kernels.linears import QuantizedLinear

SLACK = 1 + 1e-3
"""For the fp32 arithmetic of the bounds themselves."""
CHECKED_ROWS = (1, 17)
"""Rows of the tried products: a token of a decode, and a number that is no multiple of anything."""
LARGEST_ERROR = {"int8": 0.03, "fp8": 0.08, None: 0.02}
"""Activation dtype -> largest relative error of a product in the Frobenius norm, about twice what normal inputs give."""


def verify_storage(linear: QuantizedLinear, original: Tensor, name: str, step: str) -> None:
    """
    Raises:
        StepError: a stored number is not finite, or a weight is further from its original than half a step of rounding
            (a whole step where a zero point is rounded too).
    """
    for key, tensor in linear.stored():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise StepError(f"step {step}: {name}.{key} holds values that are not finite")
    found = linear.dequantize()
    if not bool(found.isfinite().all()):
        raise StepError(f"step {step}: the stored weight of {name} holds values that are not finite")
    original = original.float()
    excess = (found - original).abs() - _bound(linear, original) * SLACK
    if bool((excess > 0).any()):
        raise StepError(f"step {step}: {name} is stored {float(excess.max()):.3g} further from its weight than rounding explains")


def verify_product(linear: QuantizedLinear, dtype: torch.dtype, name: str, step: str) -> None:
    """
    Raises:
        StepError: the layer's output differs from that of its dequantized weight by more than its arithmetic explains.
    """
    weight = linear.dequantize()
    draw = torch.Generator().manual_seed(0)
    for rows in CHECKED_ROWS:
        x = torch.randn(rows, linear.in_features, generator=draw).to(device=weight.device, dtype=dtype)
        with torch.no_grad():
            expected = torch.nn.functional.linear(x.float(), weight, None if linear.bias is None else linear.bias.float())
            error = (linear(x).float() - expected).norm()
        limit = LARGEST_ERROR[linear.scheme.activation_dtype] * expected.norm()
        if not bool(error <= limit):
            raise StepError(
                f"step {step}: {name} with {rows} rows differs from its own dequantized weight by {float(error):.3g}, "
                f"at most {float(limit):.3g} is explained by its arithmetic ({linear.operator})"
            )


def _bound(linear: QuantizedLinear, original: Tensor) -> Tensor:
    """The largest error of each weight. An fp8 value is off by at most 1/16 of itself, or half the smallest step."""
    if linear.scheme.weight_dtype == "fp8":
        return original.abs() / 16 + linear.weight_scale * 2.0**-10
    steps = 0.5 if linear.scheme.symmetric else 1.0
    if linear.scheme.weight_dtype == "int4":
        return steps * linear.weight_scale.repeat_interleave(linear.group_size, dim=1)[:, : linear.columns]
    return steps * linear.weight_scale
