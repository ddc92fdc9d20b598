"""The kernels behind `fused_linear`: up to 16 rows against a weight that is read once, with norm, bias, gate and residual.

Two kernels, of which tuning picks one for each shape (`kernels.configurations`):

- `vector_kernel` multiplies on the ordinary cores in fp32, for 1 to 4 rows of all storages but int4. Products are added up where they
  stand and reduced once, at the end; the next tile of the weight is asked for before this one is used.
- `tensor_kernel` feeds the matrix units, weight first, so that the weight's rows fill the tile and x's few rows its narrow side. K
  may be split over programs; the last one of a tile adds the parts up in their order, so results do not depend on who that is.

What bounds both is turning stored bits into numbers, so weights are read as words of 32 bits and converted in whole registers; a sum
over K may take its terms in any order, so the value at each place of a word meets the x at that place in a product of its own, and
nothing is shuffled. fp8 needs no arithmetic: its 7 low bits, moved under the sign of a bf16 or fp32, are that number times 2^-120
(FNUZ 2^-119), subnormals included. x is multiplied by 2^60 on its way in, so that no product is lost to underflow, and the rest of
the factor meets the scale. int4 becomes 128 + n by setting n as the low bits of a bf16 (1024 + n in fp16); the sum of the group's x
takes that and the zero point off again. For the matrix units conversions exist twice: BITS in Triton's own operations, PACKED as PTX
that converts two values at once (`kernels.ptx`).

An RMSNorm in front costs no pass of its own: its weight multiplies x on the way, and its factor per row the sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from optforge.kernels import configurations, ptx
from optforge.kernels.configurations import KINDS, PACKED, PLAIN_KIND, Shape
from optforge.kernels.launches import FP8, INT4, INT8

if TYPE_CHECKING:  # the compiler's own processes have no use for PyTorch
    from torch import Tensor

_INT8, _FP8, _INT4, _PLAIN = tl.constexpr(INT8), tl.constexpr(FP8), tl.constexpr(INT4), tl.constexpr(PLAIN_KIND)
_PACKED = tl.constexpr(PACKED)
_LIFT = tl.constexpr(2.0**60)
_FLOAT_BITS = tl.constexpr(-0x78100000)
"""0x87F00000: the sign and the 7 low bits of an fp8 byte that was shifted to the top and back by 4."""
_SIGNS = tl.constexpr(-0x7F7F7F80)
"""0x80808080: makes signed bytes unsigned, 128 larger."""
_FP8_ASM, _INT8_ASM, _INT4_ASM = tl.constexpr(ptx.FP8_TO_BF16), tl.constexpr(ptx.INT8_TO_BF16), tl.constexpr(ptx.INT4_TO_BF16)
_FOUR, _EIGHT = tl.constexpr(ptx.FOUR), tl.constexpr(ptx.EIGHT)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _held(words, place: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """The 16-bit float at a place of words of 32 or 64 bits."""
    return ((words >> (16 * place)) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _float(words, place: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """The stored value at a place of words of 32 bits, as fp32; fp8 times 2^-120 or 2^-119."""
    if KIND == _FP8:
        return (((words << (24 - 8 * place)) >> 4) & _FLOAT_BITS).to(tl.float32, bitcast=True)
    elif KIND == _INT8:  # noqa: RET505 - Triton compiles what follows a return
        byte = ((words ^ _SIGNS) >> (8 * place)) & 0xFF
        return (byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
    else:
        return _held(words, place, dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _half(words, place: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """The same as bf16 or fp16: fp8 times 2^-120 (2^-119) in bf16, over `half_factor` in fp16; int4 as 128 + n or 1024 + n."""
    if KIND == _FP8:
        bits = ((words >> (8 * place)) & 0xFF).to(tl.uint16)
        shift: tl.constexpr = 7 if dtype == tl.float16 else 4
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << shift)).to(dtype, bitcast=True)
    elif KIND == _INT8:  # noqa: RET505 - as above
        return ((words << (24 - 8 * place)) >> 24).to(tl.float32).to(dtype)
    else:
        one: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300
        return (((words >> (4 * place)) & 0xF) | one).to(tl.uint16).to(dtype, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _four(words, dtype: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """The values at the four places of words of 8-bit numbers."""
    if CONVERT == _PACKED and dtype == tl.bfloat16:
        asm: tl.constexpr = _FP8_ASM if KIND == _FP8 else _INT8_ASM
        all = tl.inline_asm_elementwise(
            asm, _FOUR, [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        v0, v1, v2, v3 = all[0], all[1], all[2], all[3]
    else:
        v0, v1 = _half(words, 0, dtype, KIND), _half(words, 1, dtype, KIND)
        v2, v3 = _half(words, 2, dtype, KIND), _half(words, 3, dtype, KIND)
    return v0, v1, v2, v3


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _eight(words, dtype: tl.constexpr, CONVERT: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """The values at the eight places of words of nibbles."""
    if CONVERT == _PACKED and dtype == tl.bfloat16:
        all = tl.inline_asm_elementwise(
            _INT4_ASM,
            _EIGHT,
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
        v0, v1, v2, v3, v4, v5, v6, v7 = all[0], all[1], all[2], all[3], all[4], all[5], all[6], all[7]
    else:
        v0, v1 = _half(words, 0, dtype, _INT4), _half(words, 1, dtype, _INT4)
        v2, v3 = _half(words, 2, dtype, _INT4), _half(words, 3, dtype, _INT4)
        v4, v5 = _half(words, 4, dtype, _INT4), _half(words, 5, dtype, _INT4)
        v6, v7 = _half(words, 6, dtype, _INT4), _half(words, 7, dtype, _INT4)
    return v0, v1, v2, v3, v4, v5, v6, v7


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
def _add_row(  # type: ignore[no-untyped-def]  # pointers and tiles
    total, second, squares, x_words, at, in_k, words, words_up, by_words, norm_offset,
    dtype: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr, HAS_NORM: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """One row of x against a tile of words of the weight."""
    held = tl.load(x_words + at, mask=in_k, other=0)
    for place in tl.static_range(PER):
        x = _held(held, place, dtype).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x = x * (_held(by_words, place, dtype).to(tl.float32) + norm_offset)
        if KIND == _FP8:
            x = x * _LIFT
        total += _float(words, place, dtype, KIND) * x[None, :]
        if GATE:
            second += _float(words_up, place, dtype, KIND) * x[None, :]
    return total, second, squares


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def vector_kernel(  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr,
    N, K, stride_xm, stride_wn, stride_sn, stride_rm, factor, eps, norm_offset,
    KIND: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of all ROWS (1 to 4) rows. Grid: (ceil(N / BLOCK_N),).

    Rows of the weight, of x and of the norm's weight are read as words; strides are those of elements, a multiple of 8.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PER: tl.constexpr = 2 if KIND == _PLAIN else 4
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    word: tl.constexpr = tl.int32 if KIND == _PLAIN else tl.int64
    x_words = x_ptr.to(tl.pointer_type(word))
    norm_words = norm_ptr.to(tl.pointer_type(word))
    w_words = w_ptr.to(tl.pointer_type(tl.int32))
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    offs = tl.arange(0, BLOCK_K // PER)
    length = K // PER
    w_rows = w_words + offs_n.to(tl.int64)[:, None] * (stride_wn // PER)
    u_rows = w_words + (offs_n + N).to(tl.int64)[:, None] * (stride_wn // PER)
    first = in_n[:, None] & (offs < length)[None, :]
    stored = tl.load(w_rows + offs[None, :], mask=first, other=0)
    stored_up = tl.load(u_rows + offs[None, :], mask=first, other=0) if GATE else stored
    if PDL:
        tl.extra.cuda.gdc_wait()  # the weight is nobody's result; x is
    nothing = tl.zeros((BLOCK_N, BLOCK_K // PER), dtype=tl.float32)
    none = tl.zeros((BLOCK_K // PER,), dtype=tl.float32)
    t0, t1, t2, t3 = nothing, nothing, nothing, nothing
    u0, u1, u2, u3 = nothing, nothing, nothing, nothing
    s0, s1, s2, s3 = none, none, none, none
    stride_xw = stride_xm // PER
    for k in range(0, length, BLOCK_K // PER):
        at = k + offs
        in_k = at < length
        later = at + BLOCK_K // PER
        asked = in_n[:, None] & (later < length)[None, :]
        ahead = tl.load(w_rows + later[None, :], mask=asked, other=0)
        ahead_up = tl.load(u_rows + later[None, :], mask=asked, other=0) if GATE else ahead
        by = tl.load(norm_words + at, mask=in_k, other=0) if HAS_NORM else none
        # fmt: off
        t0, u0, s0 = _add_row(t0, u0, s0, x_words, at, in_k, stored, stored_up, by, norm_offset, dtype, KIND, GATE, HAS_NORM, PER)
        if ROWS > 1:
            t1, u1, s1 = _add_row(t1, u1, s1, x_words + stride_xw, at, in_k, stored, stored_up, by, norm_offset,
                                  dtype, KIND, GATE, HAS_NORM, PER)
        if ROWS > 2:
            t2, u2, s2 = _add_row(t2, u2, s2, x_words + 2 * stride_xw, at, in_k, stored, stored_up, by, norm_offset,
                                  dtype, KIND, GATE, HAS_NORM, PER)
        if ROWS > 3:
            t3, u3, s3 = _add_row(t3, u3, s3, x_words + 3 * stride_xw, at, in_k, stored, stored_up, by, norm_offset,
                                  dtype, KIND, GATE, HAS_NORM, PER)
        # fmt: on
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
def _mul(w, x, total, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """total [BLOCK_N, BLOCK_M] + w [BLOCK_N, k] x^T; WIDE for the interpreter, whose product knows no bf16."""
    if WIDE:
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), total, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _mul_four(total, words, x0, x1, x2, x3, KIND: tl.constexpr, CONVERT: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    v0, v1, v2, v3 = _four(words, x0.dtype, KIND, CONVERT)
    total = _mul(v1, x1, _mul(v0, x0, total, WIDE), WIDE)
    return _mul(v3, x3, _mul(v2, x2, total, WIDE), WIDE)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _mul_eight(  # type: ignore[no-untyped-def]  # pointers and tiles
    total, words, x0, x1, x2, x3, x4, x5, x6, x7, sums, k, offs_n, in_n, scale_ptr, zero_ptr, stride_sn, at_word,
    CONVERT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr, HAS_ZERO: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of int4 words: each group's product apart, by leaving out x of the other groups, then its scale and zero point.

    `sums` [BLOCK_M, words]: of the 8 x that meet a word.
    """
    offset = 1024.0 if x0.dtype == tl.float16 else 128.0
    v0, v1, v2, v3, v4, v5, v6, v7 = _eight(words, x0.dtype, CONVERT)
    for one in tl.static_range(BLOCK_K // STEP):
        group = offs_n * stride_sn + (k + one * STEP) // GROUP
        scale = tl.load(scale_ptr + group, mask=in_n, other=0.0)
        zero = tl.load(zero_ptr + group, mask=in_n, other=0).to(tl.float32) if HAS_ZERO else tl.full(offs_n.shape, 8.0, tl.float32)
        part = tl.zeros(total.shape, dtype=tl.float32)
        if STEP == BLOCK_K:
            part = _mul(v1, x1, _mul(v0, x0, part, WIDE), WIDE)
            part = _mul(v3, x3, _mul(v2, x2, part, WIDE), WIDE)
            part = _mul(v5, x5, _mul(v4, x4, part, WIDE), WIDE)
            part = _mul(v7, x7, _mul(v6, x6, part, WIDE), WIDE)
            whole = tl.sum(sums, 1)
        else:
            mine = (at_word * 8 // STEP == one)[None, :]
            none = tl.zeros(x0.shape, dtype=x0.dtype)
            part = _mul(v1, tl.where(mine, x1, none), _mul(v0, tl.where(mine, x0, none), part, WIDE), WIDE)
            part = _mul(v3, tl.where(mine, x3, none), _mul(v2, tl.where(mine, x2, none), part, WIDE), WIDE)
            part = _mul(v5, tl.where(mine, x5, none), _mul(v4, tl.where(mine, x4, none), part, WIDE), WIDE)
            part = _mul(v7, tl.where(mine, x7, none), _mul(v6, tl.where(mine, x6, none), part, WIDE), WIDE)
            whole = tl.sum(tl.where(mine, sums, 0.0), 1)
        total += (part - (zero + offset)[:, None] * whole[None, :]) * scale[:, None]
    return total


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _ready(x, by, HAS_NORM: tl.constexpr, LIFTED: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """x as the product takes it: times the norm's weight, times 2^60."""
    if HAS_NORM or LIFTED:
        wide = x.to(tl.float32)
        if HAS_NORM:
            wide = wide * by[None, :]
        return ((wide * _LIFT) if LIFTED else wide).to(x.dtype)
    return x


@triton.jit
def _square(x):  # type: ignore[no-untyped-def]  # tiles
    wide = x.to(tl.float32)
    return wide * wide


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def tensor_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915 - one launch of pointers and tiles
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, part_ptr, square_ptr, count_ptr,
    M, N, K, stride_xm, stride_wn, stride_sn, stride_rm, factor, eps, norm_offset,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, HAS_ZERO: tl.constexpr, GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of up to BLOCK_M rows over one part of K. Grid: (ceil(N / BLOCK_N), SPLIT)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PER: tl.constexpr = 1 if KIND == _PLAIN else 8 if KIND == _INT4 else 4
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    LIFTED: tl.constexpr = KIND == _FP8 and dtype == tl.bfloat16
    w_words = w_ptr if KIND == _PLAIN else w_ptr.to(tl.pointer_type(tl.int32))
    block, part = tl.program_id(0), tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_K // PER)
    in_m, in_n = offs_m < M, offs_n < N
    stride = stride_wn if KIND == _PLAIN else stride_wn // 4
    w_rows = w_words + offs_n.to(tl.int64)[:, None] * stride
    u_rows = w_words + (offs_n + N).to(tl.int64)[:, None] * stride
    x_rows = x_ptr + offs_m[:, None] * stride_xm
    x_words = x_ptr.to(tl.pointer_type(tl.int64)) + offs_m[:, None] * (stride_xm // 4)
    norm_words = norm_ptr.to(tl.pointer_type(tl.int64))
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    spread = tl.zeros((BLOCK_M, BLOCK_K // PER), dtype=tl.float32)
    for k in range(part * each, min(part * each + each, K), BLOCK_K):
        at = k // PER + offs
        in_k = at < K // PER
        in_x = in_m[:, None] & in_k[None, :]
        in_w = in_n[:, None] & in_k[None, :]
        words = tl.load(w_rows + at[None, :], mask=in_w, other=0)
        words_up = tl.load(u_rows + at[None, :], mask=in_w, other=0) if GATE else words
        if KIND == _PLAIN:
            x = tl.load(x_rows + at[None, :], mask=in_x, other=0.0)
            by = tl.load(norm_ptr + at, mask=in_k, other=0.0).to(tl.float32) + norm_offset if HAS_NORM else 0.0
            if HAS_NORM:
                spread += _square(x)
            x = _ready(x, by, HAS_NORM, LIFTED)
            total = _mul(words, x, total, WIDE)
            if GATE:
                second = _mul(words_up, x, second, WIDE)
        elif KIND == _INT4:
            a = tl.load(x_words + 2 * at[None, :], mask=in_x, other=0)
            b = tl.load(x_words + 2 * at[None, :] + 1, mask=in_x, other=0)
            x0, x1, x2, x3 = _held(a, 0, dtype), _held(a, 1, dtype), _held(a, 2, dtype), _held(a, 3, dtype)
            x4, x5, x6, x7 = _held(b, 0, dtype), _held(b, 1, dtype), _held(b, 2, dtype), _held(b, 3, dtype)
            if HAS_NORM:
                spread += _square(x0) + _square(x1) + _square(x2) + _square(x3)
                spread += _square(x4) + _square(x5) + _square(x6) + _square(x7)
                n = tl.load(norm_words + 2 * at, mask=in_k, other=0)
                o = tl.load(norm_words + 2 * at + 1, mask=in_k, other=0)
                x0 = _ready(x0, _held(n, 0, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
                x1 = _ready(x1, _held(n, 1, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
                x2 = _ready(x2, _held(n, 2, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
                x3 = _ready(x3, _held(n, 3, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
                x4 = _ready(x4, _held(o, 0, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
                x5 = _ready(x5, _held(o, 1, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
                x6 = _ready(x6, _held(o, 2, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
                x7 = _ready(x7, _held(o, 3, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
            sums = x0.to(tl.float32) + x1.to(tl.float32) + x2.to(tl.float32) + x3.to(tl.float32)
            sums += x4.to(tl.float32) + x5.to(tl.float32) + x6.to(tl.float32) + x7.to(tl.float32)
            # fmt: off
            total = _mul_eight(total, words, x0, x1, x2, x3, x4, x5, x6, x7, sums, k, offs_n, in_n, scale_ptr, zero_ptr, stride_sn,
                               offs, CONVERT, GROUP, STEP, BLOCK_K, HAS_ZERO, WIDE)
            if GATE:
                second = _mul_eight(second, words_up, x0, x1, x2, x3, x4, x5, x6, x7, sums, k, offs_n + N, in_n, scale_ptr, zero_ptr,
                                    stride_sn, offs, CONVERT, GROUP, STEP, BLOCK_K, HAS_ZERO, WIDE)
            # fmt: on
        else:
            a = tl.load(x_words + at[None, :], mask=in_x, other=0)
            x0, x1, x2, x3 = _held(a, 0, dtype), _held(a, 1, dtype), _held(a, 2, dtype), _held(a, 3, dtype)
            n = tl.load(norm_words + at, mask=in_k, other=0) if HAS_NORM else at.to(tl.int64)
            if HAS_NORM:
                spread += _square(x0) + _square(x1) + _square(x2) + _square(x3)
            x0 = _ready(x0, _held(n, 0, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
            x1 = _ready(x1, _held(n, 1, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
            x2 = _ready(x2, _held(n, 2, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
            x3 = _ready(x3, _held(n, 3, dtype).to(tl.float32) + norm_offset, HAS_NORM, LIFTED)
            total = _mul_four(total, words, x0, x1, x2, x3, KIND, CONVERT, WIDE)
            if GATE:
                second = _mul_four(second, words_up, x0, x1, x2, x3, KIND, CONVERT, WIDE)
    squares = tl.sum(spread, 1)
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
    kind = KINDS[storage]
    factor = 1.0
    if kind == FP8:
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
        flags |= {
            "GROUP": group_size,
            "STEP": configurations.step(group_size, tile["BLOCK_K"]),
            "HAS_ZERO": zero is not None,
            "WIDE": x.device.type == "cpu",
        }
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
