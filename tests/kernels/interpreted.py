"""Runs the weight-only kernels of one storage and holds each product against float64. Run by test_interpreted.py.

The expected values are made here from the stored bytes alone, one format definition at a time, without the package's
arithmetic: a mistake there would otherwise agree with itself.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from optforge.kernels.formats import FNUZ, OCP
from optforge.kernels.launches import FP8, INT4, INT8, MATVEC_ROWS
from optforge.kernels.weight_only import launch

SHAPES = ((1, 33, 40), (3, 64, 512), (17, 50, 130), (130, 65, 96))
"""Rows, outputs, inputs: one row, no multiple of anything, more than one tile each way."""
EPSILON = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11, torch.float32: 1e-5}
"""Of rounding to each dtype; the interpreter cuts to bf16 where hardware rounds, hence twice its half step."""


def fp8_value(byte: int, bias: int) -> float:
    """An e4m3 byte by its definition; -0 of OCP is not made here."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    return sign * (mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias))


def stored(kind: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor, dict[str, object]]:
    """Random storage: weight, scale, zero point, the float64 weight it stands for, and the launch's arguments."""
    scale = torch.rand(outputs, 1) * 0.01 + 1e-3
    if kind == "int8":
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        weight[0] = 0
        return weight, scale, None, weight.double() * scale.double(), {"kind": INT8}
    if kind.startswith("fp8"):
        fmt = FNUZ if kind == "fp8_fnuz" else OCP
        finite = [b for b in range(256) if b & 0x7F != 0x7F and b != 0x80]
        if fmt is FNUZ:
            finite = [b for b in range(256) if b != 0x80]
        weight = torch.tensor(finite, dtype=torch.uint8)[torch.randint(0, len(finite), (outputs, inputs))]
        weight[0] = 0
        table = torch.tensor([fp8_value(byte, fmt.bias) for byte in range(256)], dtype=torch.float64)
        scale = scale[:1] if kind == "fp8_tensor" else scale
        return weight, scale, None, table[weight.long()] * scale.double(), {"kind": FP8, "factor": fmt.half_factor}
    group = 512 if kind == "int4_channel" else 32
    groups = -(-inputs // group)
    scale = torch.rand(outputs, groups) * 0.05 + 1e-3
    nibbles = torch.randint(0, 16, (outputs, inputs + inputs % 2), dtype=torch.uint8)
    zero = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if kind == "int4" else None
    nibbles[0] = zero[0, 0] if zero is not None else 8
    packed = nibbles[:, 0::2] + 16 * nibbles[:, 1::2]
    value = torch.empty(outputs, inputs, dtype=torch.float64)
    for k in range(inputs):
        offset = 8.0 if zero is None else zero[:, k // group].double()
        value[:, k] = (nibbles[:, k].double() - offset) * scale[:, k // group].double()
    return packed, scale, zero, value, {"kind": INT4, "group": group}


def main(kind: str) -> None:
    torch.manual_seed(0)
    for rows, outputs, inputs in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype is torch.bfloat16 and rows > MATVEC_ROWS:
                continue  # the interpreter's tl.dot reads bf16 as integers; tests/kernels/test_on_gpu.py covers it
            weight, scale, zero, value, arguments = stored(kind, outputs, inputs)
            x = torch.randn(rows, inputs).to(dtype)
            x[-1] *= 100
            if rows > 1:
                x[0] = 0
            bias = torch.randn(outputs).to(dtype) if dtype is not torch.float16 else None
            y = launch(x, weight, scale, zero, bias, **arguments)  # type: ignore[arg-type]  # kind, group, factor
            expected = x.double() @ value.t() + (0 if bias is None else bias.double())
            # what rounding the result to dtype, and summing in fp32, can be off by
            limit = EPSILON[dtype] * expected.abs() + 1e-5 * (x.double().abs() @ value.abs().t()) + 1e-6
            excess = float(((y.double() - expected).abs() - limit).max())
            assert y.dtype is dtype and excess <= 0, (kind, rows, outputs, inputs, dtype, excess)
            print(rows, outputs, inputs, dtype, "ok")


if __name__ == "__main__":
    main(sys.argv[1])
