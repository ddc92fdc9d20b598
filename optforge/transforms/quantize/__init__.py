"""Rounds the weights of linear layers to int8, int4 or fp8, and their activations as they come where the scheme says so.

Round to nearest by the largest absolute value, without calibration data. What is quantized keeps its name and stays an
`nn.Linear` (see optforge/kernels/linears.py); what is not is listed with the reason, because a model that is half
quantized looks like a slow kernel otherwise. After each layer the stored numbers are held against the originals, and one
product per shape against plain arithmetic on this device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import Problem
from optforge.schemes import ENTRIES, LACKING, SCHEMES, note, runs, units
from optforge.spec import Hardware, Scheme
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Search
from optforge.transforms.quantize import algorithms
from optforge.transforms.quantize.algorithms import Algorithm, Uncalibrated

if TYPE_CHECKING:
    from torch import nn

DEFAULT_TARGETS = ("Linear", "Conv1D")
GROUP_SIZES = (16, 32, 64, 96, 128, 192, 256)
"""What the int4 kernels take (`kernels.int4_weight.GROUP_SIZES`; a test holds them equal)."""


class SchemeName(Enum):
    int8_weight = "int8_weight"
    int8_dynamic = "int8_dynamic"
    int8_static = "int8_static"
    int4_weight = "int4_weight"
    fp8_weight = "fp8_weight"
    fp8_dynamic = "fp8_dynamic"
    fp8_static = "fp8_static"
    fp8_block_weight = "fp8_block_weight"
    fp8_block = "fp8_block"
    mxfp8_weight = "mxfp8_weight"
    mxfp8 = "mxfp8"
    mxfp4_weight = "mxfp4_weight"
    mxfp4 = "mxfp4"
    nvfp4_weight = "nvfp4_weight"
    nvfp4 = "nvfp4"


class Activation(Enum):
    row = "row"
    tensor = "tensor"


class Tied(Enum):
    skip = "skip"
    untie = "untie"
    both = "both"


class Misfit(Enum):
    error = "error"
    skip = "skip"
    pad = "pad"


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """What is rounded, to what, and what happens to layers that the scheme does not fit."""

    kind: ClassVar[str] = "quantize"
    phase: ClassVar[Phase] = Phase.QUANTIZE
    search: ClassVar[Search] = {
        "*": {"ignore": (["lm_head"], ["lm_head", "down_proj"]), "tied": ("untie",)},
        "int4_weight": {"group_size": (32, 128)},
        "fp8_dynamic": {"activation": ("tensor",)},
        **{name: None for name, entry in ENTRIES.items() if not entry.kernel},  # emulated: never faster
        "*_static": None,  # wants calibration data, and costs quality that int8_dynamic and fp8_dynamic keep
    }

    scheme: SchemeName
    """A row of docs/schemes.md. Names that end in `_weight`: stored so, multiplied in the model's dtype; the others round activations
    too, and the product runs in their numbers."""
    group_size: int | None = None
    """int4_weight: inputs that share a scale; null is one scale per output channel. Other schemes have one per channel."""
    symmetric: bool = True
    """int4_weight: false stores an integer zero point beside each scale. Other schemes are symmetric."""
    activation: Activation = Activation.row
    """fp8_dynamic: row is a scale per token and per output channel; tensor is one for the whole input and the whole weight."""
    targets: list[str] = field(default_factory=lambda: list(DEFAULT_TARGETS))
    """Selectors of what is quantized. Of the default entries, those that the model lacks are left out."""
    ignore: list[str] = field(default_factory=list)
    """Selectors of what is left as it is; they win over `targets`."""
    ignore_extra: list[str] = field(default_factory=list)
    """Added to `ignore`, where replacing its list would lose the recipe's entries."""
    tied: Tied = Tied.skip
    """A linear whose weight is also the embedding's. skip: left as it is; untie: the linear alone is quantized, and the
    model keeps both; both: one quantized weight serves both."""
    on_misfit: Misfit = Misfit.error
    """int4_weight: a width that the group size does not divide. error: refused, all layers named; skip: left as they are;
    pad: the last group of a row is shorter."""
    strict: bool = False
    """A weight that is targeted, or kept as 3-D experts, and stays unquantized is an error."""
    algorithm: Algorithm = Algorithm.rtn
    """Who decides the stored values. rtn: round to nearest; gptq: later columns make up for the errors of earlier ones; awq: inputs
    that matter get finer steps, by scales folded into what comes before, and ranges are cut; hqq: int4, without data, a robust
    fit of scales and zero points."""
    smooth: float | None = None
    """Schemes that round activations: SmoothQuant's alpha, how much of the inputs' range is moved into the weights; null is none."""
    samples: int = 128
    """gptq, awq, smooth: samples to calibrate on, apart from those that quality is measured on."""
    sample_tokens: int = 512
    """Of a language model: tokens of each sample."""
    damping: float = 0.01
    """gptq: share of the mean diagonal that is added to the second moments of the inputs; raised where they are singular."""
    act_order: bool = True
    """gptq: the columns with the largest inputs are rounded first."""
    clip: bool = True
    """gptq, awq: each range is cut where that lessens the error."""
    uncalibrated: Uncalibrated = Uncalibrated.keep
    """A layer that no sample reaches. keep: left as it is, and named; error: refused."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """Fields that contradict the scheme, and group sizes that no kernel takes."""
        where, name = f"step {ctx.step}", self.scheme.name
        if ctx.workload == "train" and "adapter" not in ctx.later:
            fix = (
                f"train adapters over them, steps.adapter={{use: adapter/lora}}, drop it with '~steps.{ctx.step}', or type workload=prefill"
            )
            yield Problem(where=where, what=f"weights in {name} have no gradient and cannot be trained", fix=fix)
        int4 = self.scheme is SchemeName.int4_weight
        if self.group_size is not None and not int4:
            yield Problem(where=where, what=f"group_size does not apply to {name}", fix="take it out, or use quantize/int4_weight")
        elif self.group_size is not None and self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            yield Problem(where=where, what=f"group_size {self.group_size} has no kernel", fix=f"use one of {sizes}, or null")
        if not self.symmetric and not int4:
            yield Problem(where=where, what=f"symmetric: false does not apply to {name}", fix="take it out, or use quantize/int4_weight")
        if self.activation is Activation.tensor and self.scheme is not SchemeName.fp8_dynamic:
            yield Problem(where=where, what=f"activation: tensor does not apply to {name}", fix="write activation: row")
        yield from algorithms.check(self, ctx)

    def lower(self, target: Hardware) -> Lowered | None:
        """A scheme that rounds activations becomes its weight-only one where the target has no units for the product."""
        scheme = SCHEMES[self.scheme.name]
        instead = ENTRIES[self.scheme.name].weight_only
        if instead is None or runs(scheme, target) != LACKING:
            return None
        runs_as = SchemeName[instead]
        return Lowered(
            requested=self.scheme.name,
            runs_as=runs_as.name,
            transform=replace(self, scheme=runs_as, activation=Activation.row, smooth=None),
            reason=f"{target.name} has no {units(scheme)} matrix units: {self.scheme.name} runs as {runs_as.name}",
        )

    def to_scheme(self) -> Scheme:
        """The scheme with this step's group size, symmetry and granularity."""
        scheme = SCHEMES[self.scheme.name]
        if self.scheme is SchemeName.int4_weight:
            granularity = "channel" if self.group_size is None else "group"
            return replace(scheme, granularity=granularity, group_size=self.group_size, symmetric=self.symmetric)
        if self.activation is Activation.tensor:
            return replace(scheme, granularity="tensor", activation_granularity="tensor")
        return scheme

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Quantizes in place. Everything that refuses is found before the first layer changes.

        Raises:
            SelectorError: an entry of `targets` or `ignore` matches nothing.
            PlanError: a targeted layer is quantized already, is parametrised, or misfits the group size; all are told together.
                With `strict`, a weight stays unquantized.
            StepError: what was stored is not finite, or is further from the original than rounding explains.
        """
        from optforge.transforms.quantize.rewrite import rewrite
        from optforge.transforms.quantize.survey import survey

        scheme = self.to_scheme()
        receipt = rewrite(model, survey(model, self, ctx.step), scheme, self, ctx)
        receipt.notes += filter(None, [note(scheme, ctx.target)])
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """The same layers under the same schemes, without values."""
        from optforge.transforms.quantize.rewrite import rebuild

        rebuild(model, receipt.decisions)
