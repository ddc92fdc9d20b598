"""Holds the plan's predictions against measurements of the same runs, in one process: time and memory, point by point.

    python benchmarks/prediction.py --device cpu              # SmolLM2 and two vision models
    python benchmarks/prediction.py --device cuda --record    # Llama 3 shapes; the errors go into the device's calibration

A point is a whole model on a workload: as loaded and eager, or with every step of a recipe. Calibrations are made from single
operators on random numbers (benchmarks/calibrate.py), so no point of one is a point of the other. Predictions are those of
`optforge plan`, made from the model's structure before it is loaded; measurements use the engine's own rows and timing.

Points run in order of importance, each within its own limit of seconds. The result is written after each one, so that whatever cuts
the run off leaves the points before it. Nothing is left out of the statistics but points that failed, and those are listed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from prediction_cases import Case, cpu_cases, cuda_cases, title
from prediction_drift import Drift, Moment, between, refreshed
from prediction_errors import Result, bands, markdown, number, percent, remember, statistics
from torch import nn

from optforge import config, environment, registry
from optforge.atomic import write_bytes
from optforge.backends.base import Candidate
from optforge.calibrate.samples import Samples
from optforge.cli.hardware import teller
from optforge.errors import OptForgeError
from optforge.measure.size import nbytes, tensors, weight_bytes
from optforge.models.base import Loaded
from optforge.plan import calibration_file, devices, make, roofline
from optforge.plan.calibration import Calibration, calibration_for
from optforge.plan.document import Study
from optforge.plan.fusion import kernels
from optforge.plan.graph import EAGER
from optforge.plan.make import Plan
from optforge.plan.speed import product_dtype
from optforge.plan.stages import Stage, stages
from optforge.plan.study import study
from optforge.plan.summary import Priced, alike
from optforge.rows import Rows
from optforge.spec import Measure, Measurement

RESULTS = Path(__file__).parent / "results"
BACKENDS = {"cpu": "cpu", "cuda": "nvidia"}
LIMIT_S = 90.0
"""Seconds that measuring one row may take, its compile included."""


class Bench:
    """Measures cases one after the other; a model that the next case needs too stays loaded."""

    def __init__(self, device: str, tell: Any) -> None:
        self.drift: Drift | None = None
        self.backend = registry.get("backends", BACKENDS[device])()
        self.device, self.tell = self.backend.torch_device(), tell
        self.options = Measure(warmup=2, min_rounds=5, max_s=2.5 if device == "cuda" else 4.0, steady=0.01)
        self._key: tuple[str, ...] | None = None
        self._loaded: Loaded | None = None

    def results(self, case: Case) -> Iterator[Result]:
        """Each row of a case; one that fails says why."""
        try:
            run = config.compose(config.parse([*case.overrides, f"hardware={self.target}"], cwd=Path.cwd()), cwd=Path.cwd())
            plan = make.make(run)
            predicted = study(plan, kernels=False, xla=False)
        except OptForgeError as error:
            yield Result(name=title(case), workload="", dtype="", mode="", failed=str(error))
            return
        for row in case.rows:
            result = _predicted(case, row, plan, predicted)
            points = self.drift.points(_priced(plan, row)) if self.drift is not None else []
            try:
                before = self.drift.now(points) if self.drift is not None else None
                with limit(LIMIT_S):
                    self._measure(case, row, plan, result, predicted)
                if self.drift is not None and before is not None:
                    _tell_drift(result, plan, row, between(before, self.drift.now(points)))
            except (OptForgeError, RuntimeError, TimeoutError) as error:  # told in the table; the other points stand
                result.failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                self._key = None
            self._clear()
            yield result

    @property
    def target(self) -> str:
        if self.device.type == "cpu":
            return "cpu"
        seen = self.backend.detect()
        return (devices.profiletitle(seen.name) if seen else None) or "auto"

    def _measure(self, case: Case, row: str, plan: Plan, result: Result, predicted: Study) -> None:
        loaded = self._model(case, plan)
        loaded.module.zero_grad(set_to_none=True)  # of a training case before
        workload = plan.run.workload.source
        work = workload.prepare(loaded, plan.run.data.source, self.device, plan.run.seed)
        module = loaded.module
        if row == "recipe":
            example = workload.example(loaded, self.device)
            rows = Rows(plan, loaded.module, work, example, self.options, on_device=True, samples=Samples.of(plan.run, loaded))
            module, _ = rows.fresh(plan.rewrites)
            rows.compile(module)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        work.ready(module)  # decode: the pass over the prompt, which the plan counts and the timed calls do not
        prompt = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        resident = _only_in(loaded.module, module)
        remember(result.kept, measured=self._kept(module, work) - (resident if cuda else 0))
        measured = self.backend.measure(Candidate(name=result.name, call=lambda: work.run(module)), None, self.options)
        _fill(result, measured, resident=resident, prompt=prompt)

    def _kept(self, module: nn.Module, work: Any) -> float:
        """Bytes that lie on the device between two calls: what the allocator says on CUDA; on a CPU the tensors themselves, since
        nothing counts there."""
        if self.device.type == "cuda":
            return float(torch.cuda.memory_allocated(self.device))
        return float(weight_bytes(module) + sum(nbytes(tensor) for tensor in work.kept(module)))

    def _model(self, case: Case, plan: Plan) -> Loaded:
        if self._loaded is None or self._key != case.model:
            self._loaded, self._key = None, case.model
            self._clear()
            loaded = plan.run.model.source.load(plan.run.seed)
            self.backend.place(loaded.module.eval())
            self._loaded = loaded
        return self._loaded

    def _clear(self) -> None:
        """Forgets compiled programs and gives memory back, so that no case is measured in the shadow of another."""
        torch._dynamo.reset()
        gc.collect()
        self.backend.free()


def _predicted(case: Case, row: str, plan: Plan, found: Study) -> Result:
    """The row's prediction, as the plan makes it."""
    at = 0 if row == "eager" else -1
    stage = list(stages(plan))[at]
    assert found.speed is not None and found.fit is not None, "a study of a plan has both"
    speed, fitted = found.speed.rows[at], found.fit.rows[at]
    result = Result(
        name=title(case),
        workload=plan.run.workload.kind,
        dtype=product_dtype(stage.graph) or str(plan.model.get("dtype")),
        mode=speed.mode,
        predicted_ms=speed.latency_ms,
        ideal_ms=speed.ideal_ms,
        bound=speed.bound,
    )
    remember(result.kept, predicted=sum(fitted.parts.get(part, 0.0) for part in ("weights", "kv_cache")))
    runtime = fitted.parts.get("runtime", 0.0)  # the driver's own memory is outside the allocator
    remember(result.total, predicted=None if fitted.total_bytes is None else fitted.total_bytes - runtime)
    return result


