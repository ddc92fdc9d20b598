"""Everything between the products: norms, activations, look-ups, copies, long reductions, the optimizer's update.

Eager PyTorch runs each as a kernel of its own. Inductor merges neighbours, so the merged forms that decoders and classifiers
end in are compiled here as small functions of their own and measured whole; their points bear the name `fused`. What they
read was just written by the layer before; what is too large to wait in a core's own cache is cycled through (see `case.flows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels.formats import OCP
from optforge.kernels.rounding import fp8_rows, int8_rows
from optforge.measure.machine.case import Case, random, warm
from optforge.measure.machine.clock import Call
from optforge.measure.machine.point import COPY, EMBEDDING, FUSED, OPTIMIZER, POINTWISE, REDUCTION, UPDATE
from optforge.pretrained import torch_dtype

DECODER_SIZES = ((256, 576), (256, 1536), (4, 576), (64, 576), (1024, 1536), (1, 4096), (16, 4096))
LARGE_SIZES = ((2048, 4096), (256, 4096), (2048, 14336), (8192, 8192))
"""(rows, width) of single operators; the large ones on CUDA."""
WIDER = {"bf16": torch.float32, "fp32": torch.bfloat16}
"""What a tensor of the dtype is converted to."""
NORM_SIZES = ((32, 112), (96, 112), (144, 56), (240, 28), (480, 14), (1152, 7), (16, 28))
"""(channels, pixels a side) of batch norms."""

# name -> kind, bytes per element in elements of the dtype, the operator on two tensors
SINGLE: dict[str, tuple[str, float, Callable[[Tensor, Tensor], Any]]] = {
    "aten.mul": (POINTWISE, 3, torch.mul),
    "aten.add": (POINTWISE, 3, torch.add),
    "aten.silu": (POINTWISE, 2, lambda x, y: F.silu(x)),
    "aten.pow": (POINTWISE, 2, lambda x, y: x.pow(2)),
    "aten.neg": (POINTWISE, 2, lambda x, y: -x),
    "aten.hardtanh": (POINTWISE, 2, lambda x, y: F.relu6(x)),
    "aten.cat": (COPY, 4, lambda x, y: torch.cat((x, y), -1)),
    "aten.mean": (REDUCTION, 1, lambda x, y: x.mean(-1, keepdim=True)),
    "aten._softmax": (REDUCTION, 2, lambda x, y: x.softmax(-1)),
}


def eager(device: torch.device) -> Iterator[Case]:
    """Single operators as PyTorch runs them."""
    for size in (*DECODER_SIZES, *LARGE_SIZES) if device.type == "cuda" else DECODER_SIZES:
        for dtype in ("bf16", "fp32"):
            inputs = partial(_tensors, (size, size), torch_dtype(dtype), device)
            elements = size[0] * size[1]
            for name, (kind, moved, call) in SINGLE.items():
                result = (size[0], 2 * size[1]) if name == "aten.cat" else size
                yield Case(
                    kind=kind,
                    name=name,
                    dtype=dtype,
                    size=result,
                    bytes=moved * elements * torch_dtype(dtype).itemsize,
                    make=warm(call, inputs),
                )
            converted = partial(torch.Tensor.to, dtype=WIDER[dtype])
            make = warm(lambda x, y, converted=converted: converted(x), inputs)
            yield Case(kind=COPY, name="aten._to_copy", dtype=dtype, size=size, bytes=6.0 * elements, make=make)


def batch_norms(device: torch.device) -> Iterator[Case]:
    """Batch norms of classifiers in evaluation, channels first, as eager models have them."""
    for batch in (1, 8, 32):
        for channels, side in NORM_SIZES:
            for dtype in ("fp32", "bf16"):
                size = (batch, channels, side, side)
                yield Case(
                    kind=REDUCTION,
                    name="aten.native_batch_norm",
                    dtype=dtype,
                    size=size,
                    bytes=2.0 * batch * channels * side**2 * torch_dtype(dtype).itemsize,
                    make=warm(_batch_norm, partial(_tensors, (size, (channels,), (channels,)), torch_dtype(dtype), device)),
                )


def paddings(device: torch.device) -> Iterator[Case]:
    """Borders of zeros, which classifiers from TensorFlow put before convolutions of stride 2: the result is filled, then copied into."""
    for batch in (1, 8, 32):
        for channels, side in NORM_SIZES:
            for dtype in ("fp32", "bf16"):
                size = (batch, channels, side, side)
                read, written = batch * channels * side**2, batch * channels * (side + 1) ** 2
                yield Case(
                    kind=COPY,
                    name="aten.constant_pad_nd",
                    dtype=dtype,
                    size=(batch, channels, side + 1, side + 1),
                    bytes=float(read + written) * torch_dtype(dtype).itemsize,
                    make=warm(_padded, partial(_tensors, (size,), torch_dtype(dtype), device)),
                )


def lookups(device: torch.device) -> Iterator[Case]:
    """Rows of an embedding's table."""
    for vocabulary, width in ((49152, 576), (128256, 2048), (128256, 4096)) if device.type == "cuda" else ((49152, 576),):
        for rows in (1, 16, 256, 2048, 8192):
            yield Case(
                kind=EMBEDDING,
                name="aten.embedding",
                dtype="bf16",
                size=(rows, width),
                bytes=2.0 * rows * width * 2 + 8 * rows,
                make=warm(F.embedding, partial(_table, vocabulary, width, rows, device)),
            )


