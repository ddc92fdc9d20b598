"""Triton kernels that take a row at a time: norms, gates, and either with their result rounded to 8 bits.

One program holds a whole row in registers, so that each number is read once; rows are independent, and results do not depend on how
many there are. fp8 is made by the device's conversion where Triton has it (OCP from sm_89 on, FNUZ on gfx942) and by integer
arithmetic elsewhere; both round to nearest, ties to even.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:  # the compiler's own processes have no use for PyTorch
    from torch import Tensor

NO_ROUNDING, TO_INT8, TO_FP8 = 0, 1, 2
"""What a result is rounded to (the kernels' FORM)."""

_INT8, _FP8 = tl.constexpr(TO_INT8), tl.constexpr(TO_FP8)
_TINY = tl.constexpr(2.0**-126)
_ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a number below 2^22 and taken off again, it leaves the nearest whole number, ties to even."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _fp8_bits(values, BIAS: tl.constexpr, MAXIMUM: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """fp32 to the byte of an e4m3, to nearest, ties to even, saturating; -0 becomes 0.

    Below the smallest normal number the steps are 2^(-2 - BIAS) wide: a sum with 2^23 of them rounds to one, and its low bits are the
    byte. Above, half of a step less one, and one more where the kept bits are odd, carries as rounding must.
    """
    limited = tl.minimum(tl.maximum(values, -MAXIMUM), MAXIMUM)
    size = tl.abs(limited)
    bits = size.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded - ((127 - BIAS) << 3)
    fixed: tl.constexpr = 2.0 ** (23 - 2 - BIAS)
    small = (size + fixed).to(tl.int32, bitcast=True) & 0xF
    byte = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
    byte = tl.where((limited < 0) & (byte > 0), byte | 0x80, byte)
    byte = tl.where(values == values, byte, 0x7F if BIAS == 7 else 0x80)  # noqa: PLR0124 - false for NaN
    return byte.to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _write_rounded(  # type: ignore[no-untyped-def]  # pointers and tiles
    values, at, in_k, row, stored_ptr, scale_ptr, shift_ptr, FORM: tl.constexpr, BIAS: tl.constexpr, MAXIMUM: tl.constexpr
):  # fmt: skip
    """A row's values rounded and written with scale and shift, as `rounding.int8_rows` and `fp8_rows` define them."""
    if FORM == _FP8:
        scale = tl.maximum(tl.max(tl.where(in_k, tl.abs(values), 0.0), 0) / MAXIMUM, _TINY)
        tl.store(stored_ptr + at, _fp8_bits(tl.div_rn(values, tl.zeros_like(values) + scale), BIAS, MAXIMUM), mask=in_k)
        tl.store(scale_ptr + row, scale)
        tl.store(shift_ptr + row, 0.0)
    else:
        low = tl.minimum(tl.min(tl.where(in_k, values, 0.0), 0), 0.0)
        span = tl.maximum(tl.maximum(tl.max(tl.where(in_k, values, 0.0), 0), 0.0) - low, 253 * _TINY)
        steps = 253 / span
        zero = (-127 - low * steps + _ROUNDS) - _ROUNDS
        scale = span * (1 / 253)
        whole = (values * steps + _ROUNDS) - _ROUNDS + zero
        tl.store(stored_ptr + at, whole.to(tl.int32).to(tl.int8), mask=in_k)
        tl.store(scale_ptr + row, scale)
        tl.store(shift_ptr + row, -zero * scale)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def norm_kernel(  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, hidden_ptr, scale_ptr, shift_ptr, K, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTERED: tl.constexpr,
    FORM: tl.constexpr, BIAS: tl.constexpr, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row. Grid: (rows,). `hidden_ptr` is written where there is a residual, or the result is rounded."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    in_k = offs < K
    at = row * K + offs
    x = tl.load(x_ptr + at, mask=in_k, other=0.0)
    if HAS_RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual_ptr + at, mask=in_k, other=0.0).to(tl.float32)).to(x.dtype)
    if HAS_RESIDUAL or FORM != 0:
        tl.store(hidden_ptr + at, x, mask=in_k)
    values = x.to(tl.float32)
    if CENTERED:
        values = tl.where(in_k, values - tl.sum(values, 0) / K, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / K + eps)
    if HAS_WEIGHT:
        values = values * (tl.load(weight_ptr + offs, mask=in_k, other=0.0).to(tl.float32) + offset)
    if HAS_BIAS:
        values = values + tl.load(bias_ptr + offs, mask=in_k, other=0.0).to(tl.float32)
    if FORM == 0:
        tl.store(y_ptr + at, values.to(y_ptr.dtype.element_ty), mask=in_k)
    else:
        _write_rounded(values, at, in_k, row, y_ptr, scale_ptr, shift_ptr, FORM, BIAS, MAXIMUM)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _activation(x, GATE: tl.constexpr):  # type: ignore[no-untyped-def]  # tiles
    """SiLU, GELU by the error function, or GELU by its tanh approximation (through the logistic function: it cannot overflow)."""
    if GATE == 1:
        return x / (1 + tl.exp(-x))
    elif GATE == 2:  # noqa: RET505 - Triton compiles what follows a return
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def gate_kernel(  # type: ignore[no-untyped-def]  # pointers and tiles
    x_ptr, y_ptr, scale_ptr, shift_ptr, K,
    GATE: tl.constexpr, FORM: tl.constexpr, BIAS: tl.constexpr, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK results of one row, or the whole row where it is rounded. Grid: (rows, ceil(K / BLOCK))."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_k = offs < K
    first = tl.load(x_ptr + row * 2 * K + offs, mask=in_k, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + row * 2 * K + K + offs, mask=in_k, other=0.0).to(tl.float32)
    values = _activation(first, GATE) * second
    if FORM == 0:
        tl.store(y_ptr + row * K + offs, values.to(y_ptr.dtype.element_ty), mask=in_k)
    else:
        _write_rounded(values, row * K + offs, in_k, row, y_ptr, scale_ptr, shift_ptr, FORM, BIAS, MAXIMUM)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, *, centered: bool
) -> tuple[Tensor, Tensor]:
    """y and, where a residual is given, the sum; arguments as `norms` has them."""
    import torch

    x = x.contiguous()
    y = torch.empty_like(x)
    hidden = torch.empty_like(x) if residual is not None else torch.empty(0, dtype=x.dtype, device=x.device)
    _norm(x, residual, weight, bias, y, hidden, None, None, eps, offset, centered, NO_ROUNDING, "")
    return y, hidden


