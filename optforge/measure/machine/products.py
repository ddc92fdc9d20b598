"""Matrix products y[m, n] = x[m, k] w[n, k].T of real layers, as each dtype and kernel of this package runs them.

Layers are named by (n, k): those of SmolLM2 (576 wide), of Llama 3.2 1B (2,048) and of Llama 3 8B (4,096), as they are and as
`fuse/decoder` packs them, and the heads over their vocabularies. The weight is what a model reads once a pass, so calls
cycle through several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from optforge.kernels import fp8_weight, int4_weight, int8_dynamic, int8_weight
from optforge.measure.machine.case import TORCH, Case, random
from optforge.measure.machine.clock import Call
from optforge.measure.machine.point import PRODUCT

KERNELS = (fp8_weight, int4_weight, int8_dynamic, int8_weight)
"""Modules that define this package's operators when they are imported."""

SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (1536, 576), (192, 576))
LLAMA_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048), (8192, 2048), (512, 2048))
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (14336, 4096), (1024, 4096))
"""Packed layers and the head first, then those of the model as loaded."""

ROWS = (1, 4, 16, 64, 256, 1024, 2048, 8, 2, 32, 512, 128, 4096, 8192, 16384)
"""The rows that predictions need most stand first, since a budget may end the list."""
HEAD = 32_768
HEAD_ROWS = 256
"""Rows of a layer with this many outputs: prefill computes the last position's logits alone."""
GROUP = 64
"""Columns that share an int4 scale, as the recipe llama_int4 has it."""
CUDA_INT8_ROWS = 17
"""cuBLAS's int8 product takes no fewer."""

Make = Callable[[Tensor, Tensor], Call]


def products(device: torch.device, layers: Sequence[tuple[int, int]], rows: Sequence[int] = ROWS) -> Iterator[Case]:
    """Every kind of product that the device has units or kernels for, rows outermost."""
    for m in rows:
        for n, k in layers:
            if n >= HEAD and m > HEAD_ROWS:
                continue
            yield from _dense(device, m, n, k)
            yield from _cuda(device, m, n, k) if device.type == "cuda" else _cpu(device, m, n, k)


def classifier(device: torch.device, batches: Sequence[int]) -> Iterator[Case]:
    """The last layer of an image classifier, with its bias."""
    for m in batches:
        for dtype in ("fp32", "bf16"):
            bias = random((1000,), TORCH[dtype], device)
            yield _case(
                device,
                "aten.addmm",
                dtype,
                (m, 1000, 1280),
                TORCH[dtype],
                TORCH[dtype],
                lambda x, w, bias=bias: torch.addmm(bias, x, w.t()),
            )


def gradients(device: torch.device, layers: Sequence[tuple[int, int]], tokens: Sequence[int]) -> Iterator[Case]:
    """Gradients of weights, dw[n, k] = dy[tokens, n].T x[tokens, k], which no layer's forward has: wide, with a long sum."""
    for rows in tokens:
        for n, k in layers:
            if n < HEAD:
                size = (1, n, k, rows)
                yield Case(
                    kind=PRODUCT,
                    name="aten.mm",
                    dtype="bf16",
                    size=size,
                    flops=2.0 * n * k * rows,
                    bytes=2.0 * (n * rows + k * rows + n * k),
                    make=lambda copies, n=n, k=k, rows=rows: [_gradient(device, n, k, rows)],
                )


def batched(device: torch.device) -> Iterator[Case]:
    """Products of many small matrices."""
    for batch, m, n, k in (
        (8, 64, 64, 64),
        (32, 128, 128, 64),
        (9, 256, 256, 64),
        (64, 512, 512, 64),
        (64, 1, 512, 128),
        (32, 1024, 1024, 128),
    ):
        for dtype in ("bf16", "fp32"):
            a, b = random((batch, m, k), TORCH[dtype], device), random((batch, k, n), TORCH[dtype], device)
            yield Case(
                kind=PRODUCT,
                name="aten.bmm",
                dtype=dtype,
                size=(batch, m, n, k),
                flops=2.0 * batch * m * n * k,
                bytes=float(a.element_size() * batch * (m * k + k * n + m * n)),
                make=lambda copies, a=a, b=b: [lambda: torch.bmm(a, b)],
            )


