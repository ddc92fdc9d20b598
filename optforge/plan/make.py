"""Makes the plan: what will run, on what, in which order, and what it should bring, before any weight is loaded.

The recipe's steps are applied to the model's structure on the meta device, so counts, skipped layers and bytes are what
the run will do and not an estimate of it. Every problem found is raised together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

import torch

from optforge import callables, config
from optforge.backends.base import Backend
from optforge.calibrate.samples import Samples
from optforge.errors import PlanError, Problem, UserError
from optforge.measure.own import OwnMetric
from optforge.measure.size import weight_bytes
from optforge.models.base import Loaded
from optforge.plan import alternatives, roofline
from optforge.plan.calibration import calibration_for
from optforge.plan.devices import choose
from optforge.plan.graph import CAPTURED, Graph
from optforge.plan.order import Order, order, phase
from optforge.plan.sharding import Mesh
from optforge.plan.trace import trace
from optforge.spec import Downgrade, Hardware, Json, Run, Step
from optforge.transforms.base import Context, Phase, Receipt


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step as it will run on the target, and what it does to the structure."""

    step: Step
    requested: str
    """The option as written, before the target turned it into something else."""
    phase: Phase
    moved: str | None
    receipt: Receipt
    weight_bytes: int
    """Bytes of all weights after this step."""
    graph: Graph
    """The operators of one pass after this step, as the target would run them."""

    @property
    def name(self) -> str:
        return self.step.name


@dataclass(kw_only=True)
class Plan:
    """Everything decided before weights are loaded."""

    run: Run
    target: Hardware
    device: Hardware
    backend: Backend
    is_target: bool
    steps: list[PlannedStep]
    weight_bytes: int
    """Bytes of the weights before the first step."""
    model: dict[str, Json]
    graph: Graph
    """The operators of one pass of the model as loaded, as the target would run them."""
    loaded: Loaded
    """The model on meta, with every step applied."""
    downgrades: list[Downgrade] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _bounds: dict[int, dict[str, Json]] = field(default_factory=dict, repr=False)

    @property
    def rewrites(self) -> list[PlannedStep]:
        """The steps that change the module tree: all but compile."""
        return [step for step in self.steps if step.phase is not Phase.COMPILE]

    @property
    def compile(self) -> PlannedStep | None:
        return next((step for step in self.steps if step.phase is Phase.COMPILE), None)

    @property
    def final_weight_bytes(self) -> int:
        """Bytes of the weights after the last step."""
        return self.steps[-1].weight_bytes if self.steps else self.weight_bytes

    def describe(self) -> dict[str, Json]:
        """The plan as plain data, for reports and the terminal."""
        return {
            "target": {"name": self.target.name, "description": self.target.description},
            "device": {"name": self.device.name, "is_target": self.is_target},
            "model": self.model,
            "order": [
                {"name": s.name, "use": s.step.use, "requested": s.requested, "phase": s.phase.name.lower(), "moved": s.moved}
                for s in self.steps
            ],
            "selected": [_selected(step) for step in self.steps],
            "bytes": [{"step": "baseline", "weight_bytes": self.weight_bytes}]
            + [{"step": s.name, "weight_bytes": s.weight_bytes} for s in self.rewrites],
            "predicted": self.predicted(),
            "downgrades": [asdict(downgrade) for downgrade in self.downgrades],
            "warnings": list(self.warnings),
        }

    def predicted(self) -> dict[str, Json]:
        """The target's figures from its roofline: never measured."""
        baseline = self.bound(self.graph)
        final = self.bound(self.rewrites[-1].graph) if self.rewrites else baseline
        return {
            "hardware": self.target.name,
            "label": "predicted",
            "baseline": baseline,
            "steps": [{"name": step.name, **self.bound(step.graph)} for step in self.rewrites],
            "optimized": final,
            "speedup": roofline.speedup(baseline, final),
        }

    def bound(self, graph: Graph) -> dict[str, Json]:
        """The target's roofline of one of the plan's graphs, however the recipe launches its kernels. Worked out when a report asks."""
        if id(graph) not in self._bounds:
            self._bounds[id(graph)] = asdict(roofline.predict(graph, self.target, mode=CAPTURED))
        return self._bounds[id(graph)]


