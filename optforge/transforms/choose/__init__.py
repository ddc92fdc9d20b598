"""Gives each layer the scheme that is the fastest here within the quality limits, found by measuring both; or, within a limit on
the size of the weights, the schemes that cost least quality.

Bits say little of speed: on one device int8 halves a product's time, on another it adds a pass over the weights, and the
smallest layers gain nothing anywhere. So each shape of layer is timed under each scheme, compiled as the run compiles, with the
rows that the workload gives it (times.py). What rounding costs comes from one pass of gradients for all layers and schemes
(costs.py). The assignment goes along the path of the best gains per cost (knapsack.py), as far as the measured quality of the
whole stays within the recipe's limits (judge.py, search.py). All of it is remembered under a key of everything that decides it
(remembered.py), so that the rows of a run, and the next run, choose the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import Problem, near
from optforge.measure.limits import LIMITS
from optforge.schemes import LACKING, NATIVE, SCHEMES, TABLE, runs
from optforge.spec import Hardware
from optforge.transforms.base import Context, Lowered, Phase, Receipt
from optforge.transforms.quantize import DEFAULT_TARGETS, GROUP_SIZES, Misfit, Quantize, SchemeName, Tied

if TYPE_CHECKING:
    from torch import nn

SEEN = tuple(name for name in LIMITS if name != "min_metric")
"""Limits that the samples can be held to."""


@dataclass(frozen=True, kw_only=True)
class Choose:
    """What is chosen from, and within what."""

    kind: ClassVar[str] = "quantize"
    phase: ClassVar[Phase] = Phase.QUANTIZE

    schemes: list[str] = field(default_factory=list)
    """The candidates. Empty: all that run natively on the target without calibration; the emulated ones too where there is no native
    one, and with `max_weight_bytes`. A plan, which cannot measure, shows one that the target has units for: for a decode the first
    that rounds weights alone, else the first that rounds activations too."""
    group_size: int | None = 64
    """int4_weight: inputs that share a scale; null is one scale per output channel."""
    symmetric: bool = False
    """int4_weight: false stores an integer zero point beside each scale."""
    max_weight_bytes: int | None = None
    """null: the fastest assignment within the recipe's limits. A number: all weights of the model fit it, at the least cost in quality,
    whatever the time."""
    targets: list[str] = field(default_factory=lambda: list(DEFAULT_TARGETS))
    """Selectors of what is considered. Of the default entries, those that the model lacks are left out."""
    ignore: list[str] = field(default_factory=list)
    """Selectors of what stays as it is; they win over `targets`."""
    ignore_extra: list[str] = field(default_factory=list)
    """Added to `ignore`, where replacing its list would lose the recipe's entries."""
    tied: Tied = Tied.skip
    """A head whose weight is also the embedding's. skip: it stays; untie, both: considered too, and stored apart or as one weight."""
    samples: int = 8
    """Samples that quality is judged on while choosing, apart from those that the report's figures are taken on."""
    sample_tokens: int = 512
    """Of a language model: tokens of each sample."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """Unknown schemes, and nothing to choose within."""
        where, at = f"step {ctx.step}", f"steps.{ctx.step}"
        if ctx.workload == "train":
            fix = f"drop it with '~{at}', or plan workload=prefill"
            yield Problem(where=where, what="quantized weights have no gradient and cannot be trained", fix=fix)
        for name in self.schemes:
            if name not in SCHEMES:
                fix = near(name, SCHEMES) or f"known: {', '.join(SCHEMES)}"
                yield Problem(where=f"{where}, schemes", what=f"unknown scheme {name!r}", fix=fix)
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            yield Problem(where=where, what=f"group_size {self.group_size} has no kernel", fix=f"use one of {sizes}, or null")
        for name, value in (("samples", self.samples), ("sample_tokens", self.sample_tokens), ("max_weight_bytes", self.max_weight_bytes)):
            if value is not None and value < 1:
                yield Problem(where=f"{where}, {name}", what=f"must be 1 or more, is {value}")
        if self.max_weight_bytes is None and not any(name in SEEN for name in ctx.limits):
            what = "has no limit to choose within: the fastest model of all would be any, however wrong"
            yield Problem(where=where, what=what, fix=f"recipe.limits.max_perplexity_increase=0.005, or {at}.max_weight_bytes=BYTES")
        yield from ctx.without_data()

    def lower(self, target: Hardware) -> Lowered | None:
        """Never: a candidate that the target has no units for is left out of the choice."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Measures and rewrites in place; while planning it gives every layer the likeliest of the schemes that the target runs.

        Raises:
            PlanError: no scheme fits a layer; the weights cannot be made as small as `max_weight_bytes`; there is no workload to time.
            DataError: there are too few samples, or the data is random and the weights are trained.
        """
        from optforge.transforms.choose import apply

        return apply.apply(self, model, ctx)

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """The same layers under the same schemes, without values: each part as its own quantize step would."""
        for part in receipt.decisions["parts"]:
            Quantize(scheme=SchemeName[part["scheme"]["name"]]).replay(model, Receipt(decisions=part))

    def steps(self, target: Hardware) -> Mapping[str, Quantize]:
        """Scheme -> the quantize step that would put it on every layer that it fits; those that round activations come first."""
        return {name: self._step(name) for name in self.schemes or self._candidates(target)}

    def _candidates(self, target: Hardware) -> list[str]:
        own = [entry for entry in TABLE if entry.kernel and not entry.scheme.static]
        native = [entry for entry in own if str(getattr(entry, target.backend, NATIVE)).startswith(NATIVE)]
        if self.max_weight_bytes is None and any(runs(entry.scheme, target) != LACKING for entry in native):
            own = native
        return [entry.scheme.name for entry in sorted(own, key=lambda entry: entry.scheme.activation_dtype is None)]

    def _step(self, name: str) -> Quantize:
        int4 = name == SchemeName.int4_weight.name
        return Quantize(
            scheme=SchemeName[name],
            group_size=self.group_size if int4 else None,
            symmetric=self.symmetric if int4 else True,
            targets=self.targets,
            ignore=self.ignore,
            ignore_extra=self.ignore_extra,
            tied=self.tied,
            on_misfit=Misfit.skip,
        )
