"""Heads, channels and layers: the tensors shrink, what the model's code reads follows, and every later step still works."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import llamas
import pytest
import torch
from torch import Tensor, nn
from toys import FixedSamples, context, tiny_lm, token_ids
from transformers import GPT2Config, GPT2LMHeadModel

from optforge.backends.cpu import CpuBackend
from optforge.config.steps import step
from optforge.errors import PlanError
from optforge.measure.size import weight_bytes
from optforge.share import on_meta
from optforge.transforms.base import Context, Receipt

IDS = torch.randint(0, llamas.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
EXAMPLES = [((), {"input_ids": row[None], "use_cache": False}) for row in IDS]
LAYERS = 4
STRUCTURED = ("prune/heads", "prune/channels", "prune/layers")
SIZES = {"prune/heads": {"sparsity": 0.5}, "prune/channels": {"sparsity": 0.25, "round_to": 16}, "prune/layers": {"sparsity": 0.25}}


def llama(**sizes: Any) -> nn.Module:
    return llamas.module(num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4, head_dim=8, **sizes)


def ctx(name: str, *, meta: bool = False) -> Context:
    example = ((), {"input_ids": IDS[:1].to("meta" if meta else "cpu"), "use_cache": False})
    return context(name, example, backend=None if meta else CpuBackend(), samples=None if meta else FixedSamples(EXAMPLES))


def apply(model: nn.Module, use: str, **options: Any) -> Receipt:
    fields = {**(SIZES.get(use, {})), **options}
    name = use.replace("/", "_")
    with torch.no_grad():
        return step(name, {"use": use, **fields}).transform.apply(model, ctx(name, meta=next(model.parameters()).is_meta))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def rank(values: Tensor, count: int) -> list[int]:
    return sorted(values.argsort(descending=True)[:count].tolist())


def test_layers_of_the_least_influence_go_and_numbers_and_config_follow() -> None:
    model = llama()
    influence = []
    with torch.no_grad():
        states = model(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states
    # the last hidden state of transformers is behind the final norm, so the last block's output is taken by a hook
    final: list[Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _, __, output: final.append(output[0] if isinstance(output, tuple) else output)
    )
    logits(model)
    handle.remove()
    states = [*states[:-1], final[0]]
    for before, after in itertools.pairwise(states):
        cosine = (before * after).sum(-1) / (before.norm(dim=-1) * after.norm(dim=-1))
        influence.append(1 - float(cosine.mean()))
    least = min(range(LAYERS), key=lambda index: influence[index])
    kept = [layer.mlp.down_proj.weight.clone() for index, layer in enumerate(model.model.layers) if index != least]
    shared = model.config
    receipt = apply(model, "prune/layers")
    assert receipt.decisions["removed"] == [least] and receipt.decisions["gone"] == [f"model.layers.{least}"]
    assert all(torch.equal(a, layer.mlp.down_proj.weight) for a, layer in zip(kept, model.model.layers, strict=True))
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    assert model.config.num_hidden_layers == 3 and shared.num_hidden_layers == LAYERS, "other models may be built from the old config"
    assert model.model.config is model.config
    assert receipt.renamed == {f"model.layers.{i}": [f"model.layers.{i + 1}"] for i in range(least, LAYERS - 1)}
    with pytest.raises(PlanError, match=r"removed already \(step prune_layers\)"):
        apply(model, "prune/layers")


def test_channels_that_add_least_go_from_gate_up_and_down() -> None:
    model = llama()
    inputs: list[Tensor] = []
    mlp = model.model.layers[1].mlp
    handle = mlp.down_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    logits(model)
    handle.remove()
    score = inputs[0].double().square().mean(0) * mlp.down_proj.weight.double().square().sum(0)
    before = {name: child.weight.clone() for name, child in mlp.named_children() if name.endswith("proj")}
    receipt = apply(model, "prune/channels")
    kept = rank(score, 48)
    assert torch.equal(mlp.gate_proj.weight, before["gate_proj"][kept]) and torch.equal(mlp.up_proj.weight, before["up_proj"][kept])
    assert torch.equal(mlp.down_proj.weight, before["down_proj"][:, kept])
    assert (mlp.gate_proj.out_features, mlp.down_proj.in_features, model.config.intermediate_size) == (48, 48, 48)
    assert receipt.touched[0].what == "channels: 64x32 became 48x32"


def test_whole_groups_of_heads_that_add_least_go() -> None:
    model = llama()
    attention = model.model.layers[2].self_attn
    inputs: list[Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    logits(model)
    handle.remove()
    columns = inputs[0].double().square().mean(0) * attention.o_proj.weight.double().square().sum(0)
    groups = rank(columns.reshape(4, 16).sum(1), 2)
    before = {name: child.weight.clone() for name, child in attention.named_children() if name.endswith("proj")}
    apply(model, "prune/heads")
    queries = [row for group in groups for row in range(group * 16, group * 16 + 16)]
    keys = [row for group in groups for row in range(group * 8, group * 8 + 8)]
    assert torch.equal(attention.q_proj.weight, before["q_proj"][queries]) and torch.equal(attention.v_proj.weight, before["v_proj"][keys])
    assert torch.equal(attention.o_proj.weight, before["o_proj"][:, queries])
    assert (model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim) == (4, 2, 8)


@pytest.mark.parametrize("use", STRUCTURED)
def test_a_part_that_does_nothing_is_the_one_that_goes_and_the_output_stays(use: str) -> None:
    model = llama()
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            if use == "prune/layers" and index == 2:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            if use == "prune/channels":
                layer.mlp.down_proj.weight[:, index::4] = 0
            if use == "prune/heads":
                layer.self_attn.o_proj.weight[:, 16:48] = 0
    before = logits(model)
    apply(model, use)
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("use", STRUCTURED)
def test_decoding_with_a_cache_gives_what_whole_passes_give(use: str) -> None:
    model = llama()
    apply(model, use)
    tokens = IDS[:1, :5]
    for kind in ("dynamic", "static"):
        found = model.generate(tokens, max_new_tokens=6, do_sample=False, cache_implementation=kind)
        expected = tokens
        for _ in range(6):
            with torch.no_grad():
                expected = torch.cat([expected, model(input_ids=expected, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(found, expected), kind


@pytest.mark.parametrize("use", STRUCTURED)
def test_the_whole_chain_fused_quantized_healed_saved_and_rebuilt(use: str) -> None:
    uses = ["precision/bf16", "fuse/decoder", use, "quantize/int8_weight"]
    model, planned, rebuilt = llama(), on_meta(llama()), on_meta(llama())
    for each in uses:
        foreseen, receipt = apply(planned, each), apply(model, each)
        assert (foreseen.bytes_before, foreseen.bytes_after) == (receipt.bytes_before, receipt.bytes_after)
        decisions = json.loads(json.dumps(receipt.decisions))
        step("replay", {"use": each, **SIZES.get(each, {})}).transform.replay(rebuilt, dataclasses.replace(receipt, decisions=decisions))
    shapes = [{name: tensor.shape for name, tensor in each.state_dict().items()} for each in (planned, model, rebuilt)]
    assert shapes[0] == shapes[1] == shapes[2]
    assert weight_bytes(planned) == weight_bytes(model) < weight_bytes(llama()) / 2
    rebuilt.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        parent, _, key = name.rpartition(".")
        rebuilt.get_submodule(parent)._buffers[key] = buffer
    assert torch.equal(logits(rebuilt), logits(model))


def test_packed_linears_are_cut_part_by_part() -> None:
    plain, packed = llama(), llama()
    apply(packed, "fuse/decoder", attention="keep")
    for model in (plain, packed):
        apply(model, "prune/heads")
        apply(model, "prune/channels")
    assert packed.model.layers[0].self_attn.qkv_proj.weight.shape == (4 * 8 + 2 * 2 * 8, 32)
    assert packed.model.layers[0].mlp.gate_up_proj.out_features == 96
    torch.testing.assert_close(logits(packed), logits(plain), atol=1e-5, rtol=1e-4)


def test_channels_are_found_by_flow_in_any_family() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=llamas.VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=32)).eval()
    receipt = apply(gpt2, "prune/channels", sparsity=0.5)
    assert {touched.name for touched in receipt.touched} == {f"transformer.h.{i}.mlp.{n}" for i in range(2) for n in ("c_fc", "c_proj")}
    assert gpt2.transformer.h[0].mlp.c_fc.weight.shape == (32, 64)
    assert logits(gpt2).isfinite().all()
    plain = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    x = torch.randn(5, 8)
    transform = step("p", {"use": "prune/channels", "sparsity": 0.5}).transform
    found = transform.apply(plain, context("p", ((x,), {}), backend=CpuBackend(), samples=FixedSamples([((x,), {})])))
    assert {touched.name for touched in found.touched} == {"0", "2"}, "a norm mixes what the third linear reads"
    assert plain(x).shape == (5, 4)


def test_what_cannot_be_cut_is_refused_in_words() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=llamas.VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=32)).eval()
    with pytest.raises(PlanError, match=r"no attention whose heads can be removed.*prune layers, channels"):
        apply(gpt2, "prune/heads")
    with pytest.raises(PlanError, match=r"sparsity 0.1 of 4 layers is none; write steps.prune_layers.sparsity=0.250"):
        apply(llama(), "prune/layers", sparsity=0.1)
    with pytest.raises(PlanError, match=r"sparsity 0.05 of 4 groups of heads is 0"):
        apply(llama(), "prune/heads", sparsity=0.05)
    with pytest.raises(PlanError, match="it has no repeated layers"):
        transform = step("p", {"use": "prune/layers"}).transform
        transform.apply(nn.Sequential(nn.Linear(4, 4)), context("p", ((torch.zeros(1, 4),), {}), backend=CpuBackend()))
    fixed = tiny_lm(layers=2)
    for layer in fixed.layers:
        layer.attention.forward = lambda x, own=layer.attention: own.o_proj(own.q_proj(x).view(*x.shape[:2], 32))
    with pytest.raises(PlanError, match="does not run, since its code counts on the shapes that it had"):
        transform = step("p", {"use": "prune/heads", "sparsity": 0.25}).transform
        transform.apply(fixed, context("p", ((token_ids(),), {}), backend=CpuBackend(), samples=FixedSamples([((token_ids(),), {})])))


def test_ignored_layers_and_linears_stay() -> None:
    model = llama()
    receipt = apply(model, "prune/layers", sparsity=0.5, ignore=["layers.0", "layers.3"])
    assert receipt.decisions["removed"] == [1, 2]
    model = llama()
    apply(model, "prune/channels", ignore=["re:model.layers.[01].mlp.down_proj"])
    assert [layer.mlp.down_proj.in_features for layer in model.model.layers] == [64, 64, 48, 48]
    assert model.config.intermediate_size == llamas.HIDDEN, "true of no layer alone, so it is left"
