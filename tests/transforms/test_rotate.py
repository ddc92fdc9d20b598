"""Rotations change what flows through a model and nothing of what it computes; what cannot carry one is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import llamas
import pytest
import torch
from torch import Tensor, nn
from toys import TinyAttention, context, tiny_lm, token_ids

from optforge.backends.cpu import CpuBackend
from optforge.errors import PlanError
from optforge.plan.order import order
from optforge.share import alias, on_meta
from optforge.transforms.base import Receipt, Touched
from optforge.transforms.fuse.packing import pack_
from optforge.transforms.rotate import Rotate
from optforge.transforms.rotate.matrices import HADAMARD, RANDOM, hadamard, rotation

IDS = torch.randint(0, llamas.VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


def rotate(model: nn.Module, **fields: Any) -> Receipt:
    return Rotate(**fields).apply(model, context("spread", ((), {"input_ids": IDS}), backend=CpuBackend()))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("width", [1, 2, 4, 8, 12, 20, 28, 36, 60, 64, 72, 128, 576, 768, 960, 2560])
def test_hadamard_matrices_are_ones_with_orthogonal_rows(width: int) -> None:
    found = hadamard(width)
    assert found is not None and bool((found.abs() == 1).all())
    assert torch.equal(found @ found.t(), width * torch.eye(width, dtype=torch.float64))


@pytest.mark.parametrize(("width", "kind"), [(64, HADAMARD), (576, HADAMARD), (6, RANDOM), (92, RANDOM), (99, RANDOM)])
def test_every_width_has_a_rotation_that_its_seed_decides(width: int, kind: str) -> None:
    matrix, found = rotation(width, 3)
    assert found == kind
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(width, dtype=torch.float64), atol=1e-12, rtol=0)
    assert torch.equal(matrix, rotation(width, 3)[0]) and not torch.equal(matrix, rotation(width, 4)[0])


@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str)
@pytest.mark.parametrize("heads", [True, False])
def test_a_llama_computes_the_same_in_rotated_coordinates(sizes: dict[str, Any], heads: bool) -> None:
    original = llamas.module(**sizes)
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    before = {name: value.clone() for name, value in original.state_dict().items()}
    model = alias(original)
    receipt = rotate(model, heads=heads)
    assert relative(logits(model), logits(original)) < 1e-5
    assert all(torch.equal(before[name], value) for name, value in original.state_dict().items())
    matrix, _ = rotation(llamas.WIDTH, 0)
    torch.testing.assert_close(model.model.embed_tokens.weight, (original.model.embed_tokens.weight.double() @ matrix).float())
    norm = original.model.layers[0].input_layernorm.weight.double()
    expected = (original.model.layers[0].self_attn.q_proj.weight.double() * norm) @ matrix
    torch.testing.assert_close(model.model.layers[0].self_attn.q_proj.weight, expected.float())
    assert all(bool((layer.input_layernorm.weight == 1).all()) for layer in model.model.layers)
    values = [each.model.layers[0].self_attn.v_proj.weight for each in (model, original)]
    lengths = [value.double().reshape(llamas.KV_HEADS, -1).norm(dim=1) for value in (values[0], values[1] * norm)]
    torch.testing.assert_close(lengths[0], lengths[1])
    assert "a Hadamard matrix with random signs (seed 0)" in " ".join(receipt.notes)


def test_values_are_rotated_within_their_heads_alone() -> None:
    with_heads, without = llamas.module(), llamas.module()
    rotate(with_heads)
    rotate(without, heads=False)
    size = llamas.WIDTH // llamas.HEADS
    matrix = rotation(size, 0)[0]
    first, second = (each.model.layers[1].self_attn for each in (with_heads, without))
    expected = torch.cat([matrix.t() @ head for head in second.v_proj.weight.double().split(size)])
    torch.testing.assert_close(first.v_proj.weight, expected.float())
    assert torch.equal(first.q_proj.weight, second.q_proj.weight)
    assert not torch.equal(first.o_proj.weight, second.o_proj.weight)


def test_packed_layers_rotate_like_those_they_are_packed_from() -> None:
    packed, apart = llamas.module(), llamas.module()
    for layer in packed.model.layers:
        pack_(layer.self_attn, "qkv_proj", ["q_proj", "k_proj", "v_proj"])
        pack_(layer.mlp, "gate_up_proj", ["gate_proj", "up_proj"])
    rotate(packed)
    rotate(apart)
    parts = [getattr(apart.model.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(packed.model.layers[0].self_attn.qkv_proj.weight, torch.cat(parts))


def test_a_channel_that_stands_out_is_spread_over_all() -> None:
    """What it is for: the largest value of the stream against its root mean square falls."""
    original = llamas.module()
    with torch.no_grad():
        original.model.embed_tokens.weight[:, 5] *= 50
    model = alias(original)
    rotate(model)
    tables = [each.model.embed_tokens.weight.detach() for each in (original, model)]
    peaks = [float(table.abs().amax() / table.square().mean().sqrt()) for table in tables]
    assert peaks[1] < 0.6 * peaks[0]


def test_bf16_stays_bf16_and_near() -> None:
    original = llamas.module(dtype=torch.bfloat16)
    model = alias(original)
    rotate(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert relative(logits(model), logits(original)) < 0.05


def test_norms_that_store_one_less_and_norms_of_queries_are_understood() -> None:
    from transformers import GemmaConfig, GemmaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": llamas.VOCABULARY,
    }
    torch.manual_seed(0)
    for original in (GemmaForCausalLM(GemmaConfig(**sizes)).eval(), Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()):
        model = alias(original)
        rotate(model)
        assert relative(logits(model), logits(original)) < 1e-5


def test_a_tied_head_gets_its_own_weight_and_the_receipt_rebuilds_it() -> None:
    original = llamas.module(tie_word_embeddings=True)
    model = alias(original)
    receipt = rotate(model)
    assert model.lm_head.weight is not model.model.embed_tokens.weight and not model.config.tie_word_embeddings
    assert original.config.tie_word_embeddings and original.lm_head.weight is original.model.embed_tokens.weight
    assert receipt.bytes_after - receipt.bytes_before == original.lm_head.weight.numel() * 4
    assert "lm_head was tied to model.embed_tokens and no longer is" in receipt.notes[0]
    written = json.loads(json.dumps(dataclasses.asdict(receipt), allow_nan=False))
    skeleton = on_meta(llamas.module(tie_word_embeddings=True))
    Rotate().replay(skeleton, Receipt(**{**written, "touched": [Touched(**touched) for touched in written["touched"]]}))
    skeleton.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        owner, _, local = name.rpartition(".")
        skeleton.get_submodule(owner)._buffers[local] = buffer
    assert torch.equal(logits(skeleton), logits(model))


def test_the_plan_on_meta_says_what_the_run_does() -> None:
    original = llamas.module(tie_word_embeddings=True)
    planned = Rotate().apply(on_meta(original), context("spread", ((), {"input_ids": IDS.to("meta")})))
    assert planned == rotate(alias(original))


def test_a_second_rotation_is_refused_also_of_a_copy() -> None:
    rotate(model := llamas.module())
    with pytest.raises(PlanError, match=r"is rotated already \(step spread\)"):
        rotate(copy.deepcopy(model))


def refused(model: nn.Module) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError) as error:
        rotate(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "nothing changed before the refusal"
    return str(error.value)


def test_layer_norms_norms_behind_a_layer_and_unknown_readers_are_refused_by_name() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

    gpt = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128, bos_token_id=None, eos_token_id=None)).eval()
    text = refused(gpt)
    assert "transformer.ln_f: norms that subtract a mean" in text and "transformer.h.0.attn.c_attn" in text
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    gemma = Gemma2ForCausalLM(Gemma2Config(**sizes, intermediate_size=64, vocab_size=128)).eval()
    assert "post_attention_layernorm" in refused(gemma)
    extra = llamas.module()
    extra.model.layers[0].gate = nn.Parameter(torch.ones(llamas.WIDTH))
    assert "model.layers.0: reads or writes the stream in a way that is not understood" in refused(extra)


def test_a_quantized_model_is_refused_and_a_rotated_one_quantizes() -> None:
    from optforge.transforms.quantize import Quantize, SchemeName

    model = llamas.module()
    Quantize(scheme=SchemeName.int8_weight, ignore=["lm_head"]).apply(model, context("weights"))
    assert "rotate first" in refused(model)
    rotate(model := llamas.module())
    expected = logits(model)
    Quantize(scheme=SchemeName.int8_weight, ignore=["lm_head"]).apply(model, context("weights"))
    assert relative(logits(model), expected) < 0.05


def test_it_runs_before_quantization_wherever_it_is_written() -> None:
    from optforge.config.steps import step

    steps = [step("weights", {"use": "quantize/int4_weight"}), step("spread", {"use": "rotate/hadamard"})]
    assert [each.name for each in order(steps).steps] == ["spread", "weights"]


class Wide(TinyAttention):
    """Does not say how wide its heads are."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.width_of_a_head = self.__dict__.pop("head_dim")

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            each(x).view(batch, tokens, -1, self.width_of_a_head).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


def test_a_model_of_ones_own_without_head_dim_keeps_its_values() -> None:
    model = tiny_lm()
    for layer in model.layers:
        layer.attention = Wide(32, 4)
    ids = token_ids()
    with torch.no_grad():
        expected = model(ids)
        receipt = Rotate().apply(model, context("spread", ((ids,), {}), backend=CpuBackend()))
        assert relative(model(ids), expected) < 1e-5
    assert "no attention module says how wide its heads are (head_dim): values are not rotated within them" in receipt.notes
