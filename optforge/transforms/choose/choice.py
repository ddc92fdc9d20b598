"""The measurements behind one assignment, and the decision that they lead to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

import torch
from torch import nn

from optforge.calibrate.samples import LANGUAGE, Samples, Taken
from optforge.measure.size import weight_bytes
from optforge.share import alias
from optforge.spec import Json, QualityResult
from optforge.transforms.base import Context
from optforge.transforms.choose import candidates, costs, judge, knapsack, remembered, search, times
from optforge.transforms.choose.candidates import Uniform
from optforge.transforms.choose.knapsack import Move, Option
from optforge.transforms.choose.table import Timed, describe, rows, summary

if TYPE_CHECKING:
    from optforge.transforms.choose import Choose

log = logging.getLogger("optforge")
TIMES = "time of each shape of layer"


class Choice:
    """One choice for one model in one run, which offers data and a workload."""

    def __init__(self, options: Choose, model: nn.Module, uniforms: Mapping[str, Uniform], ctx: Context) -> None:
        assert ctx.samples is not None and ctx.once is not None and ctx.backend is not None, "apply() refuses a context without them"
        self.options, self.model, self.uniforms, self.ctx = options, model, uniforms, ctx
        self.samples: Samples = ctx.samples
        self.device: torch.device = ctx.backend.torch_device()
        considered = {name for one in uniforms.values() for name in one.layers}
        self.layers = {name: module for name, module in model.named_modules() if name in considered}
        self.taken = self._taken()
        self.sites = times.sites(model, self.layers, ctx.once)
        self.judged: dict[str, str] = {}
        """What was measured -> its quality in words."""

    def _taken(self) -> Taken | None:
        """Samples; None for random weights, of which nothing says what rounding costs."""
        if self.samples.loaded.weights != "trained":
            return None
        return self.samples.take(self.options.samples, tokens=self.options.sample_tokens, step=self.ctx.step)

    def made(self) -> dict[str, Json]:
        """`assigned` (layer -> scheme), `table`, `notes` and `made` (when): remembered, or measured and then remembered."""
        path = remembered.place(self.options, self.model, self.taken, self.sites, self.ctx)
        kept = remembered.load(path, self.ctx)
        if kept is not None:
            kept["notes"] = [*kept["notes"], f"chosen on {kept['made']} and remembered; to measure again, delete {path}"]
            return kept
        found = self._measured()
        remembered.save(path, found, self.ctx)
        return found

    def _measured(self) -> dict[str, Json]:
        by_size = self.options.max_weight_bytes is not None
        timed = {} if by_size else self._times()
        estimated = self._costs(timed)
        assigned = self._smallest(estimated) if by_size else self._fastest(timed, estimated)
        table = rows(self.layers, self.sites, self.uniforms, timed=timed, estimated=estimated, assigned=assigned)
        notes = summary(table, self.judged, self.ctx)
        why = "random weights: no quality can be held to a limit, so time or size alone decided"
        notes.append(self.taken.note if self.taken is not None else why)
        made = datetime.now().astimezone().isoformat(timespec="seconds")
        return {"assigned": assigned, "table": [describe(row) for row in table], "notes": notes, "made": made}

    # --- what is measured ----------------------------------------------------------------------------------------

    def _times(self) -> dict[str, dict[str, times.Time]]:
        """Layer -> scheme -> its time; layers that a pass does not call are missing."""
        found: dict[str, dict[str, times.Time]] = {}
        groups = times.shapes(self.layers, self.sites)
        rounded = {scheme: one.layers for scheme, one in self.uniforms.items()}
        for index, names in enumerate(groups):
            self._tell(TIMES, index / len(groups))
            timed = times.measure(names, self.layers, rounded, self.sites, self.ctx)
            found |= dict.fromkeys(names, timed)
            shown = ", ".join(f"{scheme} {1e6 * time.seconds:.1f} us ({time.ratio:.2f}x)" for scheme, time in timed.items())
            log.info("step %s: %d layers like %s: %s", self.ctx.step, len(names), names[0], shown)
        self._tell(TIMES, 1.0)
        return found

    def _costs(self, timed: Timed) -> costs.Costs:
        """Of every layer under every scheme that wins somewhere, or under all where time does not count."""
        winning = {scheme for own in timed.values() for scheme, time in own.items() if time.low > 1.0}
        considered = set(self.uniforms) if self.options.max_weight_bytes is not None else winning
        if self.taken is None or not considered:
            return {}
        seen = costs.observe(
            self.model,
            self.layers,
            {scheme: one.layers for scheme, one in self.uniforms.items() if scheme in considered},
            self.taken.examples,
            device=self.device,
            classes=self.samples.loaded.family in (LANGUAGE, "image_classifier"),
            seed=self.ctx.seed,
            tell=self.ctx.tell,
        )
        return seen.costs()

    # --- what is decided -----------------------------------------------------------------------------------------

    def _fastest(self, timed: Timed, estimated: costs.Costs) -> dict[str, str]:
        """As far along the path as the limits allow; or one scheme alone, where that is faster still and within them."""
        options = {
            name: [
                Option(scheme=scheme, gain=self._gain(name, time), cost=estimated.get(name, {}).get(scheme, 0.0))
                for scheme, time in own.items()
                if time.low > 1.0
            ]
            for name, own in timed.items()
        }
        moves = knapsack.path(options)
        if self.taken is None or not moves:
            return knapsack.assignment(moves)
        strain = self._strain(moves)
        best = knapsack.assignment(moves[: search.furthest(moves, lambda count: strain(knapsack.assignment(moves[:count])))])
        for scheme, alone in _uniform(options):
            if self._total(alone, timed) > self._total(best, timed) and strain(alone) <= 1.0:
                self.judged[f"{scheme} alone is faster than any mixture within the limits"] = "it is taken"
                best = alone
        return best

    def _gain(self, name: str, time: times.Time) -> float:
        """Seconds that a pass of the workload takes less."""
        return self.sites[name].calls * (time.before - time.seconds)

    def _total(self, assigned: Mapping[str, str], timed: Timed) -> float:
        return sum(self._gain(name, timed[name][scheme]) for name, scheme in assigned.items())

    def _smallest(self, estimated: costs.Costs) -> dict[str, str]:
        """As little cost as the limit on the size of the weights leaves."""
        options = {
            name: [
                Option(scheme=scheme, gain=float(one.saved[name]), cost=estimated.get(name, {}).get(scheme, 0.0))
                for scheme, one in self.uniforms.items()
                if name in one.layers
            ]
            for name in self.layers
        }
        moves, taken = knapsack.path(options), 0
        need = weight_bytes(self.model) - (self.options.max_weight_bytes or 0)
        while need > 0 and taken < len(moves):
            need -= int(moves[taken].gain)
            taken += 1
        assigned = knapsack.assignment(moves[:taken])
        if self.taken is not None and assigned:
            self._strain(moves)(assigned)
        return assigned

    def _strain(self, moves: list[Move]) -> _Strain:
        """Measures assignments; a small change at the very beginning, which every later layer sees, tells what any makes of the KL."""
        assert self.taken is not None, "random weights are not judged"
        reference = self.ctx.reference if self.ctx.reference is not None else alias(self.model)
        found = _Strain(self, judge.judge_of(reference, self.samples, self.taken, self.device))
        order = list(self.layers)
        first = min(moves, key=lambda move: order.index(move.layer))  # of a layer's moves the first: its cost is the whole one
        found.floor = max(0.0, found.kl({first.layer: first.scheme}) - first.cost)
        return found

    def _tell(self, title: str, fraction: float) -> None:
        if self.ctx.tell is not None:
            self.ctx.tell(title, fraction)


def _uniform(options: Mapping[str, list[Option]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each scheme on all the layers that gain by it."""
    for scheme in dict.fromkeys(option.scheme for own in options.values() for option in own):
        yield scheme, {name: scheme for name, own in options.items() if any(option.scheme == scheme for option in own)}