def updates(device: torch.device) -> Iterator[Case]:
    """One step of fused AdamW over eight equal parameters; parameter, gradient and both moments in one dtype."""
    for each in (2**17, 2**21, 2**24) if device.type == "cuda" else (2**15, 2**19):
        for dtype in ("bf16", "fp32"):
            yield Case(
                kind=OPTIMIZER,
                name="aten._fused_adamw_",
                dtype=dtype,
                size=(each,),
                phase=UPDATE,
                bytes=7.0 * 8 * each * torch_dtype(dtype).itemsize,
                make=partial(_update, device, each, torch_dtype(dtype)),
            )


def fused(device: torch.device) -> Iterator[Case]:
    """What Inductor makes of decoders' and classifiers' small operators, at several numbers of rows each."""
    cuda = device.type == "cuda"
    many = (1, 4, 16, 64, 256, 2048, 8192) if cuda else (4, 16, 64, 256, 512, 1024)
    for width in (4096, 2048, 576) if cuda else (576,):
        yield from _Fused(REDUCTION, "bf16", _norm, (BF16_ROWS, BF16_ROWS, CHANNELS), 8).cases(device, width, many)
        yield from _Fused(REDUCTION, "int8", int8_rows, (BF16_ROWS,), 3).cases(device, width, many)
        yield from _Fused(REDUCTION, "int8", _norm_int8, (BF16_ROWS, BF16_ROWS, CHANNELS), 7).cases(device, width, many)
        if cuda:
            yield from _Fused(REDUCTION, "fp8", _round_fp8, (BF16_ROWS,), 3).cases(device, width, many)
    for width in (14336, 8192, 1536) if cuda else (1536,):
        yield from _Fused(POINTWISE, "bf16", _swiglu, (TWICE,), 6).cases(device, width, many)
        yield from _Fused(REDUCTION, "int8", _swiglu_int8, (TWICE,), 5).cases(device, width, many)
    for width in (4096, 2048) if cuda else (576, 3072):
        yield from _Fused(POINTWISE, "bf16", _dequantize, (FP32_ROWS, SCALES, SCALES, CHANNELS), 6).cases(device, width, many)
    if not cuda:  # there int8 products end in fp32, and what follows begins with their scales
        norm = (FP32_ROWS, SCALES, SCALES, CHANNELS, BF16_ROWS, CHANNELS)
        yield from _Fused(REDUCTION, "int8", _dequantize_norm_int8, norm, 9).cases(device, 576, many)
        yield from _Fused(POINTWISE, "bf16", _dequantize_swiglu, (FP32_TWICE, SCALES, SCALES, BOTH), 10).cases(device, 1536, many)
    for dtype, rows in (("fp32", FP32_ROWS), ("bf16", BF16_ROWS)):
        program = _Fused(POINTWISE, dtype, _residual, (rows, rows), 3 * torch_dtype(dtype).itemsize)
        yield from program.cases(device, 144, (784, 3136, 25088, 100352))


def choices(device: torch.device) -> Iterator[Case]:
    """The most likely token, which workloads choose outside of what is compiled."""
    for width in (128256, 49152) if device.type == "cuda" else (49152,):
        for rows in (1, 4, 16, 64):
            yield Case(
                kind=REDUCTION,
                name="aten.argmax",
                dtype="int64",
                size=(rows, 1, width),
                bytes=2.0 * rows * width + 8 * rows,
                make=warm(_argmax, partial(_tensors, ((rows, 1, width),), torch.bfloat16, device)),
            )


