"""Runs a plan whose recipe has a shard step: every rank works through the same rows, and rank 0 writes the report.

Started alone, this process starts as many as the mesh has and waits for them; started by torchrun, Slurm or Lightning, it
joins what is there. Ranks must do the same things in the same order, so whatever rests on a clock is decided by rank 0
(`distributed.world.agree`), and each step works from the same seed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from optforge.distributed import world
from optforge.distributed.launch import launch
from optforge.distributed.relay import Teller
from optforge.errors import OptForgeError, OutOfMemory, PlanError, Problem, message
from optforge.execution import Execution
from optforge.plan.make import Plan, make, mesh_of
from optforge.plan.sharding import Mesh
from optforge.progress import Progress, SilentProgress
from optforge.report import store
from optforge.spec import Report, Run
from optforge.transforms.shard.spread import refused

RANKS = "ranks"
"""Folder of the ranks' logs, in the run's."""
CLOCKED = ("quantize/auto",)
"""Options that decide by times which each device measures for itself."""
Make = Callable[[Plan, Path | None, Progress], Execution]


def problems(plan: Plan) -> list[Problem]:
    """What speaks against running a sharded plan here, all of it at once; nothing for a plan on one device."""
    mesh = mesh_of(plan)
    if mesh.devices == 1:
        return []
    name = next(step.name for step in plan.steps if step.step.kind == "shard")
    transform = next(step.step.transform for step in plan.steps if step.name == name)
    told = refused(plan.loaded.module, transform, name)
    if plan.run.workload.source.uses_cache and mesh.fsdp * mesh.data > 1:
        what = f"workload {plan.run.workload.kind} keeps a KV cache, which fsdp and data do not divide yet"
        told.append(
            Problem(
                where=f"step {name}",
                what=what,
                fix=f"steps.{name}.fsdp=1 steps.{name}.data=1 steps.{name}.tensor={mesh.devices}, or workload=prefill",
            )
        )
    caches = [step for step in plan.steps if step.step.kind == "kv_cache"]
    if caches:
        what = f"{caches[0].step.use} makes a cache for all heads, and each of {mesh.devices} devices has some of them"
        told.append(Problem(where=f"step {caches[0].name}", what=what, fix=f"drop it with '~steps.{caches[0].name}'"))
    for key in ("save", "export"):
        if getattr(plan.run, key):
            what = f"each of {mesh.devices} processes holds a part of the model, and the parts are not written yet"
            told.append(Problem(where=key, what=what, fix=f"drop the step with '~steps.{name}': the weights are the same without it"))
    if plan.run.measure.attribution == "leave_one_out":
        what = "a row without the shard step would run on one device: there is nothing like to compare it with"
        told.append(Problem(where="measure.attribution", what=what, fix="measure.attribution=prefix"))
    for step in plan.steps:
        if step.step.use in CLOCKED:
            what = f"{step.step.use} decides by times, which differ between devices"
            told.append(Problem(where=f"step {step.name}", what=what, fix="name a scheme, such as quantize/int8_weight"))
    try:
        alone = world.found() is None
    except PlanError as error:
        return [*told, *error.problems]
    if plan.run.model.kind == "given" and alone:
        what = f"a module of this process cannot be handed to {mesh.devices} others"
        told.append(Problem(where="model", what=what, fix=f"start the script with torchrun --nproc-per-node={mesh.devices}"))
    return [*told, *(_missing_devices(plan, mesh, name) if alone else ())]


def _missing_devices(plan: Plan, mesh: Mesh, name: str) -> list[Problem]:
    """Fewer GPUs than the mesh has; a CPU holds as many processes as are asked for."""
    import torch

    if plan.backend.torch_device().type != "cuda":
        return []
    have = torch.cuda.device_count()
    if have >= mesh.devices:
        return []
    what = f"takes {mesh.devices} devices, and this machine shows {have} ({plan.device.name})"
    return [Problem(where=f"step {name}", what=what, fix=f"let the degrees multiply to {have}, or drop the step with '~steps.{name}'")]


def run(plan: Plan, folder: Path | None, progress: Progress, execution: Make) -> tuple[Report, nn.Module | None]:
    """The report, and this rank's part of the optimized model where this process is one of the ranks.

    Raises:
        PlanError: the processes that were started are not as many as the mesh has.
        OptForgeError: a rank failed; the first one's message, which the report in the folder says too.
    """
    found = world.found()
    if found is None:
        return _launched(plan, folder, progress), None
    world.fits(found, mesh_of(plan).devices, "the recipe's mesh")
    if world.current() is not None:
        return _as_rank(plan, folder, progress, execution)
    keep = plan.run.model.kind == "given"  # the caller goes on with this rank's part
    with world.joined(found, plan.backend.torch_device().type, plan.run.launch.timeout_s, keep=keep):
        return _as_rank(plan, folder, progress, execution)


def _as_rank(plan: Plan, folder: Path | None, progress: Progress, execution: Make) -> tuple[Report, nn.Module | None]:
    """Works through the rows; only rank 0 writes and tells."""
    own = world.current()
    assert own is not None, "joined before"
    first = own.rank == 0
    working = execution(plan, folder if first else None, progress if first else SilentProgress())
    module = working.run()
    if module is None:
        raise OutOfMemory(f"{working.report.reason}: {(working.report.error or {}).get('message', '')}")
    return working.report, module


def _launched(plan: Plan, folder: Path | None, progress: Progress) -> Report:
    """Starts the ranks, waits for them, and reads what rank 0 wrote."""
    options, device = plan.run.launch, plan.backend.torch_device().type
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="optforge-ranks-")))
        progress.note(f"{mesh_of(plan).devices} processes, their logs under {folder / RANKS}")
        try:
            launch(
                "optforge.sharded:work",
                plan.run,
                folder,
                count=mesh_of(plan).devices,
                folder=folder / RANKS,
                device=device,
                timeout_s=options.timeout_s,
                max_restarts=options.max_restarts,
                progress=progress,
            )
        except OptForgeError as error:
            _record(plan, folder, error)
            if not isinstance(error, OutOfMemory):
                raise
        return store.read(folder)


def _record(plan: Plan, folder: Path, error: OptForgeError) -> None:
    """Says in the report what ended the ranks: rank 0 may have been stopped before it could."""
    from optforge.record import Record

    report = store.read(folder) if (folder / "report.json").exists() else Record(plan, folder).report
    told = message(error)
    report.status = report.verdict = "oom" if isinstance(error, OutOfMemory) else "failed"
    report.reason = told.splitlines()[0]
    report.error = {**(report.error or {}), "type": getattr(error, "kind", None) or type(error).__name__, "message": told}
    store.write(report, folder)


def work(run: Run, folder: Path) -> None:
    """What each rank does that `_launched` started. Rank 0's words go to the process that waits."""
    from optforge import engine, logs

    with logs.adopted("torch", "transformers"):
        plan = make(run, executes=True)
        engine.run(plan, folder=folder, progress=Teller(folder / RANKS))
