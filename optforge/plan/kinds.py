"""What one dispatched operator does: its kind, sizes, floating-point operations, and the bytes it touches.

Flops come from PyTorch's own formulas (`torch.utils.flop_counter`), which the operators of this package add theirs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from optforge.plan import graph as g

DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.int8: "int8",
}
"""Names of the dtypes that profiles have peaks for; others keep PyTorch's name."""

REDUCTIONS = frozenset(
    {
        "sum",
        "mean",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "max",
        "min",
        "prod",
        "any",
        "all",
        "var",
        "var_mean",
        "std",
        "norm",
        "linalg_vector_norm",
        "logsumexp",
        "cumsum",
        "topk",
        "sort",
        "_softmax",
        "_log_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "native_group_norm",
        "native_batch_norm",
        "cudnn_batch_norm",
        "nll_loss_forward",
        "nll_loss_backward",
        "avg_pool2d",
        "adaptive_avg_pool2d",
        "_adaptive_avg_pool2d",
        "max_pool2d",
        "max_pool2d_with_indices",
        "upsample_bilinear2d",
    }
)
"""Operators whose outputs each need several elements of an input."""

LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "take_along_dim"})
"""Read of their first input only what they return."""

SCATTERS = frozenset({"index_copy_", "index_put_", "scatter_", "index_fill_", "_index_put_impl_"})
"""Write of their first input only as much as they are given."""

OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_"})
"""Do not read what they write to."""

COPIES = frozenset(
    {
        "clone",
        "_to_copy",
        "cat",
        "stack",
        "constant_pad_nd",
        "slice_scatter",
        "select_scatter",
        "index_put",
        "index_copy",
        "scatter",
        "repeat",
        "roll",
        "flip",
        "tril",
        "triu",
        "embedding_dense_backward",
    }
)

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
"""Memory without content: no work."""


@dataclass(frozen=True)
class Described:
    """What an operator does; tensors with the bytes touched of each."""

    name: str
    kind: str
    dtype: str
    size: tuple[int, ...]
    detail: str
    flops: float
    reads: list[tuple[Tensor, float]]
    writes: list[tuple[Tensor, float]]


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def access(tensor: Tensor) -> float:
    """Bytes of the tensor's own elements, each once however often an expanded dimension repeats it."""
    count = 1
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= extent if stride else min(extent, 1)
    return float(count * tensor.element_size())


