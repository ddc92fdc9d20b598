"""What a search leaves: tune.json (all of it), tune.md (to read), best.yaml (to share), a recipe for each point of a front.

The files are replaced whole after each job, so that a kill leaves the best so far.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from optforge import atomic, environment, safe_yaml
from optforge.errors import Problem, UserError
from optforge.report import figures
from optforge.report.codec import build
from optforge.report.markdown import table as markdown_table
from optforge.spec import Json, Ratio
from optforge.tune import judge
from optforge.tune.candidate import FAILED, HAND_WRITTEN, MEASURED, MISSED, PRUNED, REFUSED, WAITING, Candidate
from optforge.tune.search import Search, described

SCHEMA_VERSION = 1
FILE, PAGE, BEST, FRONT = "tune.json", "tune.md", "best.yaml", "pareto"
COLUMNS = ("recipe", "from", "state", "predicted", "measured", "vs as loaded", "final round", "peak memory", "weights", "quality", "why")
MAX_NEAREST = 5


def write(search: Search, folder: Path, *, command: str, about: dict[str, str]) -> None:
    """Replaces every file of a search in its folder.

    Args:
        command: as it was typed.
        about: model, hardware and workload by name.

    Raises:
        OutputError: the folder cannot be written.
    """
    best = search.best()
    values: dict[str, Json] = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        **about,
        "options": asdict(search.options),
        "limits": search.limits.all,
        "overrides": list(search.base),
        "versions": environment.versions(),
        "space": {**asdict(search.space), "points": search.space.points()},
        "candidates": [asdict(one) for one in search.candidates],
        "as_loaded": None if search.as_loaded is None else asdict(search.as_loaded),
        "best": None if best is None else best.name,
        "front": [one.name for one in search.front()],
        "winner": None if search.winner is None else search.winner.name,
        "why": search.why,
        "ended": search.ended,
        "final_round": search.final_round,
        "final_error": search.final_error,
        "seconds": round(search.seconds, 1),
    }
    atomic.write_json(folder / FILE, values)
    atomic.write_bytes(folder / PAGE, markdown(search, command=command, about=about).encode("utf-8", "replace"))
    if best is not None:
        atomic.write_bytes(folder / BEST, recipe_text(search, best, command=command, about=about).encode("utf-8"))
    if len(search.options.objectives) > 1:
        (folder / FRONT).mkdir(exist_ok=True)
        for stale in (folder / FRONT).glob("*.yaml"):
            stale.unlink()
        for one in search.front():
            text = recipe_text(search, one, command=command, about=about)
            atomic.write_bytes(folder / FRONT / f"{one.name}.yaml", text.encode("utf-8"))


def earlier(folder: Path) -> list[Candidate]:
    """The candidates of the search in `folder`.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    path = folder / FILE
    fix = "give the folder of a search, outputs/tunes/<date>_<time>"
    try:
        values = json.loads(path.read_text(encoding="ascii"))
        if values["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version {values['schema_version']!r}")
        return [build(Candidate, one) for one in values["candidates"]]
    except FileNotFoundError as error:
        raise UserError(Problem(where="tune.resume", what=f"there is no search in {folder}", fix=fix)) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(Problem(where="tune.resume", what=f"{path} cannot be read ({error})", fix=fix)) from error


def recipe_text(search: Search, candidate: Candidate, *, command: str, about: dict[str, str]) -> str:
    """A candidate as a recipe file, with what it was measured at in comments."""
    found = candidate.figures
    where = f"{about['model']}, {about['workload']}, {about['hardware']}"
    comments = [f"Found by optforge tune for {where}."]
    if found is not None:
        comments.append(f"Measured: {described(found)}.")
    if candidate.final is not None:
        comments.append(f"Final round: {_times(candidate.final)}.")
    if quality := quality_words(candidate):
        comments.append(f"Quality: {quality}.")
    if candidate.source:
        comments.append(
            f"From: {Path(candidate.source).name}." if candidate.origin == HAND_WRITTEN else f"Limits from: {candidate.source}."
        )
    comments.append(f"Command: {command}")
    return safe_yaml.dumps(search.recipe(candidate), comments)


def quality_words(candidate: Candidate) -> str:
    """The figures of quality that readers compare, in one line."""
    found = candidate.figures.quality if candidate.figures is not None and candidate.steps else {}
    parts = []
    if "perplexity_increase" in found:
        parts.append(f"perplexity {found['perplexity_increase']:+.1%}")
    if "kl" in found:
        parts.append(f"KL {found['kl']:.2g}")
    if "agreement" in found:
        parts.append(f"top-1 agreement {found['agreement']:.1%}")
    if not parts and "relative_error" in found:
        parts.append(f"relative error {found['relative_error']:.2g}")
    return ", ".join(parts)


