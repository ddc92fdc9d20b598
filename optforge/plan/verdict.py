"""The verdict of a plan in words: fits or not, the expected gain and its bound, the risk, and the command to run next.

It is about the recipe's goal, as a run's verdict is, and a recipe for memory that costs time says both. A predicted
slow-down is a regression and never a success.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from optforge import config
from optforge.measure import timing
from optforge.plan import recorded
from optforge.plan.document import (
    DOES_NOT_FIT,
    GAIN,
    NO_GAIN,
    REGRESSION,
    UNKNOWN,
    Change,
    Fit,
    Kernels,
    Recorded,
    SpeedRow,
    Study,
    Verdict,
)
from optforge.plan.kernels import OVER_SHARED_MEMORY, REFUSED
from optforge.report import figures
from optforge.spec import Downgrade

FAR = 100.0
"""Times faster at the peaks, from which they are no limit that matters."""
AS_LOADED, COMPILED_BASELINE = "as loaded", "compiled baseline"
"""Names of the rows of a plan that are no step."""


def outcome(value: float | None) -> str:
    """`gain`, `no_gain`, `regression` or `unknown` for a ratio (above 1 is better)."""
    if value is None:
        return UNKNOWN
    return GAIN if value > timing.GAIN else REGRESSION if value < timing.LOSS else NO_GAIN


def ratio(before: SpeedRow | None, after: SpeedRow | None) -> float | None:
    """How many times faster: by the rates of all devices, and so by latency where there is one; None where either is unknown."""
    first, second = (None if row is None else row.tokens_per_s or row.items_per_s for row in (before, after))
    return second / first if first and second else None


def times(value: float, better: str = "faster", worse: str = "slower", band: str = "") -> str:
    """`1.72 times (1.5 to 2.0): faster`, `0.50 times: slower`, `1.00 times: no gain`."""
    word = {GAIN: better, REGRESSION: worse}.get(outcome(value), "no gain")
    return f"{value:.2f} times{band}: {word}"


def judge(study: Study, *, goal: str, found: Sequence[Recorded]) -> Verdict:
    """The verdict of a study whose steps, fit and speed are known.

    Args:
        goal: the recipe's; `latency` and `throughput` are about time.
        found: recorded runs that say something of this plan (`recorded.recorded`).
    """
    schemes = changing(study)
    verdict = Verdict(fit=_fit(study.fit), downgrade="; ".join(_downgrades(study.downgrades)), recorded=list(found))
    names = {key: str(part.get("name")) for key, part in (("model", study.model), ("recipe", study.recipe))}
    verdict.quality = recorded.quality(found, schemes=schemes, **names)
    failed = _cannot_run(study.kernels)
    if failed:
        verdict.sentence = f"none to expect: a kernel cannot run on {study.target.get('arch')} ({failed})"
    elif goal in ("latency", "throughput"):
        _of_time(verdict, study)
    else:
        _of_bytes(verdict, study, goal)
    if study.fit is not None and study.fit.fits is False:
        verdict.outcome = DOES_NOT_FIT
    _measured(verdict, study, found)
    _next(verdict, study)
    return verdict


def _cannot_run(kernels: Kernels | None) -> str:
    """The first kernel that the target cannot run, with the reason; empty where every one was compiled or none was asked for."""
    rows = kernels.rows if kernels is not None else []
    return next((f"{row.kernel}: {row.reason}" for row in rows if row.status in (REFUSED, OVER_SHARED_MEMORY)), "")


def changing(study: Study) -> list[str]:
    """Options that change the precision of the numbers: the quantize steps, else the last cast."""
    of = {kind: [step.use for step in study.steps if step.use.startswith(f"{kind}/")] for kind in ("quantize", "precision")}
    return of["quantize"] or of["precision"][-1:]


# --- the gain -----------------------------------------------------------------------------------------------------


def _of_time(verdict: Verdict, study: Study) -> None:
    """Gain in time over the reference, with its band and its bound."""
    reference, last = _ends(study)
    verdict.gain = ratio(reference, last)
    if reference is None or last is None or verdict.gain is None:
        reason = study.speed.reason if study.speed is not None and study.speed.reason else "no time could be predicted"
        verdict.sentence = f"unknown: {reason}"
        return
    if last is reference:
        verdict.outcome = NO_GAIN
        verdict.sentence = "the recipe changes nothing that the plan can time"
        return
    verdict.outcome = outcome(verdict.gain)
    if reference.low_ms and reference.high_ms and last.low_ms and last.high_ms and last.devices == 1:
        verdict.gain_low, verdict.gain_high = reference.low_ms / last.high_ms, reference.high_ms / last.low_ms
    on = f" on {last.devices} devices" if last.devices > 1 else ""
    word = "expected" if study.speed is not None and study.speed.calibration is not None else "at the published peaks alone"
    verdict.sentence = f"{word} {times(verdict.gain, band=_range(verdict))}{on}, against the {reference.name}"
    if last.partial or reference.partial:
        verdict.sentence += ", without the operators whose work is unknown"
    verdict.bound = _bound(verdict, reference, last)


def _ends(study: Study) -> tuple[SpeedRow | None, SpeedRow | None]:
    """The row that everything is compared with, and the whole recipe's."""
    rows = study.speed.rows if study.speed is not None else []
    wanted = study.speed.reference if study.speed is not None else None
    return next((row for row in rows if row.name == wanted), None), rows[-1] if rows else None


