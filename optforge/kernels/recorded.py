"""What an operator would launch, found by letting it launch into a recorder: no device and no numbers are needed, meta tensors do.

A `Configuration` made so is what `cross_compile` takes; what is compiled and what is launched cannot be two things.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optforge.kernels.launches import ALIGNMENT, SMALL, Configuration

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's names of dtypes."""

OPTIONS = ("num_warps", "num_stages", "launch_pdl")
"""Arguments of a launch that are the compiler's, not the kernel's."""


class _Recorder:
    """Takes a kernel's place: `kernel[grid](...)` is noted and does nothing."""

    def __init__(self, note: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._note = note

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self._note(args, kwargs)


@contextmanager
def recording(module: str) -> Iterator[list[Configuration]]:
    """Within it, launches of `optforge.kernels.<module>` run nothing; the list fills with what they would have compiled."""
    home: Any = importlib.import_module(f"optforge.kernels.{module}")
    kernels: dict[str, Any] = dict(home.KERNELS)
    found: list[Configuration] = []

    def note(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
        return lambda args, kwargs: found.append(configuration(module, name, kernels[name], args, kwargs))

    home.KERNELS.update({name: _Recorder(note(name)) for name in kernels})
    try:
        yield found
    finally:
        home.KERNELS.update(kernels)


def configuration(module: str, name: str, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Configuration:
    """One launch as the compiler gets it; tensors are taken as an allocator aligns them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | {key: value for key, value in kwargs.items() if key not in OPTIONS}
    compiled_in = {param.name for param in kernel.params if param.is_constexpr}
    signature: dict[str, str] = {}
    constants: dict[str, int] = {}
    aligned: list[str] = []
    small: list[str] = []
    for key, value in given.items():
        if key in compiled_in or (isinstance(value, int) and value == 1):
            signature[key], constants[key] = "constexpr", int(value)
        elif isinstance(value, Tensor):
            signature[key] = f"*{TYPES[value.dtype]}"
            aligned.append(key)
            if value.numel() * value.element_size() <= SMALL:
                small.append(key)
        elif isinstance(value, float):
            signature[key] = "fp32"
        else:
            signature[key] = "i32" if abs(value) < 2**31 else "i64"
            if value % ALIGNMENT == 0:
                aligned.append(key)
    label = ", ".join(f"{key} {value}" for key, value in constants.items() if key in compiled_in and key.isupper())
    options = {key: int(kwargs[key]) for key in OPTIONS if key in kwargs}
    return Configuration(
        kernel=f"optforge.kernels.{module}:{name}",
        label=label,
        signature=signature,
        constants=constants,
        aligned=tuple(aligned),
        small=tuple(small),
        options=options,
    )