def mesh_of(plan: Plan) -> Mesh:
    """The mesh of the plan's shard step; one device where it has none."""
    return next((Mesh.of(step.receipt.decisions) for step in plan.steps if step.step.kind == "shard"), Mesh())


def later(steps: Sequence[Step], name: str) -> tuple[str, ...]:
    """The kinds of the steps after the one of that name."""
    names = [step.name for step in steps]
    return tuple(step.kind for step in steps[names.index(name) + 1 :])


def _selected(planned: PlannedStep) -> dict[str, Json]:
    receipt = planned.receipt
    return {
        "step": planned.name,
        "touched": len(receipt.touched),
        "skipped": len(receipt.skipped),
        "ignored": len(receipt.ignored),
        "bytes_before": receipt.bytes_before,
        "bytes_after": receipt.bytes_after,
        "share": receipt.bytes_before / receipt.total_bytes if receipt.total_bytes else None,
    }


def make(run: Run, *, executes: bool = True) -> Plan:
    """The plan of a run. Loads no weights and touches no device memory.

    Args:
        executes: the run will be executed here, so what it needs of this machine (a compiler) is checked too.

    Raises:
        UserError: everything that is wrong with the run, in one exception.
    """
    problems: list[Problem] = []
    _collect(problems, lambda: problems.extend(run.model.source.check()))
    _collect(problems, lambda: problems.extend(run.data.source.check()))
    metric = run.quality.metric
    if executes and run.quality.enabled and metric is not None:
        _collect(problems, lambda: OwnMetric(metric))
    samples = run.calibration.factory
    if executes and samples is not None:
        _collect(problems, lambda: callables.resolve(samples, "calibration.factory"))
    ordered = _collect(problems, lambda: order(run.recipe.steps, reorder=run.reorder))
    chosen = _collect(problems, lambda: choose(run.hardware, config.hardware, require_target=run.require_target))
    if problems or ordered is None or chosen is None:
        raise PlanError(*problems)
    target, device = chosen
    return _Planner(run, target, device.hardware, device.backend, device.is_target, executes=executes).plan(ordered)


def _collect(problems: list[Problem], call: Callable[[], Any]) -> Any:
    """The call's result; a UserError's problems join the others."""
    try:
        return call()
    except UserError as error:
        problems.extend(error.problems)
        return None


