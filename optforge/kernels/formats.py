"""The small floats: the 8-bit one of each device, the 4-bit one, and the byte-wide scales of blocks; decided here alone.

NVIDIA and AMD's MI350 multiply OCP e4m3 (largest 448, 0x80 is -0); AMD's MI300 multiplies e4m3 FNUZ (largest 240, 0x80
is NaN, exponents biased by one more). The same byte means half the value there, so bytes of one format are never read as
the other: `convert` goes from one to the other exactly where it can.

Blocks that carry their scale in a byte (MX, NVFP4) hold OCP e4m3 or e2m1 on every device.

Sources: OCP 8-bit floating point specification 1.0, section 5; AMD Instinct MI300 CDNA3 ISA reference, section on FP8; OCP
microscaling formats (MX) specification 1.0, sections 5.2 to 5.4 and 6.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optforge.spec import Hardware


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit float with 4 exponent and 3 mantissa bits."""

    name: str
    dtype: torch.dtype
    maximum: float
    """The largest finite value; scales are `absmax / maximum`."""
    bias: int
    """What the stored exponent is reduced by."""

    @property
    def half_factor(self) -> float:
        """What a value is multiplied by when its bits, shifted into a float16 (exponent bias 15), are read as one."""
        return float(2 ** (15 - self.bias))


OCP = Fp8Format("e4m3fn", torch.float8_e4m3fn, 448.0, 7)
FNUZ = Fp8Format("e4m3fnuz", torch.float8_e4m3fnuz, 240.0, 8)
FORMATS = {fmt.name: fmt for fmt in (OCP, FNUZ)}


def format_for(target: Hardware) -> Fp8Format:
    """The format that `target` multiplies; OCP where it has no fp8 units, since storage is then free to choose.

    Raises:
        KeyError: the profile names a format that is not known here.
    """
    return FORMATS[target.fp8_format] if target.fp8_format else OCP


def convert(bits: Tensor, scale: Tensor, source: Fp8Format, target: Fp8Format) -> tuple[Tensor, Tensor]:
    """The same values in another format: uint8 bits and fp32 scales in, uint8 bits and fp32 scales out.

    Equal bytes stand for twice the value in OCP, so the scale carries the factor of two and the bytes stay, with two exceptions:
    -0 of OCP becomes 0 (0x80 is NaN in FNUZ), and FNUZ's largest numbers, +-240, whose bytes 0x7F and 0xFF are NaN in OCP. Where one
    of those is stored, the numbers are written anew under the scale that they have: exact, but for those below 2^-6, which lose their
    last bit (half of OCP's smallest step).

    Raises:
        ValueError: the bits hold NaN.
    """
    if source is target:
        return bits, scale
    if bool(bits.view(source.dtype).float().isnan().any()):
        raise ValueError(f"the stored {source.name} values hold NaN")
    if bool(((bits & 0x7F) == 0x7F).any()):  # of FNUZ alone: in OCP they are NaN
        written = bits.view(source.dtype).float().to(target.dtype).view(torch.uint8)
        return torch.where(written == 0x80, torch.zeros_like(written), written), scale
    kept = torch.where(bits == 0x80, torch.zeros_like(bits), bits)
    return kept, scale * 2.0 ** (target.bias - source.bias)


E2M1_MAXIMUM = 6.0
E2M1_TIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Halfway points between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6, and whether a tie goes up: to the value with an even code."""
LARGEST_EXPONENT = {"fp8": 8, "fp4": 2}
"""Exponent of an element's largest value (448 = 1.75 * 2^8, 6 = 1.5 * 2^2), which MX takes off a block's exponent for its scale."""


def to_e2m1(values: Tensor) -> Tensor:
    """fp32 values to 4-bit codes (sign, 2 exponent bits, 1 mantissa bit) as uint8: to nearest, ties to even, saturating at 6."""
    size = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for tie, up in E2M1_TIES:
        codes = codes + ((size >= tie) if up else (size > tie)).to(torch.uint8)
    return codes | ((values < 0) & (codes > 0)).to(torch.uint8) << 3


def from_e2m1(codes: Tensor) -> Tensor:
    """4-bit codes as uint8 to the fp32 values that they stand for."""
    size = (codes & 7).float()
    value = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
    return torch.where(codes >= 8, -value, value)


def to_e8m0(largest: Tensor, dtype: str) -> Tensor:
    """The scale of MX blocks whose largest absolute values are given (fp32): the power of two at or below it, divided by that of
    the element's largest value, as its exponent + 127 in uint8.

    fp32's exponent has the same bias, so its bits are the code. A block of zeros, or one that is too small, gets 2^-126, the
    smallest normal float, since a device may take a subnormal one for 0; one that holds NaN or Inf gets NaN, lest saturation hide it.
    """
    exponent = (largest.view(torch.int32) >> 23) & 0xFF
    code = (exponent - LARGEST_EXPONENT[dtype]).clamp(min=1)
    return torch.where(exponent == 0xFF, 0xFF, code).to(torch.uint8)


def from_e8m0(codes: Tensor) -> Tensor:
    """2^(code - 127) in fp32, exactly, the subnormal 2^-127 of code 0 too; 255 is NaN."""
    code = codes.to(torch.int32)
    bits = torch.where(code == 0, 0x00400000, torch.where(code == 255, 0x7FC00000, code << 23))
    return bits.to(torch.int32).view(torch.float32)
