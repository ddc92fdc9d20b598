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
from optforge.spec import Hardware, Json, Run
from optforge.tune import space
from optforge.tune.candidate import Foreseen, Refusal
from optforge.tune.space import Declared


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the process brings back."""

    declared: Declared
    """Empty where it was not asked for."""
    foreseen: list[Foreseen]
    said: list[str]
    """What took time beside the plans: peaks of a device of which no figures were known."""


def look(overrides: Sequence[Sequence[str]], *, cwd: Path, timeout_s: float, space_too: bool = False) -> Seen:
    """Plans each run.

    Args:
        overrides: of each run, as `config.parse` gives them.
        space_too: bring the part of the declared space that applies to the model on the target.

    Raises:
        ChildFailed, ChildTimeout: the process crashed, or took too long.
    """
    seen: Seen = isolate.call(_look, [list(texts) for texts in overrides], cwd, space_too, timeout_s=timeout_s)
    return seen


def _look(overrides: list[list[str]], cwd: Path, space_too: bool) -> Seen:
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
        declared = _applicable(overrides[0], cwd) if space_too else {}
    return Seen(declared=declared, foreseen=found, said=said)


def _applicable(overrides: list[str], cwd: Path) -> Declared:
    """The declared space without what cannot be had here: options and values that are refused, or change nothing, even alone.

    Most random combinations hold one of those, and a full plan of each costs seconds. What the target would turn into another option is
    left out too: that option is in the space under its own name.
    """
    from optforge.plan.devices import choose

    found = space.declared()
    try:
        run = config.compose(config.parse(overrides, cwd=cwd), cwd=cwd)
        target, device = choose(run.hardware, config.hardware, require_target=run.require_target)
    except UserError:  # the plans have told why; the space is of no use then
        return found
    return {
        kind: {
            option: {
                name: kept
                for name, values in fields.items()
                if (kept := [value for value in values if _applies(run, target, device.hardware, f"{kind}/{option}", {name: value})])
            }
            for option, fields in options.items()
            if _applies(run, target, device.hardware, f"{kind}/{option}", {})
        }
        for kind, options in found.items()
    }


def _applies(run: Run, target: Hardware, device: Hardware, use: str, values: dict[str, Json]) -> bool:
    """Whether a step alone is taken, runs as written, and changes something of the structure."""
    import torch

    from optforge.transforms.base import Context

    loaded = run.model.source.skeleton()
    workload = run.workload.source
    try:
        transform = config.step("step", {"use": use, **values}).transform
        context = Context(
            step="step",
            target=target,
            device=device,
            workload=run.workload.kind,
            uses_cache=workload.uses_cache,
            seed=run.seed,
            example=workload.example(loaded, torch.device("meta")),
        )
        if transform.lower(target) is not None or any(True for _ in transform.check(context)):
            return False
        return bool(transform.apply(loaded.module, context).touched)
    except UserError:  # refused, which is what was asked
        return False


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