Input = tuple[str, torch.dtype]
BF16_ROWS, FP32_ROWS, TWICE = ("rows", torch.bfloat16), ("rows", torch.float32), ("twice", torch.bfloat16)
FP32_TWICE, BOTH = ("twice", torch.float32), ("both", torch.float32)
SCALES, CHANNELS = ("scales", torch.float32), ("channels", torch.bfloat16)
"""What an input of a merged kernel looks like: [rows, width], [rows, 2 width], [rows, 1], [width] or [2 width]."""


@dataclass(frozen=True)
class _Fused:
    """A small function that Inductor compiles: on CUDA a program for each size, as blocks are compiled; on a CPU, where each takes
    seconds, one program for one row and one for every other number."""

    kind: str
    dtype: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    per_element: float
    """Bytes read and written for each of rows x width."""

    def cases(self, device: torch.device, width: int, many: Sequence[int]) -> Iterator[Case]:
        cuda = device.type == "cuda"
        programs = {single: torch.compile(self.function) for single in (True, False)}
        for rows in many:
            yield Case(
                kind=self.kind,
                name=FUSED,
                dtype=self.dtype,
                size=(rows, width),
                bytes=self.per_element * rows * width,
                compiled=True,
                make=partial(self._make, None if cuda else programs[rows == 1], rows, width, device),
            )

    def _make(self, program: Callable[..., Any] | None, rows: int, width: int, device: torch.device, copies: int) -> list[Call]:
        shapes = {"rows": (rows, width), "twice": (rows, 2 * width), "scales": (rows, 1), "channels": (width,), "both": (2 * width,)}
        tensors = [random(shapes[shape], dtype, device) for shape, dtype in self.inputs]
        if program is None:
            torch._dynamo.reset()  # programs of one function are limited in number, and beyond it the function runs eagerly
            return [partial(torch.compile(self.function, dynamic=False), *tensors)]
        for tensor in tensors if rows > 1 else ():
            if tensor.ndim > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
        return [partial(program, *tensors)]


def _norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual sum and its RMS norm, as a decoder's layer begins."""
    total = x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return total, weight * normed.to(x.dtype)


def _round_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    return fp8_rows(x, OCP, per_row=True)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _norm_int8(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A layer's beginning whose product takes int8: the rows are gone over once for the norm and twice for their range."""
    total, normed = _norm(x, residual, weight)
    return total, *int8_rows(normed)


def _swiglu_int8(x: Tensor) -> tuple[Tensor, ...]:
    return int8_rows(_swiglu(x))


def _dequantize(sums: Tensor, scale: Tensor, offset: Tensor, weight_sum: Tensor) -> Tensor:
    """What follows an int8 product."""
    return (sums * scale + offset * weight_sum).bfloat16()


def _dequantize_swiglu(sums: Tensor, scale: Tensor, offset: Tensor, weight_sum: Tensor) -> Tensor:
    return _swiglu(_dequantize(sums, scale, offset, weight_sum))


def _dequantize_norm_int8(*operands: Tensor) -> tuple[Tensor, ...]:
    *product, residual, weight = operands
    return _norm_int8(_dequantize(*product), residual, weight)


def _residual(x: Tensor, y: Tensor) -> Tensor:
    return F.relu6(x) + y


def _argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def _batch_norm(x: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
    return F.batch_norm(x, mean, weight, weight, mean)  # a variance below zero gives NaN, in no other time


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1, 0, 1))


def _tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(random(shape, dtype, device) for shape in shapes)


def _table(vocabulary: int, width: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row numbers and the table."""
    return torch.randint(0, vocabulary, (rows,), device=device), random((vocabulary, width), torch.bfloat16, device)


def _update(device: torch.device, each: int, dtype: torch.dtype, copies: int) -> list[Call]:
    parameters, gradients, first = ([random((each,), dtype, device) for _ in range(8)] for _ in range(3))
    second = [tensor.square() for tensor in first]
    steps = [torch.ones((), device=device) for _ in range(8)]
    options: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    return [partial(torch._fused_adamw_, parameters, gradients, first, second, [], steps, amsgrad=False, maximize=False, **options)]
