"""Matrix products y[m, n] = x[m, k] w[n, k].T of real layers, as each dtype and kernel of this package runs them.

Layers are named by (n, k): those of SmolLM2 (576 wide), of Llama 3.2 1B (2,048) and of Llama 3 8B (4,096), as they are and as
`fuse/decoder` packs them, and the heads over their vocabularies. The weight is what a model reads once a pass, so calls
cycle through several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from optforge.kernels import fp8_weight, int4_weight, int8_dynamic, int8_weight
from optforge.measure.machine.case import FLOWING, Case, random, warm
from optforge.measure.machine.clock import Call
from optforge.measure.machine.point import PRODUCT
from optforge.pretrained import torch_dtype

KERNELS = (fp8_weight, int4_weight, int8_dynamic, int8_weight)
"""Modules that define this package's operators when they are imported."""

SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (1536, 576), (192, 576))
LLAMA_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048), (8192, 2048), (512, 2048))
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (14336, 4096), (1024, 4096))
"""Packed layers and the head first, then those of the model as loaded."""

ROWS = (1, 4, 16, 64, 256, 1024, 2048, 8, 2, 32, 512, 128, 4096, 8192, 16384)
"""The rows that predictions need most stand first, since a budget may end the list."""
CPU_ROWS = (1, 4, 256, 64, 512, 2048, 16, 8, 1024, 2, 128)
HEAD = 32_768
HEAD_ROWS = 256
"""Rows of a layer with this many outputs: prefill computes the last position's logits alone."""
GROUP = 64
"""Columns that share an int4 scale, as the recipe llama_int4 has it."""
CUDA_INT8_ROWS = 17
"""cuBLAS's int8 product takes no fewer."""
FP8_CAPABILITY = (8, 9)
BATCHED = ((8, 64, 64, 64), (32, 128, 128, 64), (9, 256, 256, 64), (64, 512, 512, 64), (64, 1, 512, 128), (32, 1024, 1024, 128))
"""(batch, m, n, k)."""

BF16, INT8, UINT8 = torch.bfloat16, torch.int8, torch.uint8


def products(device: torch.device, layers: Sequence[tuple[int, int]], rows: Sequence[int] = ROWS) -> Iterator[Case]:
    """Every kind of product that the device has units or kernels for, rows outermost."""
    for m in rows:
        for n, k in layers:
            if n < HEAD or m <= HEAD_ROWS:
                yield from _Layer(device, m, n, k).cases()


def classifier(device: torch.device, batches: Sequence[int]) -> Iterator[Case]:
    """The last layer of an image classifier, with its bias."""
    for m in batches:
        for dtype in ("fp32", "bf16"):
            yield _Layer(device, m, 1000, 1280).product("aten.addmm", dtype, (torch_dtype(dtype), torch_dtype(dtype)), _with_bias)


def gradients(device: torch.device, layers: Sequence[tuple[int, int]], tokens: Sequence[int]) -> Iterator[Case]:
    """Gradients of weights, dw[n, k] = dy[tokens, n].T x[tokens, k], which no forward pass has: wide, with a long sum."""
    for rows in tokens:
        for n, k in (layer for layer in layers if layer[0] < HEAD):
            yield Case(
                kind=PRODUCT,
                name="aten.mm",
                dtype="bf16",
                size=(1, n, k, rows),
                flops=2.0 * n * k * rows,
                bytes=2.0 * (n * rows + k * rows + n * k),
                make=warm(_transposed, partial(_pair, (rows, n), (rows, k), BF16, device)),
            )


def batched(device: torch.device) -> Iterator[Case]:
    """Products of many small matrices."""
    for batch, m, n, k in BATCHED:
        for dtype in ("bf16", "fp32"):
            yield Case(
                kind=PRODUCT,
                name="aten.bmm",
                dtype=dtype,
                size=(batch, m, n, k),
                flops=2.0 * batch * m * n * k,
                bytes=float(torch_dtype(dtype).itemsize * batch * (m * k + k * n + m * n)),
                make=warm(torch.bmm, partial(_pair, (batch, m, k), (batch, k, n), torch_dtype(dtype), device)),
            )


