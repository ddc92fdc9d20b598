"""The kernels behind `fused_linear`: up to 16 rows against a weight that is read once, with norm, bias, gate and residual.

Two kernels, of which tuning picks one for each shape (`kernels.configurations`):

- `vector_kernel` multiplies on the ordinary cores in fp32, for 1 to 4 rows. Products are added up where they stand and reduced once,
  at the end; the next tile of the weight is asked for before this one is used.
- `tensor_kernel` feeds the matrix units, weight first, so that the weight's rows fill the tile and x's few rows its narrow side. K
  may be split over programs; the last one of a tile adds the parts up in their order, so results do not depend on who that is.

What bounds both is turning stored bits into numbers. fp8 needs no arithmetic for it: its 7 low bits, moved under the sign of a bf16
or fp32, are that number times 2^-120 (FNUZ 2^-119), subnormals included. x is multiplied by 2^60 on its way in, so that no product
is lost to underflow, and the rest of the factor meets the scale. int4 becomes 128 + n by setting n as the low bits of a bf16 (1024 + n
in fp16); the sum of the group's x takes 128 and the zero point off again. Conversions exist three times: BITS in Triton's own
operations, HARDWARE for the instructions of sm_89 and later, PACKED as PTX that converts several values in a register at once.

An RMSNorm in front costs no pass of its own: its weight multiplies x on the way, and its factor per row the sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from optforge.kernels import configurations, ptx
from optforge.kernels.configurations import HARDWARE, KINDS, PACKED, PLAIN_KIND, Shape
from optforge.kernels.launches import FP8, INT4, INT8

if TYPE_CHECKING:  # the compiler's own processes have no use for PyTorch
    from torch import Tensor

_INT8, _FP8, _INT4, _PLAIN = tl.constexpr(INT8), tl.constexpr(FP8), tl.constexpr(INT4), tl.constexpr(PLAIN_KIND)
_HARDWARE, _PACKED = tl.constexpr(HARDWARE), tl.constexpr(PACKED)
_LIFT = tl.constexpr(2.0**60)
_FLOAT_BITS = tl.constexpr(-0x78100000)
"""0x87F00000: the sign and the 7 low bits of an fp8 byte that was shifted to the top and back by 4."""
_FP8_TO_FLOAT, _INT8_TO_FLOAT = tl.constexpr(ptx.FP8_TO_FLOAT), tl.constexpr(ptx.INT8_TO_FLOAT)
_FP8_TO_BF16, _INT8_TO_BF16 = tl.constexpr(ptx.FP8_TO_BF16), tl.constexpr(ptx.INT8_TO_BF16)
_INT4_TO_BF16 = tl.constexpr(ptx.INT4_TO_BF16)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _floats(stored, KIND: tl.constexpr, CONVERT: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """Stored values as fp32; fp8 by its bits, times 2^-120 or 2^-119."""
    if KIND == _FP8:
        if CONVERT == _HARDWARE:
            return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        if CONVERT == _PACKED:
            return tl.inline_asm_elementwise(_FP8_TO_FLOAT, "=r,=r,=r,=r,r", [stored], dtype=tl.float32, is_pure=True, pack=4)
        return (((stored.to(tl.int32) << 24) >> 4) & _FLOAT_BITS).to(tl.float32, bitcast=True)
    if KIND == _INT8 and CONVERT == _PACKED:
        return tl.inline_asm_elementwise(_INT8_TO_FLOAT, "=r,=r,=r,=r,r", [stored], dtype=tl.float32, is_pure=True, pack=4)
    return stored.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _halves(stored, dtype: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """Stored values as bf16 or fp16; fp8 by its bits: times 2^-120 (or 2^-119) in bf16, over `half_factor` in fp16."""
    if KIND == _FP8:
        if CONVERT == _HARDWARE:
            return stored.to(tl.float8e4nv, bitcast=True).to(dtype)
        bits = stored.to(tl.uint16)
        if dtype == tl.float16:
            return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        if CONVERT == _PACKED:
            return tl.inline_asm_elementwise(_FP8_TO_BF16, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
    if KIND == _INT8 and CONVERT == _PACKED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_INT8_TO_BF16, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)
    return stored.to(tl.float32).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _nibbles(packed, dtype: tl.constexpr, CONVERT: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """The low and the high nibbles, each as 128 + n in bf16 or 1024 + n in fp16."""
    if dtype == tl.bfloat16:
        if CONVERT == _PACKED:
            return tl.inline_asm_elementwise(
                _INT4_TO_BF16, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        wide = packed.to(tl.uint16)
        return ((wide & 0xF) | 0x4300).to(tl.bfloat16, bitcast=True), ((wide >> 4) | 0x4300).to(tl.bfloat16, bitcast=True)
    wide = packed.to(tl.uint16)
    return ((wide & 0xF) | 0x6400).to(tl.float16, bitcast=True), ((wide >> 4) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _activated(x, GATE: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """SiLU, GELU by the error function, or GELU by its tanh approximation (through the logistic function: it cannot overflow)."""
    if GATE == 1:
        return x / (1 + tl.exp(-x))
    if GATE == 2:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _finished(  # type: ignore[no-untyped-def]  # pointers and tiles
    total, second, offs_n, in_n, scale_ptr, bias_ptr, N, stride_sn, factor,
    KIND: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, PER_COLUMN: tl.constexpr,
):  # fmt: skip
    """Sums with their scales, bias and gate. Outputs lie along the first dimension of a 2-D tile (PER_COLUMN) or are the tile."""
    if KIND == _INT8 or KIND == _FP8:  # noqa: PLR1714, SIM109 - Triton compiles no `in`
        scale = tl.load(scale_ptr + offs_n * stride_sn, mask=in_n, other=0.0) * factor
        total *= scale[:, None] if PER_COLUMN else scale
        if GATE:
            scale = tl.load(scale_ptr + (offs_n + N) * stride_sn, mask=in_n, other=0.0) * factor
            second *= scale[:, None] if PER_COLUMN else scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
        total += bias[:, None] if PER_COLUMN else bias
        if GATE:
            bias = tl.load(bias_ptr + offs_n + N, mask=in_n, other=0.0).to(tl.float32)
            second += bias[:, None] if PER_COLUMN else bias
    if GATE:
        total = _activated(total, GATE) * second
    return total


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _one_row(  # type: ignore[no-untyped-def]  # pointers and tiles
    total, second, squares, row, offs_n, in_n, scale_ptr, bias_ptr, residual_ptr, y_ptr, N, K, stride_sn, stride_rm, factor, eps,
    KIND: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Reduces, finishes and writes one row of the vector kernel."""
    done = tl.sum(total, 1)
    other = tl.sum(second, 1) if GATE else done
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        done *= inverse
        other *= inverse
    done = _finished(done, other, offs_n, in_n, scale_ptr, bias_ptr, N, stride_sn, factor, KIND, GATE, HAS_BIAS, False)
    if HAS_RESIDUAL:
        done += tl.load(residual_ptr + row * stride_rm + offs_n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + offs_n, done.to(y_ptr.dtype.element_ty), mask=in_n)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def vector_kernel(  # noqa: PLR0912, PLR0915 - one launch  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr,
    N, K, stride_xm, stride_wn, stride_sn, stride_rm, factor, eps, norm_offset,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of all ROWS (1 to 4) rows. Grid: (ceil(N / BLOCK_N),)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    offs = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + offs_n.to(tl.int64)[:, None] * stride_wn
    u_rows = w_ptr + (offs_n + N).to(tl.int64)[:, None] * stride_wn
    first = in_n[:, None] & (offs < K)[None, :]
    stored = tl.load(w_rows + offs[None, :], mask=first, other=0)
    stored_up = tl.load(u_rows + offs[None, :], mask=first, other=0) if GATE else stored
    if PDL:
        tl.extra.cuda.gdc_wait()  # the weight is nobody's result; x is
    nothing = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    none = tl.zeros((BLOCK_K,), dtype=tl.float32)
    t0, t1, t2, t3 = nothing, nothing, nothing, nothing
    u0, u1, u2, u3 = nothing, nothing, nothing, nothing
    s0, s1, s2, s3 = none, none, none, none
    for k in range(0, K, BLOCK_K):
        offs_k = k + offs
        in_k = offs_k < K
        later = offs_k + BLOCK_K
        asked = in_n[:, None] & (later < K)[None, :]
        ahead = tl.load(w_rows + later[None, :], mask=asked, other=0)
        ahead_up = tl.load(u_rows + later[None, :], mask=asked, other=0) if GATE else ahead
        w = _floats(stored, KIND, CONVERT)
        u = _floats(stored_up, KIND, CONVERT) if GATE else w
        by = tl.load(norm_ptr + offs_k, mask=in_k, other=0.0).to(tl.float32) + norm_offset if HAS_NORM else none + 1.0
        if KIND == _FP8 and CONVERT != _HARDWARE:
            by = by * _LIFT
        x = tl.load(x_ptr + offs_k, mask=in_k, other=0.0).to(tl.float32)
        s0 += x * x
        t0 += w * (x * by)[None, :]
        if GATE:
            u0 += u * (x * by)[None, :]
        if ROWS > 1:
            x = tl.load(x_ptr + stride_xm + offs_k, mask=in_k, other=0.0).to(tl.float32)
            s1 += x * x
            t1 += w * (x * by)[None, :]
            if GATE:
                u1 += u * (x * by)[None, :]
        if ROWS > 2:
            x = tl.load(x_ptr + 2 * stride_xm + offs_k, mask=in_k, other=0.0).to(tl.float32)
            s2 += x * x
            t2 += w * (x * by)[None, :]
            if GATE:
                u2 += u * (x * by)[None, :]
        if ROWS > 3:
            x = tl.load(x_ptr + 3 * stride_xm + offs_k, mask=in_k, other=0.0).to(tl.float32)
            s3 += x * x
            t3 += w * (x * by)[None, :]
            if GATE:
                u3 += u * (x * by)[None, :]
        stored = ahead
        stored_up = ahead_up
    # fmt: off
    _one_row(t0, u0, s0, 0, offs_n, in_n, scale_ptr, bias_ptr, residual_ptr, y_ptr, N, K, stride_sn, stride_rm, factor, eps,
             KIND, GATE, HAS_BIAS, HAS_NORM, HAS_RESIDUAL)
    if ROWS > 1:
        _one_row(t1, u1, s1, 1, offs_n, in_n, scale_ptr, bias_ptr, residual_ptr, y_ptr, N, K, stride_sn, stride_rm, factor, eps,
                 KIND, GATE, HAS_BIAS, HAS_NORM, HAS_RESIDUAL)
    if ROWS > 2:
        _one_row(t2, u2, s2, 2, offs_n, in_n, scale_ptr, bias_ptr, residual_ptr, y_ptr, N, K, stride_sn, stride_rm, factor, eps,
                 KIND, GATE, HAS_BIAS, HAS_NORM, HAS_RESIDUAL)
    if ROWS > 3:
        _one_row(t3, u3, s3, 3, offs_n, in_n, scale_ptr, bias_ptr, residual_ptr, y_ptr, N, K, stride_sn, stride_rm, factor, eps,
                 KIND, GATE, HAS_BIAS, HAS_NORM, HAS_RESIDUAL)
    # fmt: on


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _product(  # type: ignore[no-untyped-def]  # pointers and tiles
    total, x, sums, rows_ptr, k, K, offs_n, in_n, scale_ptr, zero_ptr, stride_sn,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_N, BLOCK_M] + a step of the product. `sums`: of x's row over the step, for int4 alone."""
    if KIND == _INT4:
        offs = k // 2 + tl.arange(0, BLOCK_K // 2)
        packed = tl.load(rows_ptr + offs[None, :], mask=in_n[:, None] & (2 * offs < K)[None, :], other=0)
        low, high = _nibbles(packed, x.dtype, CONVERT)
        even, odd = tl.split(x.reshape(x.shape[0], BLOCK_K // 2, 2))
        if WIDE:
            low, high, even, odd = low.to(tl.float32), high.to(tl.float32), even.to(tl.float32), odd.to(tl.float32)
        part = tl.dot(low, tl.trans(even), input_precision="ieee")
        part = tl.dot(high, tl.trans(odd), part, input_precision="ieee")
        group = offs_n * stride_sn + k // GROUP
        offset = 128.0 if x.dtype == tl.bfloat16 else 1024.0
        zero = tl.load(zero_ptr + group, mask=in_n, other=0).to(tl.float32) if HAS_ZERO else tl.full(offs_n.shape, 8.0, tl.float32)
        scale = tl.load(scale_ptr + group, mask=in_n, other=0.0)
        return total + (part - (zero + offset)[:, None] * sums[None, :]) * scale[:, None]
    offs = k + tl.arange(0, BLOCK_K)
    stored = tl.load(rows_ptr + offs[None, :], mask=in_n[:, None] & (offs < K)[None, :], other=0)
    w = _halves(stored, x.dtype, KIND, CONVERT)
    if WIDE:
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), total, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def tensor_kernel(  # noqa: PLR0912, PLR0915 - one launch  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, part_ptr, square_ptr, count_ptr,
    M, N, K, stride_xm, stride_wn, stride_sn, stride_rm, factor, eps, norm_offset,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of up to BLOCK_M rows over one part of K. Grid: (ceil(N / BLOCK_N), SPLIT)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, part = tl.program_id(0), tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = offs_m < M, offs_n < N
    w_rows = w_ptr + offs_n.to(tl.int64)[:, None] * stride_wn
    u_rows = w_ptr + (offs_n + N).to(tl.int64)[:, None] * stride_wn
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for k in range(part * each, min(part * each + each, K), BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        in_k = offs_k < K
        x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            by = tl.load(norm_ptr + offs_k, mask=in_k, other=0.0).to(tl.float32) + norm_offset
            x = (wide * by[None, :]).to(x.dtype)
        sums = tl.sum(x.to(tl.float32), 1) if KIND == _INT4 else squares
        if KIND == _FP8 and CONVERT != _HARDWARE and x.dtype == tl.bfloat16:
            x = (x.to(tl.float32) * _LIFT).to(x.dtype)
        # fmt: off
        total = _product(total, x, sums, w_rows, k, K, offs_n, in_n, scale_ptr, zero_ptr, stride_sn,
                         KIND, CONVERT, GROUP, HAS_ZERO, BLOCK_K, WIDE)
        if GATE:
            second = _product(second, x, sums, u_rows, k, K, offs_n + N, in_n, scale_ptr, zero_ptr, stride_sn,
                              KIND, CONVERT, GROUP, HAS_ZERO, BLOCK_K, WIDE)
        # fmt: on
    last = True
    if SPLIT > 1:
        blocks = tl.num_programs(0)
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + offs_m[None, :]
        tiles = 2 if GATE else 1
        here = part_ptr + ((part * blocks + block) * tiles * BLOCK_N * BLOCK_M) + within
        tl.store(here, total)
        if GATE:
            tl.store(here + BLOCK_N * BLOCK_M, second)
        if HAS_NORM:
            tl.store(square_ptr + (part * blocks + block) * BLOCK_M + offs_m, squares)
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + block, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            second = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
            for one in range(SPLIT):
                there = part_ptr + ((one * blocks + block) * tiles * BLOCK_N * BLOCK_M) + within
                total += tl.load(there, cache_modifier=".cg")
                if GATE:
                    second += tl.load(there + BLOCK_N * BLOCK_M, cache_modifier=".cg")
                if HAS_NORM:
                    squares += tl.load(square_ptr + (one * blocks + block) * BLOCK_M + offs_m, cache_modifier=".cg")
            tl.store(count_ptr + block, 0)
    if last:
        if HAS_NORM:
            inverse = tl.rsqrt(squares / K + eps)
            total *= inverse[None, :]
            second *= inverse[None, :]
        total = _finished(total, second, offs_n, in_n, scale_ptr, bias_ptr, N, stride_sn, factor, KIND, GATE, HAS_BIAS, True)
        at = in_n[:, None] & in_m[None, :]
        if HAS_RESIDUAL:
            total += tl.load(residual_ptr + offs_m[None, :] * stride_rm + offs_n[:, None], mask=at, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs_m[None, :] * N + offs_n[:, None], total.to(y_ptr.dtype.element_ty), mask=at)


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    storage: str,
    group_size: int,
    eps: float,
    norm_offset: float,
    gate: str,
    config: configurations.Config | None = None,
) -> Tensor:
    """y [rows, N], or [rows, N / 2] behind a gate; arguments as `fused_linear` has them, x flat.

    Args:
        config: instead of the one that `configurations.chosen` gives; for tuning and tests.
    """
    import torch

    from optforge.kernels.devices import device_of
    from optforge.kernels.formats import FORMATS
    from optforge.kernels.gates import GATES
    from optforge.kernels.semaphores import semaphores

    rows, columns = x.shape
    outputs = weight.shape[0] // (2 if gate else 1)
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows or not outputs:
        return y
    x, weight = (x if x.stride(1) == 1 else x.contiguous()), weight.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    device = device_of(x)
    if config is None:
        config = configurations.chosen(shape_of(x, weight, storage, group_size, gate, norm is not None), device)
    kind, lifted = KINDS[storage], config["CONVERT"] != HARDWARE
    factor = 1.0
    if kind == FP8 and lifted:
        exact = FORMATS[storage].half_factor  # 2^(15 - bias)
        narrow = x.dtype is torch.float16 and not config["vector"]
        factor = exact if narrow else exact * 2.0 ** (127 - 15 - 60)
    given = scale if scale is not None else x  # an argument that is not given is another once more
    stride_s = 0 if scale is None or scale.numel() == 1 else scale.stride(0)
    around = tuple(given if tensor is None else tensor for tensor in (bias, norm, residual))
    strides = (x.stride(0), weight.stride(0), stride_s, 0 if residual is None else residual.stride(0), factor, eps, norm_offset)
    flags = {"KIND": kind, "GATE": 0 if not gate else GATES.index(gate) + 1, "HAS_BIAS": bias is not None}
    flags |= {"HAS_NORM": norm is not None, "HAS_RESIDUAL": residual is not None}
    tile = configurations.constants(config)
    early = {"launch_pdl": True} if tile["PDL"] else {}
    blocks = triton.cdiv(outputs, tile["BLOCK_N"])
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        if config["vector"]:
            KERNELS["vector_kernel"][(blocks,)](
                x, weight, given, *around, y, outputs, columns, *strides, **flags, ROWS=rows, **tile, **early
            )
            return y
        split, tiles = tile["SPLIT"], 2 if gate else 1
        part = square = counts = given
        if split > 1:
            part = torch.empty(split * blocks * tiles * tile["BLOCK_N"] * tile["BLOCK_M"], dtype=torch.float32, device=x.device)
            square = torch.empty(split * blocks * tile["BLOCK_M"], dtype=torch.float32, device=x.device)
            counts = semaphores(x, weight, blocks)
        flags |= {"GROUP": group_size, "HAS_ZERO": zero is not None, "WIDE": not x.is_cuda}
        tensors = (x, weight, given, given if zero is None else zero, *around, y, part, square, counts)
        KERNELS["tensor_kernel"][(blocks, split)](*tensors, rows, outputs, columns, *strides, **flags, **tile, **early)
    return y


def shape_of(x: Tensor, weight: Tensor, storage: str, group_size: int, gate: str, norm: bool) -> Shape:
    """What a configuration is chosen by. `outputs` are the result's: behind a gate, half of the weight's rows."""
    from optforge.kernels.devices import DTYPES

    form = " ".join([storage, *(["norm"] * norm), *(["gate"] * bool(gate))])
    return Shape(
        operator="fused_linear",
        form=form,
        dtype=DTYPES[x.dtype],
        rows=x.shape[0],
        outputs=weight.shape[0] // (2 if gate else 1),
        columns=x.shape[1],
        group=group_size if storage == "int4" else 0,
    )


KERNELS: dict[str, Any] = {"vector_kernel": vector_kernel, "tensor_kernel": tensor_kernel}
