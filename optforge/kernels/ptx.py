"""Conversions of stored weights as PTX: two values of one register at a time, which Triton's own operations do not give.

Each is for `tl.inline_asm_elementwise(pack=2)` on words of 32 bits: two neighbouring words come in, and for each place in a word one
register of two bf16 goes out, the first word's value in its low half. tests/kernels/test_ptx.py runs them instruction by instruction,
over every byte, on an emulator of the few that they use.
"""

from __future__ import annotations


def _fp8(place: int) -> str:
    """The bytes to the upper halves, then their 7 low bits moved under the sign: 4 instructions for two values."""
    return (
        f"prmt.b32 t, $4, $5, 0x{4 + place}{4 + place}{place}{place}; and.b32 s, t, 0x80008000; "
        f"shr.u32 t, t, 4; and.b32 t, t, 0x07F007F0; or.b32 ${place}, t, s;"
    )


def _int8(place: int) -> str:
    """Each byte as the low bits of 2^23, then 2^23 + 128 off: exact; the upper halves of the floats hold all their bits."""
    return (
        f"prmt.b32 f, a, 0x4B000000, 0x744{place}; sub.f32 f, f, 0f4B000080; "
        f"prmt.b32 g, b, 0x4B000000, 0x744{place}; sub.f32 g, g, 0f4B000080; prmt.b32 ${place}, f, g, 0x7632;"
    )


def _int4(byte: int) -> str:
    """Nibbles as the low bits of 128: the byte's low one, then its high one."""
    return (
        f"prmt.b32 t, $8, $9, 0x{4 + byte}{4 + byte}{byte}{byte}; and.b32 s, t, 0x000F000F; or.b32 ${2 * byte}, s, 0x43004300; "
        f"shr.u32 t, t, 4; and.b32 s, t, 0x000F000F; or.b32 ${2 * byte + 1}, s, 0x43004300;"
    )


FP8_TO_BF16 = "{ .reg .b32 t, s; " + " ".join(map(_fp8, range(4))) + " }"
"""Words of 4 fp8 to 4 bf16 each that are 2^-120 (FNUZ: 2^-119) of what they stand for."""

INT8_TO_BF16 = "{ .reg .b32 a, b, f, g; xor.b32 a, $4, 0x80808080; xor.b32 b, $5, 0x80808080; " + " ".join(map(_int8, range(4))) + " }"
"""Words of 4 signed bytes to 4 bf16 each."""

INT4_TO_BF16 = "{ .reg .b32 t, s; " + " ".join(map(_int4, range(4))) + " }"
"""Words of 8 nibbles to 8 bf16 each, 128 + the nibble."""

FOUR = "=r,=r,=r,=r,r,r"
EIGHT = "=r,=r,=r,=r,=r,=r,=r,=r,r,r"
"""The operands: outputs, then the two words."""
