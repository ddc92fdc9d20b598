"""Greedy decoding with everything that changes from step to step on the device: the token, its place, the cache's positions.

A step is one program: forward pass, choice of the token, and where it is kept. On a GPU that program is captured once as a CUDA
graph and replayed for each step, so that the host only says how often; on a CPU it is called. Nothing in the loop waits for the
device or reads a value of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from optforge import single_row
from optforge.backends.base import CompileOptions
from optforge.compiling import compile_, compiled_with
from optforge.kernels.argmax import argmax

WARM_CALLS = 3
"""Steps before the capture, as PyTorch asks: they compile, and let libraries allocate what they keep."""
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Compile modes that capture graphs of their own, which cannot be captured again."""


class Step(nn.Module):
    """One step of a module over a cache that it holds; compiled as a whole."""

    def __init__(self, module: nn.Module, cache: Any) -> None:
        super().__init__()
        self.module, self.cache = module, cache

    def forward(self, token: Tensor, chosen: Tensor, place: Tensor) -> None:
        """Replaces `token` [batch, 1] by the one that follows it and keeps it in column `place` [1] of `chosen` [batch, new
        tokens], all int64; then `place` is the next."""
        # its forward and not its call: compiled alone, it would be a program within this one
        told = {single_row.STEP: True}
        logits = self.module.forward(input_ids=token, past_key_values=self.cache, use_cache=True, **told).logits
        token.copy_(argmax(logits[:, -1:]))
        chosen.index_copy_(1, place, token)
        place.add_(1)


class Greedy:
    """Decodes `new_tokens` tokens after a prompt that is in the cache."""

    def __init__(
        self, module: nn.Module, cache: Any, *, first: Tensor, lengths: Sequence[Tensor], starts: Sequence[Tensor], new_tokens: int
    ) -> None:
        """Prepares the loop for `module` as it is compiled now; `serves` says whether it still is.

        Args:
            cache: transformers' static cache, filled with the prompt.
            first: the token that the prompt chose, int64 [batch, 1].
            lengths: the cache's position counters, wherever they stand.
            starts: what they are at the end of the prompt.
        """
        options = compiled_with(module)
        assert options is not None, "only a compiled module has a loop of its own"
        self.compiled, self.options = module._compiled_call_impl, options
        self.first, self.lengths, self.starts = first, list(lengths), list(starts)
        self.token, self.place = first.clone(), torch.zeros(1, dtype=torch.int64, device=first.device)
        self.chosen = first.new_zeros(first.shape[0], new_tokens)
        self.step = Step(module, cache)
        single_row.mark_(self.step, kernels=single_row.has_kernels(module))
        compile_(self.step, own_options(options))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.compiles = True
        """No step has run yet."""

    def serves(self, module: nn.Module) -> bool:
        """Whether `module` is compiled as it was when this loop was made."""
        return module._compiled_call_impl is self.compiled

    def run(self) -> Tensor:
        """The tokens after the first, int64 [batch, new_tokens]."""
        if self.token.is_cuda and self.graph is None:
            self.graph = self._captured()
        self._rewind()
        with self._unguarded():
            for _ in range(self.chosen.shape[1]):
                self.graph.replay() if self.graph is not None else self._advance()
        self.compiles = False
        return self.chosen.clone()

    def _unguarded(self) -> AbstractContextManager[Any]:
        """Leaves out Dynamo's look at every parameter before each step, which takes a tenth of a small model's step: one program
        serves this loop alone, its tensors stay, and a module that a step changed gets a loop of its own."""
        return nullcontext() if self.compiles else torch.compiler.set_stance(skip_guard_eval_unsafe=True)

    def _advance(self) -> None:
        self.step(self.token, self.chosen, self.place)

    def _rewind(self) -> None:
        """Back to the end of the prompt."""
        torch._foreach_copy_(self.lengths, self.starts)
        self.token.copy_(self.first)
        self.place.zero_()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """One step as a CUDA graph over the tensors held here."""
        with torch.cuda.device_of(self.token):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # as above
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_CALLS):
                    self._rewind()
                    self._advance()
            torch.cuda.current_stream().wait_stream(side)
            self._rewind()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._advance()
        return graph


def own_options(options: CompileOptions) -> CompileOptions:
    """How a step of a module that was compiled with `options` is compiled: the same, without CUDA graphs of the compiler's own."""
    return replace(options, mode=_WITHOUT_GRAPHS.get(options.mode, options.mode), family=None)
