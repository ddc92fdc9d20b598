"""Runs against a stored baseline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from optforge.compare import conditions
from optforge.errors import ConfigError, Problem, UserError, near
from optforge.gate import figures, judge
from optforge.gate import statistics as estimates
from optforge.gate.judge import MISSED, Finding, Judgement
from optforge.gate.limits import ABSOLUTE, DIFFERENCE, Limit, Rules
from optforge.gate.statistics import Figure
from optforge.report.figures import named
from optforge.spec import Report

T = TypeVar("T")

MAY_CHANGE = ("versions", "device software", "measure", conditions.CONTENDED, conditions.EVALUATED)
"""Conditions whose change is often what a gate is there to judge; they are noted. Any other makes two experiments."""
SHARED_SPREAD = 0.1
"""Standard deviation between runs that is assumed for times of a shared device: 9% on two cores that others used to 83%."""
DRIFT = 0.1
"""Change of the reference's own time that is noted."""


def gate(new: Sequence[Report], base: Sequence[Report], rules: Rules, *, strict: bool = False, title: str = "gate") -> Judgement:
    """Holds `new` to the rules, with `base` as what it was before.

    Raises:
        UserError: a run is not finished or ran on a stand-in, the two were measured under different conditions, or a limit is
            about a figure that one of them does not have; every problem at once.
    """
    check(new, "run", require_target=rules.require_target)
    check(base, "baseline", require_target=rules.require_target)
    notes = _alike(new, base)
    findings = own_limits(new)
    new, base = _undisturbed("run", new, notes), _undisturbed("baseline", base, notes)
    findings = [*(hold(limit, new, base, rules, notes) for limit in require(rules.limits, new, base)), *findings]
    return Judgement(title=title, findings=findings, notes=list(dict.fromkeys(notes)), strict=strict, facts=_facts(new, base))


def undisturbed(runs: Sequence[T], contended: Callable[[T], bool]) -> Sequence[T]:
    """The runs that had the device to themselves; all of them, where none had."""
    return [run for run in runs if not contended(run)] or runs


def _undisturbed(what: str, reports: Sequence[Report], notes: list[str]) -> Sequence[Report]:
    """As `undisturbed`; what is left out is noted."""
    kept = undisturbed(reports, _contended)
    if len(kept) < len(reports):
        notes.append(f"{len(reports) - len(kept)} of {len(reports)} {what}s are left out: something else used the device during them")
    return kept


def _contended(report: Report) -> bool:
    return bool(report.environment.get(conditions.CONTENDED))


def check(reports: Sequence[Report], what: str, *, require_target: bool) -> None:
    """Refuses runs that no limit can be held against.

    Raises:
        UserError
    """
    problems = []
    for report in reports:
        where = f"{what} {report.folder}".strip()
        if report.status != "complete":
            problems.append(Problem(where=where, what=f"is not finished ({report.reason or report.status})", fix="run it again"))
        elif require_target and not report.device.get("is_target", True):
            stood = f"{report.device.get('name')} stood in for {report.target.get('name')}"
            fix = f"run on the target, take hardware={report.device.get('name')}, or write require_target: false into the limits file"
            problems.append(Problem(where=where, what=stood, fix=fix))
    if problems:
        raise UserError(*problems)


def require(limits: Sequence[Limit], new: Sequence[Report], base: Sequence[Report]) -> Sequence[Limit]:
    """The limits, each of which has its figure in all of the runs that it needs.

    Raises:
        ConfigError: with near names.
    """
    problems = []
    for limit in limits:
        for what, reports in (("the run", new), ("the baseline", base if limit.kind != ABSOLUTE else ())):
            lacking = next((report for report in reports if figures.plain(report, limit.path) is None), None)
            if lacking is not None:
                fix = near(limit.path, figures.known(lacking)) or f"there are {', '.join(figures.known(lacking)[:8])} and more"
                problems.append(Problem(where=limit.text, what=f"{what} has no figure {limit.path}", fix=fix))
                break
    if problems:
        raise ConfigError(*problems)
    return limits


def hold(limit: Limit, new: Sequence[Report], base: Sequence[Report], rules: Rules, notes: list[str]) -> Finding:
    """The verdict on one limit; what has to be said about it goes to `notes`."""
    told = [[_plain(report, limit.path) for report in reports] for reports in (new, base)]
    values = [[figure.value for figure in figures_] for figures_ in told]
    if limit.kind == ABSOLUTE:
        error = max(figure.error * abs(figure.value) for figure in told[0])
        return judge.hold(limit, estimates.of_values(values[0], error), _runs(new))
    detail = f"{_shown(limit.path, values[0])} against {_shown(limit.path, values[1])}, {_runs(new)} against {_runs(base)}"
    if limit.kind == DIFFERENCE:
        return judge.hold(limit, estimates.difference(*values), detail)
    if min(map(min, values)) <= 0:
        raise ConfigError(
            Problem(
                where=limit.text, what=f"{limit.path} is not above zero, so it has no change in percent", fix="give a difference: <= +0.01"
            )
        )
    if limit.path in figures.TIMES:
        told, against = _ratios(limit, new, base, notes)
        detail = f"{against}{detail}"
    contended = any(map(_contended, (*new, *base)))
    return judge.hold(limit, estimates.of_runs(told[0], told[1], assumed(limit.path, rules, contended=contended)), detail)


