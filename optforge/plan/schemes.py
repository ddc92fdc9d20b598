"""A graph as it would be if some of its linears were quantized, without quantizing them: what a plan asks of each scheme.

The weight is read in its stored form. Schemes that multiply in low precision also round their input, row by row, and int8
scales its sums afterwards; both are operators of their own, as they are in `kernels`, and a compiler merges them with what
stands before and after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from optforge.kernels.dispatch import GPUS
from optforge.kernels.int8_dynamic import CUDA_ROWS
from optforge.measure.utilization import has_units
from optforge.plan.graph import COPY, POINTWISE, PRODUCT, REDUCTION, Access, Graph, Operator, Value
from optforge.spec import Hardware, Scheme

MULTIPLIES = {"fp8": "aten._scaled_mm", "int8": "aten._int_mm"}
"""Dtype of the activations -> the operator that multiplies them on a GPU; a CPU's int8 product is `optforge.int8_packed`."""


def with_schemes(graph: Graph, schemes: Mapping[str, Scheme], hardware: Hardware) -> Graph:
    """The graph with the linears named in `schemes` quantized.

    Args:
        graph: of the model as it is; it is not changed.
        schemes: dotted path of a linear -> the scheme that it would have.
        hardware: decides which operators multiply; a scheme whose units are missing there multiplies in the run's dtype.
    """
    values = dict(graph.values)
    operators: list[Operator] = []
    for operator in graph.operators:
        scheme, weight = schemes.get(operator.module), _weight(graph, operator)
        if scheme is None or weight is None:
            operators.append(operator)
        else:
            operators += _quantized(operator, weight, scheme, hardware, values)
    for key in _read(graph.operators) - _read(operators):
        values.pop(key)
    return replace(graph, operators=operators, values=values)


def _read(operators: Iterable[Operator]) -> set[int]:
    return {access.key for operator in operators for access in operator.reads}


def scheme_bytes(inputs: int, outputs: int, scheme: Scheme) -> int:
    """Bytes that a linear of this shape holds under `scheme`, without its bias, as `kernels.linears` stores it.

    Packed weights row by row, their scales (fp32, or a byte each, e4m3 ones under one fp32 scale), a byte of zero point beside each
    scale of an asymmetric scheme, fp32 row sums where int8 activations are multiplied, and what calibration found of the inputs.
    """
    weights = outputs * -(-inputs * scheme.weight_bits // 8)
    size = scheme.group_size or inputs
    groups = -(-inputs // size)
    scales = {"tensor": 1, "channel": outputs, "group": outputs * groups, "block": -(-outputs // size) * groups}[scheme.granularity]
    above = 4 if scheme.scale_dtype == "fp8" else 0
    zero_points = 0 if scheme.symmetric else scales
    int8 = scheme.activation_dtype == "int8"
    inputs_scales = (8 if int8 else 4) if scheme.static else 0
    return (
        weights + (4 if scheme.scale_dtype == "fp32" else 1) * scales + above + zero_points + (4 * outputs if int8 else 0) + inputs_scales
    )


def _weight(graph: Graph, operator: Operator) -> Access | None:
    """What a product reads of its weight, which is the largest parameter among its operands; None for other operators."""
    read = [access for access in operator.reads if graph.values[access.key].role == "parameter"]
    return max(read, key=lambda access: access.bytes) if operator.kind == PRODUCT and read else None


def _quantized(operator: Operator, weight: Access, scheme: Scheme, hardware: Hardware, values: dict[int, Value]) -> Iterator[Operator]:
    """The product with what goes before and after it."""
    _, rows, outputs, inputs = operator.size
    stored = _new(values, scheme_bytes(inputs, outputs, scheme), "parameter")
    others = tuple(access for access in operator.reads if access is not weight)
    wanted = scheme.activation_dtype
    if wanted is None or not has_units(hardware, wanted):
        name = f"optforge.{scheme.name}" if wanted is None else operator.name
        yield replace(operator, name=name, reads=(*others, stored))
        return
    taken = next(access for access in others if values[access.key].role != "parameter")
    rounded = _new(values, rows * inputs, "value")
    beside = replace(operator, kind=POINTWISE, flops=0.0, detail="")
    yield replace(beside, name="optforge.round_rows", kind=REDUCTION, dtype=wanted, size=(rows, inputs), reads=(taken,), writes=(rounded,))
    name = "optforge.int8_packed" if hardware.backend == "cpu" and wanted == "int8" else MULTIPLIES[wanted]
    product = replace(operator, name=name, dtype=wanted, reads=(rounded, stored, *(access for access in others if access is not taken)))
    if wanted != "int8":
        yield product
        return
    filled = max(rows, CUDA_ROWS) if hardware.backend in GPUS else rows
    if filled > rows:
        larger = _new(values, filled * inputs, "value")
        yield replace(
            beside, name="aten.constant_pad_nd", kind=COPY, dtype=wanted, size=(filled, inputs), reads=(rounded,), writes=(larger,)
        )
        flops = product.flops * filled / rows
        product = replace(product, size=(1, filled, outputs, inputs), flops=flops, reads=(larger, *product.reads[1:]))
    sums = _new(values, 4 * filled * outputs, "value")
    yield replace(product, writes=(sums,))
    needed = replace(sums, bytes=4.0 * rows * outputs)
    yield replace(beside, name="optforge.scale_rows", size=(rows, outputs), reads=(needed,), writes=operator.writes)


def _new(values: dict[int, Value], size: int, role: str) -> Access:
    """A storage of its own, with the access to all of it. Keys of traced ones are not negative."""
    key = -1 - len(values)
    values[key] = Value(key=key, bytes=size, role=role)
    return Access(key=key, bytes=float(size))