def rounded_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, *, centered: bool, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stored, scale, shift and the sum."""
    import torch

    x = x.contiguous()
    hidden = torch.empty_like(x)
    stored, scale, shift = _room(x, x.shape, form)
    _norm(x, residual, weight, bias, stored, hidden, scale, shift, eps, offset, centered, _form(form), form)
    return stored, scale, shift, hidden


def gated(x: Tensor, gate: str) -> Tensor:
    """act(x[..., :I]) * x[..., I:]."""
    import torch

    x = x.contiguous()
    half = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    _gate(x, y, None, None, gate, NO_ROUNDING, "", min(1024, triton.next_power_of_2(max(half, 1))))
    return y


def rounded_gated(x: Tensor, gate: str, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Stored, scale and shift."""
    x = x.contiguous()
    half = x.shape[-1] // 2
    stored, scale, shift = _room(x, (*x.shape[:-1], half), form)
    _gate(x, stored, scale, shift, gate, _form(form), form, triton.next_power_of_2(max(half, 1)))
    return stored, scale, shift


def _room(x: Tensor, shape: tuple[int, ...], form: str) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    stored = torch.empty(shape, dtype=torch.int8 if form == "int8" else torch.uint8, device=x.device)
    scale, shift = (torch.empty((*shape[:-1], 1), dtype=torch.float32, device=x.device) for _ in range(2))
    return stored, scale, shift


def _form(form: str) -> int:
    return TO_INT8 if form == "int8" else TO_FP8


def _limits(form: str) -> dict[str, Any]:
    from optforge.kernels.formats import FORMATS

    known = FORMATS.get(form)
    return {"BIAS": known.bias if known else 7, "MAXIMUM": known.maximum if known else 448.0}


def _warps(block: int) -> int:
    """32 numbers a thread at most, up to 16 warps of 32."""
    return max(1, min(16, block // 512))


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    hidden: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
    form: int,
    name: str,
) -> None:
    import torch

    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    if not rows or not columns:
        return
    flags = {"HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    given = [x if t is None else t.contiguous() for t in (residual, weight, bias)]
    block = triton.next_power_of_2(columns)
    tensors = (x, *given, y, hidden, x if scale is None else scale, x if shift is None else shift)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        KERNELS["norm_kernel"][(rows,)](
            *tensors,
            columns,
            eps,
            offset,
            **flags,
            CENTERED=centered,
            FORM=form,
            **_limits(name),
            BLOCK=block,
            PDL=0,
            num_warps=_warps(block),
        )


def _gate(x: Tensor, y: Tensor, scale: Tensor | None, shift: Tensor | None, gate: str, form: int, name: str, block: int) -> None:
    import torch

    from optforge.kernels.gates import GATES

    half = x.shape[-1] // 2
    rows = x.numel() // max(x.shape[-1], 1)
    if not rows or not half:
        return
    tensors = (x, y, x if scale is None else scale, x if shift is None else shift)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        KERNELS["gate_kernel"][(rows, triton.cdiv(half, block))](
            *tensors, half, GATE=GATES.index(gate) + 1, FORM=form, **_limits(name), BLOCK=block, PDL=0, num_warps=_warps(block)
        )


KERNELS: dict[str, Any] = {"norm_kernel": norm_kernel, "gate_kernel": gate_kernel}
