"""Triton kernels for products whose weight alone is quantized: y = x @ dequantize(weight).T + bias.

Three storages share two kernels, because they differ only in how a tile becomes numbers: int8, fp8 as bits, and int4 two
per byte. Up to `MATVEC_ROWS` rows each program reads some weight rows once and reduces in registers, which is bound by
memory; above that a tiled product feeds the matrix units in the activation's dtype. Values become bf16 or fp16 without
loss in all three, sums are fp32, and scales multiply the sums (once per channel, once per group for int4), never the
values: that keeps the only rounding at the end.

fp8 is converted by integer arithmetic: its 7 low bits moved under a float16 sign are that float16 times a power of two
(`Fp8Format.half_factor`), subnormals included. Hardware conversion of e4m3 exists from sm_89 on only, and Triton refuses
the type below; this way one kernel serves every device and both formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from optforge.kernels import launches

if TYPE_CHECKING:  # the compiler's own processes have no use for PyTorch
    from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _tile(stored, offs_k, zero, KIND: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]  # pointers and tiles
    """A tile of stored weights as numbers, not yet scaled. `zero` broadcasts against it."""
    if KIND == 1:
        bits = stored.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(dtype)
    if KIND == 2:
        nibble = (stored.to(tl.int32) >> ((offs_k & 1) * 4)) & 0xF
        return (nibble - zero).to(dtype)
    return stored.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def matvec_kernel(  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, N, K, stride_xm, stride_wn, stride_sn, factor,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of one row. Grid: (ceil(N / BLOCK_N), rows)."""
    row = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    w_rows = w_ptr + offs_n.to(tl.int64)[:, None] * stride_wn
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        in_k = offs_k < K
        x = tl.load(x_ptr + row * stride_xm + offs_k, mask=in_k, other=0.0).to(tl.float32)
        at = offs_k // 2 if KIND == 2 else offs_k
        stored = tl.load(w_rows + at[None, :], mask=in_n[:, None] & in_k[None, :], other=0)
        if KIND == 2:
            group = offs_n * stride_sn + k // GROUP
            zero = tl.load(zero_ptr + group, mask=in_n, other=0).to(tl.int32) if HAS_ZERO else tl.full((BLOCK_N,), 8, tl.int32)
            w = _tile(stored, offs_k[None, :], zero[:, None], KIND, tl.float32)
            total += tl.sum(w * x[None, :], axis=1) * tl.load(scale_ptr + group, mask=in_n, other=0.0)
        else:
            total += tl.sum(_tile(stored, offs_k, 0, KIND, tl.float32) * x[None, :], axis=1)
    if KIND != 2:
        total *= tl.load(scale_ptr + offs_n * stride_sn, mask=in_n, other=0.0) * factor
    if HAS_BIAS:
        total += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + offs_n, total.to(y_ptr.dtype.element_ty), mask=in_n)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def matmul_kernel(  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, K, stride_xm, stride_wn, stride_sn, factor,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a BLOCK_M by BLOCK_N tile of the output. Grid: (ceil(M / BLOCK_M), ceil(N / BLOCK_N))."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = offs_m < M, offs_n < N
    x_rows = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    w_columns = w_ptr + offs_n.to(tl.int64)[None, :] * stride_wn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        in_k = offs_k < K
        x = tl.load(x_rows + offs_k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
        at = offs_k // 2 if KIND == 2 else offs_k
        stored = tl.load(w_columns + at[:, None], mask=in_k[:, None] & in_n[None, :], other=0)
        if KIND == 2:
            group = offs_n * stride_sn + k // GROUP
            zero = tl.load(zero_ptr + group, mask=in_n, other=0).to(tl.int32) if HAS_ZERO else tl.full((BLOCK_N,), 8, tl.int32)
            w = _tile(stored, offs_k[:, None], zero[None, :], KIND, x.dtype)
            part = tl.dot(x, w, input_precision="ieee")
            total += part * tl.load(scale_ptr + group, mask=in_n, other=0.0)[None, :]
        else:
            total = tl.dot(x, _tile(stored, offs_k, 0, KIND, x.dtype), total, input_precision="ieee")
    if KIND != 2:
        total *= (tl.load(scale_ptr + offs_n * stride_sn, mask=in_n, other=0.0) * factor)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at_y = y_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(at_y, total.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def launch(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *, kind: int, group: int = 0, factor: float = 1.0
) -> Tensor:
    """y [rows, N] in x's dtype.

    Args:
        x: [rows, K], bf16, fp16 or fp32.
        weight: int8 or uint8 [N, K], or packed int4 [N, ceil(K / 2)]; contiguous.
        scale: fp32 [N, 1], [1, 1], or [N, groups] for int4.
        zero: uint8 [N, groups], or None.
        kind: `launches.INT8`, `FP8` or `INT4`.
        group: the group size of int4, a multiple of 16.
        factor: multiplies every scale (`Fp8Format.half_factor`).
    """
    import torch

    rows, columns, outputs = x.shape[0], x.shape[1], weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return y
    x, weight = (x if x.stride(1) == 1 else x.contiguous()), weight.contiguous()
    stride_s = 0 if scale.numel() == 1 else scale.stride(0)
    tensors = (x, weight, scale, scale if zero is None else zero, scale if bias is None else bias, y)
    strides = (x.stride(0), weight.stride(0), stride_s, factor)
    name, constants = launches.weight_only(kind, group, rows, zero=zero is not None, bias=bias is not None)
    across = triton.cdiv(outputs, constants["BLOCK_N"])
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        if name == "matvec_kernel":
            KERNELS[name][(across, rows)](*tensors, outputs, columns, *strides, **constants)
        else:
            KERNELS[name][(triton.cdiv(rows, constants["BLOCK_M"]), across)](*tensors, rows, outputs, columns, *strides, **constants)
    return y


KERNELS: dict[str, Any] = {"matvec_kernel": matvec_kernel, "matmul_kernel": matmul_kernel}
"""The names that `launches` knows them by."""
