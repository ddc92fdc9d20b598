"""Measures a model's layers: one pass of gradients for all of them, then the worst alone, the whole, and the whole without the worst.

Steps of the recipe that come before quantization are applied first, so that the layers are those that a quantize step would see.
Nothing is rounded for good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import torch
from torch import Tensor, nn

from optforge.backends.base import Backend
from optforge.calibrate.samples import LANGUAGE, Samples, Taken
from optforge.errors import ConfigError, PlanError, Problem
from optforge.measure.quality import reason_against
from optforge.measure.size import nbytes, weight_bytes
from optforge.models.base import Example, Loaded, Tell
from optforge.plan.make import Plan
from optforge.progress import Progress
from optforge.schemes import ENTRIES
from optforge.sensitivity import advice
from optforge.sensitivity.findings import Advice, Figure, Layer, Left, Sensitivity
from optforge.share import alias
from optforge.spec import QualityResult, Run
from optforge.transforms.base import Context, Phase
from optforge.transforms.choose import Choose, candidates, costs, judge
from optforge.transforms.choose.candidates import Uniform
from optforge.transforms.quantize import Tied

STEP = "sensitivity"
DEFAULT_LIMITS = {
    "causal_lm": {"max_perplexity_increase": 0.01},
    "image_classifier": {"min_agreement": 0.99},
    "module": {"max_relative_error": 0.02},
}
"""Held where the recipe sets none."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked for."""

    schemes: tuple[str, ...] = ("int8_weight", "int8_dynamic", "int4_weight")
    samples: int = 8
    sample_tokens: int = 512
    check: int = 3
    """Layers of each scheme that are measured alone, the worst by the estimate."""


def require(run: Run, options: Options) -> None:
    """Refuses before any weight is loaded.

    Raises:
        ConfigError: random weights, random data, unknown schemes, counts below 1; all at once.
    """
    problems = []
    reason = reason_against(run.model.source.skeleton(), run.data.source, run.quality)
    if reason is not None:
        fix = "give trained weights and real data, such as model=smollm2_135m data=wikipedia"
        problems.append(Problem(where="sensitivity", what=f"cannot be measured: {reason}", fix=fix))
    for name in options.schemes:
        if name not in ENTRIES:
            problems.append(Problem(where="--schemes", what=f"unknown scheme {name!r}", fix=f"known: {', '.join(ENTRIES)}"))
    for key, value in (("--samples", options.samples), ("--tokens", options.sample_tokens)):
        if value < 1:
            problems.append(Problem(where=key, what=f"must be 1 or more, is {value}"))
    if options.check < 0:
        problems.append(Problem(where="--check", what=f"must be 0 or more, is {options.check}"))
    if not options.schemes:
        problems.append(Problem(where="--schemes", what="names no scheme", fix="--schemes int8_dynamic,int4_weight"))
    if problems:
        raise ConfigError(*problems)


def measure(plan: Plan, options: Options, progress: Progress) -> Sensitivity:
    """The findings. `require` has passed.

    Raises:
        UserError: a step before quantization, or the quantize step itself, refuses the model.
    """
    run = plan.run
    with plan.backend.session(run.seed):
        with progress.stage(f"load {run.model.name}"):
            loaded: Loaded = run.model.source.load(run.seed, None)
            model: nn.Module = plan.backend.place(loaded.module.eval())
        return _Measuring(plan, options, progress, loaded, model).findings()