def _dense(device: torch.device, m: int, n: int, k: int) -> Iterator[Case]:
    for dtype in ("bf16", "fp32"):
        if dtype == "bf16" or device.type == "cpu" or k < 2048:
            yield _case(device, "aten.mm", dtype, (m, n, k), TORCH[dtype], TORCH[dtype], lambda x, w: torch.mm(x, w.t()))


def _cpu(device: torch.device, m: int, n: int, k: int) -> Iterator[Case]:
    if n >= HEAD:  # recipes leave the head in the model's dtype
        return
    if vnni():
        scale = torch.full((n, 1), 1e-3)
        yield _case(
            device,
            "optforge.int8_packed",
            "int8",
            (m, n, k),
            torch.uint8,
            torch.int8,
            lambda x, w: torch.ops.optforge.int8_packed(x, w, scale),
        )
    yield _case(device, "aten._int_mm", "int8", (m, n, k), torch.int8, torch.int8, lambda x, w: torch._int_mm(x, w.t()))


def _cuda(device: torch.device, m: int, n: int, k: int) -> Iterator[Case]:
    if n >= HEAD:
        return
    if torch.cuda.get_device_capability(device) >= (8, 9) and torch.version.hip is None:
        rows, channels = torch.full((m, 1), 1e-3, device=device), torch.full((1, n), 1e-3, device=device)
        fp8 = torch.float8_e4m3fn
        yield _case(
            device,
            "aten._scaled_mm",
            "fp8",
            (m, n, k),
            fp8,
            fp8,
            lambda x, w: torch._scaled_mm(x, w.t(), rows, channels, out_dtype=torch.bfloat16),
        )
    if m >= CUDA_INT8_ROWS:
        yield _case(device, "aten._int_mm", "int8", (m, n, k), torch.int8, torch.int8, lambda x, w: torch._int_mm(x, w.t()))
    if m <= 256:
        yield from _weight_only(device, m, n, k)


def _weight_only(device: torch.device, m: int, n: int, k: int) -> Iterator[Case]:
    """This package's kernels: the weight is stored in few bits and multiplied in bf16."""
    ops, scale = torch.ops.optforge, torch.full((n, 1), 1e-3, device=device)
    bf16 = torch.bfloat16
    yield _case(device, "optforge.int8_weight", "bf16", (m, n, k), bf16, torch.int8, lambda x, w: ops.int8_weight(x, w, scale, None))
    yield _case(
        device, "optforge.fp8_weight", "bf16", (m, n, k), bf16, torch.uint8, lambda x, w: ops.fp8_weight(x, w, scale, None, "e4m3fn")
    )
    if k % GROUP == 0:
        groups = torch.full((n, k // GROUP), 1e-3, device=device)
        call = lambda x, w: ops.int4_weight(x, w, groups, None, None, GROUP)  # noqa: E731 - a line of its own would hide that it is one operator
        yield _case(device, "optforge.int4_weight", "bf16", (m, n, k), bf16, torch.uint8, call, packing=2, detail=f"group={GROUP}")


def _case(
    device: torch.device,
    name: str,
    dtype: str,
    size: tuple[int, int, int],
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    call: Callable[[Tensor, Tensor], Tensor],
    *,
    packing: int = 1,
    detail: str = "",
) -> Case:
    """`packing`: values of the weight in one stored element."""
    m, n, k = size
    weight = n * k * w_dtype.itemsize / packing

    def make(copies: int) -> list[Call]:
        x = random((m, k), x_dtype, device)
        weights = [random((n, k // packing), w_dtype, device) for _ in range(copies)]
        return [lambda w=w: call(x, w) for w in weights]  # type: ignore[misc]  # mypy types no lambda with a default

    return Case(
        kind=PRODUCT,
        name=name,
        dtype=dtype,
        size=(1, m, n, k),
        detail=detail,
        flops=2.0 * m * n * k,
        bytes=m * k * x_dtype.itemsize + weight + m * n * (4 if dtype == "int8" else 4 if dtype == "fp32" else 2),
        cold=weight,
        extra=weight if name == "optforge.int8_packed" else 4 * weight,
        make=make,
    )


def _gradient(device: torch.device, n: int, k: int, rows: int) -> Call:
    dy, x = random((rows, n), torch.bfloat16, device), random((rows, k), torch.bfloat16, device)
    return lambda: torch.mm(dy.t(), x)


def vnni() -> bool:
    """Whether the CPU has the int8 units that oneDNN's packed product needs."""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_vnni_supported())  # type: ignore[no-untyped-call]  # PyTorch leaves them untyped
