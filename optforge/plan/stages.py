"""The rows of a plan: the model as loaded, the same compiled, and after each step, each as it would run on the target."""

from __future__ import annotations

from collections.abc import Iterator

from optforge.plan.changes import Knobs
from optforge.plan.graph import CAPTURED, COMPILED, EAGER
from optforge.plan.make import Plan
from optforge.plan.memory import Stage
from optforge.plan.sharding import Mesh
from optforge.plan.verdict import AS_LOADED, COMPILED_BASELINE
from optforge.transforms.base import Phase

CAPTURING = ("reduce_overhead", "max_autotune")
"""Modes of the compile step that replay a captured graph, on devices that have them."""
CAPTURES = ("nvidia", "amd")


def stages(plan: Plan) -> Iterator[Stage]:
    """The rows in their order; all but the first are compiled where the recipe compiles."""
    mode, regions = _compiled(plan)
    yield Stage(name=AS_LOADED, graph=plan.graph)
    if mode != EAGER:
        yield Stage(name=COMPILED_BASELINE, graph=plan.graph, mode=mode, regions=regions)
    mesh = Mesh()
    for step in plan.rewrites:
        if step.phase is Phase.SHARD:
            mesh = Mesh.of(step.receipt.decisions)
        yield Stage(name=step.name, graph=step.graph, mesh=mesh, mode=mode, regions=regions)


def knobs(plan: Plan) -> Knobs:
    """What a user may change so that the plan's run fits."""
    of = {phase: [step.name for step in plan.steps if step.phase is phase] for phase in (Phase.SHARD, Phase.QUANTIZE)}
    return Knobs(
        batch=None if plan.loaded.family == "module" else getattr(plan.run.workload.source, "batch_size", None),
        steps=tuple(step.name for step in plan.run.recipe.steps),
        shard=next(iter(of[Phase.SHARD]), None),
        quantize=next(reversed(of[Phase.QUANTIZE]), None),
    )


def _compiled(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """How the recipe compiles, and the modules that are compiled, each by itself; the whole model has the name ''."""
    if plan.compile is None:
        return EAGER, ("",)
    chosen = getattr(plan.compile.step.transform, "mode", None)
    captured = getattr(chosen, "name", "") in CAPTURING and plan.target.backend in CAPTURES
    return (CAPTURED if captured else COMPILED), tuple(touched.name for touched in plan.compile.receipt.touched)
