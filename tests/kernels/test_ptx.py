"""The PTX of the conversions, instruction by instruction on an emulator, over every byte."""

from __future__ import annotations

import re
import struct

import pytest

from optforge.kernels import ptx
from optforge.kernels.trials import fp8_value

WORD = 0xFFFFFFFF


def run(asm: str, inputs: tuple[int, int], outputs: int) -> list[int]:
    """The registers of the outputs after the instructions; inputs come behind them, as `tl.inline_asm_elementwise` numbers them."""
    registers = {f"${outputs}": inputs[0], f"${outputs + 1}": inputs[1]}

    def value(text: str) -> int:
        if text.startswith("0f"):
            return int(text[2:], 16)
        return registers[text] if text in registers else int(text, 0)

    for line in asm.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith("."):
            continue
        name, to, *rest = re.split(r"[ ,]+", line.strip())
        given = [value(text) for text in rest]
        registers[to] = execute(name, given)
    return [registers[f"${index}"] for index in range(outputs)]


def execute(name: str, given: list[int]) -> int:
    if name == "prmt.b32":
        eight = [(given[0] >> 8 * n) & 0xFF for n in range(4)] + [(given[1] >> 8 * n) & 0xFF for n in range(4)]
        return sum(eight[(given[2] >> 4 * n) & 7] << 8 * n for n in range(4))
    if name == "sub.f32":
        a, b = (struct.unpack("f", struct.pack("I", word))[0] for word in given)
        return int(struct.unpack("I", struct.pack("f", a - b))[0])
    operation = {"and.b32": int.__and__, "or.b32": int.__or__, "xor.b32": int.__xor__, "shr.u32": int.__rshift__}[name]
    return operation(*given) & WORD


def bf16(half: int) -> float:
    return float(struct.unpack("f", struct.pack("I", half << 16))[0])


def word(first: int) -> int:
    return sum(((first + 67 * n) % 256) << 8 * n for n in range(4))


@pytest.mark.parametrize("first", range(256))
def test_every_byte_becomes_its_number(first: int) -> None:
    a, b = word(first), word((first * 5 + 3) % 256)
    fp8, int8, int4 = run(ptx.FP8_TO_BF16, (a, b), 4), run(ptx.INT8_TO_BF16, (a, b), 4), run(ptx.INT4_TO_BF16, (a, b), 8)
    for place in range(4):
        for half, source in enumerate((a, b)):
            byte = (source >> 8 * place) & 0xFF
            out = (fp8[place] >> 16 * half) & 0xFFFF, (int8[place] >> 16 * half) & 0xFFFF
            exponent, bias = (byte >> 3) & 0xF, 7
            assert bf16(out[0]) * 2.0**120 == fp8_value(byte, bias) or (exponent == 0 and byte & 7 == 0)
            assert bf16(out[1]) == (byte - 256 if byte > 127 else byte)
            nibbles = [bf16((int4[2 * place + high] >> 16 * half) & 0xFFFF) for high in range(2)]
            assert nibbles == [128 + (byte & 0xF), 128 + (byte >> 4)]