class _Layer:
    """The products of one layer at one number of rows."""

    def __init__(self, device: torch.device, m: int, n: int, k: int) -> None:
        self.device, self.m, self.n, self.k = device, m, n, k

    def cases(self) -> Iterator[Case]:
        cuda = self.device.type == "cuda"
        yield self.product("aten.mm", "bf16", (BF16, BF16), _plain)
        if (self.n, self.k) in SMOLLM2:  # nobody runs the larger decoders in fp32
            yield self.product("aten.mm", "fp32", (torch.float32, torch.float32), _plain)
        if self.n < HEAD:  # recipes leave the head in the model's dtype
            yield from self._cuda() if cuda else self._cpu()

    def _cpu(self) -> Iterator[Case]:
        if vnni() and self.m >= int8_dynamic.PACKED_ROWS:
            scale = torch.full((self.n, 1), 1e-3)
            yield self.product("optforge.int8_packed", "int8", (UINT8, INT8), lambda x, w: torch.ops.optforge.int8_packed(x, w, scale))
        if not vnni() or self.m <= int8_dynamic.PACKED_ROWS:
            yield self.product("aten._int_mm", "int8", (INT8, INT8), _whole)

    def _cuda(self) -> Iterator[Case]:
        if torch.cuda.get_device_capability(self.device) >= FP8_CAPABILITY and torch.version.hip is None:
            rows, channels = self._ones(self.m, 1), self._ones(1, self.n)
            fp8 = torch.float8_e4m3fn
            scaled = partial(torch._scaled_mm, scale_a=rows, scale_b=channels, out_dtype=BF16)
            yield self.product("aten._scaled_mm", "fp8", (fp8, fp8), lambda x, w: scaled(x, w.t()))
        if self.m >= CUDA_INT8_ROWS:
            yield self.product("aten._int_mm", "int8", (INT8, INT8), _whole)
        if self.m <= HEAD_ROWS:
            yield from self._weight_only()

    def _weight_only(self) -> Iterator[Case]:
        """This package's kernels: the weight is stored in few bits and multiplied in bf16."""
        ops, scale = torch.ops.optforge, self._ones(self.n, 1)
        yield self.product("optforge.int8_weight", "bf16", (BF16, INT8), lambda x, w: ops.int8_weight(x, w, scale, None))
        yield self.product("optforge.fp8_weight", "bf16", (BF16, UINT8), lambda x, w: ops.fp8_weight(x, w, scale, None, "e4m3fn"))
        if self.k % GROUP == 0:
            groups = self._ones(self.n, self.k // GROUP)
            int4 = partial(_int4, groups)
            yield self.product("optforge.int4_weight", "bf16", (BF16, UINT8), int4, packing=2, detail=f"group={GROUP}")

    def product(
        self,
        name: str,
        dtype: str,
        stored: tuple[torch.dtype, torch.dtype],
        call: Callable[[Tensor, Tensor], Tensor],
        *,
        packing: int = 1,
        detail: str = "",
    ) -> Case:
        """`stored`: dtypes of x and of the weight; `packing`: values in one stored element of the weight."""
        x_dtype, w_dtype = stored
        m, n, k = self.m, self.n, self.k
        stored_bytes = n * k * w_dtype.itemsize / packing

        def make(copies: int) -> list[Call]:
            x, weight = random((m, k), x_dtype, self.device), random((n, k // packing), w_dtype, self.device)
            flowing = self.device.type == "cpu" and x.nbytes > FLOWING
            return [partial(call, x.clone() if flowing else x, weight.clone()) for _ in range(copies)]

        return Case(
            kind=PRODUCT,
            name=name,
            dtype=dtype,
            size=(1, m, n, k),
            detail=detail,
            flops=2.0 * m * n * k,
            bytes=m * k * x_dtype.itemsize + stored_bytes + m * n * (4 if dtype in ("int8", "fp32") else 2),
            cold=stored_bytes,
            extra=4 * stored_bytes,
            make=make,
        )

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)


def _plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w.t())


def _with_bias(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(w[:, 0], x, w.t())


def _whole(x: Tensor, w: Tensor) -> Tensor:
    return torch._int_mm(x, w.t())


def _int4(scale: Tensor, x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = torch.ops.optforge.int4_weight(x, w, scale, None, None, GROUP)
    return result


def _transposed(dy: Tensor, x: Tensor) -> Tensor:
    return torch.mm(dy.t(), x)


def _pair(first: tuple[int, ...], second: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return random(first, dtype, device), random(second, dtype, device)


def vnni() -> bool:
    """Whether the CPU has the int8 units that oneDNN's packed product needs."""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_vnni_supported())  # type: ignore[no-untyped-call]  # PyTorch leaves them untyped
