"""Decode: new tokens one at a time after a prompt, greedily, over a static KV cache.

Shapes are static, so that compiled code and CUDA graphs serve every step; the next token is chosen on the device, so
that the host never waits inside the loop. The prompt is run once per module, untimed; each call then sets the positions
back to the end of the prompt and writes over the same places of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from optforge.data.base import DataSource
from optforge.distributed.world import share_of
from optforge.errors import Problem
from optforge.measure.work import compute_dtype, count_flops, read_bytes
from optforge.models.base import Loaded
from optforge.workloads.base import begin_pass, example_ids, not_positive, token_ids, too_long

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from optforge.workloads.greedy import Greedy


@dataclass(frozen=True, kw_only=True)
class Decode:
    """`new_tokens` tokens for each of `batch_size` prompts of `context` tokens."""

    kind: ClassVar[str] = "decode"
    families: ClassVar[tuple[str, ...]] = ("causal_lm",)
    uses_cache: ClassVar[bool] = True

    batch_size: int = 1
    """Sequences decoded together."""
    context: int = 128
    """Tokens of each prompt, real ones from the data set; its pass is not timed."""
    new_tokens: int = 32
    """Tokens decoded in one timed call."""

    def check(self, loaded: Loaded) -> Iterator[Problem]:
        yield from not_positive("workload", batch_size=self.batch_size, context=self.context, new_tokens=self.new_tokens)
        if loaded.family not in self.families:
            yield Problem(where="workload", what=f"decode runs language models, not {loaded.family}", fix="workload=forward")
            return
        yield from too_long(loaded, "context", self.context, self.new_tokens)
        yield from self._cache_problems(loaded)

    def _cache_problems(self, loaded: Loaded) -> Iterator[Problem]:
        """Positions can be set back only in a cache whose layers all keep every position."""
        config = getattr(loaded.module, "config", None)
        if config is None:
            yield Problem(where="workload", what="decode needs a transformers model with a config", fix="workload=forward")
            return
        kinds = {type(layer).__name__ for layer in _new_cache(config, self.context + self.new_tokens).layers}
        for kind in sorted(kinds - {"StaticLayer"}):
            what = f"the model's cache has layers of kind {kind}, which cannot be set back to the end of the prompt"
            yield Problem(where="workload", what=what, fix="workload=prefill")

    def example(self, loaded: Loaded, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = example_ids(loaded, device)
        return (), {"input_ids": ids, "use_cache": False}

    def prepare(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int = 0) -> DecodeWork:
        """The prompts on `device`, int64, shape [batch_size, context]. The cache is made when a module is first seen."""
        ids = token_ids(loaded, data, (self.batch_size, self.context), device, seed)
        return DecodeWork(ids=ids, new_tokens=self.new_tokens)


@dataclass(kw_only=True)
class _State:
    """One module's cache after its prompt: where each layer's position counter lies, and what it is set back to."""

    cache: Any
    lengths: list[Tensor]
    starts: list[Tensor]
    first: Tensor
    """The token that the prompt itself chose, int64, shape [batch, 1]."""
    widths: tuple[int, ...]
    """`_widths` of the module that the cache was made for."""
    loop: Greedy | None = None
    """Of a fused and compiled module, the program of a whole step."""


@dataclass(kw_only=True)
class DecodeWork:
    """Prompts on the device, and per module a cache that they fill."""

    ids: Tensor
    new_tokens: int
    unit: str = "tokens"
    _states: WeakKeyDictionary[nn.Module, _State] = field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def units(self) -> int:
        return self.ids.shape[0] * self.new_tokens

    @property
    def calls(self) -> int:
        return self.new_tokens

    def ready(self, module: nn.Module) -> None:
        """Runs the prompt, uncompiled: it runs once, and compiled it would only add a second shape to compile for.

        A cache that the module already has is filled again in place, so that compiled code which holds its address
        stays valid.
        """
        import torch

        from optforge.kernels import kv_cache

        known, widths = self._states.get(module), _widths(module)
        if (
            known is not None
            and known.widths == widths
            and known.cache.layers[0].dtype == compute_dtype(module)
            and kv_cache.same_kind(known.cache, module)
        ):
            cache = known.cache
            cache.reset()
        else:
            cache = kv_cache.new_cache(module, self.ids.shape[1] + self.new_tokens)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = module(input_ids=self.ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        lengths = [layer.cumulative_length for layer in cache.layers]
        self._states[module] = _State(
            cache=cache,
            lengths=lengths,
            starts=[length.clone() for length in lengths],
            first=logits[:, -1:].argmax(-1),
            widths=widths,
        )

    def first(self, module: nn.Module) -> Tensor:
        """The token that follows the prompt, int64, shape [batch, 1]; `run` gives those after it."""
        if module not in self._states:
            self.ready(module)
        return self._states[module].first

    def run(self, module: nn.Module) -> Tensor:
        """The tokens chosen, int64, shape [batch, new_tokens]: those after the one that the prompt chose."""
        import torch

        if module not in self._states:
            self.ready(module)
        state = self._states[module]
        with torch.no_grad():
            if (loop := self._loop(module, state)) is not None:
                return loop.run()
            torch._foreach_copy_(state.lengths, state.starts)
            token, chosen = state.first, []
            for _ in range(self.new_tokens):
                token = _next(module, token, state.cache)
                chosen.append(token)
            return torch.cat(chosen, dim=1)

    def _loop(self, module: nn.Module, state: _State) -> Greedy | None:
        """The loop of a module that a step fused and that is compiled as a whole; None for every other, which is called as it is."""
        from optforge import single_row
        from optforge.compiling import compiled_with
        from optforge.workloads.greedy import Greedy

        if not single_row.marked(module) or compiled_with(module) is None or share_of(module).devices > 1:
            state.loop = None
        elif state.loop is None or not state.loop.serves(module):
            state.loop = None  # first, so that its memory is free
            told = {"first": state.first, "lengths": state.lengths, "starts": state.starts}
            state.loop = Greedy(module, state.cache, **told, new_tokens=self.new_tokens)  # type: ignore[arg-type]  # of each its own type
        return state.loop

    def once(self, module: nn.Module) -> Tensor:
        """One step, int64, shape [batch, 1]. The cache is static, so that every step does the same work."""
        import torch

        state = self._states[module]
        with torch.no_grad():
            return _next(module, state.first, state.cache)

    def kept(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Keys and values of every layer, [batch, kv_heads, context + new_tokens, head_dim], and the scales of those in 8 bits."""
        from optforge.kernels import kv_cache

        return kv_cache.tensors(self._states[module].cache)

    def flops(self, module: nn.Module) -> int | None:
        """Operations of all steps. Attention grows by one position a step, so the mean of first and last is exact."""
        context = self.ids.shape[1]
        ends = [self._step_flops(module, length) for length in (context + 1, context + self.new_tokens)]
        if ends[0] is None or ends[1] is None:
            return None
        return (ends[0] + ends[1]) * self.new_tokens // 2

    def _step_flops(self, module: nn.Module, length: int) -> int | None:
        """Operations of one step whose query sees `length` positions."""
        import torch

        def call(forward: Any) -> Any:
            cache = _new_cache(module.config, length)
            token = torch.zeros((self.ids.shape[0], 1), dtype=torch.int64)
            return forward(input_ids=token, past_key_values=cache, use_cache=True)

        return count_flops(module, call)

    def bytes(self, module: nn.Module) -> int | None:
        """Weights once a step, the cache of the positions seen so far read, one position written."""
        from optforge.kernels import kv_cache

        batch, context = self.ids.shape
        dtype = compute_dtype(module)
        if dtype is None:
            return None
        position = batch * kv_cache.position_bytes(module, dtype) // share_of(module).tensor
        seen = sum(context + step for step in range(self.new_tokens))
        return self.new_tokens * read_bytes(module, batch) + position * (seen + self.new_tokens)


def _widths(module: nn.Module) -> tuple[int, ...]:
    """The outputs of every linear, which a step that removes heads or layers changes, and with them the shape of the cache."""
    found = (getattr(child, "out_features", None) for child in module.modules())
    return tuple(width for width in found if isinstance(width, int))


def _next(module: nn.Module, token: Tensor, cache: Any) -> Tensor:
    """The most likely token after `token`, both int64 of shape [batch, 1]."""
    begin_pass(token.device)
    chosen: Tensor = module(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return chosen


def _new_cache(config: Any, length: int) -> Any:
    """A static cache for `length` positions; its tensors are made by the first pass, in that pass's dtype."""
    from transformers import StaticCache

    return StaticCache(config=config, max_cache_len=length)
