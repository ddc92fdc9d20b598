"""The kernels of a decoder's pass through the compilers of devices that are not here: none is refused, spills much or wants too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from optforge.kernels import argmax_kernel, cross_entropy_kernel, few_rows, rotary_kernel, row_kernels, split_attention
from optforge.kernels import configurations as known
from optforge.kernels.compiler import COMPILED
from optforge.kernels.configurations import Device
from optforge.kernels.cross_compile import compile_all
from optforge.kernels.launches import Configuration
from optforge.kernels.recorded import recording

DEVICES = {
    "sm_80": Device("sm_80", "A100", 108),
    "sm_90": Device("sm_90", "NVIDIA H200", 132),
    "gfx942": Device("gfx942", "MI300X", 304),
    "gfx950": Device("gfx950", "MI350X", 256),
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def product(device: Device, storage: str, rows: int, gate: str) -> None:
    outputs, columns = 512, 4096
    kind = {"plain": torch.bfloat16, "int8": torch.int8}.get(storage, torch.uint8)
    four = storage == "int4"
    weight = meta(outputs * (2 if gate else 1), columns // (2 if four else 1), dtype=kind)
    groups = columns // 128 if four else 1
    scale = None if storage == "plain" else meta(weight.shape[0], groups, dtype=torch.float32)
    zero = meta(weight.shape[0], groups, dtype=torch.uint8) if four else None
    x, norm = meta(rows, columns), meta(columns) if gate else None
    config = known.reasoned(few_rows.shape_of(x, weight, storage, 128, gate, bool(gate)), device)
    few_rows.launch(x, weight, scale, zero, None, norm, None, storage, 128 * four, 1e-5, 0.0, gate, config)


def attention(device: Device, storage: str) -> None:
    kind = {"plain": torch.bfloat16, "int8": torch.int8}.get(storage, torch.uint8)
    q, cache = meta(1, 32, 1, 128), meta(1, 8, 8192, 128, dtype=kind)
    scales = None if storage == "plain" else meta(1, 8, 8192, 1, dtype=torch.float32)
    config = known.reasoned(split_attention.shape_of(q, cache, storage), device)
    split_attention.launch(q, cache, cache, scales, scales, meta(1, dtype=torch.int64), 0.1, storage, config)


def rotary(storage: str) -> None:
    cache = meta(1, 8, 64, 128, dtype=torch.bfloat16 if storage == "plain" else torch.uint8)
    scales = None if storage == "plain" else meta(1, 8, 64, 1, dtype=torch.float32)
    angle, places, none = meta(1, 1, 128), meta(1, dtype=torch.int64), (None, None)
    rotary_kernel.launch(meta(1, 1, 48 * 128), angle, angle, places, cache, cache, scales, scales, *none, 32, storage, 1e-5, 0.0)


def recorded(module: str, call: Callable[[], Any]) -> list[Configuration]:
    with recording(module) as found:
        call()
    return [replace(one, constants=dict(one.constants) | {"WIDE": 0} if "WIDE" in one.constants else one.constants) for one in found]


def configurations(arch: str) -> list[Configuration]:
    device, fp8, x = DEVICES[arch], "e4m3fnuz" if arch == "gfx942" else "e4m3fn", meta(4, 4096)
    found: list[Configuration] = []
    for storage in ("plain", fp8, "int8", "int4"):
        for rows, gate in ((1, ""), (1, "silu"), (16, "silu")):
            found += recorded("few_rows", lambda s=storage, r=rows, g=gate: product(device, s, r, g))
    for storage in ("plain", fp8, "int8"):
        found += recorded("split_attention", lambda s=storage: attention(device, s))
    for storage in ("plain", fp8):
        found += recorded("rotary_kernel", lambda s=storage: rotary(s))
    found += recorded("row_kernels", lambda: row_kernels.rounded_norm(x, x, x[0], None, 1e-5, 0.0, centered=False, form=fp8))
    found += recorded("row_kernels", lambda: row_kernels.gated(x, "gelu"))
    logits = meta(1, 128256)
    found += recorded("argmax_kernel", lambda: argmax_kernel.launch(logits, known.reasoned(argmax_kernel.shape_of(logits), device)))
    wide, targets, each = meta(4, 128256, dtype=torch.float32), meta(4, dtype=torch.int64), meta(1, dtype=torch.float32)
    found += recorded("cross_entropy_kernel", lambda: cross_entropy_kernel.step(wide, targets, each, -100, True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
def test_what_is_launched_by_reasoning_compiles_and_fits(arch: str) -> None:
    found = configurations(arch)
    assert len(found) == 21
    for configuration, result in zip(found, compile_all([(one, arch) for one in found]), strict=True):
        said = (configuration.name, configuration.label, result)
        assert result.status == COMPILED, said
        assert (result.shared_memory_bytes or 0) <= DEVICES[arch].shared_memory_bytes, said
        assert (result.spills or 0) <= 16, said
