"""Holds a freshly quantized layer against its original: what is stored, and what its product gives on this device.

Rounding to nearest has a known largest error, so a layer that misses it was stored wrongly, and a product that misses the
dequantized weight's was computed wrongly (kernels that were silently off by a third at some group sizes are known).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optforge.errors import StepError
from optforge.kernels import blocks
from optforge.kernels.parameters import QuantizedParameters, Stored
from optforge.kernels.quantized import Quantized, blocked

SLACK = 1 + 1e-3
"""For the fp32 arithmetic of the bounds themselves."""
CHECKED_ROWS = (1, 17)
"""Rows of the tried products: a token of a decode, and a number that is no multiple of anything."""
LARGEST_ROUNDING = {"int8": 0.1, "fp8": 0.05, "int4": 0.5, "fp4": 0.25}
"""Weight dtype -> largest relative error of a whole weight; a few large values among small ones cost integers most."""
LARGEST_ERROR = {"int8": 0.03, "fp8": 0.08, "fp4": 0.3, None: 0.02}
"""Activation dtype -> largest relative error of a product in the Frobenius norm, about twice what normal inputs give."""


def verify_finite(layer: Quantized, name: str, step: str) -> Tensor:
    """The weight that the storage stands for.

    Raises:
        StepError: a stored number is not finite.
    """
    for key, tensor in layer.stored():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise StepError(f"step {step}: {name}.{key} holds values that are not finite")
    found = layer.dequantize()
    if not bool(found.isfinite().all()):
        raise StepError(f"step {step}: the stored weight of {name} holds values that are not finite")
    return found


def verify_decided(layer: Quantized, values: Tensor | None, name: str, step: str) -> None:
    """Holds the storage against the values that an algorithm chose, which need not be the nearest ones; None where they are not known.

    Raises:
        StepError: a stored number is not finite, or the storage stands for other values.
    """
    found = verify_finite(layer, name, step)
    if values is not None and not torch.allclose(found, values, rtol=1e-4, atol=1e-6 * float(values.abs().max())):
        off = float((found - values).abs().max())
        raise StepError(f"step {step}: {name} is stored {off:.3g} away from the values that were decided for it")


def verify_storage(layer: Quantized, original: Tensor, name: str, step: str) -> None:
    """
    Raises:
        StepError: a stored number is not finite, or a weight is further from its original than half a step of rounding
            (a whole step where a zero point is rounded too).
    """
    found = verify_finite(layer, name, step)
    original = original.float()
    excess = (found - original).abs() - _bound(layer, original) * SLACK
    if bool((excess > 0).any()):
        raise StepError(f"step {step}: {name} is stored {float(excess.max()):.3g} further from its weight than rounding explains")


def verify_parameters(module: QuantizedParameters, originals: Mapping[str, Tensor], name: str, step: str) -> None:
    """Weights that a module reads itself; nothing is checked on meta.

    Raises:
        StepError: one holds values that are not finite, or is further from its original than rounding explains.
    """
    for key, original in originals.items():
        if original.is_meta:
            continue
        found = Stored(module, key).dequantize().float()
        if not bool(found.isfinite().all()):
            raise StepError(f"step {step}: the stored {key} of {name} holds values that are not finite")
        wanted = original.detach().float()
        error, size = float((found - wanted).norm()), float(wanted.norm())
        if error > LARGEST_ROUNDING[module.scheme.weight_dtype] * size:
            raise StepError(f"step {step}: {key} of {name} is stored {error / size:.2g} of its size away from its values")


def verify_product(layer: Quantized, dtype: torch.dtype, name: str, step: str) -> None:
    """
    Raises:
        StepError: the layer's output differs from that of its dequantized weight by more than its arithmetic explains.
    """
    draw = torch.Generator().manual_seed(0)
    for rows in CHECKED_ROWS:
        with torch.no_grad():
            found, expected = layer.trial(rows, draw, dtype)
            error = (found - expected).norm()
        limit = LARGEST_ERROR[layer.scheme.activation_dtype] * expected.norm()
        if not bool(error <= limit):
            raise StepError(
                f"step {step}: {name} with {rows} rows differs from its own dequantized weight by {float(error):.3g}, "
                f"at most {float(limit):.3g} is explained by its arithmetic ({layer.operator})"
            )


def _bound(layer: Quantized, original: Tensor) -> Tensor:
    """The largest error of each weight. An fp8 value is off by at most 1/16 of itself, or half the smallest step."""
    if blocked(layer.scheme):
        return blocks.bound(original, layer.weight_scale, layer._parameters.get("weight_global_scale"), layer.scheme)
    if layer.scheme.weight_dtype == "fp8":
        return original.abs() / 16 + layer.weight_scale * 2.0**-10
    steps = 0.5 if layer.scheme.symmetric else 1.0
    if layer.scheme.weight_dtype == "int4":
        return steps * layer.weight_scale.repeat_interleave(layer.group_size, dim=1)[:, : layer.columns]
    return steps * layer.weight_scale
