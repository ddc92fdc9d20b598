"""Conversions of stored weights as PTX: several values of one 32-bit register at a time, which Triton's own operations do not give.

Each is for `tl.inline_asm_elementwise(pack=4)`: four bytes come in one register, the first in the lowest bits. tests/kernels/test_ptx.py
runs them instruction by instruction, over every byte, on an emulator of the few that they use.
"""

from __future__ import annotations

_FLOAT = "shl.b32 t, w, {shift}; shr.s32 t, t, 4; and.b32 ${out}, t, 0x87F00000;"

FP8_TO_FLOAT = (
    "{ .reg .b32 w, t; mov.b32 w, $4; "
    + " ".join(_FLOAT.format(shift=24 - 8 * out, out=out) for out in range(3))
    + " shr.s32 t, w, 4; and.b32 $3, t, 0x87F00000; }"
)
"""4 bytes of fp8 to 4 floats that are 2^-120 (FNUZ: 2^-119) of what they stand for."""

_PAIR = "prmt.b32 t, w, 0, {selector}; and.b32 s, t, 0x80008000; shr.u32 t, t, 4; and.b32 t, t, 0x07F007F0; or.b32 ${out}, t, s;"

FP8_TO_BF16 = (
    "{ .reg .b32 w, t, s; mov.b32 w, $2; " + _PAIR.format(selector="0x1404", out=0) + " " + _PAIR.format(selector="0x3424", out=1) + " }"
)
"""4 bytes of fp8 to 4 bf16 in two registers, scaled as above."""

_MAGIC = "prmt.b32 {to}, w, 0x4B000000, {selector}; sub.f32 {out}, {to}, 0f4B000080;"
"""A byte as the low bits of 2^23, then 2^23 + 128 off: exact, and no conversion instruction."""

INT8_TO_FLOAT = (
    "{ .reg .b32 w, t; xor.b32 w, $4, 0x80808080; "
    + " ".join(_MAGIC.format(to="t", out=f"${byte}", selector=f"0x744{byte}") for byte in range(4))
    + " }"
)
"""4 signed bytes to 4 floats."""

INT8_TO_BF16 = (
    "{ .reg .b32 w, f0, f1, f2, f3; xor.b32 w, $2, 0x80808080; "
    + " ".join(_MAGIC.format(to=f"f{byte}", out=f"f{byte}", selector=f"0x744{byte}") for byte in range(4))
    + " prmt.b32 $0, f0, f1, 0x7632; prmt.b32 $1, f2, f3, 0x7632; }"
)
"""4 signed bytes to 4 bf16 in two registers: the upper halves of the floats, which hold all their bits."""

_NIBBLES = "prmt.b32 t, {of}, 0x43, {selector}; and.b32 ${out}, t, 0xFF0FFF0F;"

INT4_TO_BF16 = (
    "{ .reg .b32 w, h, t; mov.b32 w, $4; shr.u32 h, w, 4; "
    + " ".join(
        _NIBBLES.format(of=of, selector=selector, out=out)
        for out, (of, selector) in enumerate((("w", "0x4140"), ("w", "0x4342"), ("h", "0x4140"), ("h", "0x4342")))
    )
    + " }"
)
"""4 bytes of two nibbles to 128 + the low ones as bf16 in two registers, then 128 + the high ones in two more."""
