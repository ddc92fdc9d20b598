"""Puts the parts of a plan together: order, fit, speed, kernels and the verdict, as plain data for json and for readers.

`make.make` decides what will run; everything here reads what it found and changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from optforge.errors import UserError
from optforge.kernels.formats import FORMATS, OCP
from optforge.plan import kernels as of_target
from optforge.plan import make, memory, recorded, verdict
from optforge.plan import xla as of_xla
from optforge.plan.coverage import missed
from optforge.plan.document import REFUSED, Kernels, Recorded, Refusal, Skipped, StepPlan, Study, Verdict
from optforge.plan.kernels import GPUS
from optforge.plan.make import Plan
from optforge.plan.speed import speed
from optforge.plan.stages import knobs, stages
from optforge.progress import Progress, SilentProgress
from optforge.spec import Hardware, Json, Run
from optforge.transforms.base import Phase, Receipt


def study(plan: Plan, *, kernels: bool = True, xla: bool = True, progress: Progress | None = None) -> Study:
    """Everything that is known of a plan before it runs.

    Args:
        plan: from `make.make`.
        kernels: cross-compile the kernels that the recipe would launch on the target.
        xla: on XLA targets, compile the step's program ahead of time.
        progress: is told the stage that runs.
    """
    told = progress or SilentProgress()
    found = _said(plan.run, plan.target)
    found.device = {"name": plan.device.name, "is_target": plan.is_target}
    found.model = plan.model
    found.weight_bytes = plan.weight_bytes
    found.steps = steps(plan)
    found.downgrades = list(plan.downgrades)
    found.warnings = list(plan.warnings)
    rows = list(stages(plan))
    with _timed(found, "memory"):
        found.fit = memory.fit(rows, plan.target, knobs(plan))
    with _timed(found, "speed"):
        found.speed = speed(rows, plan.target, plan.run.workload.kind)
    if kernels and plan.target.backend in GPUS:
        with _timed(found, "kernels"), told.stage(f"compile the kernels for {plan.target.arch}"):
            found.kernels = _kernels(plan, told)
    if xla and plan.target.backend == of_xla.BACKEND:
        with _timed(found, "xla"), told.stage(f"XLA compiles one pass for {plan.target.arch}"):
            found.xla = of_xla.compile_for(plan)
    found.verdict = verdict.judge(found, goal=plan.run.recipe.goal, found=_recorded(found))
    return found


def refused(run: Run, error: UserError) -> Study:
    """The study of a run for which there is no plan: what was asked for, and every reason."""
    found = _said(run, run.hardware)
    found.status = REFUSED
    found.refused = [Refusal.of(problem) for problem in error.problems]
    found.verdict = Verdict(sentence=f"refused: {found.refused[0]}")
    return found


def plan_or_refusal(run: Run, *, kernels: bool, xla: bool, progress: Progress | None = None) -> Study:
    """The study of a run; where the plan refuses it, the study that says why."""
    start = time.perf_counter()
    try:
        with (progress or SilentProgress()).stage(f"plan {run.recipe.name} for {run.hardware.name}: structure and operators"):
            plan = make.make(run, executes=False)
    except UserError as error:
        return refused(run, error)
    taken = time.perf_counter() - start
    found = study(plan, kernels=kernels, xla=xla, progress=progress)
    found.seconds = {"plan": round(taken, 3), **found.seconds}
    return found


def steps(plan: Plan) -> list[StepPlan]:
    """The steps in the order in which they run; what quantization missed stands at its last step."""
    quantizing = [step for step in plan.steps if step.phase is Phase.QUANTIZE]
    rows = [_step(step) for step in plan.steps]
    if quantizing:
        last = next(row for row in rows if row.name == quantizing[-1].name)
        ignore = [entry for step in quantizing for entry in (*step.step.transform.ignore, *step.step.transform.ignore_extra)]
        last.missed = missed(plan.loaded.module, [step.receipt for step in quantizing], ignore)
    return rows


def _step(planned: make.PlannedStep) -> StepPlan:
    receipt = planned.receipt
    return StepPlan(
        name=planned.name,
        use=planned.step.use,
        requested=planned.requested,
        phase=planned.phase.name.lower(),
        moved=planned.moved,
        touched=len(receipt.touched),
        became=dict(Counter(touched.what for touched in receipt.touched)),
        skipped=_by_reason(receipt.skipped),
        ignored=list(receipt.ignored),
        unmatched=list(receipt.unmatched),
        share=receipt.bytes_before / receipt.total_bytes if receipt.total_bytes else None,
        bytes_before=receipt.bytes_before,
        bytes_after=receipt.bytes_after,
        weight_bytes=planned.weight_bytes,
        notes=[*_formats(receipt), *receipt.notes],
    )


def _formats(receipt: Receipt) -> Iterator[str]:
    """Which 8-bit float the target multiplies, where the step stores one: mixing the two corrupts values."""
    scheme = receipt.decisions.get("scheme")
    if isinstance(scheme, dict) and scheme.get("weight_dtype") == "fp8":
        found = FORMATS[receipt.decisions["fp8_format"]] if scheme.get("scale_dtype", "fp32") == "fp32" else OCP
        yield f"fp8 is stored as {found.name}, largest value {found.maximum:g}"


def _by_reason(skipped: dict[str, str]) -> list[Skipped]:
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(name)
    return [Skipped(reason=reason, names=names) for reason, names in reasons.items()]


def _said(run: Run, target: Hardware) -> Study:
    """What the command asked for."""
    recipe, workload = run.recipe, run.workload
    return Study(
        recipe={"name": recipe.name, "description": recipe.description, "goal": recipe.goal, "limits": dict(recipe.limits)},
        target=_facts(target),
        model={"name": run.model.name, "kind": run.model.kind, **dict(run.model.options)},
        workload={"name": workload.name, "kind": workload.kind, **dict(workload.options)},
        command=run.command,
    )


def _facts(hardware: Hardware) -> dict[str, Json]:
    return {
        "name": hardware.name,
        "description": hardware.description,
        "backend": hardware.backend,
        "arch": hardware.arch,
        "memory_bytes": hardware.memory_bytes,
        "bandwidth_bytes_per_s": hardware.bandwidth_bytes_per_s,
        "peak_flops": dict(hardware.peak_flops),
    }


def _recorded(found: Study) -> Sequence[Recorded]:
    return recorded.recorded(
        schemes=verdict.changing(found),
        recipe=str(found.recipe["name"]),
        model=str(found.model["name"]),
        device=str(found.target["name"]),
        backend=str(found.target["backend"]),
    )


def _kernels(plan: Plan, progress: Progress) -> Kernels:
    """The kernels of one pass of the whole recipe, compiled for the target."""
    graph = plan.steps[-1].graph if plan.steps else plan.graph
    launched = of_target.launched(graph, plan.target)
    reports = of_target.check(launched, plan.target, progress)
    notes = of_target.notes(graph, plan.target, compiled=plan.compile is not None)
    return Kernels(rows=reports, notes=notes)


@contextmanager
def _timed(found: Study, part: str) -> Iterator[None]:
    """Keeps how long a part took."""
    start = time.perf_counter()
    yield
    found.seconds[part] = round(time.perf_counter() - start, 3)
