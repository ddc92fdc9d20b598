"""The report as Markdown, for pull requests and terminals: verdict, steps, quality, predictions, how to repeat it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from optforge.report import cost, figures, losses, view
from optforge.spec import Report


def render(report: Report) -> str:
    """The whole report as Markdown text; every figure stands under `measured on` or `predicted for`."""
    badge = view.BADGES.get(report.verdict, report.verdict)
    parts = [
        f"# {escaped(report.recipe.get('name') or 'run')} for {escaped(view.target_name(report))}: {badge}",
        f"**{escaped(view.verdict_line(report))}.**",
        _subject(report),
        _section("Warnings", _bullets(view.warnings(report))),
        _section("Downgrades", _downgrades(report)),
        _section(f"Steps, {view.measured_label(report)}", _steps(report)),
        _section(f"Quality, {view.measured_label(report)}", _quality(report)),
        _section(f"Loss, {view.measured_label(report)}", _losses(report)),
        _section(f"Memory of a step, {view.measured_label(report)}", table(losses.MEMORY_HEAD, losses.memory_rows(report))),
        _section(f"Alternatives, {view.predicted_label(report)}", _alternatives(report)),
        _section(f"Roofline figures, {view.predicted_label(report)}", _predicted(report)),
        _section("Generations", _generations(report)),
        _section("Exports", _bullets(view.exports(report))),
        _section("Environment", _bullets(f"{name}: {figures.named(name, value)}" for name, value in view.flat(report.environment))),
        _section("Repeat it", code(report.command) if report.command else ""),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escaped(value: object) -> str:
    """`value` on one line, with everything that Markdown or HTML would act on escaped."""
    line = " ".join(str(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!])", r"\\\1", line)


def code(text: str) -> str:
    """A fenced block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _section(title: str, body: str) -> str:
    return f"## {escaped(title)}\n\n{body}" if body else ""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[bool] = (True,)) -> str:
    """A table of escaped cells, or nothing where there are no lines; columns that are not `left` stand right."""
    if not lines:
        return ""
    rule = ["---" if index < len(left) and left[index] else "---:" for index in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *[[escaped(cell) for cell in line] for line in lines]])


def _subject(report: Report) -> str:
    model, workload = report.model.get("name"), report.workload.get("name")
    notes = [str(note) for note in report.model.get("notes") or []]
    return _bullets([f"model {model}, workload {workload}, goal {report.recipe.get('goal')}, started {report.started}", *notes])


def _downgrades(report: Report) -> str:
    return _bullets(f"step {d.step}: {d.reason}" for d in report.downgrades)


def _steps(report: Report) -> str:
    priced = cost.priced(report)
    money = (cost.title(report),) if priced else ()
    head = ("row", "p50", "p90", "n", "speed", "vs previous", "vs reference", "peak memory", "weights", *money, "verdict")
    lines = []
    for row in view.rows(report):
        latency = row.measured.latency_ms if row.measured else {}
        lines.append(
            (
                row.name + ("" if row.kept else " (dropped)"),
                figures.milliseconds(latency.get("p50")),
                figures.milliseconds(latency.get("p90")),
                figures.named("n", latency.get("n")),
                row.speed,
                figures.ratio(row.vs_previous),
                figures.ratio(row.vs_reference),
                figures.nbytes(row.measured.peak_memory_bytes if row.measured else None),
                figures.nbytes(row.measured.weight_bytes if row.measured else None),
                *([view.row_cost(report, row)] if priced else []),
                row.verdict or "",
            )
        )
    return "\n\n".join(part for part in (table(head, lines), _bullets(view.zeros(report))) if part)


def _quality(report: Report) -> str:
    lines = [(line.name, line.baseline, line.optimized, line.difference) for line in view.quality_lines(report.quality)]
    limits = [f"limit on {item.name}: {item.bound}, found {item.value}{' (missed)' if item.missed else ''}" for item in view.limits(report)]
    return "\n\n".join(part for part in (table(("", "baseline", "optimized", "difference"), lines), _bullets(limits)) if part)


def _losses(report: Report) -> str:
    return "\n\n".join(part for part in (_bullets(losses.sentences(report)), table(losses.HEAD, losses.rows(report))) if part)


def _alternatives(report: Report) -> str:
    lines = [
        (str(item.get("use")), figures.named("predicted_speedup", item.get("predicted_speedup")), str(item.get("note") or ""))
        for item in view.alternatives(report)
    ]
    return table(("instead", "predicted speedup", "note"), lines)


def _predicted(report: Report) -> str:
    money = (cost.title(report),) if cost.priced(report) else ()
    lines = [(row.name, row.time, row.speed, row.bound, row.weights, *([row.cost] if money else [])) for row in view.predicted_rows(report)]
    speedup = figures.named("speedup", report.predicted.get("speedup"))
    notes = [*view.predicted_notes(report), *([f"whole recipe: {speedup}"] if lines else [])]
    return "\n\n".join(part for part in (table(("after", "time", "speed", "bound by", "weights", *money), lines), _bullets(notes)) if part)


def _generations(report: Report) -> str:
    parts = []
    for item in report.generations:
        parts.append(f"Prompt: {escaped(item.get('prompt', ''))}")
        parts += [f"{name.capitalize()}:\n\n{code(item.get(name, ''))}" for name in ("baseline", "optimized")]
    return "\n\n".join(parts)
