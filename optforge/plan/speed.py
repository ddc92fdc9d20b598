"""The predicted time of both baselines and of each prefix of the recipe, as rows that build on one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from optforge.plan import roofline
from optforge.plan.calibration import Calibration, calibration_for
from optforge.plan.document import UNKNOWN, Band, Operator, Source, Speed, SpeedRow, UnknownOperator
from optforge.plan.graph import PRODUCT, Graph
from optforge.plan.make import Plan
from optforge.plan.roofline import Prediction
from optforge.plan.verdict import AS_LOADED, COMPILED_BASELINE, outcome
from optforge.transforms.base import Phase

EAGER, COMPILED, CAPTURED = "eager", "compiled", "captured"
CAPTURING = ("reduce_overhead", "max_autotune")
"""Modes of the compile step that replay a captured graph, on devices that have them."""
CAPTURES = ("nvidia", "amd")
TOP = 10


def speed(plan: Plan) -> Speed:
    """The rows of a plan, the costliest kernels of the whole recipe, and where the figures come from."""
    found = calibration_for(plan.target)
    predictions = list(_predictions(plan, found))
    rows = [_row(name, mode, prediction) for name, mode, prediction in predictions]
    reference = COMPILED_BASELINE if any(row.name == COMPILED_BASELINE for row in rows) else AS_LOADED
    _compare(rows, reference)
    last = predictions[-1][2]
    return Speed(
        basis=last.basis,
        known=last.known,
        reason=last.reason,
        rows=rows,
        reference=reference,
        top=[_operator(item) for item in last.top[:TOP]],
        calibration=None if found is None else Source(name=found.name, device=found.device, exact=found.exact, source=found.source),
        band=_band(last.band),
        unknown=_unknown(_graphs(plan)),
        notes=list(dict.fromkeys(note for _, _, prediction in predictions for note in prediction.notes)),
    )


def _predictions(plan: Plan, found: Calibration | None) -> Iterator[tuple[str, str, Prediction]]:
    """Name, mode and prediction of each row: as loaded, compiled, then each step that rewrites the model."""
    mode, regions = _compiled(plan)

    def predicted(graph: Graph, how: str) -> Prediction:
        band = found.band(plan.run.workload.kind, product_dtype(graph)) if found is not None else None
        return roofline.predict(graph, plan.target, mode=how, regions=regions, calibration=found, band=band)

    yield AS_LOADED, EAGER, predicted(plan.graph, EAGER)
    if mode != EAGER:
        yield COMPILED_BASELINE, mode, predicted(plan.graph, mode)
    for step in plan.rewrites:
        yield step.name, mode, predicted(step.graph, mode)


def product_dtype(graph: Graph) -> str:
    """The dtype of the products that hold most of the arithmetic; empty where there are none."""
    flops: Counter[str] = Counter()
    for operator in graph.operators:
        if operator.kind == PRODUCT:
            flops[operator.dtype] += int(operator.flops)
    return flops.most_common(1)[0][0] if flops else ""


def _compiled(plan: Plan) -> tuple[str, list[str]]:
    """How the recipe compiles, and the modules that are compiled, each by itself; the whole model has the name ''."""
    if plan.compile is None:
        return EAGER, [""]
    chosen = getattr(plan.compile.step.transform, "mode", None)
    captured = getattr(chosen, "name", "") in CAPTURING and plan.target.backend in CAPTURES
    return (CAPTURED if captured else COMPILED), [touched.name for touched in plan.compile.receipt.touched]


def _row(name: str, mode: str, prediction: Prediction) -> SpeedRow:
    same = (
        "latency_ms",
        "low_ms",
        "high_ms",
        "ideal_ms",
        "tokens_per_s",
        "items_per_s",
        "mfu",
        "mbu",
        "bound",
        "kernels",
        "flops",
        "bytes",
    )
    return SpeedRow(name=name, mode=mode, reason=prediction.reason, **{key: getattr(prediction, key) for key in same})


def _compare(rows: Sequence[SpeedRow], reference: str) -> None:
    """Fills the ratios and what they amount to."""
    base = next(row for row in rows if row.name == reference)
    for before, row in zip([None, *rows], rows, strict=False):
        row.vs_previous = _ratio(before, row)
        row.vs_reference = _ratio(base, row)
        if row is not base and row.name != AS_LOADED and row.vs_reference is not None:
            found = outcome(row.vs_reference)
            row.outcome = found if found != UNKNOWN else None


def _ratio(before: SpeedRow | None, after: SpeedRow) -> float | None:
    return before.latency_ms / after.latency_ms if before is not None and before.latency_ms and after.latency_ms else None


def _operator(item: dict[str, Any]) -> Operator:
    return Operator(**{key: item[key] for key in Operator.__dataclass_fields__})


def _band(found: Any) -> Band | None:
    if found is None:
        return None
    return Band(**{key: getattr(found, key) for key in Band.__dataclass_fields__})


def _graphs(plan: Plan) -> list[Graph]:
    return [plan.graph, *(step.graph for step in plan.steps if step.phase is not Phase.COMPILE)]


def _unknown(graphs: Sequence[Graph]) -> list[UnknownOperator]:
    """Operators of the whole recipe, or of the baseline, whose work nobody can count, those of one name together."""
    found: dict[tuple[str, str], list[str]] = {}
    for graph in (graphs[-1], graphs[0]):
        for operator in graph.unknown_operators():
            found.setdefault((operator.name, operator.why), []).append(operator.module)
        if found:
            break
    return [UnknownOperator(name=name, why=why, module=modules[0], count=len(modules)) for (name, why), modules in found.items()]
