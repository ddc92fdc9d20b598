"""The device that a launch goes to, as `configurations` asks for it; the interpreter where tensors lie on a CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from optforge.kernels.configurations import INTERPRETER, Device

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def device_of(x: Tensor) -> Device:
    """The device of a tensor; what PyTorch says of it is asked once."""
    return _device(x.device.index or 0) if x.is_cuda else INTERPRETER


@cache
def _device(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Device(str(found.gcnArchName).partition(":")[0], found.name, found.multi_processor_count)
    return Device(f"sm_{found.major}{found.minor}", found.name, found.multi_processor_count)
