"""A KV cache in 8 bits: what it holds, what is read from it, its bytes in the plan, and quality that is measured through it."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace

import llamas
import pytest
import torch
from torch import nn
from toys import context, tiny_lm
from transformers import StaticCache

from optforge.data.tokens import RandomTokens
from optforge.errors import PlanError, SelectorError
from optforge.kernels import kv_cache
from optforge.kernels.kv_cache import Format
from optforge.measure.language import logits_of
from optforge.measure.size import nbytes
from optforge.plan.trace import trace
from optforge.share import alias, on_meta
from optforge.spec import Hardware
from optforge.transforms.base import Receipt, Touched
from optforge.transforms.kv_cache import KVCache, Stored
from optforge.workloads.decode import Decode

CPU = torch.device("cpu")
SMALL = Decode(batch_size=2, context=12, new_tokens=8)
H100 = Hardware(name="h100", backend="nvidia", arch="sm_90", fp8_format="e4m3fn")
KINDS = list(Stored)


def marked(model: nn.Module, dtype: Stored = Stored.int8, **fields: object) -> Receipt:
    given = replace(context("cache", workload="decode", uses_cache=True), target=H100)
    return KVCache(dtype=dtype, **fields).apply(model, given)  # type: ignore[arg-type]


def ids(tokens: int = 12, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, llamas.VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(3))


def test_values_by_hand() -> None:
    stored, scale = Format("int8", "e4m3fn").round(torch.tensor([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0]]))
    assert stored.tolist() == [[127, -50, 0], [0, 0, 0]] and scale[0].item() == pytest.approx(0.01)
    stored, scale = Format("fp8", "e4m3fn").round(torch.tensor([[448.0, -1.0625, 2.0**-9]]))
    assert stored.tolist() == [[0b0_1111_110, 0b1_0111_000, 1]] and scale.tolist() == [[1.0]]
    stored, scale = Format("fp8", "e4m3fnuz").round(torch.tensor([[240.0, -0.0]]))
    assert stored.tolist() == [[0x7F, 0]] and scale.tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: d.name)
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_written_within_half_a_step(dtype: Stored, values: torch.dtype) -> None:
    """The first layer's keys do not depend on any cache, so a plain cache holds the exact ones."""
    model = llamas.module(dtype=values)
    plain = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(input_ids=ids(), past_key_values=plain, use_cache=True)
    marked(model, dtype)
    cache = kv_cache.new_cache(model, 16)
    with torch.no_grad():
        model(input_ids=ids(), past_key_values=cache, use_cache=True)
    (first, *_), (exact, *_) = cache.layers, plain.layers
    for stored, scales, wanted in ((first.keys, first.key_scales, exact.keys), (first.values, first.value_scales, exact.values)):
        assert stored.dtype is (torch.int8 if dtype is Stored.int8 else torch.uint8) and stored.shape == wanted.shape
        found = first.form.back(stored, scales, torch.float32)
        step = scales / 2 if dtype is Stored.int8 else wanted.abs() / 16 + scales * 2.0**-10
        assert bool(((found - wanted.float()).abs() <= step * 1.001 + 1e-6).all())
        assert not bool(found[:, :, 12:].any()), "places that nothing was written to"


@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: d.name)
def test_decode_gives_the_tokens_of_the_logits_that_quality_judges_in_every_call(dtype: Stored) -> None:
    """A window in one pass and token by token: each position reads the same rounded keys either way."""
    loaded = llamas.llama()
    marked(loaded.module, dtype)
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    tokens = torch.cat([work.first(loaded.module), work.run(loaded.module)], dim=1)
    with torch.no_grad():
        logits = logits_of(loaded.module, torch.cat([work.ids, tokens], dim=1))
    assert torch.equal(logits[:, work.ids.shape[1] - 1 : -1].argmax(-1), tokens)
    assert torch.equal(torch.cat([work.first(loaded.module), work.run(loaded.module)], dim=1), tokens)


@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: d.name)
def test_quality_is_that_of_the_rounded_cache(dtype: Stored) -> None:
    model = llamas.module()
    with torch.no_grad():
        exact = logits_of(model, ids())
        marked(model, dtype)
        found = logits_of(model, ids())
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < (0.01 if dtype is Stored.int8 else 0.05)


