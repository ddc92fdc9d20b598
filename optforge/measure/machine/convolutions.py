"""Convolutions of the image classifiers here, in the channels-last layout that Inductor gives them.

A classifier's weights are small, so what they and the activations cost is decided by the activations alone (see `case.flows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from optforge.measure.machine.case import Case, random
from optforge.measure.machine.clock import Call
from optforge.measure.machine.point import CONVOLUTION, compiled_name
from optforge.pretrained import torch_dtype

# in channels, out channels, groups, kernel, stride, input pixels a side (padded)
EFFICIENTNET = (
    (3, 32, 1, 3, 2, 225),
    (32, 32, 32, 3, 1, 114),
    (32, 16, 1, 1, 1, 112),
    (16, 96, 1, 1, 1, 112),
    (96, 96, 96, 3, 2, 113),
    (96, 24, 1, 1, 1, 56),
    (24, 144, 1, 1, 1, 56),
    (144, 144, 144, 3, 1, 58),
    (144, 144, 144, 5, 2, 59),
    (144, 40, 1, 1, 1, 28),
    (240, 240, 240, 5, 1, 32),
    (240, 80, 1, 1, 1, 14),
    (80, 480, 1, 1, 1, 14),
    (480, 480, 480, 3, 1, 16),
    (480, 480, 480, 5, 1, 18),
    (480, 112, 1, 1, 1, 14),
    (672, 672, 672, 5, 1, 18),
    (672, 672, 672, 5, 2, 17),
    (192, 1152, 1, 1, 1, 7),
    (1152, 1152, 1152, 5, 1, 11),
    (1152, 192, 1, 1, 1, 7),
    (320, 1280, 1, 1, 1, 7),
)
FASHION = (
    (1, 16, 1, 3, 1, 30),
    (16, 16, 1, 3, 1, 30),
    (16, 32, 1, 3, 2, 29),
    (32, 32, 1, 3, 1, 16),
    (32, 64, 1, 3, 2, 15),
    (64, 64, 1, 3, 1, 9),
    (32, 64, 1, 1, 2, 14),
)
RESNET = ((3, 64, 1, 7, 2, 230), (64, 64, 1, 3, 1, 58), (256, 64, 1, 1, 1, 56), (512, 512, 1, 3, 1, 9))
"""A few wider ones, so that other classifiers lie between points too."""


@dataclass(frozen=True)
class Shape:
    inputs: int
    outputs: int
    groups: int
    kernel: int
    stride: int
    side: int

    @property
    def pixels(self) -> int:
        return ((self.side - self.kernel) // self.stride + 1) ** 2


def convolutions(device: torch.device, batches: tuple[int, ...] = (1, 8, 32)) -> Iterator[Case]:
    for values in (*FASHION, *EFFICIENTNET, *RESNET):
        for batch in batches:
            for dtype in ("fp32", "bf16"):
                for compiled in (False, True):
                    yield _case(device, batch, dtype, Shape(*values), compiled=compiled)


def _case(device: torch.device, batch: int, dtype: str, shape: Shape, *, compiled: bool) -> Case:
    """Eager models keep channels first; Inductor has convolutions read and write channels last."""
    layout = torch.channels_last if compiled else torch.contiguous_format
    weight_shape = (shape.outputs, shape.inputs // shape.groups, shape.kernel, shape.kernel)
    weights = shape.outputs * shape.inputs // shape.groups * shape.kernel**2

    def make(copies: int) -> list[Call]:
        x = random((batch, shape.inputs, shape.side, shape.side), torch_dtype(dtype), device).to(memory_format=layout)
        weight = random(weight_shape, torch_dtype(dtype), device).to(memory_format=layout)
        bias = random((shape.outputs,), torch_dtype(dtype), device)
        return [partial(F.conv2d, x, weight, bias, shape.stride, groups=shape.groups)]

    elements = batch * shape.inputs * shape.side**2 + weights + shape.outputs + batch * shape.outputs * shape.pixels
    return Case(
        kind=CONVOLUTION,
        name=compiled_name("aten.convolution") if compiled else "aten.convolution",
        dtype=dtype,
        size=(batch, shape.inputs, shape.outputs, shape.groups, shape.kernel**2, shape.pixels),
        flops=2.0 * batch * weights * shape.pixels,
        bytes=float(elements * torch_dtype(dtype).itemsize),
        make=make,
    )