class _Planner:
    """Walks the ordered steps over the structure on meta."""

    def __init__(self, run: Run, target: Hardware, device: Hardware, backend: Backend, is_target: bool, *, executes: bool) -> None:
        self.run, self.target, self.device, self.backend, self.is_target = run, target, device, backend, is_target
        self.loaded: Loaded = run.model.source.skeleton()
        self.executes = executes
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.downgrades: list[Downgrade] = []

    def plan(self, ordered: Order) -> Plan:
        loaded = self.loaded
        workload = self.run.workload.source
        self.problems.extend(workload.check(loaded))
        sized = not self.problems  # a workload that does not suit the model cannot be traced; the steps are checked all the same
        self.example = workload.example(loaded, torch.device("meta"))
        before = weight_bytes(loaded.module)
        graph = self._trace() if sized else Graph()
        self.steps = self._missing_compiler([self._lowered(step, graph) for step in ordered.steps])
        planned: list[PlannedStep] = []
        for step, requested in self.steps:
            problems = list(step.transform.check(self._context(step)))
            self.problems.extend(problems)
            if not problems:
                last = planned[-1].graph if planned else graph
                planned.extend(self._apply(step, requested, ordered.moved.get(step.name), last))
        if self.problems:
            raise PlanError(*self.problems)
        return Plan(
            run=self.run,
            target=self.target,
            device=self.device,
            backend=self.backend,
            is_target=self.is_target,
            steps=planned,
            weight_bytes=before,
            model=_model(self.run, loaded),
            graph=graph,
            loaded=loaded,
            downgrades=self.downgrades,
            warnings=self.warnings,
        )

    def _lowered(self, step: Step, graph: Graph) -> tuple[Step, str]:
        """The step as it runs on the target, and the option as written; a downgrade is recorded or refused."""
        lowered = step.transform.lower(self.target)
        if lowered is None:
            return step, step.use
        known = calibration_for(self.target)
        ranked = alternatives.alternatives(step, self.loaded.module, graph, self.target, dtype=self.dtype, calibration=known)
        runs_as = f"{step.kind}/{lowered.runs_as}"
        if self.run.downgrade == "forbid":
            self.problems.append(alternatives.refusal(step, lowered, self.target, ranked))
        self.downgrades.append(Downgrade(step=step.name, requested=step.use, runs_as=runs_as, reason=lowered.reason, alternatives=ranked))
        return replace(step, use=runs_as, transform=lowered.transform, options=_options(lowered.transform)), step.use

    def _missing_compiler(self, steps: list[tuple[Step, str]]) -> list[tuple[Step, str]]:
        """Holds the backend's preflight against the steps; a compile step with `on_missing: skip` goes, and says so."""
        compiles = [step for step, _ in steps if phase(step) is Phase.COMPILE]
        missing = self.backend.preflight(compiles=bool(compiles)) if self.executes else []
        if not missing:
            return steps
        if compiles and all(step.transform.skips_when_missing for step in compiles):
            self.warnings.extend(f"compile was left out: {problem}" for problem in missing)
            return [(step, requested) for step, requested in steps if step not in compiles]
        self.problems.extend(missing)
        return steps

    def _context(self, step: Step) -> Context:
        return Context(
            step=step.name,
            target=self.target,
            device=self.device,
            workload=self.run.workload.kind,
            uses_cache=self.run.workload.source.uses_cache,
            seed=self.run.seed,
            example=self.example,
            later=later([one for one, _ in self.steps], step.name),
            limits=self.run.recipe.limits,
            samples=Samples.of(self.run, self.loaded),
        )

    def _apply(self, step: Step, requested: str, moved: str | None, before: Graph) -> list[PlannedStep]:
        """The step applied to the structure; empty where it cannot be, with the reason among the problems.

        After one problem the later steps are applied all the same, for the problems of their own; that one of them finds
        nothing to change is then no news.
        """
        module = self.loaded.module
        receipt = _collect(self.problems, lambda: step.transform.apply(module, self._context(step)))
        if receipt is None:
            return []
        if not receipt.touched:
            if not self.problems:
                self.problems.append(nothing_changed(step, receipt))
            return []
        graph = self._trace() if not self.problems and phase(step) < Phase.EXPORT else before
        return [
            PlannedStep(
                step=step,
                requested=requested,
                phase=phase(step),
                moved=moved,
                receipt=receipt,
                weight_bytes=weight_bytes(module),
                graph=graph,
            )
        ]

    def _trace(self) -> Graph:
        return trace(self.loaded, self.run.workload.source, self.run.data.source, self.target)

    @property
    def dtype(self) -> str:
        chosen = getattr(self.run.model.source, "dtype", "bf16")
        return str(getattr(chosen, "name", chosen))


def _options(transform: Any) -> dict[str, Json]:
    """A transform's fields as YAML spells them."""
    values = {item.name: getattr(transform, item.name) for item in fields(transform)}
    return {name: value.name if isinstance(value, Enum) else value for name, value in values.items()}


def nothing_changed(step: Step, receipt: Receipt) -> Problem:
    """A step that would change nothing is an error, with the reasons it gave."""
    reasons = list(dict.fromkeys([*receipt.skipped.values(), *receipt.notes]))
    why = f" ({'; '.join(reasons[:3])})" if reasons else ""
    return Problem(
        where=f"step {step.name}",
        what=f"{step.use} would change nothing{why}",
        fix=f"drop it with '~steps.{step.name}', or widen its targets",
    )


def _model(run: Run, loaded: Loaded) -> dict[str, Json]:
    dtype = getattr(run.model.source, "dtype", None)
    return {
        "name": run.model.name,
        "kind": run.model.kind,
        "family": loaded.family,
        "dtype": getattr(dtype, "name", dtype),
        "weights": loaded.weights,
        "parameters": sum(p.numel() for p in loaded.module.parameters()),
        "notes": list(loaded.notes),
    }
