"""Sections 1 to 4 of a plan as tables and lines of text: steps, memory, speed, kernels."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from optforge.plan.document import Fit, FitRow, Kernels, Missed, Operator, Speed, SpeedRow, StepPlan, Study, Xla
from optforge.report import figures

PARTS = ("weights", "kv_cache", "activations", "gradients", "optimizer", "workspace", "runtime")
BAD_KERNELS = ("refused", "over_shared_memory")
"""Statuses of kernels that cannot run on the target."""
XLA_FIGURES = ("device", "argument_bytes", "temporary_bytes", "in_place_bytes", "program_bytes", "compile_seconds")
SHOWN_SHARE = 0.01
"""Missed weights below this share of all bytes are in plan.json only."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows of text. `wide` names the columns that a narrow terminal leaves out."""

    head: Sequence[str]
    rows: list[list[str]]
    wide: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    """Columns of words; figures stand right."""
    marks: dict[tuple[int, str], str] = field(default_factory=dict)
    """(row, column) -> an outcome that colours the cell."""

    def narrowed(self) -> Table:
        kept = [index for index, name in enumerate(self.head) if name not in self.wide]
        rows = [[row[index] for index in kept] for row in self.rows]
        return Table(head=[self.head[index] for index in kept], rows=rows, left=self.left, marks=self.marks)


Line = tuple[str, str]
"""A label and what stands beside it."""


# --- 1: steps -----------------------------------------------------------------------------------------------------


def step_table(study: Study) -> Table:
    rows = [["as loaded", "", "", "", "", figures.nbytes(study.weight_bytes)]]
    for step in study.steps:
        left = sum(len(skipped.names) for skipped in step.skipped) + len(step.ignored)
        share = figures.percent(step.share)
        rows.append([step.name, step.use, f"{step.touched:,}", f"{left:,}" if left else "", share, figures.nbytes(step.weight_bytes)])
    head = ("step", "runs as", "changes", "leaves", "of the weights", "weights after")
    return Table(head=head, rows=rows, left=frozenset({"step", "runs as"}))


def step_lines(study: Study) -> Iterator[Line]:
    """What moved, what runs as something else, what was left and why."""
    for step in study.steps:
        if step.moved:
            yield "moved", f"{step.name} {step.moved}"
    for item in study.downgrades:
        yield "downgrade", f"{item.step}: {item.reason}"
        for one in item.alternatives[:3]:
            yield "instead", f"steps.{item.step}.use={one['use']}: {_speedup(one.get('predicted_speedup'))}, {one.get('note')}"
    for step in study.steps:
        yield from _left(step)
    for warning in study.warnings:
        yield "warning", warning


def _speedup(value: object) -> str:
    return f"{figures.named('speedup', value)} predicted" if value is not None else "speed unknown"


def _left(step: StepPlan) -> Iterator[Line]:
    for became, count in step.became.items():
        yield "changed", f"{step.name}: {counted(count, 'module')} {became}"
    for item in step.skipped:
        yield "skipped", f"{step.name}: {counted(len(item.names), 'module')} ({_some(item.names)}): {item.reason}"
    if step.ignored:
        yield "ignored", f"{step.name}: {_some(step.ignored)}, as the recipe says"
    if step.unmatched:
        yield "unmatched", f"{step.name}: {_some(step.unmatched)} matched nothing"
    for row in step.missed:
        if row.share >= SHOWN_SHARE:
            yield "missed", missed_line(step, row)
    for note in step.notes:
        yield "note", f"{step.name}: {note}"


def missed_line(step: StepPlan, row: Missed) -> str:
    """`weights: model.layers.*.experts.gate_up_proj, 32 of 128x4096x1536, 91.0% of the weight bytes: ...`."""
    shape = "x".join(map(str, row.shape))
    return f"{step.name}: {row.pattern}, {row.count} of {shape}, {figures.percent(row.share)} of the weight bytes: {row.reason}"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _some(names: Sequence[str], shown: int = 2) -> str:
    rest = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


# --- 2: fit -------------------------------------------------------------------------------------------------------


