"""The reload check: the artifact in its own engine, in a fresh process, against the optimized model.

How close must they be? Two programs that round the same things at other places differ by about as much as each differs from exact
arithmetic. So the model's own distance from its stored weights multiplied in fp32, without rounding activations, is measured on the
same inputs, and the artifact may be `FACTOR` times as far from the model. Where nothing is rounded (fp32, weights alone) that distance
is nothing and `EXACT` remains, which sums in another order stay far below.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from optforge import processes
from optforge.errors import ExportError
from optforge.export import reload
from optforge.export.base import Subject, Written
from optforge.export.called import Called
from optforge.kernels.linears import QuantizedLinear
from optforge.share import alias
from optforge.spec import Json

EXACT, FACTOR = 1e-3, 3.0
TIMEOUT_S = 3600.0
LOG_LINES = 12

Outputs = list[tuple[Tensor, ...]]
"""Of each size, the tensors that one call gives, on the CPU."""


def reloaded(folder: Path, written: Written, subject: Subject) -> dict[str, Json]:
    """Loads what `folder` holds and compares; what export.json and the report keep of it.

    Raises:
        ExportError: it does not load, needs OptForge, lacks or ignores tensors, or computes something else.
    """
    given = [_cast(subject.inputs.of(*size), written.dtype) for size in written.sizes]
    expected = _run(written.module, subject, given, written.dtype)
    allowed = EXACT + FACTOR * max(map(_distance, expected, _run(exact(written.module), subject, given, torch.float32)))
    answer, found = _ask(folder, written, given)
    _loaded_whole(answer, written.engine)
    errors = [_distance(of_engine, ours) for of_engine, ours in zip(found, expected, strict=True)]
    figures: dict[str, Any] = {
        "engine": written.engine,
        "versions": answer["versions"],
        "process": "fresh, without OptForge",
        "sizes": [subject.inputs.named(size) for size in written.sizes],
        "relative_errors": errors,
        "relative_error": max(errors),
        "allowed": allowed,
        "load_s": answer["load_s"],
        "seconds": answer["seconds"],
    }
    pairs = zip(figures["sizes"], errors, strict=True)
    wrong = [f"{error:.1e} at {said(size)}" for size, error in pairs if not error <= allowed]
    if wrong:
        told = f"computes something else in {written.engine} (relative error {'; '.join(wrong)}; allowed {allowed:.1e})"
        raise ExportError(f"the exported model {told}, and was removed")
    return figures


def said(size: Mapping[str, int]) -> str:
    """`batch 3, tokens 13`."""
    return ", ".join(f"{axis} {length}" for axis, length in size.items())


def exact(module: nn.Module) -> nn.Module:
    """A copy in fp32 whose quantized linears multiply what they store, without rounding what comes in."""
    copied = alias(module).float()
    for child in copied.modules():
        if isinstance(child, QuantizedLinear):
            weight = child.dequantize()
            child.__class__ = nn.Linear  # type: ignore[assignment]  # what it was made from
            child._parameters = {"weight": nn.Parameter(weight, requires_grad=False), "bias": child._parameters.get("bias")}
    return copied


def _cast(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def _run(module: nn.Module, subject: Subject, given: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> Outputs:
    called = Called(module, subject.inputs).eval()
    with torch.no_grad():
        return [tuple(value.cpu() for value in called(**_cast(inputs, dtype))) for inputs in given]


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what is expected, the worst of the outputs; infinite where they do not compare."""
    if len(found) != len(expected) or any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return math.inf
    return max((_relative(a, b) for a, b in zip(found, expected, strict=True)), default=math.inf)


def _relative(found: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    scale = expected.double().norm()
    difference = (found.double() - expected.double()).norm()
    return float(difference / scale) if scale > 0 else (0.0 if difference == 0 else math.inf)


def _ask(folder: Path, written: Written, given: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Any], Outputs]:
    """The answer and the outputs of the fresh process."""
    with tempfile.TemporaryDirectory(prefix="optforge-reload-") as name:
        place = Path(name)
        flat = {f"{number}/{key}": value.cpu().contiguous() for number, inputs in enumerate(given) for key, value in inputs.items()}
        save_file(flat, place / reload.INPUTS)
        request = {"engine": written.engine, "folder": str(folder.absolute()), "options": dict(written.options), "count": len(given)}
        (place / reload.REQUEST).write_text(json.dumps(request), encoding="utf-8")
        log = place / "log.txt"
        process = processes.start([sys.executable, "-I", str(Path(reload.__file__)), str(place / reload.REQUEST)], log, {})
        code = processes.end(process, TIMEOUT_S)
        if code != 0 or not (place / reload.ANSWER).exists():
            said = processes.tail(log, LOG_LINES)
            reason = next((line for line in reversed(said) if "Error" in line), said[-1] if said else processes.ending(code))
            raise ExportError(f"the exported model does not load or run in {written.engine}, and was removed: {reason.strip()}")
        answer: dict[str, Any] = json.loads((place / reload.ANSWER).read_text(encoding="utf-8"))
        made = load_file(place / reload.OUTPUTS)
    outputs: Outputs = []
    for number in range(len(given)):
        keys = [key for key in made if key.startswith(f"{number}/")]
        outputs.append(tuple(made[f"{number}/{index}"] for index in range(len(keys))))
    return answer, outputs


def _loaded_whole(answer: Mapping[str, Any], engine: str) -> None:
    """
    Raises:
        ExportError: the loader missed, ignored or refused a tensor, or the tokenizer reads text in another way.
    """
    loading = copy.copy(answer.get("loading") or {})
    if loading:
        told = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in loading.items())
        raise ExportError(f"{engine} does not load the exported model whole, which was removed: {told}")
    if answer.get("tokenizer") is False:
        raise ExportError(f"{engine} reads text in another way than the model's own tokenizer; the export was removed")
