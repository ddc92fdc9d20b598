"""Two versions of a program against each other, in one session.

Each pair is two fresh processes, one of either version, whose calls take turns. The ratio of a round has the drift of the
machine cancelled in it; the ratio of a pair has the luck of two processes in it; several pairs tell how much that is.
"""

from __future__ import annotations

import json
import statistics as stats
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from optforge import atomic
from optforge.compare import conditions, metrics
from optforge.errors import ConfigError, Problem
from optforge.gate import figures, interleave, judge, stored
from optforge.gate import statistics as estimates
from optforge.gate.judge import Finding, Judgement
from optforge.gate.limits import ABSOLUTE, DIFFERENCE, Limit, Rules
from optforge.gate.side import Side
from optforge.measure import contention
from optforge.report import store
from optforge.report.figures import milliseconds, named
from optforge.spec import Json, Report

T = TypeVar("T")

PREPARE_S, SAMPLE_S = 7200.0, 600.0
"""Seconds after which a side that says nothing counts as hung."""
PAIRS = 5
LEAST_PAIRS = 3
"""Fewer processes say nothing of how much they differ."""
MOST = 2
"""How many times as many pairs are run while a limit is undecided."""
LEAST_ROUNDS = 8
SAME = ("workload", "data")
"""Conditions that must be alike on both sides; to find out about any other is what the mode is for."""
RESULT = "gate.json"


@dataclass(frozen=True, kw_only=True)
class Version:
    """One side: an interpreter, the folder it starts in, and the overrides of its run."""

    name: str
    python: Path
    cwd: Path
    overrides: tuple[str, ...]

    @property
    def described(self) -> str:
        """What sets it apart, for a reader; a git worktree by its commit."""
        commit = _commit(self.cwd)
        return f"{self.python}, {self.cwd}{f' at {commit}' if commit else ''}, {' '.join(self.overrides)}"


@dataclass(kw_only=True)
class Pair:
    """Two processes in turns: the seconds of each round, and the report of each."""

    a_s: list[float]
    b_s: list[float]
    a: Report
    b: Report
    load: dict[str, Json] = field(default_factory=dict)

    @property
    def contended(self) -> bool:
        return bool(self.load.get("contended"))


def measure(a: Version, b: Version, rules: Rules, *, pairs: int, folder: Path, tell: Callable[[str], object]) -> list[Pair]:
    """Runs `pairs` pairs, each in a folder of its own below `folder`, and up to MOST times as many while a limit is undecided.

    The side that starts first takes turns.

    Raises:
        UserError: a side refuses its run; says which side.
        ChildFailed, OutOfMemory: a side has crashed, ended, hung, or ran out of memory.
    """

    def run(index: int) -> Pair:
        beyond = "" if index < pairs else ", since a limit is undecided"
        tell(f"pair {index + 1} of {pairs if index < pairs else MOST * pairs}{beyond}")
        return _pair((a, b) if index % 2 == 0 else (b, a), rules, folder / f"pair_{index + 1}", tell, quality=index == 0)

    return until_decided(run, pairs, lambda found: not _undecided(gate(found, rules)))


def until_decided(run: Callable[[int], T], pairs: int, decided: Callable[[list[T]], bool]) -> list[T]:
    """What `run` gives for each index below `pairs`, and for up to MOST times as many until `decided`."""
    found = [run(index) for index in range(pairs)]
    while len(found) < MOST * pairs and not decided(found):
        found.append(run(len(found)))
    return found


def _undecided(judgement: Judgement) -> bool:
    """Whether more pairs could tell: a limit is undecided, and none is missed."""
    return not judgement.failed and any(finding.verdict == judge.UNDECIDED for finding in judgement.findings)


def _pair(versions: tuple[Version, Version], rules: Rules, folder: Path, tell: Callable[[str], object], *, quality: bool) -> Pair:
    first, second = versions
    with _started(first, rules, folder, quality) as one:
        told = one.ready(PREPARE_S)["measure"]
        with _started(second, rules, folder, quality) as two:
            two.ready(PREPARE_S)
            watch = contention.CpuWatch()
            samples = interleave.alternate(
                [(one, "candidate"), (two, "candidate")],
                least=max(LEAST_ROUNDS, int(told["min_rounds"])),
                max_s=float(told["max_s"]),
                enough=lambda found: steady(found, float(told["steady"])),
                timeout_s=SAMPLE_S,
            )
            load = watch.read()
    reports = {version.name: store.read(folder / version.name) for version in versions}
    # the second one's own watch has seen the first one on the device, so only the first one's counts
    load["contended"] = bool(load.get("contended")) or bool(reports[first.name].environment.get("contended"))
    by_name = {version.name: values for version, values in zip(versions, samples, strict=True)}
    pair = Pair(a_s=by_name["a"], b_s=by_name["b"], a=reports["a"], b=reports["b"], load=load)
    tell(f"  A {milliseconds(1e3 * stats.median(pair.a_s))}, B {milliseconds(1e3 * stats.median(pair.b_s))}, {len(pair.a_s)} rounds")
    return pair


