"""Compiles modules in place, so that names, parameters and keys stay, and takes the compile away again.

`nn.Module.compile` alone has two faults here, both silent. It compiles nothing when the class is one of PyTorch's own (a
bare `nn.Sequential`, `nn.TransformerEncoderLayer`), since Dynamo skips the frames of PyTorch's files. And it keeps
compiled programs per class, eight at most: when the rows of a run, or the layers of a decoder with a KV cache (each guards
on its own index), have used those up, the rest runs uncompiled. Here the programs belong to a `Family` of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from optforge import single_row
from optforge.backends.base import CompileOptions

if TYPE_CHECKING:
    from torch import nn


class Family:
    """Modules that share compiled programs where their guards allow, and share none with other families.

    The blocks of one model without a cache are one family: they compile once. Blocks that each hold their own state, such
    as their layer's place in a KV cache, are a family each.
    """

    def __init__(self) -> None:
        self._programs: dict[type, Callable[..., Any]] = {}

    def program(self, kind: type[nn.Module], options: CompileOptions, more: Mapping[str, Any]) -> Callable[..., Any]:
        """The compiled `call(module, *args, **kwargs)` for modules of one class, compiled with the family's first options."""
        import torch

        if kind not in self._programs:
            call = _call if _skipped(kind) else kind.forward
            # Dynamo keeps programs and their limit per code object: a copy of it starts a fresh set
            code, defaults, cells = call.__code__.replace(), call.__defaults__, call.__closure__
            copied = FunctionType(code, call.__globals__, call.__name__, defaults, cells)
            copied.__kwdefaults__ = call.__kwdefaults__
            self._programs[kind] = torch.compile(copied, **_arguments(options, more))
        return self._programs[kind]


class _Compiled:
    """What a compiled module is called through.

    A module with hooks (`fully_shard` adds some, so do readers of activations) goes through `_call_impl` as
    `nn.Module.compile` does it: there the hooks run before and after the compiled forward, and break no graph.
    """

    def __init__(self, module: nn.Module, options: CompileOptions) -> None:
        family = options.family if options.family is not None else Family()
        self.module, self.options = module, options
        self.more = single_row.inductor_options(module)
        self.program = family.program(type(module), options, self.more)
        self.runs_hooks = _skipped(type(module))
        self.hooked: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.runs_hooks or not _hooked(self.module):
            return self.program(self.module, *args, **kwargs)
        if self.hooked is None:
            import torch

            self.hooked = torch.compile(self.module._call_impl, **_arguments(self.options, self.more))
        return self.hooked(*args, **kwargs)


def compile_(module: nn.Module, options: CompileOptions) -> None:
    """Compiles `module` in place, within `options.family`, or in a family of its own."""
    # where nn.Module.compile keeps it: Module.__call__ looks there, and pickling and deepcopy leave it out
    module._compiled_call_impl = _Compiled(module, options)


def compiled_with(module: nn.Module) -> CompileOptions | None:
    """How `compile_` compiled this module; None where it is not compiled, or hooks run around its forward."""
    found = module._compiled_call_impl
    return found.options if isinstance(found, _Compiled) and not _hooked(module) else None


def lift_(module: nn.Module) -> None:
    """Takes the compile of `module` away; its children keep theirs."""
    module._compiled_call_impl = None


def _arguments(options: CompileOptions, more: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `torch.compile`, `more` beside the options. It takes a mode or options, so a mode beside options is spelled out
    as options."""
    chosen: dict[str, Any] = {"backend": options.engine, "fullgraph": options.fullgraph, "dynamic": options.dynamic}
    if options.engine != "inductor":
        return chosen
    if not options.options and not more:
        return {**chosen, "mode": options.mode}
    from torch._inductor import list_mode_options

    return {**chosen, "options": {**list_mode_options(options.mode, options.dynamic), **more, **options.options}}


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A frame that Dynamo traces around a forward that it would skip."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch ships it untyped


def _skipped(kind: type[nn.Module]) -> bool:
    """Whether Dynamo skips the frame of this class's forward, or there is no such frame to copy."""
    from torch._dynamo import trace_rules

    return not isinstance(kind.forward, FunctionType) or bool(trace_rules.check(kind.forward))


def _hooked(module: nn.Module) -> bool:
    """Whether anything but the class's forward runs in a call: hooks, or a forward set on the instance."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks) or "forward" in vars(module)
