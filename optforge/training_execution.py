"""A run whose workload is a training: the same rows and verdicts, with losses in place of the quality of outputs.

Training changes the weights that it runs on, and rows share storage. So the model as loaded stays on the host and is never
trained: each row is built from it anew, with storage of its own. A row is first trained over the data of the loss curve, from the weights
as loaded, and then timed on the steps that follow: what a step costs does not depend on the values of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import nn

from optforge.distributed.world import agree
from optforge.execution import Execution
from optforge.kernels.devices import DTYPES
from optforge.measure import memory
from optforge.measure.size import weight_bytes
from optforge.measure.work import compute_dtype
from optforge.models.base import Loaded
from optforge.plan.make import Plan, PlannedStep, mesh_of
from optforge.rows import Applied, Rows
from optforge.share import alias
from optforge.spec import Measure, Measurement, QualityResult, StepReport
from optforge.training.curve import LossQuality
from optforge.training.settings import settings_of
from optforge.training.trainer import Trainer, own_, trained
from optforge.workloads.base import Work
from optforge.workloads.train import TrainWork


class TrainingRows(Rows):
    """Rows whose weights are their own."""

    def __init__(self, plan: Plan, baseline: nn.Module, work: Work, example: Any, options: Measure, **given: Any) -> None:
        mesh = mesh_of(plan)
        cast(TrainWork, work).ranks = mesh.fsdp * mesh.data
        super().__init__(plan, baseline, work, example, options, **given)

    def batches(self, module: nn.Module) -> int:
        """One: a step is the same one for every row, and one device makes alone what several share."""
        return 1

    @property
    def training(self) -> TrainWork:
        return cast(TrainWork, self.work)

    def fresh(self, steps: Sequence[PlannedStep] = ()) -> tuple[nn.Module, list[Applied]]:
        """A new tree with the weights as loaded, on the device, with `steps` applied in order."""
        module = alias(self.baseline)
        if self.on_device:
            # on another device placing copies; on the host's own it would not
            host = self.plan.backend.torch_device().type == "cpu"
            module = own_(module) if host else self.plan.backend.place(module)
        return module, [self.apply(module, step) for step in steps]

    def place(self, module: nn.Module) -> nn.Module:
        """A tree that was built on the host, brought to the device with storage of its own."""
        return module if self.on_device else super().place(own_(module))

    def output(self, module: nn.Module) -> torch.Tensor:
        """The loss and the norm of each gradient of one batch, without an update."""
        return self.training.probe(module).cpu()

    def measure(self, module: nn.Module, reference: nn.Module | None, name: str) -> Measurement:
        """Time and memory of the next steps of a tree's training, in rounds that alternate with the reference's."""
        measured = super().measure(module, reference, name)
        held = self.training.held_bytes(module)
        if measured.peak_memory_bytes is not None:
            measured.memory_parts = {**held, "rest": max(0, measured.peak_memory_bytes - sum(held.values()))}
        return measured

    def product_dtype(self, module: nn.Module) -> str:
        """The dtype that the row's products run in: that of autocast, else of its weights (fp8 products are held against their peak)."""
        dtype = compute_dtype(module)
        named = DTYPES.get(dtype) if dtype is not None else None
        return settings_of(module).autocast or named or super().product_dtype(module)

    def resident(self, reference: nn.Module, module: nn.Module) -> int:
        """Weights and states of the reference's training; it shares nothing with `module`."""
        held = self.training.held_bytes(reference)
        return held["weights"] + held["optimizer"]