def assumed(path: str, rules: Rules, *, contended: bool) -> float:
    """The standard deviation between runs that is assumed of a figure, as a fraction; 0 for what is counted."""
    timed = path in figures.TIMES or path == figures.REFERENCE or path.startswith(f"{figures.SPEEDUP}.")
    if not timed and path not in figures.ALONE:
        return 0.0
    return max(rules.run_to_run, figures.ASSUMED_ALONE if path in figures.ALONE else 0.0, SHARED_SPREAD if contended else 0.0)


def _ratios(limit: Limit, new: Sequence[Report], base: Sequence[Report], notes: list[str]) -> tuple[list[list[Figure]], str]:
    """The times as ratios to the references; raw, and said so, where there is none or not the same one."""
    found = [[figures.against_reference(report, limit.path) for report in reports] for reports in (new, base)]
    references = {figures.reference_of(report) for report in (*new, *base)}
    if any(figure is None for group in found for figure in group) or len(references) > 1:
        why = "was timed against different references" if len(references) > 1 else "has no reference that was timed with it"
        notes.append(f"{limit.path} {why}: the times are compared as they are, and a busy machine does not cancel")
        return [[_plain(report, limit.path) for report in reports] for reports in (new, base)], ""
    _note_drift(new, base, notes)
    return [[figure for figure in group if figure is not None] for group in found], f"relative to {references.pop()}; "


def _note_drift(new: Sequence[Report], base: Sequence[Report], notes: list[str]) -> None:
    """Says so when the reference itself has become slower or faster: the ratio does not see what meets both."""
    before, now = (statistics.fmean(_plain(report, figures.REFERENCE).value for report in reports) for reports in (base, new))
    if abs(now / before - 1) > DRIFT:
        notes.append(
            f"the reference itself takes {now / before:.2f} times as long as in the baseline: the machine differs, or a change meets both; "
            f"optforge gate --ab tells which"
        )


def own_limits(new: Sequence[Report]) -> list[Finding]:
    """What the recipe's own limits on quality say; each that is missed."""
    missed = dict.fromkeys(text for report in new if report.quality is not None for text in report.quality.missed)
    return [Finding(limit="recipe's own limit", verdict=MISSED, found=text) for text in missed]


def alike(reports: Sequence[Report]) -> None:
    """Refuses runs that were measured under different conditions, for one baseline.

    Raises:
        ConfigError
    """
    _alike(reports[:1], reports[1:])


def _alike(new: Sequence[Report], base: Sequence[Report]) -> list[str]:
    """Refuses different experiments; returns what else differs, as sentences."""
    named_ = {
        f"{what} {index + 1}": conditions.conditions(report)
        for what, reports in (("run", new), ("baseline", base))
        for index, report in enumerate(reports)
    }
    problems, notes = [], []
    for found in conditions.differences(named_):
        if found.condition in MAY_CHANGE or (found.condition == "model" and _same_model([*new, *base])):
            notes.append(f"{found.condition} differs: {found}")
        else:
            fix = "take a baseline of this with --update, or run what the baseline ran"
            problems.append(Problem(where=found.condition, what=f"differs from the baseline: {found}", fix=fix))
    if problems:
        raise ConfigError(*problems)
    return [*notes, *conditions.unrecorded(named_), *conditions.disturbed(named_)]


def _same_model(reports: Sequence[Report]) -> bool:
    """Whether only the weights differ: a new checkpoint of one model is what a gate on quality is for."""
    return len({(report.model.get("name"), report.model.get("family"), report.model.get("dtype")) for report in reports}) == 1


def _plain(report: Report, path: str) -> Figure:
    figure = figures.plain(report, path)
    assert figure is not None  # `require` has seen to it
    return figure


def _runs(reports: Sequence[Report]) -> str:
    return f"{len(reports)} run{'s' if len(reports) != 1 else ''}"


def _shown(path: str, values: Sequence[float]) -> str:
    return named(judge.unit_of(path), statistics.fmean(values))


def _facts(new: Sequence[Report], base: Sequence[Report]) -> dict[str, str]:
    first = new[0]
    return {
        "recipe": str(first.recipe.get("name")),
        "model": str(first.model.get("name")),
        "workload": str(first.workload.get("name")),
        "device": str(first.device.get("description") or first.device.get("name")),
        "command": first.command,
        "baseline": f"{_runs(base)}, {base[0].started}",
    }