def _range(verdict: Verdict) -> str:
    if verdict.gain_low is None or verdict.gain_high is None:
        return " (no error band)"
    return f" ({verdict.gain_low:.2f} to {verdict.gain_high:.2f})"


def _bound(verdict: Verdict, reference: SpeedRow, last: SpeedRow) -> str:
    """`memory bound: 1.9 times at equal efficiency, at most 2.4`: from the figures at the published peaks."""
    if not last.bound:
        return ""
    words = f"{last.bound} bound"
    if not (last.ideal_ms and reference.ideal_ms and last.latency_ms and reference.latency_ms and verdict.gain):
        return words
    if last.latency_ms < last.ideal_ms or reference.latency_ms < reference.ideal_ms:
        return f"{words}; caches serve part of what the roofline takes from memory"
    verdict.at_most = verdict.gain * last.latency_ms / last.ideal_ms
    verdict.at_equal_efficiency = verdict.at_most * reference.ideal_ms / reference.latency_ms
    return f"{words}: {verdict.at_equal_efficiency:.2f} times at equal efficiency, {_at_most(verdict.at_most)}"


def _at_most(value: float) -> str:
    """What the peaks would allow; far from them, as where launches are the limit, the figure would say nothing."""
    return f"at most {value:.2f} times at the peaks" if value < FAR else "nowhere near the peaks"


def _of_bytes(verdict: Verdict, study: Study, goal: str) -> None:
    """Gain in memory or size, and what it costs in time."""
    before, after = _bytes(study, goal)
    what = "memory per device" if goal == "memory" else "weight bytes"
    verdict.unit = goal
    slower = _time_too(study)
    if not before or not after:
        verdict.sentence = f"gain in {what} unknown" + slower
        return
    verdict.gain = before / after
    verdict.outcome = outcome(verdict.gain)
    word = times(verdict.gain, f"less {what}", f"more {what}")
    verdict.sentence = f"expected {word}, against the model as loaded{slower}"
    verdict.bound = f"{figures.nbytes(before)} become {figures.nbytes(after)}"


def _bytes(study: Study, goal: str) -> tuple[float | None, float | None]:
    if goal == "size":
        return study.weight_bytes, study.steps[-1].weight_bytes if study.steps else study.weight_bytes
    rows = study.fit.rows if study.fit is not None else []
    return (rows[0].total_bytes, rows[-1].total_bytes) if rows else (None, None)


def _time_too(study: Study) -> str:
    found = ratio(*_ends(study))
    return "; time unknown" if found is None else f"; in time {times(found)}"


def _measured(verdict: Verdict, study: Study, found: Sequence[Recorded]) -> None:
    """What the same recipe did with the same workload when it was measured; a regression of this model on this device is one."""
    device, backend = study.target.get("name"), study.target.get("backend")
    timed = recorded.speed(found, recipe=str(study.recipe.get("name")), workload=str(study.workload.get("name")))
    near = [run for run in timed if config.hardware(run.device).backend == backend]
    verdict.measured = ", ".join(f"{times(run.speedup or 0.0)} for {run.model} on {run.device} ({run.date})" for run in near)
    own = [run for run in near if run.same_model and run.device == device]
    if any(outcome(run.speedup) == REGRESSION for run in own) and verdict.outcome != DOES_NOT_FIT:
        verdict.outcome = REGRESSION


# --- fit, downgrades ----------------------------------------------------------------------------------------------


def _fit(fit: Fit | None) -> str:
    if fit is None:
        return "unknown"
    if fit.fits is None:
        return f"unknown: {fit.reason or 'a part of the memory is unknown'}"
    last = fit.rows[-1]
    need = f"{figures.nbytes(last.total_bytes)} of {figures.nbytes(fit.memory_bytes)} per device"
    if fit.devices > 1:
        need += f", {fit.devices} devices"
    if fit.fits:
        return f"yes: {need}, {figures.nbytes(last.spare_bytes)} spare"
    change = f"; smallest change: {fit.changes[0].what}" if fit.changes else "; no change that the plan knows makes it fit"
    return f"no: {need}, {figures.nbytes(-(last.spare_bytes or 0.0))} too much{change}"


