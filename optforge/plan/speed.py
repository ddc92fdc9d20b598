"""The predicted time of both baselines and of each prefix of the recipe, as rows that build on one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from optforge.plan import roofline, sharding
from optforge.plan.calibration import Calibration, calibration_for
from optforge.plan.document import Band, Operator, Source, Speed, SpeedRow, UnknownOperator
from optforge.plan.graph import PRODUCT, Graph
from optforge.plan.memory import Stage
from optforge.plan.roofline import Prediction
from optforge.plan.verdict import AS_LOADED, COMPILED_BASELINE, outcome, ratio
from optforge.spec import Hardware

SAME = ("latency_ms", "low_ms", "high_ms", "ideal_ms", "mfu", "mbu", "bound", "kernels", "flops", "bytes", "partial", "reason")
"""Figures that a row has from its prediction as they are."""


def speed(stages: Sequence[Stage], target: Hardware, workload: str) -> Speed:
    """The rows of a plan, the costliest kernels of the whole recipe, and where the figures come from.

    Args:
        stages: from `stages.stages`.
        workload: its kind, for the error band.
    """
    found = calibration_for(target)
    predictions = [_predicted(stage, target, workload, found) for stage in stages]
    rows = [_row(stage, prediction) for stage, prediction in zip(stages, predictions, strict=True)]
    reference = COMPILED_BASELINE if any(row.name == COMPILED_BASELINE for row in rows) else AS_LOADED
    _compare(rows, reference)
    last = predictions[-1]
    return Speed(
        basis=last.basis,
        known=last.known,
        reason=last.reason,
        rows=rows,
        reference=reference,
        passes=stages[0].graph.passes,
        top=[Operator(**{key: item[key] for key in Operator.__dataclass_fields__}) for item in last.top],
        calibration=None if found is None else Source(name=found.name, device=found.device, exact=found.exact, source=found.source),
        band=None if last.band is None else Band(**{key: getattr(last.band, key) for key in Band.__dataclass_fields__}),
        unknown=_unknown(stages[-1].graph),
        notes=list(dict.fromkeys(note for prediction in predictions for note in prediction.notes)),
    )


def product_dtype(graph: Graph) -> str:
    """The dtype of the products that hold most of the arithmetic; empty where there are none."""
    flops: Counter[str] = Counter()
    for operator in graph.operators:
        if operator.kind == PRODUCT:
            flops[operator.dtype] += int(operator.flops)
    return flops.most_common(1)[0][0] if flops else ""


def _predicted(stage: Stage, target: Hardware, workload: str, found: Calibration | None) -> Prediction:
    """One device's part, with what it sends. An error band belongs to one device: nobody measured sharded runs against it."""
    alone = stage.mesh.devices == 1
    return roofline.predict(
        sharding.split(stage.graph, stage.mesh),
        target,
        mode=stage.mode,
        regions=stage.regions,
        collectives=sharding.collectives(stage.graph, stage.mesh),
        calibration=found,
        band=found.band(workload, product_dtype(stage.graph)) if found is not None and alone else None,
    )


def _row(stage: Stage, found: Prediction) -> SpeedRow:
    """The row; rates are of all devices together, since each copy of the model has a batch of its own."""
    copies = stage.mesh.fsdp * stage.mesh.data
    rates: dict[str, Any] = {
        key: None if (rate := getattr(found, key)) is None else copies * rate for key in ("tokens_per_s", "items_per_s")
    }
    return SpeedRow(name=stage.name, mode=stage.mode, devices=stage.mesh.devices, **rates, **{key: getattr(found, key) for key in SAME})


def _compare(rows: Sequence[SpeedRow], reference: str) -> None:
    """Fills the ratios and what they amount to."""
    base = next(row for row in rows if row.name == reference)
    for before, row in zip([None, *rows], rows, strict=False):
        row.vs_previous = ratio(before, row)
        row.vs_reference = ratio(base, row)
        if row is not base and row.name != AS_LOADED and row.vs_reference is not None:
            row.outcome = outcome(row.vs_reference)


def _unknown(graph: Graph) -> list[UnknownOperator]:
    """Operators whose work nobody can count, those of one name together."""
    found: dict[tuple[str, str], list[str]] = {}
    for operator in graph.unknown_operators():
        found.setdefault((operator.name, operator.why), []).append(operator.module)
    return [UnknownOperator(name=name, why=why, module=modules[0], count=len(modules)) for (name, why), modules in found.items()]