class _Strain:
    """The share of the limits that assignments use up, each measured once."""

    def __init__(self, choice: Choice, judging: judge.Judge) -> None:
        self.choice, self.judging, self.floor = choice, judging, 0.0
        self.known: dict[frozenset[tuple[str, str]], float] = {}

    def __call__(self, assigned: Mapping[str, str]) -> float:
        key = frozenset(assigned.items())
        if key not in self.known:
            choice = self.choice
            result, broken = self.judging.evaluate(self._rounded(assigned))
            self.known[key] = judge.strain(self._cautious(result), broken, choice.ctx.limits)
            what = ", ".join(f"{scheme} on {len(names)}" for scheme, names in candidates.by_scheme(assigned).items())
            choice.judged[what] = f"{judge.words(result)}, {self.known[key]:.0%} of the limits"
            log.info("step %s: %s: %s", choice.ctx.step, what, choice.judged[what])
            choice._tell(f"quality of {what}: {choice.judged[what]}", 1.0)
        return self.known[key]

    def _cautious(self, result: QualityResult) -> QualityResult:
        return judge.cautious(result, floor=self.floor, tokens=self.choice.samples.quality.tokens)

    def kl(self, assigned: Mapping[str, str]) -> float:
        """The KL of an assignment; 0 where there is none."""
        return self.judging.evaluate(self._rounded(assigned))[0].kl or 0.0

    def _rounded(self, assigned: Mapping[str, str]) -> nn.Module:
        choice = self.choice
        model = alias(choice.model)
        steps = {scheme: one.step for scheme, one in choice.uniforms.items()}
        candidates.rewrite(model, assigned, steps, choice.ctx)
        return model