class TrainingExecution(Execution):
    """One run over a training."""

    rows_of: ClassVar[type[Rows]] = TrainingRows

    apart: Sequence[float] = ()
    """Samples of a reference that had to leave the device."""

    @property
    def work(self) -> TrainWork:
        return cast(TrainWork, self.rows.work)

    def _placed(self, module: nn.Module) -> nn.Module:
        """The model as loaded stays on the host. Where its weights, gradients and states alone are more than the device has, the
        baseline is left out, and the report says so."""
        workload, settings = self.spec.workload.source, settings_of(module)
        states = sum(workload.state_bytes(parameter, settings) for parameter in trained(module))
        needed, room = 2 * weight_bytes(module) + states, self.plan.device.memory_bytes
        self.fits = room is None or needed <= room
        if not self.fits:
            self._without_baseline(
                f"its weights, gradients and optimizer states ({needed / 1e9:.1f} GB) do not fit {self.plan.device.name}"
            )
        return module

    def _without_baseline(self, why: str) -> None:
        self.fits, self.reference = False, None
        self.report.baseline = None
        self.report.baseline_reason = why
        self.report.warnings.append(f"no baseline: {why}")

    def _time_baseline(self) -> None:
        """The model as loaded, trained as it is. Running out of memory here ends the baseline, not the run."""
        self.reference, _ = self.rows.fresh()
        try:
            with self.progress.stage("baseline, as loaded"):
                self.report.baseline = self.rows.measure(self.reference, None, "baseline")
        except Exception as error:
            if not self.backend.is_out_of_memory(error):
                raise
            memory.released(error)
            self.reference = None
            self.backend.free()
            self._without_baseline(f"{self.plan.device.name} ran out of memory in a step of the model as loaded")

    def _prepare_quality(self, loaded: Loaded) -> None:
        """Trains the baseline twice, for its losses and for the band that two seeds give."""
        self.curves: LossQuality | None = None
        why = self._reason_against()
        if why is not None:
            self.report.warnings.append(f"no loss curves were compared: {why}")
            return
        workload = self.spec.workload.source
        self.curves = LossQuality(
            begin=self._begun,
            held_out=self.work.loss_held_out if self.work.held_out else None,
            steps=workload.steps,
            seed=self.spec.seed,
            data_name=self.spec.data.name,
            limits=self.spec.recipe.limits,
        )
        with self.progress.stage(f"loss curves of the baseline, two of {workload.steps} steps"):
            self.curves.prepare(lambda: self.rows.fresh()[0])
        self.report.warnings += self.curves.notes

    def _begun(self, module: nn.Module, seed: int) -> Trainer:
        self.work.ready(module)
        return self.work.trainer(module, seed=seed)

    def _reason_against(self) -> str | None:
        """Why no loss can be compared, or None. Random weights learn as trained ones do; random data teaches nothing."""
        if not self.spec.quality.enabled:
            return "quality.enabled is false"
        if not self.fits:
            return "there is no baseline to compare with"
        if self.work.unit == "tokens" and not self.spec.data.source.real:
            return f"data={self.spec.data.name} is random"
        return None

    def _quality(self, module: nn.Module, name: str) -> QualityResult | None:
        if self.curves is None:
            return None
        self.progress.note(f"loss curve of {name}")
        return agree(self.curves.evaluate(module))

    def _grow(self) -> nn.Module:
        """One row per step, each built from the weights as loaded."""
        previous: Measurement | None = None
        kept: list[PlannedStep] = []
        module: nn.Module | None = None
        for planned in self.plan.rewrites:
            with self.progress.stage(f"step {planned.name} ({planned.step.use})"):
                module = None  # its training goes before the next one is built
                self.backend.free()
                module, self.applied = self.rows.fresh(kept)
                step = self._row(module, planned, previous)
            if planned.step.keep == "if_faster" and step.verdict != "ok":
                self._dropped(step)
                module = None
            else:
                previous, kept = step.measured, [*kept, planned]
            self.record.write()
        if module is None:
            module, self.applied = self.rows.fresh(kept)
            self.rows.compile(module)
        return module

    def _examine(self, step: StepReport, module: nn.Module, name: str) -> Measurement:
        """The losses of the tree as it will run, compiled where the recipe compiles, then its time."""
        if self.plan.compile is not None:
            self._compiled_alike(module, name)
        step.quality = self._quality(module, name)
        step.measured = measured = self._timed(module, name)
        return measured

    def _compiled(self, module: nn.Module, name: str) -> tuple[Measurement, Applied | None]:
        applied = self._compiled_alike(module, name)
        return self._timed(module, name), applied

    def _timed(self, module: nn.Module, name: str) -> Measurement:
        """Time of the next steps, in rounds that alternate with the reference's where both trainings fit the device.

        Where they do not, the reference goes, and its samples from before stand beside the row's: drift does not cancel then.
        """
        try:
            measured = self.rows.measure(module, self.reference, name)
        except Exception as error:
            if self.reference is None or not self.backend.is_out_of_memory(error):
                raise
            memory.released(error)
            self._part_from_reference()
            self.work.ready(module)
            self.backend.free()
            measured = self.rows.measure(module, None, name)
        if self.apart:
            count = min(len(self.apart), len(measured.samples_s))
            measured = replace(measured, samples_s=measured.samples_s[:count], baseline_samples_s=list(self.apart[:count]))
        self._warn_of_limit(name, measured)
        return measured

    def _part_from_reference(self) -> None:
        self.apart = list(self._reference_measurement.samples_s)
        self.reference = None
        self.report.warnings.append(
            f"{self.plan.device.name} does not hold two trainings at once: rows were timed after {self.reference_name}, not in turns"
        )

    def _compiled_alike(self, module: nn.Module, name: str) -> Applied | None:
        """Compiles a tree, and warns where its loss and gradients are not those of the same tree uncompiled."""
        eager = self.rows.output(module)
        applied = self.rows.compile(module)
        self._warn_of_difference(name, module, eager)
        return applied

    def _generate(self, module: nn.Module, loaded: Loaded) -> None:
        """A few steps of training are nothing to read a text for."""
