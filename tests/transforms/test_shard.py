"""Shard: where each parameter goes, held against what PyTorch's own tensor parallelism and FSDP2 give the first device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import llamas
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from toys import TinyLM, context, tiny_lm
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from optforge.errors import PlanError
from optforge.share import on_meta
from optforge.transforms.fuse import Fuse
from optforge.transforms.quantize import Quantize, SchemeName
from optforge.transforms.shard import Shard
from optforge.transforms.shard.layout import splits


def llama(**changes: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    return llamas.module("meta", **{**sizes, **changes})


def decisions(model: nn.Module, **degrees: int) -> dict[str, dict[str, object]]:
    receipt = Shard(**degrees).apply(model, context("shard"))
    assert receipt.decisions["mesh"] == {"tensor": 1, "fsdp": 1, "data": 1, **degrees}
    return receipt.decisions["parameters"]


@pytest.fixture
def two_devices() -> Iterator[None]:
    """A process group of two that only pretends to send."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_tensor_parallel_shapes_are_those_that_pytorch_gives_a_device(two_devices: None) -> None:
    found = decisions(llama(), tensor=2)
    model = llama().to_empty(device="cpu")
    block = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    block |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan = {f"model.layers.{i}.{name}": style for i in range(2) for name, style in block.items()}
    plan |= {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    for name, parameter in model.named_parameters():
        whole = list(parameter.shape)
        at = found[name]["tensor"]
        if at is not None:
            whole[at] //= 2
        local = parameter.to_local() if isinstance(parameter, dist.tensor.DTensor) else parameter
        assert list(local.shape) == whole, name
    assert {entry["as"] for name, entry in found.items() if "norm" in name} == {"replicated"}


def test_fsdp_slices_are_those_that_pytorch_gives_a_device(two_devices: None) -> None:
    found = decisions(llama(), fsdp=2)
    model = llama().to_empty(device="cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for name, parameter in model.named_parameters():
        assert found[name] == {"as": found[name]["as"], "tensor": None, "fsdp": parameter.placements[0].dim}, name


def test_packed_and_quantized_linears_split_with_their_scales() -> None:
    model = llama(hidden_size=256, intermediate_size=512)
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    Fuse().apply(model, context("fuse", ((), {"input_ids": ids, "use_cache": False})))
    Quantize(scheme=SchemeName.int4_weight, group_size=64, symmetric=False, ignore=["lm_head"]).apply(model, context("weights"))
    found = decisions(model, tensor=2)
    layer = "model.layers.1."
    assert found[layer + "self_attn.qkv_proj.weight"] == {"as": "column", "tensor": 0, "fsdp": None}
    assert found[layer + "self_attn.qkv_proj.weight_scale"]["tensor"] == 0
    assert found[layer + "mlp.down_proj.weight"] == {"as": "row", "tensor": 1, "fsdp": None}
    assert found[layer + "mlp.down_proj.weight_scale"]["tensor"] == 1, "a scale for each group of inputs goes with them"
    whole = llama(hidden_size=256, intermediate_size=512)
    Quantize(scheme=SchemeName.int8_dynamic).apply(whole, context("weights"))
    found = decisions(whole, tensor=2)
    assert found[layer + "mlp.down_proj.weight_scale"]["tensor"] is None, "a scale for each output is needed whole"
    assert found[layer + "mlp.up_proj.weight_scale"]["tensor"] == 0
    assert found[layer + "mlp.up_proj.weight_sum"]["tensor"] == 0


def test_gpt2_stores_its_weights_the_other_way_round() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128))
    found = decisions(model, tensor=4)
    assert found["transformer.h.0.attn.c_attn.weight"] == {"as": "column", "tensor": 1, "fsdp": None}
    assert found["transformer.h.0.attn.c_attn.bias"]["tensor"] == 0
    assert found["transformer.h.0.mlp.c_proj.weight"] == {"as": "row", "tensor": 0, "fsdp": None}
    assert found["transformer.h.0.mlp.c_proj.bias"]["tensor"] is None
    assert found["transformer.wte.weight"]["as"] == "vocabulary" and found["transformer.wpe.weight"]["as"] == "replicated"


def test_what_a_name_does_not_tell_stays_whole_and_is_listed() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.strange = nn.Linear(8, 16), nn.Linear(16, 8)

    model = nn.Sequential(nn.ModuleList([Block(), Block()]))
    receipt = Shard(tensor=2).apply(model, context("shard"))
    assert receipt.skipped == {f"0.{i}.strange": "its name does not tell how it splits: each of 2 devices holds all of it" for i in (0, 1)}
    assert [touched.name for touched in receipt.touched] == ["0.0.up_proj", "0.1.up_proj"]


