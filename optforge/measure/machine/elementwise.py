"""Everything between the products: norms, activations, look-ups, copies, long reductions, the optimizer's update.

Eager PyTorch runs each as a kernel of its own. Inductor merges neighbours, so the merged forms that decoders and classifiers
end in are compiled here as small functions of their own and measured whole; their points bear the name `fused`. What they
read was just written by the layer before, so nothing is cycled, except the table of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optforge.kernels.formats import OCP
from optforge.kernels.rounding import fp8_rows, int8_rows
from optforge.measure.machine.case import TORCH, Case, random
from optforge.measure.machine.clock import Call
from optforge.measure.machine.point import COPY, EMBEDDING, FUSED, OPTIMIZER, POINTWISE, REDUCTION, UPDATE

SIZES = ((256, 576), (256, 1536), (4, 576), (64, 576), (1024, 1536), (2048, 4096), (1, 4096), (16, 4096), (256, 4096), (2048, 14336), (8192, 8192))  # fmt: skip
"""(rows, width) of single operators."""
CPU_ELEMENTS = 4e6
"""Larger tensors take a CPU too long, and behave as this one does."""


def eager(device: torch.device) -> Iterator[Case]:
    """Single operators as PyTorch runs them."""
    for rows, width in SIZES:
        if device.type == "cpu" and rows * width > CPU_ELEMENTS:
            continue
        for dtype in ("bf16", "fp32"):
            x, y = random((rows, width), TORCH[dtype], device), random((rows, width), TORCH[dtype], device)
            other, wide = (torch.float32, 6) if dtype == "bf16" else (torch.bfloat16, 6)
            item, count = TORCH[dtype].itemsize, rows * width
            for name, kind, moved, call in (
                ("aten.mul", POINTWISE, 3 * item, lambda x=x, y=y: x * y),
                ("aten.add", POINTWISE, 3 * item, lambda x=x, y=y: x + y),
                ("aten.silu", POINTWISE, 2 * item, lambda x=x: F.silu(x)),
                ("aten.pow", POINTWISE, 2 * item, lambda x=x: x.pow(2)),
                ("aten.neg", POINTWISE, 2 * item, lambda x=x: -x),
                ("aten.hardtanh", POINTWISE, 2 * item, lambda x=x: F.relu6(x)),
                ("aten._to_copy", COPY, wide, lambda x=x, other=other: x.to(other)),
                ("aten.clone", COPY, 2 * item, lambda x=x: x.clone()),
                ("aten.cat", COPY, 4 * item, lambda x=x, y=y: torch.cat((x, y), -1)),
                ("aten.mean", REDUCTION, item, lambda x=x: x.mean(-1, keepdim=True)),
                ("aten._softmax", REDUCTION, 2 * item, lambda x=x: x.softmax(-1)),
            ):
                yield _simple(kind, name, dtype, (rows, width), float(moved * count), call)


def batch_norms(device: torch.device) -> Iterator[Case]:
    """Batch norms of classifiers in evaluation, channels first, as eager models have them."""
    for batch in (1, 8, 32):
        for channels, side in ((32, 112), (96, 112), (144, 56), (240, 28), (480, 14), (1152, 7), (16, 28)):
            for dtype in ("fp32", "bf16"):
                x, w = random((batch, channels, side, side), TORCH[dtype], device), torch.ones(channels, dtype=TORCH[dtype], device=device)
                call = lambda x=x, w=w: F.batch_norm(x, w, w, w, w)  # noqa: E731 - as in products
                moved = 2.0 * x.numel() * x.element_size()
                yield _simple(REDUCTION, "aten.native_batch_norm", dtype, tuple(x.shape), moved, call)


def lookups(device: torch.device) -> Iterator[Case]:
    """Rows of an embedding's table."""
    for vocabulary, width in ((49152, 576), (128256, 2048), (128256, 4096)) if device.type == "cuda" else ((49152, 576),):
        table = random((vocabulary, width), torch.bfloat16, device)
        for rows in (1, 16, 256, 2048, 8192):
            ids = torch.randint(0, vocabulary, (rows,), device=device)
            moved = 2.0 * rows * width * 2 + 8 * rows
            yield _simple(EMBEDDING, "aten.embedding", "bf16", (rows, width), moved, lambda ids=ids, table=table: F.embedding(ids, table))


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
                bytes=7.0 * 8 * each * TORCH[dtype].itemsize,
                make=lambda copies, each=each, dtype=dtype: [_update(device, each, TORCH[dtype])],
            )


