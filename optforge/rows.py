"""Builds and measures one row: a module tree, what was done to it, and what it then does in time, memory and quality.

A row grows in place from an alias of the baseline. A row that must lack a step is built afresh from the baseline;
nothing that was done is ever undone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from optforge.backends.base import Candidate, CompileOptions
from optforge.calibrate.samples import Samples
from optforge.compiling import Family
from optforge.distributed.world import share_of
from optforge.errors import PlanError, StepError
from optforge.measure import compare
from optforge.measure.size import nbytes, own_part, tensors, weight_bytes
from optforge.measure.sparsity import Zeros, filled, share, zeros
from optforge.measure.utilization import mbu, mfu
from optforge.models.base import Tell
from optforge.plan.make import Plan, PlannedStep, later, nothing_changed
from optforge.share import alias
from optforge.spec import Measure, Measurement
from optforge.transforms.base import Compiler, Context, Phase, Receipt
from optforge.workloads.base import Work


@dataclass(kw_only=True)
class Applied:
    """A step that has run: its receipt and the seconds it took."""

    planned: PlannedStep
    receipt: Receipt
    seconds: float
    zeros: dict[str, Zeros] = field(default_factory=dict)
    """Of each layer whose weights it pruned: where they are zero, which every later step must keep."""


class Rows:
    """Builds rows over one baseline on one device and measures them on one prepared workload."""

    def __init__(
        self,
        plan: Plan,
        baseline: nn.Module,
        work: Work,
        example: Any,
        options: Measure,
        *,
        on_device: bool,
        samples: Samples,
        tell: Tell | None = None,
    ) -> None:
        self.plan, self.baseline, self.work, self.example, self.options = plan, baseline, work, example, options
        self.on_device, self.samples, self.tell = on_device, samples, tell
        self.flops = work.flops(baseline)

    def context(self, step: str) -> Context:
        run = self.plan.run
        return Context(
            step=step,
            target=self.plan.target,
            device=self.plan.device,
            backend=self.plan.backend,
            workload=run.workload.kind,
            uses_cache=run.workload.source.uses_cache,
            seed=run.seed,
            example=self.example,
            samples=self.samples,
            reference=self.baseline,
            tell=self.tell,
            later=later([planned.step for planned in self.plan.steps], step),
            limits=run.recipe.limits,
            once=self._once,
            compile=self._compiler(),
        )

    def _once(self, module: nn.Module) -> Callable[[], Any]:
        """One pass of the workload by `module`, as a call; its prompt, if it has one, is run here."""
        self.work.ready(module)

        def call() -> Any:
            with torch.no_grad():
                return self.work.once(module)

        return call

    def _compiler(self) -> Compiler | None:
        """Compiles as the recipe's compile step compiles a block."""
        if self.plan.compile is None:
            return None
        options: CompileOptions = getattr(self.plan.compile.step.transform, "options", CompileOptions)()

        def call(modules: Sequence[nn.Module]) -> None:
            shared = Family()
            for module in modules:
                # CUDA graphs hold addresses: modules that shared a program would record it anew for each
                family = Family() if options.mode == "reduce-overhead" else shared
                self.plan.backend.compile(module, replace(options, family=family))

        return Compiler(call=call, options={"engine": options.engine, "mode": options.mode, **options.options})

    def fresh(self, steps: Sequence[PlannedStep] = ()) -> tuple[nn.Module, list[Applied]]:
        """A new tree over the baseline's tensors with `steps` applied in order."""
        module = alias(self.baseline)
        return module, [self.apply(module, step) for step in steps]

    def apply(self, module: nn.Module, planned: PlannedStep) -> Applied:
        """Applies a step in place and holds its receipt against the tree.

        Raises:
            PlanError: the step changed nothing.
            StepError: the tree is not what the receipt says.
        """
        start = time.perf_counter()
        with torch.no_grad():
            receipt = planned.step.transform.apply(module, self.context(planned.name))
        if not receipt.touched:
            raise PlanError(nothing_changed(planned.step, receipt))
        if planned.phase is not Phase.COMPILE and self.on_device:
            self.work.ready(module)
        self.plan.backend.synchronize()
        seconds = time.perf_counter() - start
        return Applied(planned=planned, receipt=receipt, seconds=seconds, zeros=zeros(module, receipt.decisions.get("zeros", ())))

    def compile(self, module: nn.Module) -> Applied | None:
        """Applies the recipe's compile step, if it has one, on top of whatever the tree is now."""
        return None if self.plan.compile is None else self.apply(module, self.plan.compile)

    def place(self, module: nn.Module) -> nn.Module:
        """A tree that was built off the device, since its baseline does not fit there, brought to it and made ready."""
        placed: nn.Module = self.plan.backend.place(module)
        self.work.ready(placed)
        return placed

    def lift(self, module: nn.Module) -> None:
        """Takes every compile off the tree again, so that the next step sees plain modules."""
        for child in module.modules():
            self.plan.backend.lift(child)

    def measure(self, module: nn.Module, reference: nn.Module | None, name: str) -> Measurement:
        """Time and memory of a tree on the workload, in rounds that alternate with `reference`."""
        candidate = Candidate(name=name, call=lambda: self.work.run(module))
        against = None
        if reference is not None:
            against = Candidate(name="baseline", call=lambda: self.work.run(reference), resident_bytes=self.resident(reference, module))
        measured = self.plan.backend.measure(candidate, against, self.options)
        return self._shares(measured, module)

    def resident(self, reference: nn.Module, module: nn.Module) -> int:
        """Bytes that lie on the device for the reference's sake alone while `module` is measured."""
        return _only_in(reference, module)

    def batches(self, module: nn.Module) -> int:
        """Batches that one call has at once over all devices, where the baseline's has one."""
        return share_of(module).batches

    def _shares(self, measured: Measurement, module: nn.Module) -> Measurement:
        """Adds throughput, weight bytes and the shares of the device's peaks."""
        p50 = measured.latency_ms.get("p50")
        if not p50:
            return measured
        seconds = p50 / 1e3
        share = share_of(module)
        batches = self.batches(module)
        rate = self.work.units * batches / seconds
        flops = self.flops * batches // share.devices if self.flops is not None else None
        device, dtype = self.plan.device, self.product_dtype(module)
        return replace(
            measured,
            tokens_per_s=rate if self.work.unit == "tokens" else None,
            items_per_s=rate if self.work.unit == "items" else None,
            weight_bytes=weight_bytes(module),
            devices=share.devices,
            batches=batches,
            mfu=mfu(flops, seconds, device, dtype),
            mbu=mbu(self.work.bytes(module), seconds, device),
        )

    def product_dtype(self, module: nn.Module) -> str:
        """The dtype whose peak the shares are taken of: the run's."""
        return str(self.plan.model["dtype"] or "fp32")

    def output(self, module: nn.Module) -> Any:
        """What one call gives, off the device, so that holding it adds nothing to the memory that is measured."""
        found = self.work.run(module)
        return found.cpu() if isinstance(found, torch.Tensor) else found

    def agreement(self, module: nn.Module, eager_output: Any) -> float | None:
        """Signal to noise in dB of the compiled tree's output against the same tree uncompiled.

        None for token ids, and where there is nothing to compare; minus infinity where only the compiled one is not finite.
        """
        output = self.output(module)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        signal = compare.Signal()
        signal.add(eager_output, output)
        if math.isfinite(signal.signal) and not math.isfinite(signal.noise):
            return -math.inf
        return signal.sqnr_db


