"""The report of a run as far as it is known: written as `incomplete` first, replaced whole after each row.

A run that is killed, fails or runs out of memory leaves what it had measured until then, and says how it ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from optforge import environment
from optforge.errors import OutOfMemory, Terminated, message
from optforge.measure import contention, memory
from optforge.plan.make import Plan
from optforge.report import store
from optforge.spec import Hardware, Json, Report

ELSEWHERE = ("hardware", "trust")
"""Parts of the resolved run that a report's settings leave out: the target's facts stand in `target`, and trust is never stored."""


class Record:
    """Holds one run's report and puts it into the run's folder, if there is one."""

    def __init__(self, plan: Plan, folder: Path | None) -> None:
        self.plan, self.folder = plan, folder
        self.started = time.perf_counter()
        self.watch = contention.watch(plan.backend.torch_device())
        self.report = _new(plan, folder)

    def write(self) -> None:
        """Replaces the files in the folder by what is known now."""
        self.report.seconds = time.perf_counter() - self.started
        self.report.environment.update(self.watch.read())
        if self.folder is not None:
            store.write(self.report, self.folder)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Holds a run: writes its report before and after, whatever ends it. Out of memory ends it quietly, with status `oom`."""
        self.write()
        try:
            yield
            self.report.status = "complete"
        except (KeyboardInterrupt, Terminated):
            self.report.reason = "interrupted"
            raise
        except BaseException as error:
            if not self._out_of_memory(error):
                self._failed(error)
                raise
        finally:
            self.write()

    def _failed(self, error: BaseException) -> None:
        self.report.status = self.report.verdict = "failed"
        told = message(error)
        self.report.reason = told.splitlines()[0] if told else type(error).__name__
        self.report.error = {"type": type(error).__name__, "message": told}

    def _out_of_memory(self, error: BaseException) -> bool:
        """Records an out-of-memory error and lets go of everything its frames hold; False for any other error."""
        backend = self.plan.backend
        if not (isinstance(error, OutOfMemory) or backend.is_out_of_memory(error)):
            return False
        self.report.status = self.report.verdict = "oom"
        self.report.reason = f"{self.plan.device.name} ran out of memory"
        workload = dict(self.plan.run.workload.options)
        self.report.error = {"type": type(error).__name__, "message": str(error), "memory": backend.memory(), "workload": workload}
        if self.report.steps and self.report.steps[-1].verdict == "incomplete":
            self.report.steps[-1].verdict = "oom"
        memory.released(error)
        backend.free()
        return True


def _new(plan: Plan, folder: Path | None) -> Report:
    """What is known before anything has run."""
    spec = plan.run
    described = plan.describe()
    return Report(
        recipe={
            "name": spec.recipe.name,
            "description": spec.recipe.description,
            "goal": spec.recipe.goal,
            "limits": dict(spec.recipe.limits),
            "source": spec.recipe.source,
        },
        target={**_facts(plan.target), "price_per_hour": spec.hardware.price_per_hour, "currency": spec.hardware.currency},
        device={**_facts(plan.device), "is_target": plan.is_target},
        model=plan.model,
        data={"name": spec.data.name, "kind": spec.data.kind, **dict(spec.data.options)},
        workload={"name": spec.workload.name, "kind": spec.workload.kind, **dict(spec.workload.options)},
        predicted=plan.predicted(),
        downgrades=list(plan.downgrades),
        plan=described,
        warnings=list(plan.warnings),
        environment=environment.collect(plan.backend),
        command=spec.command,
        settings={key: value for key, value in spec.resolved.items() if key not in ELSEWHERE},
        started=datetime.now().astimezone().isoformat(timespec="seconds"),
        folder=str(folder) if folder else "",
    )


def _facts(hardware: Hardware) -> dict[str, Json]:
    """What a report says of a device: the figures that its shares of the peak were taken of."""
    return {
        "name": hardware.name,
        "description": hardware.description,
        "arch": hardware.arch,
        "peak_flops": dict(hardware.peak_flops),
        "bandwidth_bytes_per_s": hardware.bandwidth_bytes_per_s,
        "memory_bytes": hardware.memory_bytes,
    }