def test_nothing_in_the_tree_changes() -> None:
    model = tiny_lm()
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    receipt = Shard(tensor=2, fsdp=2, data=2).apply(model, context("shard"))
    assert {touched.what for touched in receipt.touched} == {
        "column / 2, fsdp / 2, 2 copies",
        "row / 2, fsdp / 2, 2 copies",
        "vocabulary / 2, fsdp / 2, 2 copies",
        "whole, fsdp / 2, 2 copies",
    }
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())


@pytest.mark.case("B19")
def test_b19_a_tied_parameter_lies_in_one_fsdp_group_and_the_plan_says_so(two_devices: None) -> None:
    model = on_meta(TinyLM(tied=True))
    receipt = Shard(fsdp=2).apply(model, context("shard"))
    groups = receipt.decisions["units"]
    assert [group for group, names in groups.items() if {"embed.weight", "lm_head.weight"} & set(names)] == [""]
    assert {"embed.weight", "lm_head.weight"} <= set(groups[""])
    assert receipt.notes == ["embed.weight and lm_head.weight are one tensor: one FSDP group holds both (the root)"]
    assert sorted(groups) == ["", "layers.0", "layers.1"]
    # groups as decided are what PyTorch accepts; each module by itself it refuses
    real = TinyLM(tied=True)
    for layer in real.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(real, mesh=init_device_mesh("cpu", (2,)))
    assert real.embed.weight is real.lm_head.weight


@pytest.mark.case("B19")
def test_b19_a_parameter_shared_between_layers_goes_to_the_roots_group() -> None:
    model = TinyLM()
    model.layers[1].mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight
    receipt = Shard(fsdp=2).apply(model, context("shard"))
    shared = {"layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"}
    assert shared <= set(receipt.decisions["units"][""])
    assert len(receipt.notes) == 1 and all(name in receipt.notes[0] for name in shared)


@pytest.mark.case("B111")
def test_b111_heads_and_vocabulary_that_the_degree_does_not_divide() -> None:
    with pytest.raises(PlanError) as refused:
        Shard(tensor=2).apply(llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=12, vocab_size=15), context("shard"))
    told = [str(problem) for problem in refused.value.problems]
    assert told[:2] == [
        "step shard, the model: the number of attention heads 3 is not divisible by tensor=2; "
        "no degree above 1 fits everything: use shard/fsdp",
        "step shard, the model: the vocabulary of 15 is not divisible by tensor=2; no degree above 1 fits everything: use shard/fsdp",
    ]


@pytest.mark.case("B111")
def test_b111_degrees_that_would_fit_are_listed() -> None:
    with pytest.raises(PlanError) as refused:
        Shard(tensor=3).apply(
            llama(num_attention_heads=40, num_key_value_heads=8, hidden_size=320, intermediate_size=640, vocab_size=32_000),
            context("shard"),
        )
    told = [str(problem) for problem in refused.value.problems]
    assert any("attention heads 40 is" in line for line in told)
    assert any("key/value heads 8 is" in line for line in told)
    assert any("vocabulary of 32000 is" in line for line in told)
    assert all(line.endswith("degrees that fit everything: 2, 4, 8") for line in told)


@pytest.mark.case("B111")
def test_b111_heads_that_nobody_tells_are_not_guessed() -> None:
    model = tiny_lm()
    for layer in model.layers:
        del layer.attention.heads
    with pytest.raises(PlanError, match="says how many heads there are"):
        Shard(tensor=2).apply(model, context("shard"))
    assert Shard(fsdp=2).apply(model, context("shard")).touched


def test_check_tells_degrees_below_one_and_more_devices_than_there_are() -> None:
    (problem,) = Shard(tensor=0).check(context("shard"))
    assert str(problem) == "step shard: tensor must be 1 or more, is 0; steps.shard.tensor=1"
    ctx = context("shard")
    small = replace(ctx, target=replace(ctx.target, devices=8))
    (problem,) = Shard(tensor=4, fsdp=4).check(small)
    assert "needs 16 devices, cpu has 8" in str(problem) and "hardware.devices=16" in str(problem)
    assert list(Shard(tensor=4, fsdp=2).check(small)) == list(Shard(tensor=4, fsdp=4).check(ctx)) == []


def test_one_device_touches_nothing() -> None:
    assert Shard().apply(tiny_lm(), context("shard")).touched == []


def test_every_module_with_parameters_is_decided_once() -> None:
    model = llama()
    names = [split.name for split in splits(model)]
    assert len(names) == len(set(names))
    assert {name.rpartition(".")[0] for name, _ in model.named_parameters()} == set(names)