def _only_in(reference: nn.Module, module: nn.Module) -> int:
    """Bytes of the reference's tensors that `module` does not share: resident for the comparison's sake alone."""
    shared = {own_part(tensor).untyped_storage().data_ptr() for _, tensor in tensors(module)}
    return sum(nbytes(tensor) for _, tensor in tensors(reference) if own_part(tensor).untyped_storage().data_ptr() not in shared)


def verify(module: nn.Module, applied: Sequence[Applied]) -> None:
    """Reads the dtypes of every touched module again and holds them, and the zeros of pruned layers, against the receipts.

    Raises:
        StepError: a parameter is not what the last step that touched it left; or a pruned weight is no longer zero.
    """
    expected: dict[tuple[str, str], tuple[str, str]] = {}
    for one in applied:
        expected = {(new, key[1]): found for key, found in expected.items() if (new := _moved(key[0], one.receipt)) is not None}
        for touched in one.receipt.touched:
            expected.update({(touched.name, tensor): (dtype, one.planned.name) for tensor, dtype in touched.dtypes.items()})
    for (name, tensor), (dtype, step) in expected.items():
        owner = module.get_submodule(name)
        held = owner._parameters.get(tensor)  # a module may show its own code something else under the name
        found = str((getattr(owner, tensor) if held is None else held).dtype).removeprefix("torch.")
        if found != dtype.removeprefix("torch."):
            raise StepError(f"step {step}: {name}.{tensor} should be {dtype} and is {found}: a later step changed it in silence")
    lost = filled(module, _pruned(applied))
    if lost:
        name, (count, all_of) = next(iter(lost.items()))
        what = f"{count:,} of {all_of:,} pruned weights of {name} are no longer zero"
        raise StepError(f"step {applied[-1].planned.name}: {what}: a step after the pruning filled them ({len(lost)} layers)")


def sparsity(module: nn.Module, applied: Sequence[Applied]) -> float | None:
    """Exact zeros as a share of the weights of all layers that a step pruned; None where none did."""
    return share(module, _pruned(applied))


def _pruned(applied: Sequence[Applied]) -> dict[str, Zeros]:
    """The zeros that must still be there, under the names that their layers have by now. A step that takes rows or columns out
    of a layer takes zeros with them, so that layer's are not followed any further."""
    kept: dict[str, Zeros] = {}
    for one in applied:
        kept = {new: found for name, found in kept.items() if (new := _moved(name, one.receipt)) is not None}
        if "outputs" in one.receipt.decisions:
            for touched in one.receipt.touched:
                kept.pop(touched.name, None)
        kept.update(one.zeros)
    return kept


def _moved(name: str, receipt: Receipt) -> str | None:
    """What a module is called after a step; None where it is there no more, or is now a part of another."""

    def within(path: str) -> bool:
        return name == path or name.startswith(f"{path}.")

    if any(within(path) for path in receipt.decisions.get("gone", ())):
        return None
    for new, old in receipt.renamed.items():
        if any(within(path) for path in old):
            return new + name[len(old[0]) :] if len(old) == 1 else None
    return name