def test_bytes_are_those_of_the_tensors_in_the_workload_and_in_the_plan() -> None:
    loaded, plain = llamas.llama(dtype=torch.bfloat16), llamas.llama(dtype=torch.bfloat16)
    receipt = marked(loaded.module, Stored.fp8)
    head = llamas.WIDTH // llamas.HEADS
    token = llamas.LAYERS * llamas.KV_HEADS * 2 * (head + 4)
    assert kv_cache.position_bytes(loaded.module, torch.bfloat16) == token
    assert f"takes {token} bytes of cache in place of {llamas.LAYERS * llamas.KV_HEADS * 2 * 2 * head}" in receipt.notes[0]
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    work.ready(loaded.module)
    kept = work.kept(loaded.module)
    assert sum(map(nbytes, kept)) == 2 * (12 + 8) * token and len(kept) == 4 * llamas.LAYERS
    seen = sum(12 + step for step in range(8))
    difference = work.bytes(plain.module) - work.bytes(loaded.module)
    assert difference == 2 * (seen + 8) * (llamas.LAYERS * llamas.KV_HEADS * 2 * 2 * head - token)
    graph = trace(replace(llamas.loaded(on_meta(loaded.module)), weights="random"), SMALL, RandomTokens(), H100)
    assert sum(value.bytes for value in graph.values.values() if value.role == "cache") == 2 * 20 * token


def test_layers_that_are_ignored_keep_their_dtype() -> None:
    loaded = llamas.llama()
    receipt = marked(loaded.module, ignore=["layers.0"])
    assert receipt.ignored == ["model.layers.0.self_attn"] and list(kv_cache.formats(loaded.module)) == [1]
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    work.ready(loaded.module)
    assert [tensor.dtype for tensor in work.kept(loaded.module)[:3]] == [torch.float32, torch.float32, torch.int8]
    with pytest.raises(SelectorError, match="layer_0"):
        marked(llamas.module(), ignore=["layer_0"])


def test_a_receipt_a_copy_and_meta_carry_the_marks() -> None:
    model = llamas.module()
    receipt = marked(model, Stored.fp8)
    assert marked(on_meta(llamas.module()), Stored.fp8) == receipt
    written = json.loads(json.dumps(asdict(receipt)))
    fresh = llamas.module()
    KVCache(dtype=Stored.fp8).replay(fresh, Receipt(**{**written, "touched": [Touched(**one) for one in written["touched"]]}))
    for other in (fresh, alias(model), copy.deepcopy(model)):
        assert kv_cache.formats(other) == kv_cache.formats(model) == dict.fromkeys(range(llamas.LAYERS), Format("fp8", "e4m3fn"))
    assert kv_cache.formats(alias(llamas.module())) == {}


def test_the_cache_is_made_anew_when_a_step_marks_the_model_in_between() -> None:
    loaded = llamas.llama()
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    work.ready(loaded.module)
    marked(loaded.module)
    work.ready(loaded.module)
    first = work.kept(loaded.module)
    assert first[0].dtype is torch.int8
    work.ready(loaded.module)
    assert all(one is other for one, other in zip(first, work.kept(loaded.module), strict=True)), "then it stays where it is"


@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: d.name)
def test_it_compiles_as_one_graph_with_the_same_tokens(dtype: Stored, fresh_compiler: None) -> None:
    loaded = llamas.llama()
    marked(loaded.module, dtype)
    work = SMALL.prepare(loaded, RandomTokens(), CPU)
    expected = work.run(loaded.module)
    loaded.module.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(work.run(loaded.module), expected)


def test_what_it_refuses() -> None:
    (problem,) = KVCache(dtype=Stored.int8).check(context("cache", workload="prefill"))
    assert "prefill keeps no KV cache" in problem.what and "workload=decode" in problem.fix
    assert not list(KVCache(dtype=Stored.int8).check(context("cache", workload="decode", uses_cache=True)))
    with pytest.raises(PlanError, match="no attention that writes to a cache"):
        marked(tiny_lm())
    model = llamas.module()
    marked(model)
    with pytest.raises(PlanError, match="quantized already"):
        marked(model, Stored.fp8)
