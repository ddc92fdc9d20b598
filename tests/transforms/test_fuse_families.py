"""Decoder fusion on every family of transformers that it names: the same logits in a whole pass and step by step over a cache.

The models are tiny and random, made from their configs. The reference is the same model before the step, run by transformers
alone; steps run compiled by Dynamo (without a backend), since that is when attention of one query takes its own form.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import context

from optforge import single_row
from optforge.backends.base import CompileOptions
from optforge.backends.cpu import CpuBackend
from optforge.compiling import compile_
from optforge.errors import StepError
from optforge.kernels import kv_cache
from optforge.share import alias, on_meta
from optforge.transforms.base import Receipt
from optforge.transforms.fuse import Attention, Fuse, Products, attention, steps

IDS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(3))
STEPS = 4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 16}
FULL = {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    # config, what it adds, packs a layer, why its layers keep their own forward in a step (empty: they do not)
    "llama": ("Llama", {"attention_bias": True}, 2, ""),
    "llama, one group": ("Llama", {"num_key_value_heads": 1}, 2, ""),
    "mistral": ("Mistral", {"sliding_window": None}, 2, ""),
    "mistral, window": ("Mistral", {"sliding_window": 8}, 2, ""),
    "qwen2": ("Qwen2", {}, 2, ""),
    "qwen3": ("Qwen3", {}, 2, ""),
    "gemma": ("Gemma", {}, 2, ""),
    "gemma2": ("Gemma2", WINDOW, 2, "its attention caps its scores"),
    "gemma3": ("Gemma3Text", FULL, 2, ""),
    "gemma3, window": ("Gemma3Text", WINDOW, 2, ""),
    "phi3": ("Phi3", {}, 0, ""),
    "phi": ("Phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}, 1, "its parts run as norm, attention, mlp"),
    "gpt2": ("GPT2", {}, 0, "its norms are not RMSNorms with one weight"),
}
FAST = ("llama", "gpt2")
"""The others are slow: each compiles a model."""


def made(family: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    name, fields, *_ = FAMILIES[family]
    sizes = SIZES | fields | more
    if name in ("Phi", "GPT2"):
        sizes.pop("head_dim")
    if name == "GPT2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**sizes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    return model


def fused(model: nn.Module, **fields: Any) -> Receipt:
    return Fuse(**fields).apply(model, context("fuse", ((), {"input_ids": IDS, "use_cache": False}), backend=CpuBackend()))


def stepwise(model: nn.Module, **told: Any) -> Tensor:
    """Logits of the prompt's last token and of `STEPS` given tokens after it, over a static cache, [batch, STEPS + 1, vocabulary]."""
    cache = kv_cache.new_cache(model, IDS.shape[1] + STEPS)
    with torch.no_grad():
        with torch.compiler.set_stance("force_eager"):
            found = [model(input_ids=IDS, past_key_values=cache, use_cache=True).logits[:, -1]]
        for step in range(STEPS):
            token = IDS[:, step : step + 1]
            found.append(model(input_ids=token, past_key_values=cache, use_cache=True, **told).logits[:, -1])
    return torch.stack(found, 1)


@pytest.mark.parametrize("family", [one if one in FAST else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES])
def test_a_fused_decoder_gives_the_numbers_that_it_gave(family: str) -> None:
    model, other = made(family), made(family)
    _, _, packs, why_not = FAMILIES[family]
    with torch.no_grad():
        whole = model(input_ids=IDS, use_cache=False).logits
    given = stepwise(model)
    receipt = fused(model)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, whole, atol=2e-5, rtol=2e-5)
    for told in ({}, {single_row.STEP: True}):
        torch.testing.assert_close(stepwise(model, **told), given, atol=2e-5, rtol=2e-5)
    attended = compiled(model, given, **{single_row.STEP: True})
    assert bool(attended) == (family != "gemma2"), "attention of one query is taken wherever scores are not capped"
    layers = 2
    kinds = [touched.what.split()[0] for touched in receipt.touched]
    taken = 0 if why_not else layers
    assert (kinds.count("packed"), kinds.count("attention"), kinds.count("decode")) == (packs * layers, layers, taken)
    assert receipt.kernels.get("optforge::fused_linear", 0) == 4 * taken
    assert [reason for reason in receipt.skipped.values() if "own forward" in reason] == [
        f"a step runs its own forward: {why_not}" for _ in range(layers if why_not else 0)
    ]
    torch.testing.assert_close(stepwise(other), given, atol=0, rtol=0, msg="a second model of the class is as it was")
    assert other.config._attn_implementation == "sdpa" and not single_row.marked(other)


