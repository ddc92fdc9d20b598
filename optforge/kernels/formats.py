"""The 8-bit float of each device: the one place that decides its dtype and its largest value.

NVIDIA and AMD's MI350 multiply OCP e4m3 (largest 448, 0x80 is -0); AMD's MI300 multiplies e4m3 FNUZ (largest 240, 0x80
is NaN, exponents biased by one more). The same byte means half the value there, so bytes of one format are never read as
the other: `convert` goes from one to the other exactly where it can.

Sources: OCP 8-bit floating point specification 1.0, section 5; AMD Instinct MI300 CDNA3 ISA reference, section on FP8.
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

    Equal bytes stand for twice the value in OCP, so the scale carries the factor of two and the bytes stay, except that
    -0 becomes 0 (0x80 is NaN in FNUZ) and OCP's NaN, which is never stored, is refused.

    Raises:
        ValueError: the bits hold NaN.
    """
    if source is target:
        return bits, scale
    if bool(bits.view(source.dtype).float().isnan().any()):
        raise ValueError(f"the stored {source.name} values hold NaN")
    kept = torch.where(bits == 0x80, torch.zeros_like(bits), bits)
    return kept, scale * 2.0 ** (target.bias - source.bias)
