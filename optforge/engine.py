"""Plans a run and executes it: the two calls that the command line, sweeps and the Python API all make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from optforge import sharded, verdicts
from optforge.errors import EXIT_CRASH, EXIT_LIMIT, EXIT_OK, PlanError, Problem
from optforge.execution import Execution
from optforge.plan.make import Plan, make, mesh_of
from optforge.plan.xla import require_extra
from optforge.progress import Progress, SilentProgress
from optforge.spec import Report, Run
from optforge.training_execution import TrainingExecution


def plan(run: Run, *, executes: bool = True) -> Plan:
    """Orders, checks and estimates a run without loading a weight. See `optforge.plan.make`.

    Raises:
        MissingDependency: the run is to be executed for an XLA target, and what compiles for it cannot be imported; raised
            before any work on the model.
        PlanError: the run is to be executed, and is of a kind that can only be planned so far.
    """
    if executes:
        require_extra(run.hardware)
    made = make(run, executes=executes)
    if executes:
        _require_executable(made)
    return made


@dataclass(kw_only=True)
class Outcome:
    """A finished run: its report and the optimized module, compiled if the recipe compiles."""

    report: Report
    module: nn.Module | None


def execute(plan: Plan, *, folder: Path | None = None, progress: Progress | None = None) -> Report:
    """Runs the plan and returns its report, which also lies in `folder` when one is given."""
    return run(plan, folder=folder, progress=progress).report


def run(plan: Plan, *, folder: Path | None = None, progress: Progress | None = None) -> Outcome:
    """Runs the plan; the outcome holds the optimized module too.

    Raises:
        UserError, StepError: after the report was written with `status: failed`.
        KeyboardInterrupt: after the report was written as `incomplete`.
    """
    kind = TrainingExecution if plan.run.workload.kind == "train" else Execution
    if mesh_of(plan).devices > 1:
        report, module = sharded.run(plan, folder, progress or SilentProgress(), kind)
        return Outcome(module=module, report=report)
    execution = kind(plan, folder, progress or SilentProgress())
    return Outcome(module=execution.run(), report=execution.report)


def _require_executable(plan: Plan) -> None:
    """
    Raises:
        PlanError: the run is sharded in a way, or with something, that can be planned only, so far; or it trains and is to be saved.
    """
    problems = sharded.problems(plan)
    if plan.run.workload.kind == "train":
        for key in ("save", "export"):
            if getattr(plan.run, key):
                what = "a run of workload=train measures a training and keeps no weights: they went through its timed steps too"
                problems.append(Problem(where=key, what=what, fix=f"leave out {key}; to train and keep the weights see docs/training.md"))
    if problems:
        raise PlanError(*problems)


def exit_code(report: Report, run: Run) -> int:
    """0 done and ok; 1 the run crashed; 3 a limit was missed, or what `fail_on` names happened."""
    if report.status != "complete":
        return EXIT_CRASH
    return EXIT_LIMIT if verdicts.failures(report, run) else EXIT_OK
