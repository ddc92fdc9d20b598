"""Quantizes a model block by block on calibration samples: gptq, awq and smooth.

Each block is observed with what the blocks before it, quantized already, give it; its values are decided, stored and checked; then
it runs once more to feed the next. What was decided is kept in the user's cache, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from optforge.calibrate.kept import Kept
from optforge.calibrate.walk import Block, walk
from optforge.errors import DataError, PlanError, Problem
from optforge.kernels.formats import format_for
from optforge.kernels.linears import quantize_, scheme_of
from optforge.kernels.quantized import INPUT_SCALES, Quantized
from optforge.select import repeated_blocks
from optforge.transforms.quantize.block import Decided, Deciding
from optforge.transforms.quantize.survey import Survey, counted, out_in
from optforge.transforms.quantize.verify import verify_decided, verify_product

if TYPE_CHECKING:
    from optforge.transforms.base import Context
    from optforge.transforms.quantize import Quantize

VERSION = 1
"""Of what is decided; a change of an algorithm counts it up, and blocks in users' caches are decided anew."""


@dataclass(kw_only=True)
class Outcome:
    """What the walk did beside quantizing."""

    unreached: list[str] = field(default_factory=list)
    carriers: dict[str, list[str]] = field(default_factory=dict)
    """Modules that scales were folded into -> the layers whose inputs they scale."""
    notes: list[str] = field(default_factory=list)


def calibrate(model: nn.Module, found: Survey, options: Quantize, ctx: Context) -> Outcome:
    """Quantizes every layer of `found` that a sample reaches, in place.

    Raises:
        DataError: there is nothing to calibrate on, or not enough.
        PlanError: with `uncalibrated: error`, a layer that no sample reaches.
        StepError: what was stored is not what was decided.
    """
    if ctx.samples is None or ctx.backend is None:
        wanted = "smooth" if options.algorithm.name == "rtn" else options.algorithm.name
        fix = f"write steps.{ctx.step}.algorithm=rtn and smooth=null, or call this step with data"
        raise DataError(Problem(where=f"step {ctx.step}", what=f"{wanted} needs data to calibrate on, and there is none here", fix=fix))
    taken = ctx.samples.take(options.samples, tokens=options.sample_tokens, step=ctx.step)
    layers = {name: layer for name, layer in found.layers.items() if not isinstance(layer, nn.Embedding)}  # nothing is multiplied there
    visitor = _Visitor(layers, found.layouts, options, ctx, shared=_shared(model))
    inside = {id(each) for block in repeated_blocks(model).values() for each in block.modules()}
    walk(
        model,
        taken.examples,
        visitor.visit,
        device=ctx.backend.torch_device(),
        outside={name: layer for name, layer in layers.items() if id(layer) not in inside},
        tell=ctx.tell,
        title=f"{ctx.step}: {options.algorithm.name}",
    )
    outcome = visitor.outcome
    outcome.unreached = [name for name, layer in layers.items() if not isinstance(layer, Quantized)]
    if outcome.unreached and options.uncalibrated.name == "error":
        what = f"no calibration sample reaches {counted(outcome.unreached)}"
        fix = "write uncalibrated: keep, name them in ignore, or give other samples"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=fix))
    outcome.notes = [taken.note, *outcome.notes, *visitor.summary()]
    return outcome


def _shared(model: nn.Module) -> set[int]:
    """ids of the parameters that several modules hold."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values() if parameter is not None)
    return {key for key, count in uses.items() if count > 1}


class _Visitor:
    """Decides one block after the other."""

    def __init__(
        self, layers: Mapping[str, nn.Module], layouts: Mapping[str, str], options: Quantize, ctx: Context, *, shared: set[int]
    ) -> None:
        self.layers, self.layouts, self.ctx = layers, layouts, ctx
        self.scheme, self.fmt = options.to_scheme(), format_for(ctx.target)
        self.deciding = Deciding(options=options, scheme=self.scheme, fmt=self.fmt, shared=shared, layouts={})
        names = ("algorithm", "smooth", "damping", "act_order", "clip")
        chosen = {name: str(getattr(getattr(options, name), "name", getattr(options, name))) for name in names}
        self.kept = Kept({"version": VERSION, "scheme": asdict(self.scheme), "fmt": self.fmt.name, **chosen})
        self.outcome = Outcome()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.reused, self.seen = 0, 0
        self.shapes: set[tuple[int, ...]] = set()

    def visit(self, block: Block) -> None:
        layers = {name: layer for name, layer in block.inside(self.layers).items() if not isinstance(layer, Quantized)}
        if not layers:
            return
        paths = {id(module): path for path, module in block.module.named_modules()}
        names = {paths[id(layer)]: name for name, layer in layers.items()}
        self.deciding.layouts = {path: self.layouts[name] for path, name in names.items()}
        wanted = {path: layers[name] for path, name in names.items()}
        key = self.kept.key(f"{block.fingerprint()} {sorted(self.deciding.layouts.items())}")
        stored = self.kept.get(key, block.device)
        self.seen += 1
        if stored is None:
            decided = self.deciding.decide(block, wanted)
            self.kept.put(key, decided.packed())
        else:
            decided = Decided.unpacked(stored)
            self.reused += 1
        self._install(block, wanted, decided, names)

    def _install(self, block: Block, wanted: Mapping[str, nn.Module], decided: Decided, names: Mapping[str, str]) -> None:
        """Puts what was decided into the block and checks it."""
        for path, tensors in decided.changed.items():
            module = block.module.get_submodule(path)
            for name, tensor in tensors.items():
                old = module._parameters[name]
                assert old is not None
                module._parameters[name] = nn.Parameter(tensor, requires_grad=old.requires_grad)
        for path, tensors in decided.stored.items():
            module, name = wanted[path], names[path]
            weight = out_in(module, self.deciding.layouts[path])
            dtype = weight.dtype
            inputs = {key: tensors[key] for key in INPUT_SCALES if key in tensors}
            values: dict[str, Tensor | None] = {key: value for key, value in tensors.items() if key not in INPUT_SCALES}
            if scheme_of(module, self.scheme).weight_dtype == "int4":
                values.setdefault("weight_zero_point", None)
            layer = quantize_(module, weight, self.scheme, self.fmt, step=self.ctx.step, stored=values, input_scales=inputs or None)
            verify_decided(layer, decided.values.get(path), name, self.ctx.step)
            if tuple(weight.shape) not in self.shapes:
                verify_product(layer, dtype, name, self.ctx.step)
                self.shapes.add(tuple(weight.shape))
        prefix = f"{block.name}." if block.name else ""
        for carrier, readers in decided.carriers.items():
            self.outcome.carriers[prefix + carrier] = [prefix + reader for reader in readers]
        self.outcome.notes += [f"{prefix}{path}: {note}" for path, note in decided.notes.items()]
        self.refused.update((path, reason) for path, reason in decided.refused.items())

    def summary(self) -> list[str]:
        """What was folded and what was not, in a line each, over all blocks."""
        lines = [
            f"{path}: no scales for its inputs, since {reason}" + (f" ({count} blocks)" if count > 1 else "")
            for (path, reason), count in self.refused.items()
        ]
        if self.reused:
            lines.append(f"{self.reused} of {self.seen} blocks were decided by an earlier run on the same inputs")
        return lines