def _stage(plan: Plan, row: str) -> Stage:
    return list(stages(plan))[0 if row == "eager" else -1]


def _priced(plan: Plan, row: str) -> list[Priced]:
    """The kernels that a row's prediction is the sum of."""
    stage, calibration = _stage(plan, row), calibration_for(plan.target)
    eager = stage.mode == EAGER
    listed = kernels(stage.graph, compiled=not eager, regions=stage.regions)
    return alike(listed, plan.target, () if eager else stage.regions, calibration)


def _tell_drift(result: Result, plan: Plan, row: str, moment: Moment) -> None:
    """Adds the prediction from the points as they were while the row was measured."""
    stage, calibration = _stage(plan, row), calibration_for(plan.target)
    assert calibration is not None, "there is a drift of a calibration only"
    now = refreshed(calibration, moment)
    found = roofline.predict(stage.graph, plan.target, mode=stage.mode, regions=stage.regions, calibration=now)
    result.drift, result.drifted_ms = moment.told(), found.latency_ms
    if result.measured_ms and found.latency_ms is not None:
        result.drifted_error = found.latency_ms / result.measured_ms - 1


def _fill(result: Result, measured: Measurement, *, resident: int, prompt: int) -> None:
    p50, p90 = (float(measured.latency_ms[key] or 0.0) for key in ("p50", "p90"))
    result.measured_ms, result.spread, result.compile_s = p50, p90 / p50 - 1, measured.compile_time_s
    result.fastest_ms = 1e3 * float(np.quantile(measured.samples_s, 0.1)) if measured.samples_s else None
    if result.predicted_ms is not None:
        result.error = result.predicted_ms / p50 - 1
    allocated = measured.memory.get("allocated")
    if allocated is not None:
        remember(result.total, measured=float(max(allocated, prompt) - resident))


