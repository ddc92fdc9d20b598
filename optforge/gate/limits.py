"""Limits as people write them: `latency_ms.p50 <= +3%`.

A sign means *more than the baseline*: `+3%` by so much of it, `+0.01` by that difference. Without a sign the number is the limit
itself, in the figure's own unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optforge import safe_yaml
from optforge.errors import ConfigError, Problem, near
from optforge.spec import Json

RELATIVE, DIFFERENCE, ABSOLUTE = "relative", "difference", "absolute"
_LIMIT = re.compile(
    r"\s*(?P<path>[A-Za-z_][\w.]*)\s*(?P<sense><=|>=)\s*(?P<number>(?P<sign>[+-]?)(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)\s*(?P<percent>%?)\s*"
)
EXAMPLE = "latency_ms.p50 <= +3%"
FORM = f"write it like '{EXAMPLE}', 'quality.kl <= +0.01' or 'peak_memory_bytes <= 2e9'"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit on one figure."""

    path: str
    """Where the figure stands: `latency_ms.p50`, `quality.perplexity`, `peak_memory_bytes`, `speedup.vs_baseline`."""
    upper: bool
    """Whether the figure must stay at or below `bound`; else at or above it."""
    bound: float
    kind: str
    """`relative`: `bound` is the change as a fraction of the baseline; `difference`: the change itself; `absolute`: the figure."""
    text: str
    """As it was written, blanks evened out."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a gate holds a run to."""

    limits: tuple[Limit, ...]
    run_to_run: float = 0.01
    """Standard deviation between runs of an unchanged program, as a fraction of its time, that is assumed as long as there are few
    runs to tell."""
    require_target: bool = True
    """Refuse figures of a stand-in for the target."""


def parse(text: str, where: str = "--limit") -> Limit:
    """One limit.

    Raises:
        ConfigError: it is not of the form.
    """
    found = _LIMIT.fullmatch(text)
    if found is None or not math.isfinite(float(found["number"])):
        raise ConfigError(Problem(where=where, what=f"{text!r} is no limit", fix=FORM))
    signed, percent = bool(found["sign"]), bool(found["percent"])
    kind = ABSOLUTE if not signed else RELATIVE if percent else DIFFERENCE
    written = f"{found['path']} {found['sense']} {found['number']}{found['percent']}"
    return Limit(
        path=found["path"], upper=found["sense"] == "<=", bound=float(found["number"]) / (100 if percent else 1), kind=kind, text=written
    )


def rules(file: Path | None, texts: Sequence[str]) -> Rules:
    """The rules of a file, with the limits of the command line after them.

    Raises:
        ConfigError: every problem at once.
    """
    problems: list[Problem] = []
    values = _values(file, problems)
    written = [(text, str(file)) for text in values.get("limits", [])] + [(text, "--limit") for text in texts]
    limits: dict[str, Limit] = {}
    for text, where in written:
        try:
            limit = parse(str(text), where)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if limit.text in limits:
            problems.append(Problem(where=where, what=f"{limit.text!r} stands there twice", fix="leave one out"))
        limits[limit.text] = limit
    if not written and not problems:
        problems.append(Problem(where="optforge gate", what="has no limit to hold", fix=f"give --limits FILE, or --limit '{EXAMPLE}'"))
    if problems:
        raise ConfigError(*problems)
    run_to_run = values.get("run_to_run", Rules.run_to_run)
    return Rules(limits=tuple(limits.values()), run_to_run=run_to_run, require_target=values.get("require_target", True))


def _values(file: Path | None, problems: list[Problem]) -> dict[str, Json]:
    """The keys of a limits file that are as they should be; what is not becomes a problem."""
    if file is None:
        return {}
    found = safe_yaml.read(file)
    if not isinstance(found, dict):
        raise ConfigError(Problem(where=str(file), what="must be a mapping", fix=f"write 'limits:' and below it '- {EXAMPLE}'"))
    known = ("limits", "run_to_run", "require_target")
    values: dict[str, Json] = {}
    for key, written in found.items():
        if key not in known:
            fix = near(key, known) or f"the keys are {', '.join(known)}"
            problems.append(Problem(where=f"{file}: {key}", what="unknown key", fix=fix))
            continue
        value = _fraction(written) if key == "run_to_run" else written
        wanted, right = {
            "limits": ("a list of limits", isinstance(value, list) and all(isinstance(text, str) for text in value)),
            "run_to_run": ("a fraction between 0 and 1, such as 2%", isinstance(value, float) and 0 < value < 1),
            "require_target": ("true or false", isinstance(value, bool)),
        }[key]
        if right:
            values[key] = value
        else:
            problems.append(Problem(where=f"{file}: {key}", what=f"must be {wanted}", fix=f"it is {written!r}"))
    return values


def _fraction(value: Json) -> Json:
    """`2%` and `0.02` as 0.02."""
    if isinstance(value, str) and re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*%", value):
        return float(value.rstrip("% ")) / 100
    return value
