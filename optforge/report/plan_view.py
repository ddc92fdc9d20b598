"""What a plan says as a whole: its title, its verdict, and several plans beside one another.

The words and rows are made here and in `plan_sections` once, so that the terminal and the Markdown file cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optforge.plan.document import LOOKED_UP, REFUSED, Study
from optforge.report import figures
from optforge.report.plan_sections import BAD_KERNELS, SHOWN_SHARE, Line, Table, rate

LABEL = "Nothing was measured: every figure is predicted, unless it says otherwise."
OUTCOMES = {"gain": "gain", "no_gain": "no gain", "regression": "regression", "does_not_fit": "does not fit", "unknown": "unknown"}


def title(study: Study) -> str:
    return f"{study.recipe.get('name')} for {study.target.get('name')}: {study.model.get('name')}, {workload(study)}"


def headline(study: Study) -> str:
    """The outcome and what it rests on: `gain expected`, `gain at the published peaks`, `regression, as measured before`."""
    verdict, word = study.verdict, OUTCOMES[study.verdict.outcome]
    if verdict.outcome in ("does_not_fit", "unknown"):
        return word
    if verdict.outcome == "regression" and verdict.gain is not None and verdict.gain > 1:
        return f"{word}, as measured before"
    calibrated = study.speed is not None and study.speed.calibration is not None
    return f"{word} expected" if calibrated or verdict.unit != "latency" else f"{word} at the published peaks"


def workload(study: Study) -> str:
    """`decode (batch_size 1, context 128, new_tokens 32)`."""
    hidden = ("name", "kind")
    sizes = [f"{key} {value}" for key, value in study.workload.items() if key not in hidden and isinstance(value, int | str)]
    return f"{study.workload.get('name')} ({', '.join(sizes)})" if sizes else str(study.workload.get("name"))


# --- 5: verdict ---------------------------------------------------------------------------------------------------


def verdict_lines(study: Study) -> Iterator[Line]:
    """What an expert looks for first."""
    verdict = study.verdict
    yield "fits", verdict.fit
    yield "gain", verdict.sentence
    if verdict.bound:
        yield "bound", verdict.bound
    if verdict.measured:
        yield "measured", f"before, with this recipe and workload: {verdict.measured}"
    yield "downgraded", verdict.downgrade or "nothing: every step runs as written"
    yield "quality risk", verdict.quality
    missed = sum(row.share for step in study.steps for row in step.missed if row.reason != LOOKED_UP)
    if missed >= SHOWN_SHARE:
        yield "missed", f"{figures.percent(missed)} of the weight bytes are neither quantized nor ignored (above)"
    bad = [row.kernel for row in study.kernels.rows if row.status in BAD_KERNELS] if study.kernels is not None else []
    if bad:
        yield "kernels", f"{', '.join(dict.fromkeys(bad))} cannot run on {study.target.get('name')} (above)"
    if study.speed is not None and study.speed.unknown:
        names = ", ".join(item.name for item in study.speed.unknown)
        yield "unknown", f"the work of {names}: the figures hold for the rest"


# --- several plans ------------------------------------------------------------------------------------------------


def comparison(studies: Sequence[Study]) -> Table:
    """One row for each recipe and target, in the order in which they were asked for."""
    several = {
        key: len({str(getattr(study, key).get("name")) for study in studies}) > 1 for key in ("recipe", "target", "model", "workload")
    }
    names = [key for key in ("recipe", "target", "model", "workload") if several[key]] or ["target"]
    head = (*names, "fits", "needs", "time", "speed", "bound", "predicted", "from", "runs as written")
    rows, marks = [], {}
    for index, study in enumerate(studies):
        named = [str(getattr(study, key).get("name")) for key in names]
        rows.append([*named, *_compared(study)])
        marks[(index, "predicted")] = "regression" if study.status == REFUSED else study.verdict.outcome
    return Table(
        head=head,
        rows=rows,
        left=frozenset({*names, "fits", "bound", "predicted", "from", "runs as written"}),
        wide=frozenset({"needs", "bound"}),
        marks=marks,
    )


def _compared(study: Study) -> list[str]:
    if study.status == REFUSED:
        return ["", "", "", "", "", "refused", "", ""]
    last = study.speed.rows[-1] if study.speed is not None and study.speed.rows else None
    fit = study.fit.rows[-1] if study.fit is not None and study.fit.rows else None
    fits_ = figures.NONE if study.fit is None or study.fit.fits is None else "yes" if study.fit.fits else "no"
    written = "yes" if not study.downgrades else "; ".join(f"{item.step}: {item.runs_as.partition('/')[2]}" for item in study.downgrades)
    return [
        fits_,
        figures.nbytes(fit.total_bytes if fit is not None else None),
        figures.milliseconds(last.latency_ms if last is not None else None),
        rate(last) if last is not None else figures.NONE,
        (last.bound if last is not None else None) or figures.NONE,
        _gain(study),
        _from(study),
        written,
    ]


def _from(study: Study) -> str:
    """What the figures stand on: rows on different grounds are no ranking."""
    known = study.speed.calibration if study.speed is not None else None
    return "the peaks" if known is None else "this device" if known.exact else f"borrowed, {known.name}"


def _gain(study: Study) -> str:
    verdict = study.verdict
    if verdict.gain is None:
        return figures.NONE
    word = {"gain": "better", "regression": "regression", "no_gain": "no gain"}.get(verdict.outcome, OUTCOMES[verdict.outcome])
    if verdict.outcome == "gain":
        word = {"memory": "less memory", "size": "smaller"}.get(verdict.unit, "faster")
    return f"{verdict.gain:.2f} times: {word}"


def refusals(studies: Sequence[Study]) -> Iterator[Line]:
    """Every reason of every plan that was refused."""
    for study in studies:
        for problem in study.refused:
            yield f"{study.recipe.get('name')} for {study.target.get('name')}", str(problem)