def _only_in(loaded: nn.Module, module: nn.Module) -> int:
    """Bytes of the loaded model that `module` does not use: on the device for the next case's sake alone."""
    used = {tensor.untyped_storage().data_ptr() for _, tensor in tensors(module)}
    return sum(nbytes(tensor) for _, tensor in tensors(loaded) if tensor.untyped_storage().data_ptr() not in used)


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block once `seconds` are over, at the next line of Python that runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def record(results: Sequence[Result], calibration: Calibration, source: str) -> Path:
    """Writes the errors into the calibration that the predictions were made from."""
    path = config.conf_dir() / "calibration" / f"{calibration.name}.yaml"
    calibration_file.with_errors(path, bands(results, source))
    return path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=sorted(BACKENDS), default="cpu")
    parser.add_argument("--seconds", type=float, default=None, help="no case begins after this many; 520 on cuda, 3600 on a CPU")
    parser.add_argument("--record", action="store_true", help="write the errors into the calibration of this device")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def main() -> None:
    options, tell = arguments(), teller()
    budget = options.seconds or (520.0 if options.device == "cuda" else 3600.0)
    bench = Bench(options.device, tell)
    target = config.hardware(bench.target)
    devices.measure_unknown(target, config.hardware, tell)
    hardware, _ = devices.choose(target, config.hardware)
    calibration = calibration_for(hardware)
    begun, results = time.perf_counter(), []
    document: dict[str, Any] = {
        "date": date.today().isoformat(),
        "target": hardware.description,
        "command": shlex.join(["python", "benchmarks/prediction.py", *sys.argv[1:]]),
        "calibration": "no calibration: bounds, not predictions" if calibration is None else calibration.told(),
        "load_average": os.getloadavg()[0],
    }
    stem = options.out / f"{document['date']}_prediction_{options.device}"
    options.out.mkdir(parents=True, exist_ok=True)
    with bench.backend.session(0):
        if options.device == "cpu" and calibration is not None:
            bench.drift = Drift(bench.device, calibration, hardware)
        document["environment"] = environment.collect(bench.backend)
        for case in (cpu_cases if options.device == "cpu" else cuda_cases)():
            if options.only not in title(case) or time.perf_counter() - begun > budget:
                continue
            for result in bench.results(case):
                results.append(result)
                outcome = result.failed or f"{number(result.measured_ms)} ms measured, {percent(result.error)}"
                tell(f"{result.name} {result.mode}: {number(result.predicted_ms)} ms predicted, {outcome}")
            document |= {"results": [asdict(result) for result in results], "statistics": statistics(results)}
            document["seconds"] = time.perf_counter() - begun
            write_bytes(stem.with_suffix(".json"), (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
            write_bytes(stem.with_suffix(".md"), markdown(document).encode())
    if not results:
        sys.exit(f"no case has {options.only!r} in its name")
    print(markdown(document))
    if options.record and calibration is not None and calibration.exact:
        path = record(results, calibration, source=f"{stem.name}.md: {document['command']}")
        tell(f"recorded in {path}")


if __name__ == "__main__":
    main()