def _started(version: Version, rules: Rules, folder: Path, quality: bool) -> Side:
    own = folder / version.name
    own.mkdir(parents=True)
    asked = {
        "argv": version.overrides,
        "folder": str(own),
        "quality": quality,
        "require_target": rules.require_target,
        "command": f"optforge gate --ab, side {version.name.upper()}: {version.described}",
    }
    command = [str(version.python), "-m", "optforge.gate.worker", json.dumps(asked)]
    return Side(version.name.upper(), command, cwd=version.cwd, log=own / "side.log")


def steady(samples: Sequence[Sequence[float]], within: float) -> bool:
    """Whether half the 95% interval of the rounds' median ratio is within a fraction of it."""
    ratios = [b / a for a, b in zip(*samples, strict=True)]
    ends = metrics.interval(ratios)
    return ends is not None and (ends[1] - ends[0]) / 2 <= within * stats.median(ratios)


def gate(pairs: Sequence[Pair], rules: Rules, *, strict: bool = False, facts: Mapping[str, str] | None = None) -> Judgement:
    """Holds side B to the rules, with side A as what it was before.

    Raises:
        UserError: a limit is about a figure that a side does not have, or the sides ran different workloads.
    """
    notes = _notes(pairs)
    news, bases = [pair.b for pair in pairs], [pair.a for pair in pairs]
    findings = []
    for limit in stored.require(rules.limits, news[:1], bases[:1]):
        if limit.path in figures.TIMES:
            findings.append(_timed(limit, pairs))
        else:
            count = 1 if limit.path.startswith(f"{figures.QUALITY}.") else len(pairs)  # quality is taken once
            findings.append(stored.hold(limit, news[:count], bases[:count], rules, notes))
    findings += stored.own_limits(news)
    return Judgement(title="gate --ab", findings=findings, notes=list(dict.fromkeys(notes)), strict=strict, facts=dict(facts or {}))


def _timed(limit: Limit, pairs: Sequence[Pair]) -> Finding:
    """The verdict on a time, from the pairs' own rounds."""
    a, b = ([_own(limit.path, samples, report) for samples, report in sides] for sides in _sides(pairs))
    count = f"{len(pairs)} pairs of processes"
    if limit.kind == ABSOLUTE:
        return judge.hold(limit, estimates.of_values(b), count)
    told = [named(judge.unit_of(limit.path), stats.fmean(values)) for values in (b, a)]
    detail = f"B {told[0]}, A {told[1]}, {count}"
    if limit.kind == DIFFERENCE:
        return judge.hold(limit, estimates.difference(b, a), detail)
    return judge.hold(limit, estimates.of_pairs([ratio(pair.a_s, pair.b_s, limit.path) for pair in pairs]), detail)


def ratio(a_s: Sequence[float], b_s: Sequence[float], path: str) -> float:
    """B over A of one pair, from its rounds; of a rate, where the path is one."""
    values = np.asarray(b_s) / np.asarray(a_s)
    if path.endswith("p90"):  # a tail of ratios would be A's luck as much as B's
        return float(np.quantile(b_s, 0.9) / np.quantile(a_s, 0.9))
    found = float(figures.statistic(path)(values))
    return 1 / found if path.endswith("_per_s") else found


def _sides(pairs: Sequence[Pair]) -> tuple[list[tuple[list[float], Report]], list[tuple[list[float], Report]]]:
    return [(pair.a_s, pair.a) for pair in pairs], [(pair.b_s, pair.b) for pair in pairs]


def _own(path: str, samples: Sequence[float], report: Report) -> float:
    """A time of one side in its own unit."""
    found = float(figures.statistic(path)(np.asarray(samples)))
    return float(report.workload.get("units") or 1) / found if path.endswith("_per_s") else 1e3 * found


def _notes(pairs: Sequence[Pair]) -> list[str]:
    """What differs between the sides, and whether the device was shared.

    Raises:
        ConfigError: the sides ran different workloads.
    """
    sides = {"A": conditions.conditions(pairs[0].a), "B": conditions.conditions(pairs[0].b)}
    found = [item for item in conditions.differences(sides) if item.condition != conditions.CONTENDED]
    problems = [
        Problem(where=item.condition, what=f"differs between the sides: {item}", fix="give both the same")
        for item in found
        if item.condition in SAME
    ]
    if problems:
        raise ConfigError(*problems)
    notes = [f"{item.condition} differs: {item}" for item in found]
    shared = sum(pair.contended for pair in pairs)
    return [*notes, f"something else used the device during {shared} of {len(pairs)} pairs"] if shared else notes


def write(folder: Path, pairs: Sequence[Pair], judgement: Judgement) -> None:
    """Keeps every sample and every finding in `folder`/gate.json."""
    values = {
        "schema_version": 1,
        "facts": judgement.facts,
        "notes": judgement.notes,
        "findings": [{"limit": one.limit, "verdict": one.verdict, "found": one.found, "detail": one.detail} for one in judgement.findings],
        "pairs": [{"a_s": pair.a_s, "b_s": pair.b_s, "load": pair.load} for pair in pairs],
    }
    atomic.write_json(folder / RESULT, values)


def _commit(folder: Path) -> str:
    """The short commit of a git worktree, `+` where files differ from it; empty where there is none."""
    try:
        done = subprocess.run(["git", "-C", str(folder), "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git, so nobody knows
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
