"""Runs side by side as rows: what each is called, what it reached, its place, and what tells it from the others.

The terminal, Markdown, csv, json and the page are views of one `Comparison`, so they cannot disagree. Measured and
predicted rows are kept in two lists from the start: no view can rank them together by mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from optforge.compare import conditions, ranking, settings
from optforge.compare.conditions import some
from optforge.compare.load import Entry
from optforge.compare.metrics import HIGHER, Metric, Values, measured, metrics, own_metrics, predicted, quality_metric
from optforge.errors import ConfigError, Problem, near
from optforge.report import view
from optforge.report.figures import exists
from optforge.spec import Ratio, Report

MEASURED, PREDICTED = "measured", "predicted"
TIES = {
    MEASURED: "Runs whose 95% interval reaches that of the first who holds a place share it.",
    PREDICTED: "Runs whose error band (nine of ten predictions keep to it) reaches that of the first who holds a place share it.",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step added: its row's time, and how many times better it is than the row before."""

    name: str
    use: str
    p50_ms: float | None
    vs_previous: Ratio | None
    verdict: str
    kept: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run's measured figures, or its predicted ones."""

    name: str
    kind: str
    """MEASURED or PREDICTED."""
    entry: Entry
    values: Values
    place: int | None = None
    pareto: bool = False
    group: str = ""
    """Letter of its conditions, where they are not the same for all."""

    @property
    def report(self) -> Report:
        return self.entry.report

    @property
    def where(self) -> str:
        """`measured on cpu, a stand-in for a100` or `predicted for a100`."""
        return view.provenance(self.report) if self.kind == MEASURED else view.predicted_label(self.report)

    @property
    def ratio(self) -> Ratio | None:
        """The ratio that the run's verdict is about; predicted rows have no interval and no ratio of ours."""
        return view.main_ratio(self.report)[0] if self.kind == MEASURED else None

    @property
    def reference_ms(self) -> float | None:
        """Median of what the ratio compares with: the compiled baseline, else the model as loaded."""
        row = (self.report.compiled_baseline or self.report.baseline) if self.kind == MEASURED else None
        return row.latency_ms.get("p50") if row is not None else None

    @property
    def p90_ms(self) -> float | None:
        row = self.report.optimized if self.kind == MEASURED else None
        return row.latency_ms.get("p90") if row is not None else None

    @property
    def steps(self) -> list[Step]:
        """Baselines and steps in the order in which they build on each other; of a predicted row, its predictions."""
        return _measured_steps(self.report) if self.kind == MEASURED else _predicted_steps(self.report)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that is shown of several runs."""

    measured: list[Row]
    predicted: list[Row]
    failed: list[tuple[str, Entry]]
    """Name and entry of each run that brought no figures."""
    metrics: tuple[Metric, ...]
    by: Metric
    axes: tuple[Metric, Metric]
    """What the Pareto front is over: x, y."""
    settings: dict[str, settings.Settings]
    """Run's name -> its settings."""
    differing: list[str]
    deciding: list[str]
    differences: list[conditions.Difference]
    conditions: dict[str, conditions.Conditions]
    notes: list[str]

    @property
    def rows(self) -> list[Row]:
        """Measured rows, then predicted ones."""
        return [*self.measured, *self.predicted]

    def metric(self, key: str) -> Metric:
        return next(metric for metric in self.metrics if metric.key == key)

    def shown(self, rows: Sequence[Row]) -> list[Metric]:
        """The metrics of which at least one of the rows has a figure."""
        return [metric for metric in self.metrics if any(metric.key in row.values for row in rows)]


def compare(entries: Sequence[Entry], *, by: str | None = None, anyway: bool = False, notes: Sequence[str] = ()) -> Comparison:
    """Lays runs side by side.

    Args:
        entries: the runs, at least one.
        by: the figure that ranks them, one of KEYS or `metric.<name>`; None takes the goal that their recipes share, else latency.
        anyway: compare also what was measured under different conditions, and say in what they differ.
        notes: what there is to know already.

    Raises:
        ConfigError: conditions differ and `anyway` is not given, or `by` names no figure, or one that no run has.
    """
    tree = [_settings(entry) for entry in entries]
    differing, deciding = _differing(entries, tree)
    names = settings.names(tree, deciding)
    named = dict(zip(names, entries, strict=True))
    finished = {name: entry for name, entry in named.items() if entry.finished}
    own = {name: conditions.conditions(entry.report) for name, entry in finished.items()}
    differences = conditions.differences(own)
    if not anyway:
        conditions.refuse(differences)
    reports = [entry.report for entry in finished.values()]
    quality = quality_metric(reports)
    rows, guesses = _rows(finished, quality, conditions.groups(own, differences))
    figures = metrics(quality, own_metrics(reports))
    key, axes = _by(by, figures, rows or guesses), _axes(figures, rows or guesses)
    return Comparison(
        measured=_placed(rows, key, axes),
        predicted=_placed(guesses, key, axes),
        failed=[(name, entry) for name, entry in named.items() if not entry.finished],
        metrics=figures,
        by=key,
        axes=axes,
        settings=dict(zip(names, tree, strict=True)),
        differing=differing,
        deciding=deciding,
        differences=differences,
        conditions=own,
        notes=[*notes, *conditions.disturbed(own), *conditions.unrecorded(own), *_of_predictions(guesses)],
    )


