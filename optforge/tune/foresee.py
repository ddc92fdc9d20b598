"""Plans candidates in a process of their own, so that the search itself loads no torch and opens no device.

A plan needs neither weights nor the device's time: what it refuses, what does not fit and what is predicted to be slow is never
measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optforge import config, isolate, logs
from optforge.errors import UserError, message
from optforge.spec import Run
from optforge.tune import space
from optforge.tune.candidate import Foreseen, Refusal
from optforge.tune.space import Declared


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the process brings back."""

    declared: Declared
    foreseen: list[Foreseen]
    said: list[str]


def look(overrides: Sequence[Sequence[str]], *, cwd: Path, timeout_s: float) -> Seen:
    """Plans each run.

    Args:
        overrides: of each run, as `config.parse` gives them.

    Raises:
        ChildFailed, ChildTimeout: the process crashed, or took too long.
    """
    seen: Seen = isolate.call(_look, [list(texts) for texts in overrides], cwd, timeout_s=timeout_s)
    return seen


def _look(overrides: list[list[str]], cwd: Path) -> Seen:
    from optforge.plan.devices import measure_unknown

    said: list[str] = []
    found: list[Foreseen] = []
    with logs.quiet("torch", "transformers"):
        for texts in overrides:
            start = time.perf_counter()
            try:
                run = config.compose(config.parse(texts, cwd=cwd), cwd=cwd)
                measure_unknown(run.hardware, config.hardware, said.append)
                one = _planned(run)
            except UserError as error:
                one = Foreseen(refused=[Refusal(where=each.where, what=each.what, fix=each.fix) for each in error.problems])
            except Exception as error:  # a plan that crashes must not take the plans of the others with it
                one = Foreseen(refused=[Refusal(where="plan", what=f"crashed: {type(error).__name__}: {message(error)}"[:300])])
            one.seconds = round(time.perf_counter() - start, 3)
            found.append(one)
    return Seen(declared=space.declared(), foreseen=found, said=said)


def _planned(run: Run) -> Foreseen:
    from optforge import engine
    from optforge.plan.study import study

    found = study(engine.plan(run), kernels=False, xla=False)
    fit = found.fit
    last = found.speed.rows[-1] if found.speed is not None and found.speed.rows else None
    return Foreseen(
        latency_ms=last.latency_ms if last else None,
        low_ms=last.low_ms if last else None,
        high_ms=last.high_ms if last else None,
        fits=fit.fits if fit is not None else None,
        total_bytes=fit.rows[-1].total_bytes if fit is not None and fit.rows else None,
        memory_bytes=fit.memory_bytes if fit is not None else None,
        weight_bytes=found.steps[-1].weight_bytes if found.steps else found.weight_bytes,
    )
