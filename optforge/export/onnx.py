"""ONNX through `torch.export`: the stored integers as initializers, dequantized in the graph, everything else in fp32.

fp32, because ONNX Runtime has no bf16 products on a CPU. Three operators get a translation here: the int8 product, which is ONNX's
MatMulInteger, and the view of bytes as fp8, for which the bytes are stored as fp8 to begin with, because PyTorch has none; and the
shift that takes nibbles out of a byte, because PyTorch's gives int8 for uint8 and ONNX Runtime refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from optforge.errors import ModelError, Problem
from optforge.export import program
from optforge.export.base import Subject, Written
from optforge.kernels.formats import FORMATS, OCP
from optforge.kernels.quantized import Quantized
from optforge.measure.size import nbytes, tensors
from optforge.share import alias

FILE = "model.onnx"
SINGLE_FILE_BYTES = 1_500_000_000
"""Above it the weights lie beside the graph, whose own format ends at 2 GiB."""


class Onnx:
    """What `onnxruntime.InferenceSession` runs."""

    name: ClassVar[str] = "onnx"
    loads: ClassVar[str] = "ONNX Runtime"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript", "onnxruntime")

    def machine(self) -> Iterator[Problem]:
        yield from ()

    def refusals(self, subject: Subject) -> Iterator[Problem]:
        """Bytes that ONNX has no type for, or no operator to look into."""
        names: dict[str, list[str]] = {}
        for name, module in subject.module.named_modules():
            if isinstance(module, Quantized) and (reason := _refusal(module)):
                names.setdefault(reason, []).append(name)
        for reason, found in names.items():
            what = f"ONNX does not hold {len(found)} layers ({', '.join(found[:3])}{' ...' * (len(found) > 3)}): {reason}"
            yield Problem(where="export onnx", what=what, fix="export it as torch_export")

    def nbytes(self, subject: Subject) -> int:
        sizes = (tensor.numel() * 4 if tensor.is_floating_point() else nbytes(tensor) for _, tensor in tensors(subject.module))
        return sum(sizes)

    def write(self, subject: Subject, folder: Path) -> Written:
        module = alias(subject.module).float()
        floats = {name: value.float() if value.is_floating_point() else value for name, value in subject.inputs.tensors.items()}
        whole = replace(subject, module=module, inputs=replace(subject.inputs, tensors=floats), dtype=torch.float32)
        made = program.program(replace(whole, module=_with_fp8_bytes(module)))
        try:
            with torch.no_grad():
                found: Any = torch.onnx.export(
                    made.exported, (), kwargs=floats, dynamo=True, verbose=False, optimize=False, custom_translation_table=_translations()
                )
        except Exception as error:  # the exporter raises many kinds; each is told
            raise ModelError(
                Problem(where="export onnx", what=f"PyTorch cannot translate the model ({_reason(error)})", fix="export it as torch_export")
            ) from error
        apart = self.nbytes(subject) > SINGLE_FILE_BYTES
        found.save(folder / FILE, external_data=apart)
        return Written(
            engine="onnx",
            module=module,
            dtype=torch.float32,
            options={"file": FILE, "inputs": list(floats)},
            sizes=subject.inputs.sizes(made.dynamic),
            facts={"file": FILE, **program.facts(made, whole), "opset": found.model.opset_imports.get("")},
            notes=(*made.notes, "floating-point values are fp32"),
        )


def _refusal(module: Quantized) -> str | None:
    scheme = module.scheme
    if scheme.weight_dtype == "fp4" or scheme.scale_dtype != "fp32":
        return f"scheme {scheme.name} looks into the bits of a byte"
    if scheme.weight_dtype == "fp8" and module.fp8_format != OCP.name:
        return f"its fp8 is {module.fp8_format}"
    return None


def _with_fp8_bytes(module: nn.Module) -> nn.Module:
    """A copy of the structure whose fp8 weights are float8 tensors, over the same memory."""
    copied = alias(module)
    for child in copied.modules():
        if isinstance(child, Quantized) and child.scheme.weight_dtype == "fp8":
            child.weight = nn.Parameter(child.weight.view(FORMATS[child.fp8_format].dtype), requires_grad=False)
    return copied


def _translations() -> dict[Any, Callable[..., Any]]:
    """PyTorch operators that its exporter does not know -> what they are in ONNX."""
    from onnxscript import opset18

    op: Any = opset18  # its types are narrower than what it takes

    def int_mm(a: Any, b: Any) -> Any:
        return op.MatMulInteger(a, b)

    def view_dtype(self: Any, dtype: int) -> Any:
        return op.Identity(self)  # of a float8 tensor as float8: `_with_fp8_bytes`

    def right_shift(self: Any, other: int) -> Any:
        return op.BitShift(self, op.CastLike(op.Constant(value_int=other), self), direction="RIGHT")

    aten = torch.ops.aten
    return {aten._int_mm.default: int_mm, aten.view.dtype: view_dtype, aten.__rshift__.Scalar: right_shift}


def _reason(error: Exception) -> str:
    """The exporter's own reason, which it tells last of all."""
    causes = [line.strip() for line in str(error).splitlines() if "Error" in line and ":" in line]
    return (causes[-1] if causes else str(error).strip().splitlines()[0])[:300]