def _downgrades(downgrades: Sequence[Downgrade]) -> Iterator[str]:
    for item in downgrades:
        best = item.alternatives[0] if item.alternatives else None
        better = f"; best instead: {best['use']}" if best and best.get("use") != item.runs_as else ""
        if better and best and best.get("predicted_speedup"):
            better += f" ({best['predicted_speedup']:.2f} times, predicted)"
        yield f"{item.step}: {item.reason}{better}"


# --- what to run next ---------------------------------------------------------------------------------------------


def _next(verdict: Verdict, study: Study) -> None:
    """The command: what was asked for, changed where it does not fit; a plan where the run is of a kind that cannot be executed."""
    words, fit = run_words(study.command), study.fit
    only_planned = _only_planned(study)
    if fit is not None and fit.fits is False:
        change = next((one for one in fit.changes if not _shards(study, one)), next(iter(fit.changes), None))
        if change is None:
            verdict.why = "it does not fit, and no single change makes it fit: a smaller model, or hardware with more memory"
            return
        words, verdict.why = with_override(words, change.override), f"changed so that it fits: {change.what}"
        only_planned = only_planned or (SHARDED if _keeps_cache(study) and _shards(study, change) else "")
    elif fit is not None and fit.memory_bytes is None:
        verdict.why = f"to be told whether it fits, add hardware.memory_bytes=<bytes of one {study.target.get('name')}>"
    if fit is not None and fit.fits and fit.rows[0].fits is False and not only_planned:
        verdict.why = "the model as loaded does not fit, so the run has no baseline: it tells the recipe's own speed and no gain"
    if only_planned:
        verdict.why = f"{verdict.why}; {only_planned}" if verdict.why else only_planned
        words[1] = "plan"
    if not only_planned or words != shlex.split(study.command):
        verdict.command = shlex.join(words)
    for item in study.downgrades:
        if better := _better(item):
            verdict.instead = shlex.join(with_override(words, f"steps.{item.step}.use={better}"))
            model = str(study.model.get("name"))
            known = recorded.recorded(schemes=[better], recipe="", model=model, device=str(study.target.get("name")))
            verdict.instead_quality = recorded.quality(known, schemes=[better], model=model)
            return


SHARDED = "decode over copies and FSDP can be planned, and not executed yet"


def _only_planned(study: Study) -> str:
    """Why `optforge run` would refuse what was asked for; empty where it would not."""
    return (
        SHARDED if _keeps_cache(study) and any(step.use.startswith("shard/") and step.use != "shard/tensor" for step in study.steps) else ""
    )


def _keeps_cache(study: Study) -> bool:
    return study.workload.get("kind") == "decode"


def _shards(study: Study, change: Change) -> bool:
    if "use: shard/tensor" in change.override:
        return False
    sharding = {f"{step.name}.{degree}" for step in study.steps if step.use.startswith("shard/") for degree in ("fsdp", "data")}
    return "use: shard/" in change.override or _key(change.override) in sharding


def _better(item: Downgrade) -> str | None:
    """The best alternative, where it is predicted to beat what the step runs as."""
    speedups = {str(one["use"]): one.get("predicted_speedup") for one in item.alternatives}
    own, best = speedups.get(item.runs_as), max((value or 0.0 for value in speedups.values()), default=0.0)
    if own is None or best <= own * timing.GAIN:
        return None
    return next(use for use, value in speedups.items() if value == best)


PLAN_ONLY = ("--json", "--no-kernels", "--debug")
"""Options of `optforge plan` that `optforge run` does not have, or that say nothing of the run."""


def run_words(command: str) -> list[str]:
    """`optforge plan ...` as the words of the run that it plans."""
    words = [word for word in shlex.split(command) if word not in PLAN_ONLY]
    return ["optforge", "run", *words[2:]]


def with_override(words: Sequence[str], override: str) -> list[str]:
    """`words` with one override more, in place of what they say for its key."""
    key, kept = _key(override), list[str]()
    for before, word in zip(["", *words], words, strict=False):
        if "=" in word and _key(word) == key:
            if before == "--set":
                kept.pop()
            continue
        kept.append(word)
    return [*kept, override]


def _key(word: str) -> str:
    """The key of an override however it is written: `steps.weights.use`, `recipe.steps.weights.use`, `--set weights.use`."""
    return word.lstrip("+~").partition("=")[0].removeprefix("recipe.").removeprefix("steps.")
