"""The loop of a search: foresee, measure, promote, propose, until the time is up; then the final round.

Every measurement is a job of the sweep machinery, so a candidate that crashes, hangs or runs out of memory is a record and not
the end. After each one the best so far lies in best.yaml.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from optforge import atomic, config, preflight, safe_yaml
from optforge.measure.limits import nested
from optforge.spec import Json, Measure, Report
from optforge.sweep import schedule, store
from optforge.sweep.definition import finished
from optforge.sweep.session import Session, key_of
from optforge.sweep.store import DONE, Job
from optforge.tune import final, foresee, judge
from optforge.tune.candidate import (
    AS_LOADED,
    FAILED,
    HAND_WRITTEN,
    MEASURED,
    MISSED,
    PRUNED,
    REFUSED,
    WAITING,
    Candidate,
    Figures,
    Result,
)
from optforge.tune.options import Limits, TuneOptions
from optforge.tune.proposals import Proposals
from optforge.tune.space import Space, build, params_of

RUNGS = 2
"""Of successive halving, before the final round: `measure.max_s` divided by eta squared, then by eta."""
LEAST_ROUNDS = 4
LEAST_JOB_S, LEAST_PLAN_S = 20.0, 120.0
GOALS = {"latency": "latency", "memory": "memory", "size": "size", "quality": "latency"}


@dataclass(kw_only=True)
class Search:
    """One search while it runs, and what it has found."""

    session: Session
    options: TuneOptions
    limits: Limits
    base: tuple[str, ...]
    """Overrides of every candidate's run."""
    cwd: Path
    measure: Measure
    candidates: list[Candidate]
    """At first the hand-written ones."""
    changed: Callable[[Search], None]
    """Called when something is worth writing."""
    kept: dict[tuple[str, int], Job] = field(default_factory=dict)
    """Finished jobs of an earlier search: key of the candidate and rung -> the job."""
    space: Space = field(default_factory=Space)
    as_loaded: Candidate | None = None
    winner: Candidate | None = None
    why: str = ""
    """Why the winner is named."""
    ended: str = ""
    """Why the search ended."""
    final_round: dict[str, Json] | None = None
    final_error: str = ""

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self._proposals: Proposals | None = None

    # --- what others ask -----------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def remaining_s(self) -> float:
        return self.options.budget_s - self.seconds

    @property
    def everyone(self) -> list[Candidate]:
        """The candidates, and the model as loaded once it was measured."""
        return [*self.candidates, *([self.as_loaded] if self.as_loaded is not None else [])]

    def best(self) -> Candidate | None:
        """The winner, or who leads so far; the model as loaded where nothing is better than it."""
        if self.winner is not None:
            return self.winner
        return next(iter(judge.ranked(self.everyone, self.options.objectives)), None)

    def front(self) -> list[Candidate]:
        """The Pareto front of those that meet the limits, the best in the first objective first."""
        return judge.front_of([one for one in self.everyone if one.state == MEASURED], self.options.objectives)

    def recipe(self, candidate: Candidate) -> dict[str, Json]:
        """A candidate as the content of a recipe file."""
        words = ", ".join(str(step["use"]) for step in candidate.steps.values()) or "the model as loaded"
        return {
            "name": candidate.name,
            "description": words,
            "goal": GOALS[self.options.objectives[0]],
            "steps": candidate.steps,
            "limits": nested(candidate.limits),
        }

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Searches until the time is up, the space is exhausted, or enough was measured; then names the winner."""
        proposes = self.options.sampler != "none"
        seen = self._foresee(self.candidates, space_too=proposes)
        self.space = build(seen.declared, [one.steps for one in self.candidates])
        for one in self.candidates:
            one.params = params_of(one.steps, self.space)
        if proposes:
            self._proposals = Proposals(self.space, self.options, self.limits)
        self.changed(self)
        while (work := self._next()) is not None:
            self._measure(*work)
            self.changed(self)
        self._finish()
        self.changed(self)

    def _next(self) -> tuple[Candidate, int] | None:
        """Whom to measure next and how long; None when the search has ended."""
        while True:
            if not self._time_for_a_job():
                self.ended = f"the time is up (tune.budget_s={self.options.budget_s:g})"
                return None
            self._prune()
            written = [one for one in self.candidates if one.state == WAITING and one.origin == HAND_WRITTEN]
            if written and self._may_measure():
                return _soonest(written), 0
            better = judge.promoted(self.candidates, self.options.objectives, eta=self.options.eta, rungs=RUNGS)
            if better is not None:
                return better, better.tried + 1
            if not self._may_measure():
                self.ended = f"{self.options.candidates} recipes were measured (tune.candidates)"
                return None
            waiting = [one for one in self.candidates if one.state == WAITING]
            if waiting:
                return _soonest(waiting), 0
            if not self._propose():
                self.ended = "every recipe of the search was tried" if self._proposals is not None else "every given recipe was measured"
                return None

    def _may_measure(self) -> bool:
        tried = sum(bool(one.results) or one.state == FAILED for one in self.candidates)
        return self.options.candidates is None or tried < self.options.candidates

    def _time_for_a_job(self) -> bool:
        """Whether one more job leaves time for the final round; the first is run in any case."""
        if not self.session.sweep.jobs:
            return True
        return self.remaining_s - self._final_s() > 0.8 * self._job_s(default=0.0)

    def _job_s(self, default: float) -> float:
        """Seconds that a job takes: the median so far."""
        taken = [job.seconds for job in self.session.sweep.jobs if job.seconds]
        return statistics.median(taken) if taken else default

    def _final_s(self) -> float:
        """Seconds that the final round will take: a job's, and the timing of all finalists; none where nobody is left for it."""
        if not any(one.state == MEASURED for one in self.candidates):
            return 0.0
        return 1.2 * self._job_s(default=self.options.budget_s / 6) + self.measure.max_s * (self.options.finalists + 1) / 2

    # --- what the plan says --------------------------------------------------------------------------------------

    def _foresee(self, candidates: Sequence[Candidate], *, space_too: bool = False) -> foresee.Seen:
        self._say(f"plan {len(candidates)} recipes: {', '.join(one.name for one in candidates)}")
        for one in candidates:
            self._write(one)
        overrides = [self._overrides(one, {}) for one in candidates]
        seen = foresee.look(overrides, cwd=self.cwd, timeout_s=max(self.remaining_s, LEAST_PLAN_S), space_too=space_too)
        for line in seen.said:
            self._say(line)
        for one, found in zip(candidates, seen.foreseen, strict=True):
            one.foreseen = found
            if found.refused:
                one.state, one.why = REFUSED, "; ".join(str(problem) for problem in found.refused)
                self._told(one)
        return seen

    def _prune(self) -> None:
        """Takes out whoever the plan says cannot win, against the best that is measured by now."""
        best = self.best()
        for one in self.candidates:
            if one.state == WAITING and (why := judge.why_not(one.foreseen, best, self.options, self.limits)):
                one.state, one.why = PRUNED, why
                self._told(one)
                self._say(f"not measured: {one.name}: {why}")

    def _propose(self) -> bool:
        """Takes up recipes that nobody tried, and plans them; False where there are no new ones."""
        fresh = self._proposals.ask(self.candidates) if self._proposals is not None else []
        self.candidates += fresh
        if fresh:
            self._foresee(fresh)
        return bool(fresh)

    # --- jobs ----------------------------------------------------------------------------------------------------

    def _measure(self, candidate: Candidate, rung: int) -> None:
        job = self.kept.pop((candidate.key, rung), None)
        if job is not None:
            self.session.display.kept(job)
        else:
            job = self._run(candidate, rung)
        report = finished(self.session.folder / job.folder)
        candidate.tried = rung
        if rung and job.status == store.TIMEOUT:  # what the shorter measurement found still stands
            candidate.why = f"rung {rung} {job.error}"
            return
        if job.status != DONE or report is None:
            candidate.state, candidate.why = FAILED, f"{job.status}: {job.error or 'no report'}"
            if rung == 0:
                self._told(candidate)
            return
        self._judge(candidate, Result(rung=rung, job=job.index, figures=judge.figures(report)), report)
        if self.as_loaded is None:
            self._take_baseline(report, job)

    def _run(self, candidate: Candidate, rung: int) -> Job:
        index = len(self.session.sweep.jobs)
        folder = f"{index}_{preflight.slug(candidate.name, 48)}" + (f"_rung{rung}" if rung else "")
        job = Job(index=index, name=candidate.name, overrides=self._overrides(candidate, self._settings(rung)), folder=folder)
        self.session.sweep.jobs.append(job)
        self.session.options = replace(self.session.options, timeout_s=self._timeout_s())
        schedule.run(self.session, [job])
        return job

    def _settings(self, rung: int) -> dict[str, str]:
        """What a rung measures and for how long. Quality does not depend on time: the first rung settles it."""
        share = self.options.eta ** (RUNGS - rung)
        settings = {
            "measure.attribution": "ends",
            "measure.max_s": f"{self.measure.max_s / share:g}",
            "measure.min_rounds": str(max(LEAST_ROUNDS, self.measure.min_rounds // share)),
            "quality.generate": "0",
        }
        return settings | ({"quality.enabled": "false"} if rung else {})

    def _timeout_s(self) -> float:
        """So long that no honest candidate is cut off, and so short that none eats the others' time."""
        usual = self._job_s(default=0.0)
        fair = max(3 * usual, self.options.budget_s / 8) if usual else self.options.budget_s / 2
        return max(min(fair, self.remaining_s - self._final_s()), LEAST_JOB_S)

    def _judge(self, candidate: Candidate, result: Result, report: Report) -> None:
        if candidate.results:
            first = candidate.results[0].figures
            result.figures.quality, result.figures.quality_reason = first.quality, first.quality_reason
        candidate.results.append(result)
        missed = judge.missed(result.figures, report.quality, self.limits, judged=result.rung == 0)
        candidate.state, candidate.why = (MISSED, "; ".join(missed)) if missed else (MEASURED, "")
        if result.rung == 0:
            self._told(candidate)
        if self.best() is candidate:
            self._say(f"best so far: {candidate.name}, {described(result.figures)}")
        elif missed:
            self._say(f"out: {candidate.name}: {candidate.why}")

    def _take_baseline(self, report: Report, job: Job) -> None:
        """The model as loaded stands among the candidates: whoever is slower does not win."""
        found = judge.baseline_figures(report)
        if found is None:
            return
        one = Candidate(name="as_loaded", origin=AS_LOADED, steps={}, results=[Result(rung=RUNGS, job=job.index, figures=found)])
        missed = judge.missed(found, None, self.limits, judged=False)
        one.state, one.why = (MISSED, "; ".join(missed)) if missed else (MEASURED, "")
        self.as_loaded = one

    def _told(self, candidate: Candidate) -> None:
        """What became of a candidate, for the sampler."""
        if self._proposals is not None:
            self._proposals.told(candidate)

    # --- the final round -----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        chosen = judge.finalists(self.candidates, self.options.objectives, self.options.finalists)
        if not chosen:
            return
        baseline_fits = self.as_loaded is not None
        if baseline_fits:
            self._say(f"final round: {', '.join(one.name for one in chosen)} and the model as loaded, in the same rounds")
            self._final(chosen)
        else:
            self.final_error = "the model as loaded does not fit the device, so there is no round that all share"
        self.winner, self.why = self._named(chosen)

    def _final(self, chosen: Sequence[Candidate]) -> None:
        folder = preflight.claim(self.session.folder / final.FOLDER, "output_dir")
        (folder / final.RESULT).unlink(missing_ok=True)
        settings = {"measure.attribution": "ends", "quality.enabled": "false"}
        runs = [(one.name, self._overrides(one, settings)) for one in chosen]
        final.write_request(folder, cwd=self.cwd, runs=runs)
        limit_s = max(self.remaining_s, 2 * self._final_s())
        job = final.run(folder, index=len(self.session.sweep.jobs), slot=self.session.slots[0], limit_s=limit_s)
        self.final_round = final.read_result(folder)
        if self.final_round is None:
            self.final_error = f"{job.status}: {job.error}"
            return
        for name, ratio in final.ratios(self.final_round).items():
            next(one for one in chosen if one.name == name).final = ratio

    def _named(self, chosen: Sequence[Candidate]) -> tuple[Candidate, str]:
        """The winner, and why."""
        if self.final_round is None:
            best = self.best()
            assert best is not None, "a finalist was measured"
            return best, f"the best of its own measurement; there was no final round ({self.final_error})"
        if self.options.objectives[0] != "latency":
            everyone = [*chosen, *([self.as_loaded] if self.as_loaded is not None else [])]
            return judge.ranked(everyone, self.options.objectives)[0], f"the best in {self.options.objectives[0]}"
        name, why = final.winner(self.final_round, [one.name for one in chosen if one.origin == HAND_WRITTEN])
        won = next(one for one in chosen if one.name == name)
        if self.as_loaded is not None and self.as_loaded.state == MEASURED and won.final is not None and won.final.value <= 1.0:
            return self.as_loaded, f"no recipe that was tried is faster; the nearest is {name} with {won.final.value:.2f} times"
        return won, why

    # --- files and words -----------------------------------------------------------------------------------------

    def _write(self, candidate: Candidate) -> None:
        path = self._path(candidate)
        preflight.claim(path.parent, "output_dir")
        atomic.write_bytes(path, safe_yaml.dumps(self.recipe(candidate)).encode("utf-8"))

    def _path(self, candidate: Candidate) -> Path:
        return self.session.folder / "recipes" / f"{candidate.name}.yaml"

    def _overrides(self, candidate: Candidate, settings: dict[str, str]) -> list[str]:
        kept = [word for word in self.base if key_of(word) not in settings]
        words = [f"recipe={self._path(candidate)}", *kept, *(f"{key}={value}" for key, value in settings.items())]
        return list(config.parse(words, cwd=self.cwd).overrides)

    def _say(self, line: str) -> None:
        self.session.display.console.print(line, highlight=False, markup=False, soft_wrap=True)


def described(found: Figures) -> str:
    """`1.63 times the model as loaded, 12.3 ms`."""
    parts = [f"{found.ratio.value:.2f} times as fast as the model as loaded"] if found.ratio is not None else []
    parts += [f"{found.latency_ms:.3g} ms"] if found.latency_ms is not None else []
    return ", ".join(parts)


def _soonest(candidates: Sequence[Candidate]) -> Candidate:
    """The one that is predicted to be fastest; those without a prediction last, in their order."""
    return min(candidates, key=lambda one: (one.foreseen.latency_ms is None, one.foreseen.latency_ms or 0.0))