def compiled(model: nn.Module, given: Tensor, **told: Any) -> int:
    """Holds compiled steps against the given logits; how often attention of one query was traced."""
    traced = []
    one_row = attention.one_row_attention

    def seen(*arguments: Any) -> Tensor:
        traced.append(arguments[0].shape)
        return one_row(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, steps):
            patch.setattr(module, "one_row_attention", seen)
        torch._dynamo.reset()
        compile_(model, CompileOptions(engine="eager"))
        torch.testing.assert_close(stepwise(model, **told), given, atol=2e-5, rtol=2e-5)
    return len(traced)


@pytest.mark.slow
def test_compiled_steps_outside_of_a_loop_attend_over_the_mask_that_they_are_given() -> None:
    model = made("llama")
    given = stepwise(model)
    fused(model)
    assert compiled(model, given)


def test_a_padded_batch_is_no_step_and_keeps_its_mask() -> None:
    model, mask = made("llama"), torch.ones_like(IDS)
    mask[0, :4] = 0
    with torch.no_grad():
        given = model.generate(
            IDS, attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True
        )
        fused(model)
        found = model.generate(
            IDS, attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True
        )
    assert torch.equal(found, given)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_steps_read_and_write_a_cache_of_8_bits(dtype: str) -> None:
    model = made("llama")
    for _, module in kv_cache.attention_modules(model):
        kv_cache.mark_(module, kv_cache.Format(dtype, "e4m3fn"))
    given = stepwise(model)
    fused(model)
    torch.testing.assert_close(stepwise(model, **{single_row.STEP: True}), given, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["int8_weight", "int8_dynamic", "int4_weight"])
def test_steps_of_quantized_layers(scheme: str) -> None:
    from optforge.config.steps import step

    model = made("llama")
    fused(model)
    fields = {"group_size": 32} if scheme == "int4_weight" else {}
    ctx = context("weights", ((), {"input_ids": IDS, "use_cache": False}), backend=CpuBackend())
    step("weights", {"use": f"quantize/{scheme}", "ignore": ["lm_head"], **fields}).transform.apply(model, ctx)
    given, found = stepwise(model), stepwise(model, **{single_row.STEP: True})
    # a step leaves activations as they are where the layer itself rounds them
    torch.testing.assert_close(found, given, atol=0.1 if scheme == "int8_dynamic" else 1e-4, rtol=1e-4)


def test_a_step_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps.rotary_append
    monkeypatch.setattr(steps, "rotary_append", lambda qkv, cos, sin, *rest, **more: right(qkv, sin, cos, *rest, **more))
    with pytest.raises(StepError, match="a decode step by fused operators changed the logits"):
        fused(made("llama"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_the_plan_on_meta_decides_what_the_run_does_and_a_receipt_replays_it(family: str) -> None:
    model = made(family)
    ctx = context("fuse", ((), {"input_ids": IDS.to("meta"), "use_cache": False}))
    planned, done = Fuse().apply(on_meta(model), ctx), fused(made(family))
    assert planned.decisions == done.decisions and planned.kernels == done.kernels
    assert [touched.name for touched in planned.touched] == [touched.name for touched in done.touched]
    fresh, whole = made(family), fused(model)
    Fuse().replay(fresh, done)
    assert fresh.config._attn_implementation == model.config._attn_implementation == attention.NAME
    assert single_row.marked(fresh) and dict(fresh.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert whole.decisions == done.decisions


def test_a_candidate_over_the_same_weights_keeps_the_mark_and_the_baseline_gets_none() -> None:
    baseline = made("llama")
    row = alias(baseline)
    fused(row)
    assert single_row.marked(row) and single_row.marked(alias(row)) and not single_row.marked(baseline)


def test_products_and_attention_can_be_kept_each() -> None:
    model = made("llama")
    receipt = fused(model, products=Products.keep, attention=Attention.keep)
    assert not single_row.marked(model) and "loops" not in receipt.decisions and "attention" not in receipt.decisions
