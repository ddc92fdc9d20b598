"""Decode over a static cache: token for token what transformers generates, and the same again in every call."""

from __future__ import annotations

import gc

import pytest
import torch
from llamas import (
    HEADS,
    KV_HEADS,
    LAYERS,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    layer_flops,
    layer_weights,
    llama,
    rotary_flops,
)
from torch import Tensor, nn

from optforge import registry
from optforge.backends.base import CompileOptions
from optforge.compiling import compile_
from optforge.data.tokens import RandomTokens
from optforge.measure import compiles
from optforge.models.base import Loaded
from optforge.workloads.base import Work, Workload
from optforge.workloads.decode import Decode

CPU = torch.device("cpu")
SMALL = Decode(batch_size=2, context=12, new_tokens=8)


def generated(module: nn.Module, ids: Tensor, count: int) -> Tensor:
    """What transformers' own greedy generation appends."""
    with torch.no_grad():
        return module.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))[:, ids.shape[1] :]


def decoded(work, module: nn.Module) -> Tensor:
    return torch.cat([work.first(module), work.run(module)], dim=1)


def test_protocols() -> None:
    assert isinstance(SMALL, Workload)
    assert isinstance(SMALL.prepare(llama(), RandomTokens(), CPU), Work)


def test_tokens_equal_transformers_greedy_generation_in_every_call() -> None:
    loaded = llama()
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    expected = generated(loaded.module, work.ids, SMALL.new_tokens + 1)
    assert len(expected.unique()) > 2, "a model that repeats one token would hide a wrong position"
    assert (work.unit, work.units, work.calls) == ("tokens", 16, 8)
    for _ in range(3):
        assert torch.equal(decoded(work, loaded.module), expected)


def test_two_modules_do_not_share_a_cache() -> None:
    a, b = llama(seed=0), llama(seed=1)
    work = SMALL.prepare(a, RandomTokens(), CPU)
    expected = [generated(loaded.module, work.ids, 9) for loaded in (a, b)]
    assert not torch.equal(*expected)
    for _ in range(2):
        assert torch.equal(decoded(work, a.module), expected[0])
        assert torch.equal(decoded(work, b.module), expected[1])


def test_ready_fills_the_cache_again_after_the_module_was_changed() -> None:
    loaded, other = llama(seed=0), llama(seed=1)
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    work.run(loaded.module)
    address = work._states[loaded.module].cache.layers[0].keys.data_ptr()
    loaded.module.load_state_dict(other.module.state_dict())
    work.ready(loaded.module)
    assert torch.equal(decoded(work, loaded.module), generated(other.module, work.ids, 9))
    assert work._states[loaded.module].cache.layers[0].keys.data_ptr() == address, "compiled code holds this address"
    loaded.module.to(torch.bfloat16)
    work.ready(loaded.module)
    work.run(loaded.module)
    assert work._states[loaded.module].cache.layers[0].keys.dtype == torch.bfloat16


def test_a_module_that_is_gone_takes_its_cache_with_it() -> None:
    loaded = llama()
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    work.run(loaded.module)
    assert len(work._states) == 1
    del loaded
    gc.collect()
    assert len(work._states) == 0


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_are_compiled_once_and_decode_the_same() -> None:
    loaded = llama()
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    expected = decoded(work, loaded.module)
    for layer in loaded.module.model.layers:
        compile_(layer, CompileOptions(engine="eager", fullgraph=True))
    first = compiles.first_calls(lambda: work.run(loaded.module), lambda: None)
    assert 1 <= first.graphs <= LAYERS
    with compiles.watch() as later:
        work.ready(loaded.module)
        again = decoded(work, loaded.module)
    assert later.graphs == 0, "neither the prompt nor a cache filled again compiles anything"
    assert torch.equal(again, expected)


def test_operations_by_hand_also_on_meta() -> None:
    # step i has one query over 12 + i + 1 positions
    per_sequence = sum(LAYERS * layer_flops(1, 12 + step + 1) + 2 * WIDTH * VOCABULARY for step in range(8))
    for loaded, device in ((llama(), CPU), (llama("meta"), torch.device("meta"))):
        work = SMALL.prepare(loaded, RandomTokens(), device)
        assert work.flops(loaded.module) == 2 * per_sequence + 8 * rotary_flops(1)


def test_bytes_by_hand() -> None:
    loaded = llama()
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    head = WIDTH // HEADS
    weights = LAYERS * layer_weights() + WIDTH + VOCABULARY * WIDTH + 2 * (head // 2) + 2 * WIDTH
    position = 2 * 2 * LAYERS * KV_HEADS * head
    cache = position * sum(12 + step + 1 for step in range(8))
    assert work.bytes(loaded.module) == 4 * (8 * weights + cache)


def test_check_says_what_is_wrong() -> None:
    (problem,) = Decode(context=POSITIONS, new_tokens=8).check(llama())
    assert str(problem) == (
        f"workload.context: {POSITIONS + 8} tokens are more than the {POSITIONS} positions of tiny; workload.context={POSITIONS - 8}"
    )
    (other,) = Decode().check(Loaded(module=nn.Identity(), family="module", name="x"))
    assert "not module" in str(other)


def test_a_sliding_window_is_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    with torch.device("meta"):
        module = MistralForCausalLM(config)
    (problem,) = SMALL.check(Loaded(module=module, family="causal_lm", name="mistral"))
    assert "StaticSlidingWindowLayer" in str(problem)


@pytest.mark.slow
def test_smollm2_decodes_what_transformers_generates() -> None:
    source = registry.get("models", "smollm2")(dtype="fp32")
    missing = list(source.check())
    if missing:
        pytest.skip(f"SmolLM2 is not here: {missing[0]}")
    loaded = source.load()
    ids = loaded.tokenizer("The history of the city begins in the second century, when", return_tensors="pt").input_ids

    class Prompt(RandomTokens):
        def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
            return ids.flatten()

    work = Decode(context=ids.shape[1], new_tokens=24).prepare(loaded, Prompt(), CPU)
    expected = generated(loaded.module, ids, 25)
    assert torch.equal(decoded(work, loaded.module)[:, : expected.shape[1]], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_on_a_device_the_loop_never_waits_and_decodes_the_same(mode: str | None) -> None:
    torch._dynamo.reset()
    loaded, device = llama(), torch.device("cuda")
    loaded.module.to(device)
    work = SMALL.prepare(loaded, RandomTokens(), device)
    expected = decoded(work, loaded.module)
    assert torch.equal(expected, generated(loaded.module, work.ids, 9))
    if mode is not None:
        for layer in loaded.module.model.layers:
            compile_(layer, CompileOptions(mode=mode))
    for _ in range(3):
        work.run(loaded.module)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = work.run(loaded.module)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected[:, 1:])
