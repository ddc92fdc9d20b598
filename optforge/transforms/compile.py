"""Compiles a model in place, block by block or as a whole, as the last step.

Block by block is the default: the repeated layers of one class share one compilation, a compile of seconds instead of
minutes, and it is the form that sharding accepts. With a KV cache the whole model is compiled, since there the time
between the blocks counts. Compiling in place (`nn.Module.compile`) keeps every name and every key of the state dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from optforge.backends.base import CompileOptions
from optforge.compiling import Family, compile_, lift_
from optforge.errors import PlanError, Problem
from optforge.measure.size import weight_bytes
from optforge.select import original_name, repeated_blocks
from optforge.spec import Hardware
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Search, Touched

if TYPE_CHECKING:
    from torch import nn


class Engine(Enum):
    inductor = "inductor"


class Mode(Enum):
    default = "default"
    reduce_overhead = "reduce-overhead"
    max_autotune = "max-autotune"
    max_autotune_no_cudagraphs = "max-autotune-no-cudagraphs"


class Scope(Enum):
    auto = "auto"
    block = "block"
    model = "model"


class OnMissing(Enum):
    error = "error"
    skip = "skip"


KINDS = 4
"""Kinds of blocks up to which `auto` compiles by block: Dynamo stops at 8 programs of one class and runs the rest uncompiled."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """How the model is compiled."""

    kind: ClassVar[str] = "compile"
    phase: ClassVar[Phase] = Phase.COMPILE
    search: ClassVar[Search] = {"*": {"scope": ("block", "model")}}

    engine: Engine = Engine.inductor
    """inductor: PyTorch's compiler (C++ on CPU, Triton on GPU)."""
    mode: Mode = Mode.default
    """default, reduce_overhead (CUDA graphs), max_autotune (tries many kernels; minutes), max_autotune_no_cudagraphs."""
    scope: Scope = Scope.auto
    """block: each repeated layer; model: all as one; auto: block where few kinds of layers repeat and no KV cache is used, else
    model."""
    dynamic: bool | None = None
    """true: one program for all sizes; false: one for each size; null: fixed first, then dynamic for a size that changes."""
    fullgraph: bool = False
    """true: a graph break is an error that names the line of the model, found while planning."""
    on_missing: OnMissing = OnMissing.error
    """error: refuse the run when there is no compiler; skip: leave this step out and say so."""

    @property
    def skips_when_missing(self) -> bool:
        return self.on_missing is OnMissing.skip

    def check(self, ctx: Context) -> Iterator[Problem]:
        """A mode that does nothing on the device is refused."""
        if self.mode is Mode.reduce_overhead and ctx.device.backend == "cpu" and ctx.target.backend == "cpu":
            yield Problem(
                where=f"step {ctx.step}",
                what="mode reduce_overhead works through CUDA graphs, and a CPU has none",
                fix=f"steps.{ctx.step}.mode=default",
            )

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Compiles on the context's backend; while planning it only lists what will be compiled, and with `fullgraph`
        traces it.

        Raises:
            PlanError: `scope: block` on a model without repeated layers, or a graph break under `fullgraph`.
        """
        chosen = self._modules(model, ctx)
        receipt = Receipt(total_bytes=weight_bytes(model))
        if ctx.backend is not None:
            shared = Family()
            for module in chosen.values():
                # with a cache each block is bound to its layer's place in it, and can share no program with another
                ctx.backend.compile(module, self.options(Family() if ctx.uses_cache else shared))
        elif self.fullgraph:
            _trace(model, chosen, ctx)
        what = f"compiled by {self.engine.value}, mode {self.mode.value}"
        sizes = {name: weight_bytes(module) for name, module in chosen.items()}
        receipt.touched = [Touched(name=name, what=what, bytes_before=size, bytes_after=size) for name, size in sizes.items()]
        receipt.bytes_before = receipt.bytes_after = sum(sizes.values())
        receipt.notes.append(f"{len(chosen)} repeated blocks, one by one" if "" not in chosen else "the whole model at once")
        if self.mode is Mode.reduce_overhead and ctx.device.backend == "cpu":
            receipt.notes.append(f"{ctx.device.name} has no CUDA graphs: here reduce_overhead compiles as default does")
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """The structure is as it was: a loaded model is compiled by whoever runs it."""

    def options(self, family: Family | None = None) -> CompileOptions:
        """What the backend is told."""
        return CompileOptions(engine=self.engine.value, mode=self.mode.value, fullgraph=self.fullgraph, dynamic=self.dynamic, family=family)

    def _modules(self, model: nn.Module, ctx: Context) -> dict[str, nn.Module]:
        """What is compiled, by name; the whole model has the name ''."""
        blocks = {} if self.scope is Scope.model else repeated_blocks(model)
        if self.scope is Scope.block and not blocks:
            raise PlanError(
                Problem(
                    where=f"step {ctx.step}",
                    what="scope block needs repeated layers (an nn.ModuleList of one class), and the model has none",
                    fix=f"steps.{ctx.step}.scope=model",
                )
            )
        whole = not blocks or (self.scope is Scope.auto and (ctx.uses_cache or _kinds(blocks.values()) > KINDS))
        return {"": model} if whole else {original_name(name): block for name, block in blocks.items()}


def graph_break(error: BaseException) -> Problem | None:
    """What stopped a compile under `fullgraph`, told by the file and line of the model; None for an error that is not
    the tracer's."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    frames = list(getattr(error, "real_stack", None) or ())
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the compiler's tracer"
    line = f" at '{frames[-1].line.strip()}'" if frames and frames[-1].line else ""
    reason = next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)
    return Problem(
        where=where,
        what=f"fullgraph is true and the graph breaks{line}: {reason}",
        fix="take the value read on the host out of forward, or set fullgraph=false and accept the break",
    )


def _trace(model: nn.Module, chosen: dict[str, nn.Module], ctx: Context) -> None:
    """Traces the modules on the example, so that a graph break is found before any weight is loaded."""
    import torch
    from torch._dynamo.exc import TorchDynamoException

    if ctx.example is None:
        return
    args, kwargs = ctx.example
    try:
        for module in chosen.values():
            compile_(module, CompileOptions(engine="eager", fullgraph=True))
        with torch.no_grad():
            model(*args, **kwargs)
    except TorchDynamoException as error:
        found = graph_break(error)
        assert found is not None
        raise PlanError(found) from error
    finally:
        for module in chosen.values():
            lift_(module)


def _kinds(blocks: Iterable[nn.Module]) -> int:
    """How many programs the blocks need: those whose parameters agree in name, shape and dtype share one."""
    return len({tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters()) for block in blocks})