def fit_table(fit: Fit) -> Table:
    parts = [part for part in PARTS if any(part in row.parts for row in fit.rows)]
    parts += sorted({part for row in fit.rows for part in row.parts} - set(PARTS))
    head = ("after", *(part.replace("kv_", "KV ").replace("_", " ") for part in parts), "in all", "fits")
    rows = [
        [row.name, *(figures.nbytes(row.parts.get(part)) for part in parts), figures.nbytes(row.total_bytes), fits(row)] for row in fit.rows
    ]
    marks = {(index, "fits"): {True: "gain", False: "regression"}[row.fits] for index, row in enumerate(fit.rows) if row.fits is not None}
    return Table(head=head, rows=rows, left=frozenset({"after", "fits"}), wide=frozenset(head[2:-2]) - {"KV cache"}, marks=marks)


def degree_table(fit: Fit) -> Table:
    """The whole recipe over more devices: what each of them holds."""
    rows = [
        [row.name, str(row.devices), figures.nbytes(row.total_bytes), fits(row) if row.total_bytes is not None else row.at]
        for row in fit.degrees
    ]
    marks = {
        (index, "fits"): {True: "gain", False: "regression"}[row.fits] for index, row in enumerate(fit.degrees) if row.fits is not None
    }
    return Table(head=("sharded", "devices", "on each", "fits"), rows=rows, left=frozenset({"sharded", "fits"}), marks=marks)


def fits(row: FitRow) -> str:
    if row.fits is None:
        return figures.NONE
    spare = row.spare_bytes or 0.0
    return f"yes, {figures.nbytes(spare)} spare" if row.fits else f"no, {figures.nbytes(-spare)} too much"


def fit_lines(fit: Fit) -> Iterator[Line]:
    if fit.reason:
        yield "unknown", fit.reason
    if fit.rows and fit.rows[-1].at:
        yield "fullest", f"in {fit.rows[-1].at}"
    for change in fit.changes:
        total = f", then {figures.nbytes(change.total_bytes)}" if change.total_bytes is not None else ""
        yield "to fit", f"{change.what}{total}: {shlex.quote(change.override)}"
    for note in fit.notes:
        yield "note", note


# --- 3: speed -----------------------------------------------------------------------------------------------------


def speed_table(speed: Speed) -> Table:
    head = ("row", "time", "band", "speed", "MFU", "MBU", "bound", "vs above", "predicted")
    rows, marks = [], {}
    for index, row in enumerate(speed.rows):
        rows.append(
            [
                row.name,
                figures.milliseconds(row.latency_ms),
                band(row),
                rate(row),
                figures.percent(row.mfu),
                figures.percent(row.mbu),
                row.bound or figures.NONE,
                figures.named("speedup", row.vs_previous) if index else "",
                predicted(row, speed),
            ]
        )
        if row.outcome:
            marks[(index, "predicted")] = row.outcome
    left = frozenset({"row", "bound", "predicted"})
    return Table(head=head, rows=rows, left=left, wide=frozenset({"band", "MFU", "vs above"}), marks=marks)


def band(row: SpeedRow) -> str:
    """`7.9 to 9.4 ms`."""
    if row.low_ms is None or row.high_ms is None:
        return figures.NONE
    return f"{figures.significant(row.low_ms)} to {figures.milliseconds(row.high_ms)}"


def rate(row: SpeedRow) -> str:
    for value, unit in ((row.tokens_per_s, "tok/s"), (row.items_per_s, "items/s")):
        if value is not None:
            return f"{figures.rounded(value)} {unit}"
    return figures.NONE


def predicted(row: SpeedRow, speed: Speed) -> str:
    """`1.72 times: faster`, `0.50 times: slower`; what others are compared with says so."""
    if row.name == speed.reference:
        return "compared with"
    if row.vs_reference is None:
        return figures.NONE
    words = {"gain": "faster", "regression": "slower", "no_gain": "no gain"}
    word = words.get(row.outcome or "")
    return f"{row.vs_reference:.2f} times" + (f": {word}" if word else "")


def top_table(speed: Speed) -> Table:
    rows = [
        [
            item.name,
            item.module or "",
            f"{item.count:,}",
            figures.percent(item.share),
            figures.milliseconds(item.latency_ms),
            item.bound or figures.NONE,
            *_work(item),
        ]
        for item in speed.top
    ]
    head = ("kernel", "module", "count", "share", "time", "bound", "flops", "bytes")
    return Table(head=head, rows=rows, left=frozenset({"kernel", "module", "bound"}), wide=frozenset({"flops", "bytes", "time"}))