def sentences(search: Search) -> list[str]:
    """What the search found, or what was missed, and what was not measured."""
    best = search.best()
    lines = []
    if best is not None:
        final = f", {_times(best.final)} in the final round" if best.final is not None else ""
        head = "winner" if search.winner is not None else "best so far"
        lines.append(f"{head}: {best.name}{final}{f': {search.why}' if search.why else ''}")
        reason = best.figures.quality_reason if best.figures is not None else None
        if reason:
            lines.append(f"{reason}: the limits of quality were not checked")
    else:
        lines += nearest(search)
    states = [one.state for one in search.candidates]
    counts = {
        "measured": sum(bool(one.results) for one in search.candidates),
        "over a limit": states.count(MISSED),
        "failed": states.count(FAILED),
        "not measured, since the plan predicts them to lose": states.count(PRUNED),
        "refused by the plan": states.count(REFUSED),
        "left for want of time": states.count(WAITING),
    }
    told = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    space = f" of {search.space.points():,} in the space" if search.options.sampler != "none" and search.space.kinds else ""
    lines.append(f"{len(states)} recipes{space}: {told or 'none'}")
    if search.ended:
        lines.append(f"ended after {figures.seconds(search.seconds)}: {search.ended}")
    return lines


def _times(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f}) as fast as the model as loaded"


def nearest(search: Search) -> list[str]:
    """What was missed where nothing meets the limits: those with the fewest misses first."""
    out = [one for one in search.everyone if one.state == MISSED]
    if not out:
        return ["nothing was measured to its end"]
    out.sort(key=lambda one: (len(one.why.split("; ")), judge.values(one, search.options.objectives)))
    return ["no recipe meets the limits", *(f"  {one.name} missed: {one.why}" for one in out[:MAX_NEAREST])]


def _cells(one: Candidate) -> dict[str, str]:
    found = one.figures
    low, high = one.foreseen.low_ms, one.foreseen.high_ms
    band = f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else ""
    return {
        "recipe": one.name,
        "from": one.origin,
        "state": one.state,
        "predicted": "" if one.foreseen.latency_ms is None else f"{figures.milliseconds(one.foreseen.latency_ms)}{band}",
        "measured": figures.milliseconds(found.latency_ms) if found else "",
        "vs as loaded": figures.ratio(found.ratio) if found else "",
        "final round": figures.ratio(one.final) if one.final else "",
        "peak memory": figures.nbytes(found.peak_memory_bytes) if found else "",
        "weights": figures.nbytes(found.weight_bytes) if found else "",
        "quality": quality_words(one),
        "why": one.why,
    }


def ordered(search: Search) -> list[Candidate]:
    """Best first, then whoever missed a limit, failed, or was not measured; the model as loaded among them."""
    places = {state: place for place, state in enumerate((MEASURED, MISSED, FAILED, PRUNED, WAITING, REFUSED))}
    return sorted(
        search.everyone, key=lambda one: (places[one.state], one is not search.winner, judge.values(one, search.options.objectives))
    )


def markdown(search: Search, *, command: str, about: dict[str, str]) -> str:
    """tune.md: what was asked for, what was found, every candidate."""
    rows = [_cells(one) for one in ordered(search) if one.state != REFUSED or one.origin == HAND_WRITTEN]
    limits = ", ".join(f"{key} {bound:g}" for key, bound in search.limits.all.items()) or "each recipe's own"
    lines = [
        f"# Tune: {about['model']}, {about['workload']}, {about['hardware']}",
        "",
        f"    {command}",
        "",
        f"Limits: {limits}. Objectives: {', '.join(search.options.objectives)}.",
        "",
        *(f"- {line.strip()}" for line in sentences(search)),
        "",
        "Predicted times are of the plan, with its error band; they are never ranked with measured ones. Ratios have their 95% interval.",
        "Proposals that the plan refuses stand in tune.json alone.",
        "",
        markdown_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows], [True] * len(COLUMNS)),
        "",
    ]
    return "\n".join(lines)


NARROW = ("recipe", "state", "measured", "vs as loaded", "final round", "quality")
PIPE_WIDTH = 200


def show(search: Search, folder: Path, console: Console | None = None) -> None:
    """The table, what was found, and what to type next."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in NARROW:
        table.add_column(name, justify="left" if name in ("recipe", "state", "quality") else "right")
    told = [one for one in ordered(search) if one.state not in (REFUSED, WAITING)]
    for one in told:
        cells = _cells(one)
        table.add_row(*(Text(cells[name]) for name in NARROW))
    console.print(table)
    for one in told:
        if one.state in (FAILED, PRUNED) or (one.state == MISSED and search.best() is not None):
            console.print(f"{one.name}: {one.why}", highlight=False, markup=False, soft_wrap=True)
    for line in sentences(search):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if search.best() is not None:
        console.print(f"recipe: {folder / BEST}", highlight=False, markup=False, soft_wrap=True)
        words = ["optforge", "run", f"recipe={folder / BEST}", *search.base]
        console.print(f"run it: {shlex.join(words)}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"all of it: {folder / PAGE}", highlight=False, markup=False, soft_wrap=True)
