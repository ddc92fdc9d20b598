"""The process of one side: prepares a run as `optforge run` would, then serves its optimized model.

    python -m optforge.gate.worker '{"argv": ["recipe=llama_int8"], "folder": "..."}'

The full run comes first, with its own report: memory, quality, compile time. Its rows are timed briefly, since the time
that counts is taken afterwards, in turns with the other side.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from optforge import config, preflight
from optforge.errors import EXIT_CRASH, OutOfMemory, UserError, message
from optforge.gate import serve
from optforge.progress import SilentProgress
from optforge.spec import Run

CANDIDATE = "candidate"


def main() -> None:
    """Reads what to prepare from the command line, prepares it, and serves."""
    stream = serve.answers()
    asked = json.loads(sys.argv[1])
    with ExitStack() as stack:
        try:
            run = _run(asked)
            call, synchronize = _prepared(run, Path(asked["folder"]), stack)
        except (Exception, SystemExit) as error:  # a user's model may call sys.exit; whatever it is, the other process must hear of it
            serve.tell(stream, _failure(error))
            traceback.print_exc()  # also of an exit, which Python would not tell
            sys.exit(EXIT_CRASH)
        ready = {"measure": asdict(run.measure)}
        serve.serve(stream, {CANDIDATE: call}, synchronize=synchronize, batch_s=run.measure.batch_ms / 1e3, ready=ready)


def _run(asked: Mapping[str, Any]) -> Run:
    """The checked run; what the gate decides is set here, so that it cannot collide with an override."""
    cwd = Path.cwd()
    run = config.compose(config.parse(asked["argv"], cwd=cwd), cwd=cwd, command=str(asked.get("command", "")))
    return replace(
        run,
        require_target=bool(asked.get("require_target", True)),
        quality=replace(run.quality, enabled=run.quality.enabled and bool(asked.get("quality", True)), generate=0),
        save=False,
        export=(),
    )


def _prepared(run: Run, folder: Path, stack: ExitStack) -> tuple[Callable[[], Any], Callable[[], None]]:
    """One call of the optimized model, and what waits for its device; `stack` holds the device's settings until the end."""
    from optforge import engine
    from optforge.execution import Execution

    stack.enter_context(preflight.compiler_cache(folder))
    brief = replace(run, measure=replace(run.measure, attribution="ends", max_s=0.0))
    plan = engine.plan(brief)
    execution = Execution(plan, folder, _Said())
    module = execution.run()
    if module is None:
        raise OutOfMemory(f"{execution.report.reason} ({dict(run.workload.options)})")
    work = execution.rows.work
    del execution  # the baseline's own tensors: both sides have to fit the device
    plan.backend.free()
    stack.enter_context(plan.backend.session(run.seed))
    return lambda: work.run(module), plan.backend.synchronize


class _Said(SilentProgress):
    """Stages and notes as plain lines, into the log."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        self.note(name)
        return nullcontext()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _failure(error: BaseException) -> dict[str, Any]:
    told: dict[str, Any] = {"protocol": serve.PROTOCOL, "failed": message(error).strip() or type(error).__name__, "kind": "crash"}
    if isinstance(error, OutOfMemory):
        told["kind"] = "oom"
    if isinstance(error, UserError):
        told |= {"kind": "user", "problems": [asdict(problem) for problem in error.problems]}
    elif not isinstance(error, OutOfMemory | SystemExit):
        told["failed"] = f"{type(error).__name__}: {told['failed'].splitlines()[0]}"
    return told


if __name__ == "__main__":
    main()