def _work(item: Operator) -> tuple[str, str]:
    return (f"{figures.prefixed(item.flops)}FLOP" if item.flops else ""), figures.nbytes(item.bytes)


def speed_lines(speed: Speed) -> Iterator[Line]:
    if speed.reason:
        yield "unknown", speed.reason
    for item in speed.unknown:
        where = f" in {item.module}" if item.module else ""
        yield "unknown", f"{item.name}, {counted(item.count, 'time')}{where}: {item.why}; its part is left out of every figure"
    if speed.known:
        yield "basis", speed.basis
    if speed.calibration is not None:
        source = speed.calibration
        of = f"measured on {source.device} itself" if source.exact else f"borrowed from {source.device}, the nearest that was measured"
        yield "calibration", f"{of}; {source.source}"
    else:
        yield "calibration", "none for this kind of device: the published peaks alone, an upper bound on speed"
    if speed.band is not None:
        found = speed.band
        yield (
            "error band",
            f"median {figures.percent(found.median_error)}, nine of ten within {figures.percent(found.p90_error)},"
            f" over {counted(found.points, 'measured point')}; {found.source}",
        )
    for note in speed.notes:
        yield "note", note


# --- 4: kernels ---------------------------------------------------------------------------------------------------


def kernel_table(kernels: Kernels) -> Table:
    rows, marks = [], {}
    for index, row in enumerate(kernels.rows):
        shared = figures.nbytes(row.shared_memory_bytes)
        if row.shared_memory_bytes is not None and row.shared_memory_limit:
            shared += f" of {figures.nbytes(row.shared_memory_limit)}"
        spills = "none" if row.spills == 0 else figures.named("spills", row.spills)
        status = row.status.replace("_", " ")
        rows.append([row.kernel, row.configuration, f"{row.modules:,}", status, figures.named("registers", row.registers), shared, spills])
        if row.status in BAD_KERNELS:
            marks[(index, "status")] = "regression"
    head = ("kernel", "configuration", "launches", "status", "registers", "shared memory", "spills")
    return Table(
        head=head, rows=rows, left=frozenset({"kernel", "configuration", "status"}), wide=frozenset({"configuration"}), marks=marks
    )


def kernel_lines(kernels: Kernels) -> Iterator[Line]:
    for row in kernels.rows:
        if row.reason and row.status != "library":
            yield row.status.replace("_", " "), f"{row.kernel}: {row.reason}"
    for note in kernels.notes:
        yield "note", note


def xla_table(study: Study) -> Table:
    """XLA's figures of one pass beside the roofline's of the whole recipe."""
    assert study.xla is not None
    own = study.xla.figures
    row = study.speed.rows[-1] if study.speed is not None and study.speed.rows else SpeedRow(name="", mode="")
    passes = study.speed.passes if study.speed is not None else 1
    total = study.fit.rows[-1].total_bytes if study.fit is not None and study.fit.rows else None
    per_pass = {
        key: None if (value := getattr(row, key)) is None else value / passes for key in ("latency_ms", "ideal_ms", "flops", "bytes")
    }
    rows = [
        ["time, no instruction waiting", figures.milliseconds(per_pass["ideal_ms"]), figures.milliseconds(own.get("optimal_ms"))],
        ["time, expected", figures.milliseconds(per_pass["latency_ms"]), figures.NONE],
        ["arithmetic", figures.named("flops", per_pass["flops"]), figures.named("flops", own.get("flops"))],
        ["bytes moved", figures.nbytes(per_pass["bytes"]), figures.nbytes(own.get("accessed_bytes"))],
        ["memory", figures.nbytes(total), figures.nbytes(own.get("peak_bytes"))],
    ]
    return Table(head=("one pass", "roofline, predicted", study.xla.label), rows=rows, left=frozenset({"one pass"}))


def xla_lines(xla: Xla) -> Iterator[Line]:
    if xla.reason:
        yield "unknown", xla.reason
    for name in XLA_FIGURES:
        if xla.figures.get(name) is not None:
            yield name.replace("_", " "), figures.named(name, xla.figures[name])
    for note in xla.notes:
        yield "note", note
