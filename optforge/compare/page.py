"""The comparison as one page: tables that stand in the HTML, and plots that a script of its own draws from them.

The page opens without a network. Its content security policy names the one script by its hash and forbids every request.
Without a script the tables, the settings and the failures are all there; with it come the Pareto plot, the steps side by
side, sorting and filters.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from functools import cache
from importlib.resources import files

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from optforge import __version__
from optforge.compare import ranking, table
from optforge.compare.comparison import MEASURED, Comparison, Row
from optforge.compare.conditions import UNKNOWN
from optforge.compare.metrics import Metric, text
from optforge.compare.settings import ABSENT, FIRST
from optforge.report import figures, view
from optforge.spec import Json

FACET_VALUES = 24
"""Values that one filter may have; with more it would be a list to scroll, and the search does that better."""


@cache
def _environment() -> Environment:
    """The templates of this package, and the report page's style sheet, so that both look alike."""
    loader = ChoiceLoader([PackageLoader("optforge.compare"), PackageLoader("optforge.report")])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.globals.update(view=view, figures=figures, table=table, text=text, ABSENT=ABSENT)
    return found


@cache
def _script() -> str:
    return files("optforge.compare").joinpath("templates", "compare.js").read_text(encoding="utf-8")


def render(comparison: Comparison) -> str:
    """The page as HTML text. Every string of a report is escaped."""
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    winners = _winners(comparison)
    return (
        _environment()
        .get_template("compare.html.j2")
        .render(
            c=comparison,
            headline=_headline(comparison),
            lead=_lead(comparison),
            winners=winners,
            best={(metric.key, row.name) for metric, row, _ in winners},
            varied=_varied(comparison),
            conditions=_conditions(comparison),
            version=__version__,
            script=script,
            digest=digest,
            data=_embedded(comparison),
        )
    )


def _headline(comparison: Comparison) -> str:
    """Which run is best, in words; no more than the figures say where several share the first place."""
    first = [row for row in comparison.measured if row.place == 1]
    if not first:
        return "No run was measured to the end"
    among = f"of {len(comparison.measured)} measured runs"
    if len(first) > 1:
        return f"{len(first)} {among} share the {table.best(comparison.by)}"
    return f"{first[0].name} has the {table.best(comparison.by)} {among}" if len(comparison.measured) > 1 else f"{first[0].name}, alone"


def _lead(comparison: Comparison) -> str:
    """The best figure and where it was measured; empty where nothing was."""
    if not comparison.measured:
        return ""
    best = comparison.measured[0]
    said = [text(comparison.by, best.values.get(comparison.by.key), best.report)]
    if best.ratio is not None:
        said.append(f"{view.compared(best.ratio)} than {view.main_ratio(best.report)[1]}")
    return ", ".join([*said, *view.quality_phrases(best.report.quality), best.where]) + "."


def _winners(comparison: Comparison) -> list[tuple[Metric, Row, int]]:
    """For each metric the best measured row, and how many others share its place; nothing where there is no choice."""
    found = []
    for metric in comparison.shown(comparison.measured) if len(comparison.measured) > 1 else []:
        values = {row.name: row.values[metric.key] for row in comparison.measured if metric.key in row.values}
        places = ranking.ranks(values, metric)
        first = next(iter(places))  # ranks are in order, best first
        row = next(row for row in comparison.measured if row.name == first)
        found.append((metric, row, list(places.values()).count(1) - 1))
    return found


def _varied(comparison: Comparison) -> list[tuple[str, list[tuple[str, int]]]]:
    """Each differing setting with its values, the commonest first, and how many runs have each."""
    runs = comparison.settings.values()
    return [(key, Counter(own.get(key, ABSENT) for own in runs).most_common()) for key in comparison.differing]


def _conditions(comparison: Comparison) -> list[tuple[str, list[str], bool]]:
    """Each condition that some run records, with its distinct values, and whether it differs."""
    own = list(comparison.conditions.values())
    differ = {item.condition for item in comparison.differences}
    found = [(key, [value for value in dict.fromkeys(one[key] for one in own) if value != UNKNOWN]) for key in (own[0] if own else {})]
    return [(key, values, key in differ) for key, values in found if values]


def _embedded(comparison: Comparison) -> str:
    """The plots' data as JSON that no text of a report can break out of."""
    values = json.dumps(_data(comparison), separators=(",", ":"), allow_nan=False)
    return values.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(comparison: Comparison) -> dict[str, Json]:
    return {
        "metrics": [
            {"key": metric.key, "title": metric.title, "better": metric.better, "unit": metric.unit}
            for metric in comparison.shown(comparison.rows)
        ],
        "axes": [axis.key for axis in comparison.axes],
        "rows": [_row(comparison, row) for row in comparison.rows],
        "facets": _facets(comparison),
        "settings": comparison.differing,
        "absent": ABSENT,
    }


def _row(comparison: Comparison, row: Row) -> dict[str, Json]:
    own = comparison.settings[row.name]
    return {
        "name": row.name,
        "kind": row.kind,
        "where": row.where,
        "verdict": row.report.verdict if row.kind == MEASURED else "",
        "ratio": table.ratio(row) if row.kind == MEASURED else "",
        "values": {
            metric.key: [value.value, value.low, value.high, text(metric, value, row.report)]
            for metric in comparison.metrics
            if (value := row.values.get(metric.key)) is not None
        },
        "steps": [
            {
                "name": step.name,
                "use": step.use,
                "ms": step.p50_ms,
                "text": figures.milliseconds(step.p50_ms),
                "ratio": table.times(step.vs_previous, interval=False) if step.vs_previous else "",
                "kept": step.kept,
            }
            for step in row.steps
        ],
        "facets": _facet_values(comparison, row),
        "settings": [own.get(key, ABSENT) for key in comparison.differing],
    }


def _facet_values(comparison: Comparison, row: Row) -> dict[str, str]:
    """What a reader filters by: the recipe, the target, the device, the verdict, and the settings that tell runs apart."""
    own = comparison.settings[row.name]
    found = {
        "recipe": str(row.report.recipe.get("name")),
        "target": view.target_name(row.report),
        "measured on": view.device_name(row.report) if row.kind == MEASURED else "predicted",
        "model": str(row.report.model.get("name")),
        "workload": str(row.report.workload.get("name")),
        "conditions": row.group,
        "verdict": row.report.verdict if row.kind == MEASURED else "predicted",
    }
    return found | {key: own.get(key, ABSENT) for key in comparison.deciding if key not in FIRST}


def _facets(comparison: Comparison) -> list[str]:
    """Facets with more than one value, and not one for each row."""
    values: dict[str, set[str]] = {}
    for row in comparison.rows:
        for key, value in _facet_values(comparison, row).items():
            values.setdefault(key, set()).add(value)
    return [key for key, found in values.items() if 1 < len(found) <= FACET_VALUES]
