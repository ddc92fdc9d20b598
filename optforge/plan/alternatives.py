"""What else would help on a target that lacks the units for a step, ranked by the roofline without applying anything.

A user who asks for fp8 on an A100 should learn in the same breath that int8 has matrix units there. So each option of
`quantize` is put on the step's linears as a scheme only, and the predicted times are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from optforge.errors import Problem, UserError
from optforge.measure.utilization import CUDA_UNITS, compute_capability, peak
from optforge.plan.graph import CAPTURED, Graph
from optforge.plan.price import product_dtype
from optforge.plan.roofline import predict, speedup
from optforge.schemes import NATIVE, SCHEMES, runs
from optforge.spec import Hardware, Json, Scheme, Step
from optforge.transforms.base import Lowered
from optforge.transforms.quantize.survey import survey

if TYPE_CHECKING:
    from optforge.plan.calibration import Calibration


def alternatives(
    step: Step,
    module: nn.Module,
    graph: Graph,
    hardware: Hardware,
    *,
    dtype: str,
    mode: str = CAPTURED,
    calibration: Calibration | None = None,
) -> list[dict[str, Json]]:
    """The options that `hardware` runs as written in place of `step`, the one with the highest predicted speedup first.

    Each is `{use, predicted_speedup, native, note}`. The speedup is against `module` as it is; null where the profile has no
    peaks. `native` tells whether the product itself runs in the low precision, or only the storage does. Equal ones stand
    native first, then those that store what was asked for. Steps of other kinds than `quantize`, and steps that select no
    layer, have no alternatives here.

    Args:
        step: the quantize step that the target cannot run as written.
        module: the model before the step; meta will do.
        graph: its traced pass.
        dtype: the run's dtype, `fp32`, `fp16` or `bf16`.
        mode: how the recipe runs, see `roofline.predict`.
        calibration: what kernels reach on the target, if that is known.
    """
    linears = _linears(step, module) if step.kind == "quantize" else {}
    if not linears:
        return []
    asked = step.use.partition("/")[2]
    before = predict(graph, hardware, mode=mode, calibration=calibration)
    found: list[dict[str, Json]] = []
    for option, scheme in SCHEMES.items():
        if option == asked or scheme.static or runs(scheme, hardware) != NATIVE:
            continue  # what needs data is no swap of a word, and what is emulated gains nothing
        schemes = {name: scheme for name, linear in linears.items() if _fits(linear, scheme)}
        after = predict(graph, hardware, mode=mode, schemes=schemes, calibration=calibration)
        found.append(
            {
                "use": f"quantize/{option}",
                "predicted_speedup": speedup(before, after),
                "native": scheme.activation_dtype is not None,
                "note": _note(hardware, scheme, dtype),
            }
        )
    stored = SCHEMES[asked].weight_dtype if asked in SCHEMES else None

    def rank(item: dict[str, Json]) -> tuple[float, bool, bool]:
        keeps_storage = SCHEMES[item["use"].partition("/")[2]].weight_dtype == stored
        return -round(item["predicted_speedup"] or 0.0, 3), not item["native"], not keeps_storage

    return sorted(found, key=rank)


def refusal(step: Step, lowered: Lowered, hardware: Hardware, ranked: Sequence[Mapping[str, Json]]) -> Problem:
    """Why `downgrade: forbid` refuses `step` on `hardware`, and what to use instead, best prediction first."""
    names = [str(item["use"]).partition("/")[2] for item in ranked]
    best = f"type steps.{step.name}.use={ranked[0]['use'] if ranked else f'{step.kind}/{lowered.runs_as}'}, or downgrade=allow"
    listed = f"alternatives: {', '.join(names)}; {best}" if names else best
    scheme = SCHEMES.get(lowered.requested)
    needed = scheme.activation_dtype if scheme else None
    return Problem(where=f"step {step.name}", what=lacks(hardware, needed) if needed else lowered.reason, fix=listed)


def lacks(hardware: Hardware, dtype: str) -> str:
    """Says that `hardware` has no `dtype` units, in terms of compute capability where that decides it."""
    capability = compute_capability(hardware)
    if capability is None or dtype not in CUDA_UNITS or capability >= CUDA_UNITS[dtype]:
        return f"{hardware.name} has no {dtype} matrix units"
    have, need = (".".join(map(str, pair)) for pair in (capability, CUDA_UNITS[dtype]))
    return f"{hardware.name} has compute capability {have}, {dtype} matmul needs {need}+"


def _linears(step: Step, module: nn.Module) -> dict[str, nn.Module]:
    """The linears that the step would quantize; none where the step is wrong, which its own check then reports."""
    try:
        return survey(module, step.transform, step.name).layers
    except UserError:
        return {}


def _fits(linear: nn.Module, scheme: Scheme) -> bool:
    """Whether the groups of the scheme divide the layer's inputs."""
    shape = linear_shape(linear)
    return shape is not None and (scheme.group_size is None or shape[0] % scheme.group_size == 0)


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer: nn.Linear with all subclasses, and transformers' Conv1D (a transposed linear)."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor) and module.weight.dim() == 2:
        inputs, outputs = module.weight.shape
        return int(inputs), int(outputs)
    return None


def _note(hardware: Hardware, scheme: Scheme, dtype: str) -> str:
    """What the option does there, in one phrase."""
    if scheme.activation_dtype is None:
        product = product_dtype(hardware, scheme, dtype) or dtype
        return f"weights in {scheme.weight_bits} bits, products in {product}"
    limit = peak(hardware, scheme.activation_dtype)
    rate = f" at {limit / 1e12:g} TOP/s" if limit else ""
    return f"{hardware.name} has {scheme.activation_dtype} matrix units{rate}"
