"""Compiles a module in place, so that names, parameters and keys stay, and takes the compile away again.

`nn.Module.compile` compiles nothing, without a word, when the class of the module is one of PyTorch's own (a bare
`nn.Sequential`, `nn.TransformerEncoderLayer`): Dynamo skips frames of PyTorch's files, and there is no other frame
between the call and the module. For those classes a frame of this file is put around the call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from optforge.backends.base import CompileOptions

if TYPE_CHECKING:
    from torch import nn


def compile_(module: nn.Module, options: CompileOptions) -> None:
    """Compiles `module` in place as `nn.Module.compile` does, for PyTorch's own classes too."""
    import torch

    call: Callable[..., Any] = module._call_impl
    if _skipped(type(module)):
        call = _own_frame(call)
    # where nn.Module.compile keeps it: Module.__call__ looks there, and pickling and deepcopy leave it out
    module._compiled_call_impl = torch.compile(call, **_arguments(options))


def lift_(module: nn.Module) -> None:
    """Takes the compile of `module` away; its children keep theirs."""
    module._compiled_call_impl = None


def _arguments(options: CompileOptions) -> dict[str, Any]:
    """Arguments of `torch.compile`. It takes a mode or options, so a mode beside options is spelled out as options."""
    chosen: dict[str, Any] = {"backend": options.engine, "fullgraph": options.fullgraph, "dynamic": options.dynamic}
    if options.engine != "inductor":
        return chosen
    if not options.options:
        return {**chosen, "mode": options.mode}
    from torch._inductor import list_mode_options

    return {**chosen, "options": {**list_mode_options(options.mode, options.dynamic), **options.options}}


def _skipped(kind: type[nn.Module]) -> bool:
    """Whether Dynamo skips the frame of this class's forward."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(kind.forward))


def _own_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """A frame around `call` that Dynamo does trace.

    Its code object is a copy: Dynamo keeps compiled graphs and the recompile limit per code object, and modules of
    different classes must not use up one limit together.
    """

    def frame(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return FunctionType(frame.__code__.replace(), frame.__globals__, frame.__name__, None, frame.__closure__)