class _Measuring:
    """One model on the device."""

    def __init__(self, plan: Plan, options: Options, progress: Progress, loaded: Loaded, model: nn.Module) -> None:
        self.plan, self.options, self.progress, self.loaded = plan, options, progress, loaded
        self.backend: Backend = plan.backend
        self.device = self.backend.torch_device()
        self.samples = Samples.of(plan.run, loaded)
        self.ctx = Context(
            step=STEP,
            target=plan.target,
            device=plan.device,
            backend=plan.backend,
            workload=plan.run.workload.kind,
            seed=plan.run.seed,
            example=plan.run.workload.source.example(loaded, self.device),
            samples=self.samples,
        )
        self.model = self._before_quantization(model)
        self.limits = dict(plan.run.recipe.limits) or DEFAULT_LIMITS[loaded.family]
        self.judged: dict[frozenset[str], QualityResult] = {}

    def _before_quantization(self, model: nn.Module) -> nn.Module:
        """The tree that a quantize step would be given."""
        tree = alias(model)
        for planned in self.plan.steps:
            if planned.phase < Phase.QUANTIZE:
                with self.progress.stage(f"step {planned.name} ({planned.step.use})"):
                    planned.step.transform.apply(tree, self.ctx)
        return tree

    def findings(self) -> Sensitivity:
        taken = self.samples.take(self._count(), tokens=self.options.sample_tokens, step=STEP)
        steps = Choose(schemes=list(self.options.schemes), tied=Tied.untie).steps(self.plan.target)
        native, left = candidates.native(steps, self.plan.target)
        with self.progress.stage("round each layer"):
            self.uniforms, unfit = candidates.uniforms(self.model, native, self.ctx) if native else ({}, {})
        left |= unfit
        if not self.uniforms:
            raise PlanError(*(Problem(where=f"--schemes, {scheme}", what=reason) for scheme, reason in left.items()))
        names = {name for one in self.uniforms.values() for name in one.layers}
        self.modules = {name: module for name, module in self.model.named_modules() if name in names}
        with self.progress.stage("estimate every layer, by gradients"):
            seen = self._seen(taken)
        layers = self._layers(seen)
        with self.progress.stage("run the model as it is"):
            self.judge = judge.judge_of(alias(self.model), self.samples, taken, self.device)
        self._floor(layers)
        self._check(layers)
        found = [self._advice(layers, scheme) for scheme in self.uniforms]
        return self._concluded(taken, seen, layers, found, left)

    def _count(self) -> int:
        """Of samples: a module that brings one example, and no factory of more, has just that one."""
        single = self.loaded.family == "module" and not self.plan.run.data.source.real and self.plan.run.calibration.factory is None
        return 1 if single else self.options.samples

    # --- estimates -----------------------------------------------------------------------------------------------

    def _seen(self, taken: Taken) -> costs.Seen:
        return costs.observe(
            self.model,
            self.modules,
            {scheme: one.layers for scheme, one in self.uniforms.items()},
            taken.examples,
            device=self.device,
            classes=self.loaded.family != "module",
            labels=_next_tokens if self.loaded.family == LANGUAGE else None,
            seed=self.plan.run.seed,
            tell=self._tell(),
        )

    def _tell(self) -> Tell:
        said: set[int] = set()

        def tell(title: str, fraction: float) -> None:
            if int(4 * fraction) not in said:
                said.add(int(4 * fraction))
                self.progress.note(f"{title}: {fraction:.0%}")

        return tell

    def _layers(self, seen: costs.Seen) -> list[Layer]:
        total, estimated = weight_bytes(self.model), seen.costs()
        found = []
        for name, module in self.modules.items():
            weight = module._parameters["weight"]
            assert weight is not None
            layer = Layer(name=name, shape=list(weight.shape), bytes=nbytes(weight), share=nbytes(weight) / total)
            for scheme, one in self.uniforms.items():
                if name in one.layers and name in estimated:
                    layer.figures[scheme] = self._figure(seen, name, scheme, estimated[name][scheme], one)
                else:
                    layer.skipped[scheme] = one.receipt.skipped.get(name, "no sample reaches it")
            found.append(layer)
        return found

    def _figure(self, seen: costs.Seen, name: str, scheme: str, cost: float, one: Uniform) -> Figure:
        noise, signal = seen.noise[name][scheme], seen.signal[name]
        first = seen.first.get(name, {}).get(scheme)
        return Figure(
            cost=cost,
            loss_change=None if first is None or not seen.labelled else cost - first / seen.labelled,
            sqnr_db=10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None,
            saved_bytes=one.saved[name],
        )

    # --- measurements --------------------------------------------------------------------------------------------

    def _quality(self, scheme: str, names: Sequence[str]) -> QualityResult:
        """With these layers rounded; each set is measured once."""
        key = frozenset((scheme, *names))
        if key not in self.judged:
            tree = alias(self.model)
            candidates.rewrite(tree, dict.fromkeys(names, scheme), {scheme: self.uniforms[scheme].step}, self.ctx)
            result, broken = self.judge.evaluate(tree)
            result.missed = [broken] if broken else []
            self.judged[key] = result
        return self.judged[key]

    def _floor(self, layers: Sequence[Layer]) -> None:
        """What the model's own arithmetic makes of any change: the KL of a small one that every later layer sees, beyond its cost."""
        first = next(one for one in layers if one.figures)
        cost, name, scheme = min((figure.cost, first.name, scheme) for scheme, figure in first.figures.items())
        self.floor = max(0.0, (self._quality(scheme, [name]).kl or 0.0) - cost)

    def _check(self, layers: Sequence[Layer]) -> None:
        """Measures the worst layers of each scheme alone."""
        chosen = [(one, scheme) for scheme in self.uniforms for one in _worst(layers, scheme, self.options.check)]
        if not chosen:
            return
        with self.progress.stage("measure the worst layers alone", len(chosen)):
            for layer, scheme in chosen:
                found = self._quality(scheme, [layer.name])
                error = found.relative_error
                layer.figures[scheme].measured_cost = found.kl if error is None else error**2
                layer.figures[scheme].measured_perplexity_change = found.perplexity_increase
                self.progress.advance()

    def _advice(self, layers: Sequence[Layer], scheme: str) -> Advice:
        every = [one.name for one in layers if scheme in one.figures]
        total = weight_bytes(self.model) - sum(one.figures[scheme].saved_bytes for one in layers if scheme in one.figures)
        with self.progress.stage(f"which layers to leave out of {scheme}"):
            within = self._strain(scheme, every) <= 1.0
            found = Advice(scheme=scheme, count=len(every), whole=self._quality(scheme, every), weight_bytes=total, within=within)
            if not within:
                found.fewest = self._left(layers, scheme, advice.rounded(layers, scheme, lambda names: self._strain(scheme, names)))
                kinds = self._left(layers, scheme, advice.rounded_kinds(layers, scheme, lambda names: self._strain(scheme, names)))
                shorter = kinds is not None and (found.fewest is None or len(kinds.ignore) < len(found.fewest.ignore))
                found.kinds = kinds if shorter else None
        return found

    def _left(self, layers: Sequence[Layer], scheme: str, kept: Sequence[str] | None) -> Left | None:
        """What is left out where `kept` is rounded; None where nothing may be."""
        if kept is None:
            return None
        own = {one.name: one.figures[scheme] for one in layers if scheme in one.figures}
        out = [name for name in own if name not in set(kept)]
        return Left(
            ignore=advice.selectors(out, list(own)),
            layers=out,
            quality=self._quality(scheme, kept),
            weight_bytes=weight_bytes(self.model) - sum(own[name].saved_bytes for name in kept),
        )

    def _strain(self, scheme: str, names: Sequence[str]) -> float:
        result = self._quality(scheme, names)
        broken = result.missed[0] if result.missed else None
        return judge.strain(judge.cautious(result, floor=self.floor), broken, self.limits)

    # --- conclusion ----------------------------------------------------------------------------------------------

    def _concluded(self, taken: Taken, seen: costs.Seen, layers: list[Layer], found: list[Advice], left: Mapping[str, str]) -> Sensitivity:
        run = self.plan.run
        notes = [taken.note, *(f"{scheme} left out: {reason}" for scheme, reason in left.items()), *self.loaded.notes]
        if not run.recipe.limits:
            notes.append("no limits given: " + ", ".join(f"{name} {bound:g}" for name, bound in self.limits.items()) + " was held")
        return Sensitivity(
            model=run.model.name,
            data=run.data.name,
            target=self.plan.target.name,
            device=self.plan.device.name,
            family=self.loaded.family,
            samples=len(taken.examples),
            positions=seen.positions,
            weight_bytes=weight_bytes(self.model),
            floor=self.floor,
            limits=self.limits,
            schemes=list(self.uniforms),
            layers=layers,
            advice=found,
            notes=notes,
            command=run.command,
            made=datetime.now().astimezone().isoformat(timespec="seconds"),
        )


def _worst(layers: Sequence[Layer], scheme: str, count: int) -> list[Layer]:
    return sorted((one for one in layers if scheme in one.figures), key=lambda one: -one.figures[scheme].cost)[:count]


def _next_tokens(example: Example) -> Tensor:
    """The token after each position, -1 where there is none; int64, flat."""
    ids: Tensor = example[1]["input_ids"]
    return torch.cat([ids[:, 1:], ids.new_full((ids.shape[0], 1), -1)], dim=1).flatten()
