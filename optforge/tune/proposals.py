"""Recipes that nobody wrote: what the sampler proposes, as candidates, and what became of them, told back to it."""

from __future__ import annotations

from collections.abc import Sequence

from optforge.tune import judge
from optforge.tune.candidate import HAND_WRITTEN, MEASURED, REFUSED, SEARCHED, WAITING, Candidate
from optforge.tune.options import Limits, TuneOptions
from optforge.tune.sampling import Sampler
from optforge.tune.space import Params, Space, name_of, steps_of

BATCH, ASKS = 5, 64
"""Proposals that are planned together, and questions to the sampler before its space counts as exhausted."""
NAME_LENGTH = 64


class Proposals:
    """One sampler over one space."""

    def __init__(self, space: Space, options: TuneOptions, limits: Limits) -> None:
        self.space, self.options, self.limits = space, options, limits
        self._sampler = Sampler(space, options)

    def ask(self, known: Sequence[Candidate]) -> list[Candidate]:
        """Recipes that are not among the `known` ones; none where the sampler has no new ones."""
        fresh: list[Candidate] = []
        for _ in range(ASKS):
            if len(fresh) == BATCH:
                break
            trial, params = self._sampler.ask()
            same = next((one for one in [*known, *fresh] if one.params == params), None)
            if same is not None:
                if same.state == MEASURED:  # the same point again: its figures count twice
                    self._sampler.tell(trial, judge.values(same, self.options.objectives))
                elif same.state != WAITING:
                    self._sampler.tell(trial, None)
            elif not self.space.holds(params) or not steps_of(params):
                self._sampler.tell(trial, None)
            else:
                fresh.append(self._proposed(trial, params, [*known, *fresh]))
        return fresh

    def told(self, candidate: Candidate) -> None:
        """What became of a candidate, whoever proposed it."""
        if candidate.params is None:
            return
        values = judge.values(candidate, self.options.objectives) if candidate.state == MEASURED else None
        if candidate.trial is None:
            self._sampler.add(candidate.params, values)
        else:
            self._sampler.tell(candidate.trial, values)

    def _proposed(self, trial: int, params: Params, known: Sequence[Candidate]) -> Candidate:
        limits, source = self._limits_for(params, known)
        name = name_of(params)
        taken = {one.name for one in known}
        short = name if len(name) <= NAME_LENGTH and name not in taken else f"{name[:NAME_LENGTH]}-{trial}"
        return Candidate(name=short, origin=SEARCHED, steps=steps_of(params), limits=limits, source=source, params=params, trial=trial)

    def _limits_for(self, params: Params, known: Sequence[Candidate]) -> tuple[dict[str, float], str]:
        """The user's limits; else those of the recipes that quantize the same way; else the strictest of all."""
        if self.limits.quality:
            return dict(self.limits.quality), "limits.*"
        written = [one for one in known if one.origin == HAND_WRITTEN and one.state != REFUSED and one.limits]
        same = [one for one in written if one.params is not None and one.params.get("quantize") == params.get("quantize")]
        chosen = same or written
        return judge.strictest([one.limits for one in chosen]), ", ".join(one.name for one in chosen)
