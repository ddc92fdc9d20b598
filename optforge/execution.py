"""One run, row by row: baselines, then each step on top of the rows before it, then the conclusion.

Rows: the model as loaded, the same compiled, then each further step under compile, each timed in rounds that alternate
with the compiled baseline. Quality is taken of each row's uncompiled tree (docs/log.md says why).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from optforge import artifact, export, preflight, verdicts
from optforge.calibrate.samples import Samples
from optforge.distributed.world import agree
from optforge.errors import OutputError, Problem
from optforge.measure import compiles, memory, quality
from optforge.measure.size import weight_bytes
from optforge.models.base import Loaded, Tell
from optforge.plan.make import Plan, PlannedStep
from optforge.progress import Progress
from optforge.record import Record
from optforge.rows import Applied, Rows, sparsity, verify
from optforge.spec import Measure, Measurement, QualityResult, Ratio, StepReport

LOWEST_COMPILED_SQNR_DB = 10.0
"""Below this the compiled program computes something else than the same modules run eagerly. Not higher: rounding activations
to fp8 amplifies the differences of fused sums (12.5 dB on the random weights of a 16-layer decoder, H200)."""


class Execution:
    """The state of one run: the report as known so far, the row that grows, and what it is compared with."""

    rows_of: ClassVar[type[Rows]] = Rows

    def __init__(self, plan: Plan, folder: Path | None, progress: Progress) -> None:
        # a copy of the steps, since `keep: if_faster` may drop the compile step and the caller's plan stays as it is
        self.plan, self.folder, self.progress = replace(plan, steps=list(plan.steps)), folder, progress
        self.spec, self.backend = plan.run, plan.backend
        self.record = Record(self.plan, folder)
        self.report = self.record.report
        self.applied: list[Applied] = []

    def run(self) -> nn.Module | None:
        """Fills the report; the optimized module, or None where the device ran out of memory."""
        with self.record.kept(), self.backend.session(self.spec.seed):
            return self._measured()
        return None

    # --- the rows ------------------------------------------------------------------------------------------------

    def _measured(self) -> nn.Module:
        if self.spec.save:
            preflight.space(self._saves_to(), artifact.room(self.plan.final_weight_bytes))
        if self.spec.export:
            export.foresee(self.spec, self.plan.loaded)
        loaded = self._load()
        self._baselines(loaded)
        module = self._grow() if self.fits and self.options.attribution != "ends" else self._all_at_once()
        if self.fits and self.options.attribution == "leave_one_out":
            self._leave_one_out(module)
        self._conclude(module, loaded)
        return module

    def _load(self) -> Loaded:
        with self.progress.stage(f"load {self.spec.model.name}"):
            loaded: Loaded = self.spec.model.source.load(self.spec.seed, self._tell())
            self.report.model = {**self.report.model, "digest": loaded.digest, "weights": loaded.weights, "notes": list(loaded.notes)}
        with self.progress.stage(f"place on {self.plan.device.name}"):
            if self.spec.save:
                artifact.require_storable(loaded.module)
            baseline = self._placed(loaded.module.eval())
        device = self.backend.torch_device()
        workload = self.spec.workload.source
        work = workload.prepare(loaded, self.spec.data.source, device, self.spec.seed)
        self.options = self._budgeted()
        example = workload.example(loaded, device if self.fits else torch.device("cpu"))
        samples = Samples.of(self.spec, loaded)
        self.rows = self.rows_of(self.plan, baseline, work, example, self.options, on_device=self.fits, samples=samples, tell=self._tell())
        self.report.workload = {**self.report.workload, "unit": work.unit, "units": work.units}
        return loaded

    def _tell(self) -> Tell:
        """Passes on what a model's source says of a conversion or a training, a line for every tenth of it."""
        said: set[tuple[str, int]] = set()

        def tell(stage: str, fraction: float) -> None:
            tenth = (stage, int(10 * fraction))
            if tenth not in said:
                said.add(tenth)
                self.progress.note(f"{stage}: {fraction:.0%}")

        return tell

    def _placed(self, module: nn.Module) -> nn.Module:
        """The baseline on the device; where it does not fit it stays on the CPU, and the report says why it has no figures."""
        needed, room = weight_bytes(module), self.plan.device.memory_bytes
        self.fits = room is None or needed <= room
        if self.fits:
            try:
                return self.backend.place(module)
            except Exception as error:
                if not self.backend.is_out_of_memory(error):
                    raise
                memory.released(error)
                self.backend.free()
                self.fits = False
        self.report.baseline_reason = f"the model as loaded ({needed / 1e9:.1f} GB of weights) does not fit {self.plan.device.name}"
        if room is not None:
            self.report.baseline_reason += f" ({room / 1e9:.1f} GB)"
        self.report.warnings.append(f"no baseline: {self.report.baseline_reason}")
        return module.to("cpu")

    def _budgeted(self) -> Measure:
        """`measure.budget_s` shared out over the rows."""
        options = self.spec.measure
        if options.budget_s is None:
            return options
        rows = 1 + len(self.plan.steps) if options.attribution != "ends" else 3
        if options.attribution == "leave_one_out":
            rows += 2 * len(self.plan.steps)  # each absence is a row of its own, and the whole recipe is timed against it
        return replace(options, max_s=min(options.max_s, options.budget_s / rows))

    def _baselines(self, loaded: Loaded) -> None:
        """The model as loaded, then (where the recipe compiles) the same model compiled."""
        self.reference: nn.Module | None = None
        self.reference_name = "the baseline"
        self.compiled_ratio: Ratio | None = None
        if self.fits:
            self._time_baseline()
        self._prepare_quality(loaded)
        if self.fits and self.plan.compile is not None:
            self._compiled_baseline(self.plan.compile)
        self.record.write()

    def _time_baseline(self) -> None:
        """The model as loaded, which the rows are compared with."""
        self.reference = self.rows.baseline
        with self.progress.stage("baseline, as loaded"):
            self.report.baseline = self.rows.measure(self.reference, None, "baseline")

    def _prepare_quality(self, loaded: Loaded) -> None:
        """Runs the baseline over the data that quality is measured on, or says why it is not."""
        self.quality = quality.QualityRun(
            baseline=self.rows.baseline if self.fits else None,
            loaded=loaded,
            data=self.spec.data.source,
            data_name=self.spec.data.name,
            device=self.backend.torch_device(),
            options=self.spec.quality,
            limits=self.spec.recipe.limits,
            seed=self.spec.seed,
        )
        if self.spec.quality.enabled and self.quality.reason is None:
            with self.progress.stage("baseline quality"):
                self.quality.prepare()
        elif self.quality.reason:
            self.report.warnings.append(f"no quality was measured: {self.quality.reason}")

    def _compiled_baseline(self, planned: PlannedStep) -> None:
        """The same model compiled, timed against the model as loaded: the row of the compile step."""
        with self.progress.stage("baseline, compiled"):
            compiled, _ = self.rows.fresh()
            measured, applied = self._compiled(compiled, "compiled baseline")
        ratio = verdicts.goal_ratio(self.goal, measured, self._baseline)
        step = self._step_report(planned, applied)
        step.measured, step.vs_baseline, step.vs_previous = measured, ratio, ratio
        step.verdict = verdicts.judge(ratio, None)
        step.reason = verdicts.sentence(step.verdict, ratio, "the model as loaded", self.goal, None)
        self.report.steps.append(step)
        if planned.step.keep == "if_faster" and step.verdict != "ok":
            self._dropped(step)
            self.plan.steps.remove(planned)
            return
        self.report.compiled_baseline = measured
        self.reference, self.reference_name, self.compiled_ratio = compiled, "the compiled baseline", ratio
        self.compile_applied = applied

    def _grow(self) -> nn.Module:
        """One row per step, each on top of the rows before it."""
        module, _ = self.rows.fresh()
        previous: Measurement | None = None
        for planned in self.plan.rewrites:
            with self.progress.stage(f"step {planned.name} ({planned.step.use})"):
                self.rows.lift(module)
                step = self._row(module, planned, previous)
            if planned.step.keep == "if_faster" and step.verdict != "ok":
                module = self._drop(step)
            else:
                previous = step.measured
            self.record.write()
        if not self.plan.rewrites or (self.report.steps and not self.report.steps[-1].kept):
            self.rows.compile(module)
        return module

    def _row(self, module: nn.Module, planned: PlannedStep, previous: Measurement | None) -> StepReport:
        """Applies one step, compiles, measures, evaluates, judges."""
        applied = self.rows.apply(module, planned)
        self.applied.append(applied)
        verify(module, self.applied)
        step = self._step_report(planned, applied)
        step.sparsity = sparsity(module, self.applied)
        self.report.steps.append(step)
        measured = self._examine(step, module, planned.name)
        ratio = verdicts.goal_ratio(self.goal, measured, self._reference_measurement)
        self._compare(step, ratio)
        step.vs_previous = verdicts.step_ratio(self.goal, measured, previous, ratio)
        step.verdict = verdicts.judge(step.vs_previous, step.quality)
        step.reason = verdicts.sentence(step.verdict, step.vs_previous, "the row before", self.goal, step.quality)
        return step

    def _examine(self, step: StepReport, module: nn.Module, name: str) -> Measurement:
        """Fills in the quality of a row's uncompiled tree, then its time, compiled as the recipe asks."""
        step.quality = self._quality(module, name)
        plain = self.plan.compile is None
        step.measured = measured = self.rows.measure(module, self.reference, name) if plain else self._compiled(module, name)[0]
        return measured

    def _compiled(self, module: nn.Module, name: str) -> tuple[Measurement, Applied | None]:
        """Compiles a row's tree, times it against the reference, and holds its output against the uncompiled one's."""
        eager_output = self.rows.output(module)
        applied = self.rows.compile(module)
        measured = self.rows.measure(module, self.reference, name)
        self._check_compiled(name, module, measured, eager_output)
        return measured, applied

    def _drop(self, step: StepReport) -> nn.Module:
        """Builds the row afresh without a step that gained nothing."""
        self._dropped(step)
        kept = [applied.planned for applied in self.applied[:-1]]
        module, self.applied = self.rows.fresh(kept)
        return module

    def _dropped(self, step: StepReport) -> None:
        step.kept = False
        self.report.warnings.append(f"step {step.name} was dropped (keep: if_faster): {step.reason}")

    def _all_at_once(self) -> nn.Module:
        """`attribution: ends`, or a baseline that does not fit: every step, one row."""
        why = "measure.attribution: ends" if self.fits else "the rows before it do not fit the device"
        with self.progress.stage("all steps"):
            module, self.applied = self.rows.fresh(self.plan.rewrites)
            verify(module, self.applied)
            if not self.fits:
                module = self.rows.place(module)
            for applied in self.applied:
                step = self._step_report(applied.planned, applied)
                step.verdict, step.reason = None, f"not measured alone ({why})"
                self.report.steps.append(step)
            if self.applied:
                last = self.report.steps[-1]
                last.sparsity = sparsity(module, self.applied)
                measured = self._examine(last, module, "all steps")
                self._compare(last, verdicts.goal_ratio(self.goal, measured, self._reference_measurement))
            else:
                self.rows.compile(module)
        return module

    def _leave_one_out(self, module: nn.Module) -> None:
        """How much better the whole recipe is with each step than without it."""
        kept = [applied.planned for applied in self.applied]
        for planned in kept if self.plan.compile is None else [*kept, self.plan.compile]:
            with self.progress.stage(f"without {planned.name}"):
                without, _ = self.rows.fresh([other for other in kept if other is not planned])
                if planned is not self.plan.compile:
                    self.rows.compile(without)
                alone = self.rows.measure(without, None, f"without {planned.name}")
                measured = self.rows.measure(module, without, "all steps")
            step = next(step for step in self.report.steps if step.name == planned.name)
            step.without = verdicts.goal_ratio(self.goal, measured, alone)
            self.record.write()

    # --- what a row is judged by ---------------------------------------------------------------------------------

    def _compare(self, step: StepReport, ratio: Ratio | None) -> None:
        """Fills a row's ratios; `ratio` is against the reference of this run."""
        if self.compiled_ratio is None:
            step.vs_baseline = ratio
        else:
            step.vs_compiled_baseline = ratio
            step.vs_baseline = verdicts.product(ratio, self.compiled_ratio)

    def _quality(self, module: nn.Module, name: str) -> QualityResult | None:
        if not self.spec.quality.enabled or self.quality.reason is not None:
            return None
        self.progress.note(f"quality of {name}")
        return agree(self.quality.evaluate(module))

    def _check_compiled(self, name: str, module: nn.Module, measured: Measurement, eager_output: Any) -> None:
        """Warns of a compiled row that partly runs uncompiled, or computes something else than the tree it came from."""
        self._warn_of_limit(name, measured)
        self._warn_of_difference(name, module, eager_output)

    def _warn_of_limit(self, name: str, measured: Measurement) -> None:
        if measured.recompile_limit_hit:
            self.report.warnings.append(f"{name}: {compiles.describe_limit(measured.sizes_seen)}")

    def _warn_of_difference(self, name: str, module: nn.Module, eager_output: Any) -> None:
        if self.report.model.get("weights") != "trained":
            return  # random weights amplify the rounding of each layer: 6 dB on a 32-layer decoder in fp8 that is right
        sqnr = self.rows.agreement(module, eager_output)
        if sqnr is not None and sqnr < LOWEST_COMPILED_SQNR_DB:
            self.report.warnings.append(f"{name}: the compiled output differs from the uncompiled one (SQNR {sqnr:.1f} dB)")

    def _conclude(self, module: nn.Module, loaded: Loaded) -> None:
        report = self.report
        verify(module, self.applied)
        last = next((step for step in reversed(report.steps) if step.kept and step.measured is not None), None)
        if last is None:
            report.verdict, report.reason = "no_gain", "no step is left: this is the baseline"
            report.optimized = report.baseline
        else:
            report.optimized, report.quality = last.measured, last.quality
            report.speedup = {"vs_baseline": last.vs_baseline, "vs_compiled_baseline": last.vs_compiled_baseline}
            against = last.vs_compiled_baseline or last.vs_baseline
            name = self.reference_name if last.vs_compiled_baseline else "the model as loaded"
            report.verdict = verdicts.judge(against, last.quality)
            report.reason = verdicts.sentence(report.verdict, against, name, self.goal, last.quality)
            self._price(last, name)
        self._generate(module, loaded)
        if self.spec.save:
            self._save(module)
        if self.spec.export:
            self._export(module, loaded)

    def _price(self, last: StepReport, against: str) -> None:
        """What a recipe for memory or size costs in time, which its verdict does not weigh."""
        if self.goal in ("latency", "throughput") or last.measured is None:
            return
        ratio = verdicts.goal_ratio("latency", last.measured, self._reference_measurement)
        if ratio is not None and verdicts.judge(ratio, None) == "regression":
            self.report.warnings.append(f"the goal is {self.goal}: one call takes {1 / ratio.value:.1f} times as long as with {against}")

    def _generate(self, module: nn.Module, loaded: Loaded) -> None:
        """The same prompts continued before and after, for a reader's own judgement."""
        options = self.spec.quality
        can = self.fits and loaded.tokenizer is not None and loaded.weights == "trained"
        if not options.enabled or options.generate == 0 or not can:
            return
        with self.progress.stage("two generations, before and after"):
            self.rows.lift(module)
            for prompt in self.spec.data.source.prompts()[:2]:
                self.report.generations.append(
                    {
                        "prompt": prompt,
                        "baseline": quality.generate(self.rows.baseline, loaded, prompt, options.generate),
                        "optimized": quality.generate(module, loaded, prompt, options.generate),
                    }
                )
            self.rows.compile(module)

    def _save(self, module: nn.Module) -> None:
        from optforge import config

        with self.progress.stage("save"):
            receipts = [
                {"step": a.planned.name, "use": a.planned.step.use, "options": dict(a.planned.step.options), "receipt": asdict(a.receipt)}
                for a in self.applied
            ]
            self.report.artifact = artifact.save(
                module,
                self._saves_to(),
                run_yaml=config.to_yaml(self.spec),
                receipts=receipts,
                ties_before=artifact.ties(self.rows.baseline),
                verdict=self.report.verdict,
            )
            self.report.warnings.extend(self.report.artifact["warnings"])

    def _export(self, module: nn.Module, loaded: Loaded) -> None:
        """Writes the optimized model in each format asked for; one that does not compute the same fails the run."""
        self.rows.lift(module)
        facts = {"verdict": self.report.verdict, "digest": loaded.digest}
        subject = export.subject_of(self.spec, replace(loaded, module=module), self.backend.torch_device(), facts=facts)
        for name in self.spec.export:
            target = self._saves_to("export") / export.FOLDER / name
            self.report.exports.append(export.export(subject, name, target, self.progress))
            self.record.write()
        self.rows.compile(module)

    def _saves_to(self, key: str = "save") -> Path:
        if self.folder is None:
            raise OutputError(
                Problem(where=key, what="a saved model needs a folder, and none was given", fix=f"give folder=..., or leave out {key}")
            )
        return self.folder

    # --- the report ----------------------------------------------------------------------------------------------

    @property
    def goal(self) -> str:
        return self.spec.recipe.goal

    @property
    def _baseline(self) -> Measurement:
        """The model as loaded; where it does not fit, all that is known of it is the size of its weights."""
        return self.report.baseline or Measurement(weight_bytes=self.plan.weight_bytes)

    @property
    def _reference_measurement(self) -> Measurement:
        return self.report.compiled_baseline or self._baseline

    def _step_report(self, planned: PlannedStep, applied: Applied | None) -> StepReport:
        return StepReport(
            name=planned.name,
            kind=planned.step.kind,
            use=planned.step.use,
            receipt=asdict(applied.receipt) if applied else None,
            seconds=applied.seconds if applied else None,
            predicted=self.plan.bound(planned.graph),
        )
