"""Decoder fusion's attention: for one instance only, held against PyTorch's layer by layer, left alone where it does not suit."""

from __future__ import annotations

from dataclasses import replace

import llamas
import pytest
import torch
from toys import CPU, context
from transformers import LlamaForCausalLM

from optforge.backends.cpu import CpuBackend
from optforge.errors import StepError
from optforge.transforms.fuse import Attention, Fuse, attention

IDS = torch.arange(24).reshape(2, 12)


def fused(model: LlamaForCausalLM, **fields: object) -> tuple[LlamaForCausalLM, list[str]]:
    receipt = Fuse(attention=fields.pop("attention", Attention.auto)).apply(
        model, replace(context("fuse", example=((), {"input_ids": IDS}), backend=CpuBackend()), **fields)
    )
    return model, receipt.notes


def test_the_result_is_that_of_the_model_and_other_models_keep_their_attention() -> None:
    model = llamas.module()
    other = LlamaForCausalLM(model.config).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        _, notes = fused(model)
        assert torch.allclose(model(input_ids=IDS).logits, expected, atol=1e-5)
    assert any("causal attention runs as grouped products" in note for note in notes)
    assert model.config._attn_implementation == attention.NAME
    assert other.config._attn_implementation == "sdpa"


def test_a_padded_batch_gives_what_it_gave() -> None:
    model, mask = llamas.module(), torch.ones_like(IDS)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=mask).logits
        fused(model)
        assert torch.allclose(model(input_ids=IDS, attention_mask=mask).logits, expected, atol=1e-5)


def test_generation_with_a_cache_gives_what_it_gave() -> None:
    model = llamas.module()
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False)
    fused(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), expected)


def test_a_wrong_product_is_found_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.grouped_attention
    monkeypatch.setattr(attention, "grouped_attention", lambda q, k, v, scale: right(q, k, v.flip(2), scale))
    with pytest.raises(StepError, match="step fuse: grouped attention differs from PyTorch's"):
        fused(llamas.module())


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"device": replace(CPU, name="h100", backend="nvidia")}, "attention stays SDPA: its kernels are the faster ones on h100"),
    ],
)
def test_where_it_does_not_suit_the_receipt_says_why(fields: dict[str, object], note: str) -> None:
    model, notes = fused(llamas.module(), **fields)
    assert note in notes
    assert model.config._attn_implementation == "sdpa"


def test_keep_leaves_it_alone() -> None:
    model, notes = fused(llamas.module(), attention=Attention.keep)
    assert model.config._attn_implementation == "sdpa" and not any("attention" in note for note in notes)
