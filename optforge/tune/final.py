"""The final round: the finalists and the model as loaded, in one process and the same alternating rounds.

The best of many noisy measurements is partly the luckiest one (the winner's curse), so the winner is named by a measurement that
chose nobody. It runs in a process of its own (`optforge tune-final FOLDER`), which reads request.json and writes result.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from optforge import atomic
from optforge.measure import timing
from optforge.spec import Json, Ratio
from optforge.sweep import outcome, store
from optforge.sweep.devices import Slot
from optforge.sweep.process import JobProcess, job_command
from optforge.sweep.store import Job

REQUEST, RESULT, FOLDER = "request.json", "result.json", "final"


def write_request(folder: Path, *, cwd: Path, runs: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Args:
    runs: name and overrides of each finalist.
    """
    request = {"cwd": str(cwd), "runs": [{"name": name, "overrides": list(overrides)} for name, overrides in runs]}
    atomic.write_json(folder / REQUEST, request)


def run(folder: Path, *, index: int, slot: Slot, limit_s: float) -> Job:
    """Runs the process that reads the request in `folder`, and returns its record, which also lies there.

    Args:
        index: its number among the jobs of the search.
        limit_s: seconds after which it is ended.

    Raises:
        KeyboardInterrupt, SystemExit: after it was ended and recorded.
    """
    job = Job(index=index, name=FOLDER, overrides=[], folder=folder.name, status=store.RUNNING)
    job.started = datetime.now().astimezone().isoformat(timespec="seconds")
    store.write_status(job, folder.parent)
    process = JobProcess(job_command(["tune-final", str(folder)]), folder / job.log, slot.variables)
    try:
        code = process.wait(limit_s)
    except BaseException:
        process.stop()
        job.status, job.error = store.INTERRUPTED, "the search was stopped while it ran"
        store.write_status(job, folder.parent)
        raise
    job.exit_code = process.stop() if code is None else code
    job.seconds = round(process.seconds, 3)
    if code is None:
        job.status, job.error = store.TIMEOUT, f"ended after {limit_s:.0f} s"
    elif code == 0:
        job.status = store.DONE
    else:
        job.status = store.OOM if process.was_killed_for_memory() else store.FAILED
        job.error = outcome.complaint(folder / job.log, code)
    store.write_status(job, folder.parent)
    return job


def read_result(folder: Path) -> dict[str, Json] | None:
    """What the process wrote; None where it did not come that far."""
    path = folder / RESULT
    return dict(json.loads(path.read_text(encoding="ascii"))) if path.exists() else None


def ratios(result: dict[str, Json]) -> dict[str, Ratio]:
    """How many times faster each finalist is than the model as loaded."""
    return {name: timing.ratio(samples, result["baseline_samples_s"]) for name, samples in result["samples_s"].items()}


def against(result: dict[str, Json], first: str, second: str) -> Ratio:
    """How many times faster one finalist is than another, from their common rounds."""
    return timing.ratio(result["samples_s"][first], result["samples_s"][second])


def winner(result: dict[str, Json], written: Sequence[str]) -> tuple[str, str]:
    """The fastest finalist, and why it is named.

    Where a recipe that somebody wrote cannot be told apart from it, that recipe wins: it is known from elsewhere.

    Args:
        written: names of the hand-written ones.
    """
    found = ratios(result)
    best = max(found, key=lambda name: found[name].value)
    if best in written:
        return best, "the fastest of the final round"
    equal = [name for name in written if name in found and against(result, best, name).low <= 1.0]
    if equal:
        chosen = max(equal, key=lambda name: found[name].value)
        return chosen, f"no slower than {best} within the noise of the final round, and hand-written"
    return best, "the fastest of the final round"


def measure(folder: Path) -> None:
    """Builds every finalist over one copy of the weights, times them together, and writes the result.

    Raises:
        UserError: a finalist cannot be planned any more.
    """
    from rich.console import Console

    from optforge import config, engine, preflight
    from optforge.report.terminal import Progress

    request = json.loads((folder / REQUEST).read_text(encoding="ascii"))
    cwd = Path(request["cwd"])
    names = [entry["name"] for entry in request["runs"]]
    runs = [config.compose(config.parse(entry["overrides"], cwd=cwd), cwd=cwd) for entry in request["runs"]]
    with preflight.compiler_cache(folder), Progress(Console(stderr=True)) as progress:
        with progress.stage("plan"):
            plans = [engine.plan(run) for run in runs]
        result = _timed(plans, names, progress)
    atomic.write_json(folder / RESULT, result)


def _timed(plans: list[Any], names: list[str], progress: Any) -> dict[str, Json]:
    from optforge.backends.base import Candidate
    from optforge.calibrate.samples import Samples
    from optforge.measure import compiles
    from optforge.rows import Rows, verify

    run, backend = plans[0].run, plans[0].backend
    with backend.session(run.seed):
        with progress.stage(f"load {run.model.name}"):
            loaded = run.model.source.load(run.seed)
            baseline = backend.place(loaded.module.eval())
            device = backend.torch_device()
            workload = run.workload.source
            work = workload.prepare(loaded, run.data.source, device, run.seed)
            example = workload.example(loaded, device)
        rows = [Candidate(name="as loaded", call=lambda: work.run(baseline))]
        compile_s: dict[str, float | None] = {}
        for name, plan in zip(names, plans, strict=True):
            with progress.stage(f"build and compile {name}"):
                maker = Rows(plan, baseline, work, example, run.measure, on_device=True, samples=Samples.of(run, loaded))
                module, applied = maker.fresh(plan.rewrites)
                verify(module, applied)
                maker.compile(module)
                row = Candidate(name=name, call=lambda module=module: work.run(module))  # type: ignore[misc]  # binds this module
                compile_s[name] = compiles.first_calls(row.call, backend.synchronize).seconds
                rows.insert(-1, row)
        with progress.stage(f"time {len(names)} recipes and the model as loaded in alternating rounds"):
            options = replace(run.measure, max_s=run.measure.max_s * (len(names) + 1) / 2)
            samples, steady = timing.time_together(rows, synchronize=backend.synchronize, options=options)
    taken = {row.name: own for row, own in zip(rows, samples, strict=True)}
    base = taken.pop("as loaded")
    return {"samples_s": taken, "baseline_samples_s": base, "steady": steady, "compile_time_s": compile_s}