def fused(device: torch.device) -> Iterator[Case]:
    """What Inductor makes of decoders' and classifiers' small operators, at several numbers of rows each."""
    cuda = device.type == "cuda"
    many = (1, 4, 16, 64, 256, 2048, 8192) if cuda else (4, 16, 64, 256, 512, 1024)
    for width in (4096, 2048, 576) if cuda else (576,):
        yield from _compiled(device, REDUCTION, FUSED, "bf16", width, many, _norm_inputs, _norm, 8.0)
        yield from _compiled(device, REDUCTION, FUSED, "int8", width, many, _one_input, _round_int8, 3.0)
        if cuda:
            yield from _compiled(device, REDUCTION, FUSED, "fp8", width, many, _one_input, _round_fp8, 3.0)
    for width in (14336, 8192, 1536) if cuda else (1536,):
        yield from _compiled(device, POINTWISE, FUSED, "bf16", width, many, _two_inputs, _swiglu, 6.0)
    for width in (4096, 2048) if cuda else (576, 3072):
        yield from _compiled(device, POINTWISE, FUSED, "bf16", width, many, _sum_inputs, _dequantize, 6.0)
    for dtype in ("fp32", "bf16"):
        item = TORCH[dtype].itemsize
        yield from _compiled(device, POINTWISE, FUSED, dtype, 144, (784, 3136, 25088, 100352), _pair(dtype), _residual, 3.0 * item)
    for width in (128256, 49152) if cuda else (49152,):
        yield from _compiled(device, REDUCTION, "aten.argmax", "int64", width, (1, 4, 16, 64), _one_input, _argmax, 2.0)


def _simple(kind: str, name: str, dtype: str, size: tuple[int, ...], moved: float, call: Call) -> Case:
    return Case(kind=kind, name=name, dtype=dtype, size=size, bytes=moved, make=lambda copies: [call])


def _compiled(
    device: torch.device,
    kind: str,
    name: str,
    dtype: str,
    width: int,
    many: Sequence[int],
    inputs: Callable[[int, int, torch.device], tuple[Tensor, ...]],
    function: Callable[..., Any],
    per_element: float,
) -> Iterator[Case]:
    """A small function at several numbers of rows: one program for one row, and one for every other number."""
    programs = {one: torch.compile(function, dynamic=None) for one in (True, False)}

    def make(rows: int) -> list[Call]:
        tensors, program = inputs(rows, width, device), programs[rows == 1]
        if rows > 1:
            for tensor in tensors:
                if tensor.ndim > 1 and tensor.shape[0] == rows:
                    torch._dynamo.mark_dynamic(tensor, 0)
        return [lambda: program(*tensors)]

    for rows in many:
        yield Case(
            kind=kind,
            name=name,
            dtype=dtype,
            size=(rows, width),
            bytes=per_element * rows * width,
            compiled=True,
            make=lambda copies, rows=rows: make(rows),
        )


def _one_input(rows: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    return (random((rows, width), torch.bfloat16, device),)


def _two_inputs(rows: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    return (random((rows, 2 * width), torch.bfloat16, device),)


def _norm_inputs(rows: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    return (*(random((rows, width), torch.bfloat16, device) for _ in range(2)), random((width,), torch.bfloat16, device))


def _sum_inputs(rows: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    scales = [random((rows, 1), torch.float32, device) for _ in range(2)]
    return (random((rows, width), torch.float32, device), *scales, random((width,), torch.float32, device))


def _pair(dtype: str) -> Callable[[int, int, torch.device], tuple[Tensor, ...]]:
    return lambda rows, width, device: tuple(random((rows, width), TORCH[dtype], device) for _ in range(2))


def _norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual sum and its RMS norm, as a decoder's layer begins."""
    total = x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return total, weight * normed.to(x.dtype)


def _round_int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return int8_rows(x)


def _round_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    return fp8_rows(x, OCP, per_row=True)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _dequantize(sums: Tensor, scale: Tensor, offset: Tensor, weight_sum: Tensor) -> Tensor:
    """What follows an int8 product."""
    return (sums * scale + offset * weight_sum).bfloat16()


def _residual(x: Tensor, y: Tensor) -> Tensor:
    return F.relu6(x) + y


def _argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def _update(device: torch.device, each: int, dtype: torch.dtype) -> Call:
    params, grads, first = ([random((each,), dtype, device) for _ in range(8)] for _ in range(3))
    second = [tensor.square() for tensor in first]
    steps = [torch.ones((), device=device) for _ in range(8)]

    def step() -> None:
        torch._fused_adamw_(
            params,
            grads,
            first,
            second,
            [],
            steps,
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return step
