"""A plan as Markdown, for pull requests: the verdict first, then the sections of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optforge.plan.document import REFUSED, PlanFile, Study
from optforge.report import plan_sections as sections
from optforge.report import plan_view as view
from optforge.report.markdown import code, escaped


def render(file: PlanFile) -> str:
    """plan.md: one plan in full; several as one table, and each in full below it."""
    if len(file.plans) == 1:
        parts = [f"# Plan: {escaped(view.title(file.plans[0]))}", view.LABEL, *_study(file.plans[0], "##")]
    else:
        parts = [f"# {len(file.plans)} plans", view.LABEL, _table(view.comparison(file.plans)), _refused(file.plans)]
        for study in file.plans:
            if study.status != REFUSED:
                parts += [f"## {escaped(view.title(study))}", *_study(study, "###")]
    parts += ["## Repeat it", code(file.command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _study(study: Study, level: str) -> list[str]:
    parts = [f"{level} Verdict: {view.headline(study)}", _lines(view.verdict_lines(study)), _next(study)]
    parts += [f"{level} Steps, in the order in which they run", _table(sections.step_table(study)), _lines(sections.step_lines(study))]
    if study.fit is not None:
        parts += [f"{level} Memory, {study.fit.label}", _table(sections.fit_table(study.fit))]
        parts += [_table(sections.degree_table(study.fit)), _lines(sections.fit_lines(study.fit))]
    if study.speed is not None:
        parts += [f"{level} Speed, {study.speed.label} for {escaped(study.target.get('name'))}", _table(sections.speed_table(study.speed))]
        if study.speed.top:
            parts += ["The ten costliest kernels of the whole recipe:", _table(sections.top_table(study.speed))]
        parts.append(_lines(sections.speed_lines(study.speed)))
    if study.kernels is not None:
        parts += [f"{level} Kernels, compiled for {escaped(study.target.get('arch'))}"]
        parts += [_table(sections.kernel_table(study.kernels)), _lines(sections.kernel_lines(study.kernels))]
    if study.xla is not None:
        parts += [
            f"{level} The program of one pass, {study.xla.label}",
            _table(sections.xla_table(study)),
            _lines(sections.xla_lines(study.xla)),
        ]
    return parts


def _next(study: Study) -> str:
    verdict = study.verdict
    parts = [escaped(verdict.why) if verdict.why else "", code(verdict.command) if verdict.command else ""]
    if verdict.instead:
        parts += [f"Or, predicted to be faster; quality risk {escaped(verdict.instead_quality)}:", code(verdict.instead)]
    return "\n\n".join(part for part in parts if part)


def _refused(studies: Sequence[Study]) -> str:
    return "\n".join(f"- {escaped(who)}: refused: {escaped(why)}" for who, why in view.refusals(studies))


def _lines(lines: Iterable[sections.Line]) -> str:
    return "\n".join(f"- **{escaped(label)}**: {escaped(text)}" for label, text in lines)


def _table(table: sections.Table) -> str:
    if not table.rows:
        return ""
    rule = ["---" if name in table.left else "---:" for name in table.head]
    rows = [[escaped(cell) for cell in row] for row in (table.head, *table.rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (rows[0], rule, *rows[1:]))