def _rows(finished: Mapping[str, Entry], quality: Metric, groups: Mapping[str, str]) -> tuple[list[Row], list[Row]]:
    """Each run's measured row, and the predicted row of those that have one."""
    rows = [
        Row(name=name, kind=MEASURED, entry=entry, values=measured(entry.report, quality), group=groups.get(name, ""))
        for name, entry in finished.items()
    ]
    guesses = [Row(name=name, kind=PREDICTED, entry=entry, values=predicted(entry.report)) for name, entry in finished.items()]
    return rows, [row for row in guesses if row.values]


def _settings(entry: Entry) -> settings.Settings:
    """The settings of a run; of one that left none, those that its sweep gave it."""
    own = settings.settings(entry.report)
    return own if entry.report.settings else {**settings.overridden(entry.overrides), **own}


def _differing(entries: Sequence[Entry], tree: Sequence[settings.Settings]) -> tuple[list[str], list[str]]:
    """Keys in which the runs differ, and those of them that decide the rest."""
    varied = [key for entry in entries for key in settings.overridden(entry.overrides)]
    differing = settings.differing(tree, varied)
    return differing, settings.deciding(tree, differing)


def _by(by: str | None, figures: Sequence[Metric], rows: Sequence[Row]) -> Metric:
    """The metric that ranks the rows."""
    known = {metric.key: metric for metric in figures}
    if by is None:
        goals = {str(row.report.recipe.get("goal")) for row in rows}
        wanted = goals.pop() if len(goals) == 1 else "latency"
        return known[wanted] if wanted in known and any(wanted in row.values for row in rows) else known["latency"]
    if by not in known:
        fix = near(by, known) or f"type one of {', '.join(known)}"
        raise ConfigError(Problem(where="--by", what=f"there is no figure {by!r}", fix=fix))
    if rows and not any(by in row.values for row in rows):
        fix = "run with hardware.price_per_hour=PRICE" if by == "cost" else "rank by another figure"
        raise ConfigError(Problem(where="--by", what=f"no run has a figure for {by}", fix=fix))
    return known[by]


def _axes(figures: Sequence[Metric], rows: Sequence[Row]) -> tuple[Metric, Metric]:
    """Latency against quality where two runs have it, else against peak memory, else against the weights."""
    counts = {metric.key: sum(metric.key in row.values for row in rows) for metric in figures}
    known = {metric.key: metric for metric in figures}
    other = next((key for key in ("quality", "memory", "size") if counts[key] > 1), "size")
    return known["latency"], known[other]


def _placed(rows: Sequence[Row], by: Metric, axes: tuple[Metric, Metric]) -> list[Row]:
    """Rows of one kind with their places, best first; those without the figure come last and have none."""
    places = ranking.ranks({row.name: row.values[by.key] for row in rows if by.key in row.values}, by)
    points = {row.name: _point(row, axes) for row in rows if all(axis.key in row.values for axis in axes)}
    front = ranking.front(points, *axes)
    made = [replace(row, place=places.get(row.name), pareto=row.name in front) for row in rows]
    sign = -1 if by.better == HIGHER else 1
    return sorted(made, key=lambda row: (row.place is None, sign * row.values[by.key].value if by.key in row.values else 0.0))


def _point(row: Row, axes: tuple[Metric, Metric]) -> tuple[float, float]:
    return row.values[axes[0].key].value, row.values[axes[1].key].value


def _of_predictions(rows: Sequence[Row]) -> list[str]:
    """What there is to know of the predictions: made in more than one way, of a part only, or of what does not fit."""
    made = {row.name: row.report.predicted["optimized"] for row in rows}
    bases = sorted({str(values.get("basis")) for values in made.values()})
    found = [f"the predictions were not all made the same way: {'; '.join(bases)}"] if len(bases) > 1 else []
    partial = [name for name, values in made.items() if values.get("partial")]
    if partial:
        found.append(f"predicted times that are lower bounds, since some work could not be counted: {some(partial)}")
    too_big = [name for name, values in made.items() if values.get("fits") is False]
    return [*found, *([f"predicted not to fit the target's memory: {some(too_big)}"] if too_big else [])]


def _measured_steps(report: Report) -> list[Step]:
    return [
        Step(name=row.name, use=row.use, p50_ms=row.p50_ms, vs_previous=row.vs_previous, verdict=row.verdict, kept=row.kept)
        for row in view.rows(report)
    ]


def _predicted_steps(report: Report) -> list[Step]:
    named = [("baseline", "the model as loaded", report.predicted.get("baseline"))]
    named += [(str(step.get("name")), "", step) for step in report.predicted.get("steps") or []]
    found: list[Step] = []
    for name, use, values in named:
        time = values.get("latency_ms") if isinstance(values, dict) else None
        before = found[-1].p50_ms if found else None
        ratio = before / time if before and time and exists(time) else None
        gain = Ratio(value=ratio, low=ratio, high=ratio) if ratio is not None else None
        found.append(Step(name=name, use=use, p50_ms=time, vs_previous=gain, verdict="", kept=True))
    return found