def describe(func: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> Described | None:
    """What `func` did with these tensors, or None where it only allocated memory.

    Args:
        func: an overload of `torch.ops`.
        args: its positional arguments.
        inputs: every tensor among its arguments, in their order.
        outputs: every tensor that it returned; for one that returns none and writes in place, empty.
    """
    short = func._schema.name.partition("::")[2]
    if short in ALLOCATIONS:
        return None
    kind, size, dtype, detail = _classified(func, short, args, inputs, outputs)
    reads, writes = _moved(func, short, inputs, outputs)
    return Described(
        name=f"{func.namespace}.{short}",
        kind=kind,
        dtype=dtype,
        size=size,
        detail=detail,
        flops=_flops(func, short, args, outputs),
        reads=reads,
        writes=writes,
    )


def _flops(func: Any, short: str, args: tuple[Any, ...], outputs: list[Tensor]) -> float:
    """By PyTorch's formula; of causal attention the half that is needed, which the formula counts in full."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    counted = float(formula(*args, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)))
    return counted * (1 + 1 / args[0].shape[2]) / 2 if short == "grouped_attention" else counted


def _classified(
    func: Any, short: str, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[str, tuple[int, ...], str, str]:
    """Kind, size, dtype and detail."""
    product = _PRODUCTS.get(short)
    size, operand = product(args) if product is not None else ((), None)
    if operand is not None and size[-1] > 1:  # an outer product is multiplied without matrix units
        return g.PRODUCT, size, dtype_name(operand.dtype), _detail(func, args) if func.namespace == "optforge" else ""
    if short == "grouped_attention":
        q, k = args[0], args[1]
        return g.ATTENTION, (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]), dtype_name(q.dtype), "causal"
    if short in ("convolution", "_convolution", "convolution_backward", "conv2d", "conv1d", "conv3d"):
        return g.CONVOLUTION, _convolution_size(short, args, outputs), dtype_name(args[0].dtype), ""
    first = outputs[0] if outputs else inputs[0]
    shape = tuple(int(extent) for extent in first.shape)
    if short == "embedding":
        rows = 1
        for extent in shape[:-1]:
            rows *= extent
        return g.EMBEDDING, (rows, shape[-1] if shape else 1), dtype_name(first.dtype), ""
    if short in REDUCTIONS:
        return g.REDUCTION, tuple(int(extent) for extent in inputs[0].shape) if inputs else shape, dtype_name(first.dtype), ""
    kind = g.COPY if short in COPIES or short in LOOKUPS or short in SCATTERS or short in OVERWRITES else g.POINTWISE
    return kind, shape, dtype_name(first.dtype), ""


def _detail(func: Any, args: tuple[Any, ...]) -> str:
    """Which optional arguments an operator of this package got: `per_tensor` (one scale in all), `zero`, `bias`, `group=64`."""
    said = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "scale" and value.numel() == 1:
            said.append("per_tensor")
        elif argument.name.startswith("zero") and value is not None:
            said.append("zero")
        elif argument.name == "bias" and value is not None:
            said.append("bias")
        elif argument.name.startswith("group"):
            said.append(f"group={value}")
    return ",".join(said)


Touched = list[tuple[Tensor, float]]


def _moved(
    func: Any, short: str, inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[list[tuple[Tensor, float]], list[tuple[Tensor, float]]]:
    """What is read and written, with bytes."""
    written = _written(func, inputs, outputs)
    found = sum(access(tensor) for tensor in outputs)
    if short in LOOKUPS and inputs:
        return [(inputs[0], min(found, access(inputs[0]))), *((tensor, access(tensor)) for tensor in inputs[1:])], written
    if short in SCATTERS and len(inputs) > 1:
        given = access(inputs[-1])
        return [(tensor, access(tensor)) for tensor in inputs[1:]], [(inputs[0], min(given, access(inputs[0])))]
    read = inputs[1:] if short in OVERWRITES else inputs
    return [(tensor, access(tensor)) for tensor in read], written


def _written(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Touched:
    """The outputs; for operators that write in place and return nothing, the arguments that their schema marks as written."""
    if outputs or not func._schema.is_mutable:
        return [(tensor, access(tensor)) for tensor in outputs]
    lists = str(func._schema).count("!")
    return [(tensor, access(tensor)) for tensor in (inputs if lists > 1 else inputs[: max(1, len(inputs) // 2)])]


Product = tuple[tuple[int, ...], Tensor]


def _mm(a: Tensor, b: Tensor) -> Product:
    return (1, int(a.shape[0]), int(b.shape[1]), int(a.shape[1])), a


def _bmm(a: Tensor, b: Tensor) -> Product:
    return (int(a.shape[0]), int(a.shape[1]), int(b.shape[2]), int(a.shape[2])), a


def _linear(x: Tensor, weight: Tensor) -> Product:
    rows = 1
    for extent in x.shape[:-1]:
        rows *= extent
    return (1, rows, int(weight.shape[0]), int(x.shape[-1])), x


def _packed(x: Tensor, weight: Tensor) -> Product:
    """oneDNN's packed product multiplies bytes."""
    size, _ = _linear(x, weight)
    return size, weight


def _compressed(weight: Tensor, x: Tensor) -> Product:
    """2:4: the compressed weight has the rows of the dense one, and the other factor comes transposed."""
    return (1, int(x.shape[1]), int(weight.shape[0]), int(x.shape[0])), x


_PRODUCTS: dict[str, Callable[[tuple[Any, ...]], Product]] = {
    "mm": lambda args: _mm(args[0], args[1]),
    "addmm": lambda args: _mm(args[1], args[2]),
    "_int_mm": lambda args: _mm(args[0], args[1]),
    "_scaled_mm": lambda args: _mm(args[0], args[1]),
    "bmm": lambda args: _bmm(args[0], args[1]),
    "baddbmm": lambda args: _bmm(args[1], args[2]),
    "linear": lambda args: _linear(args[0], args[1]),
    "mv": lambda args: ((1, int(args[0].shape[0]), 1, int(args[0].shape[1])), args[0]),
    "int8_weight": lambda args: _linear(args[0], args[1]),
    "int4_weight": lambda args: _linear(args[0], args[1]),
    "fp8_weight": lambda args: _linear(args[0], args[1]),
    "int8_packed": lambda args: _packed(args[0], args[1]),
    "int8_few": lambda args: _linear(args[0], args[1]),
    "_cslt_sparse_mm": lambda args: _compressed(args[0], args[1]),
}


def _convolution_size(short: str, args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    """(batch, in_channels, out_channels, groups, kernel_elements, output_pixels)."""
    if short == "convolution_backward":
        grown, inputs, weight, groups = args[0], args[1], args[2], args[9]
    else:
        inputs, weight, grown = args[0], args[1], outputs[0]
        groups = args[8] if len(args) > 8 else 1
    kernel = pixels = 1
    for extent in weight.shape[2:]:
        kernel *= int(extent)
    for extent in grown.shape[2:]:
        pixels *= int(extent)
    return int(inputs.shape[0]), int(inputs.shape[1]), int(grown.shape[1]), int(groups), kernel, pixels
