"""One device's share of a graph, against hand counts, PyTorch's own communication counter, and the shard step's decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import llamas
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from toys import context
from transformers import LlamaForCausalLM

from optforge import config
from optforge.data.tokens import RandomTokens
from optforge.plan.graph import ATTENTION, BACKWARD, FORWARD, PRODUCT, Graph, Kernel
from optforge.plan.sharding import Layout, Mesh, collectives, gathered, held, misfit, split
from optforge.plan.trace import trace
from optforge.transforms.fuse import Fuse
from optforge.transforms.quantize import Quantize, SchemeName
from optforge.transforms.shard import Shard
from optforge.workloads.base import Workload
from optforge.workloads.decode import Decode
from optforge.workloads.prefill import Prefill
from optforge.workloads.train import Train

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY = 128, 256, 2, 8, 4, 512
KV_WIDTH = WIDTH * KV_HEADS // HEADS
BLOCK = 2 * WIDTH * WIDTH + 2 * WIDTH * KV_WIDTH + 3 * WIDTH * HIDDEN
NORMS = (2 * LAYERS + 1) * WIDTH
ROWS = 2 * 16
"""Tokens of every pass here, in fp32."""


def llama(device: str = "meta") -> LlamaForCausalLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return llamas.module(device, **sizes, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)


def traced(workload: Workload, model: LlamaForCausalLM | None = None) -> Graph:
    graph = trace(llamas.loaded(model if model is not None else llama()), workload, RandomTokens(), config.hardware("h100"))
    assert graph.unknown is None
    return graph


@pytest.fixture(scope="module")
def prefill() -> Graph:
    return traced(Prefill(batch_size=2, prompt_tokens=16))


@pytest.fixture(scope="module")
def train() -> Graph:
    return traced(Train(batch_size=2, sequence=16))


@pytest.fixture
def two_devices() -> Iterator[None]:
    """A process group of two that only pretends to send."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_weights_of_one_device_by_hand(prefill: Graph, degree: int) -> None:
    split_bytes = 4 * (LAYERS * BLOCK + 2 * VOCABULARY * WIDTH)
    assert held(Layout(prefill), Mesh(tensor=degree), "parameter") == split_bytes // degree + 4 * NORMS
    assert held(Layout(prefill), Mesh(fsdp=degree), "parameter") == (split_bytes + 4 * NORMS) // degree
    assert held(Layout(prefill), Mesh(tensor=degree, fsdp=2), "parameter") == (split_bytes // degree + 4 * NORMS) // 2
    assert held(Layout(prefill), Mesh(data=degree), "parameter") == split_bytes + 4 * NORMS


def test_caches_split_by_heads_and_states_as_their_weights(train: Graph) -> None:
    decode = traced(Decode(batch_size=3, context=12, new_tokens=4))
    cache = 2 * LAYERS * 3 * KV_WIDTH * 16 * 4
    assert held(Layout(decode), Mesh(), "cache") == cache
    assert held(Layout(decode), Mesh(tensor=4), "cache") == cache // 4
    assert held(Layout(decode), Mesh(fsdp=4), "cache") == cache
    for mesh in (Mesh(), Mesh(tensor=2), Mesh(fsdp=4), Mesh(tensor=2, fsdp=2)):
        weights = held(Layout(train), mesh, "parameter")
        assert held(Layout(train), mesh, "gradient") == weights
        assert held(Layout(train), mesh, "state") == 2 * weights


@pytest.mark.parametrize("scheme", [None, "int8_dynamic", "int4_weight", "fp8_dynamic"])
def test_names_decide_alike_in_a_graph_and_in_the_shard_step(scheme: str | None) -> None:
    model = llama()
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    Fuse().apply(model, context("fuse", ((), {"input_ids": ids, "use_cache": False})))
    if scheme is not None:
        fields = {"group_size": 32, "symmetric": False} if scheme == "int4_weight" else {}
        Quantize(scheme=SchemeName[scheme], **fields).apply(model, context("weights"))
    decided = Shard(tensor=2).apply(model, context("shard")).decisions["parameters"]
    layout = Layout(traced(Prefill(batch_size=2, prompt_tokens=16), model))
    assert {name for name in layout.by_name if layout.splits(name)} == {
        name for name, entry in decided.items() if entry["tensor"] is not None
    }
    assert set(layout.by_name) == set(decided)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("which", ["prefill", "train"])
def test_devices_share_the_arithmetic_and_every_size_shrinks_with_it(request: pytest.FixtureRequest, which: str, degree: int) -> None:
    whole: Graph = request.getfixturevalue(which)
    part = split(whole, Mesh(tensor=degree))
    for before, after in zip(whole.operators, part.operators, strict=True):
        if before.kind in (PRODUCT, ATTENTION):
            rotary = before.module.endswith("rotary_emb")
            shared = 1 if rotary else degree
            assert after.flops * shared == before.flops, before
            if before.kind == PRODUCT:
                assert 2 * prod(after.size) == after.flops
            elif before.phase == FORWARD:
                assert after.size[1:3] == (HEADS // degree, KV_HEADS // degree)
        assert after.bytes <= before.bytes


def test_what_columns_make_is_in_parts_until_rows_sum_it(prefill: Graph) -> None:
    part = split(prefill, Mesh(tensor=2))
    by_module = {operator.module: operator for operator in part.operators if operator.kind == PRODUCT}
    layer = "model.layers.0."
    assert by_module[layer + "mlp.up_proj"].size == (1, ROWS, HIDDEN // 2, WIDTH)
    assert by_module[layer + "mlp.down_proj"].size == (1, ROWS, WIDTH, HIDDEN // 2)
    assert by_module[layer + "self_attn.k_proj"].size == (1, ROWS, KV_WIDTH // 2, WIDTH)
    assert by_module["lm_head"].size == (1, 2, VOCABULARY // 2, WIDTH)
    gated = next(o for o in part.operators if o.name == "aten.silu")
    assert sum(access.bytes for access in gated.writes) == 4 * ROWS * HIDDEN / 2
    norm = next(o for o in part.operators if o.module == layer + "input_layernorm")
    assert sum(access.bytes for access in norm.writes) == 4 * ROWS * WIDTH


def _kinds(found: list[Kernel]) -> Counter[tuple[str, str, str]]:
    return Counter((kernel.name, kernel.phase, kernel.detail) for kernel in found)


def test_tensor_parallel_exchanges_by_hand(prefill: Graph, train: Graph) -> None:
    found = collectives(prefill, Mesh(tensor=4))
    assert _kinds(found) == {("all_reduce", FORWARD, "activations"): 2 * LAYERS + 1, ("all_gather", FORWARD, "logits"): 1}
    reduced = [kernel.bytes for kernel in found if kernel.name == "all_reduce"]
    assert reduced == [2 * 3 / 4 * 4 * ROWS * WIDTH] * (2 * LAYERS + 1)
    assert [kernel.bytes for kernel in found if kernel.name == "all_gather"] == [3 / 4 * 4 * 2 * VOCABULARY]
    found = collectives(train, Mesh(tensor=4))
    # backward: the input's gradient of q/k/v and of gate/up of every layer, and of the head
    assert _kinds(found)["all_reduce", BACKWARD, "activations"] == 2 * LAYERS + 1


def test_tensor_parallel_exchanges_are_as_many_as_pytorch_makes(prefill: Graph, two_devices: None) -> None:
    model = llama("cpu")
    styles = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    styles |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan = {f"model.layers.{i}.{name}": style for i in range(LAYERS) for name, style in styles.items()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    with CommDebugMode() as counted, torch.no_grad():
        model(input_ids=torch.zeros(2, 16, dtype=torch.int64), use_cache=False, logits_to_keep=1)
    layers = [kernel for kernel in collectives(prefill, Mesh(tensor=2)) if kernel.module.startswith("model.layers.")]
    assert counted.get_total_counts() == len(layers) == 2 * LAYERS


def test_fsdp_gathers_each_group_and_scatters_gradients(prefill: Graph, train: Graph) -> None:
    block, rest = 4 * (BLOCK + 2 * WIDTH), 4 * (2 * VOCABULARY * WIDTH + WIDTH)
    found = collectives(prefill, Mesh(fsdp=4))
    assert {kernel.module: kernel.bytes for kernel in found} == {
        "": 3 / 4 * rest,
        **{f"model.layers.{i}": 3 / 4 * block for i in range(LAYERS)},
    }
    assert _kinds(found) == {("all_gather", FORWARD, "weights"): LAYERS + 1}
    assert _kinds(collectives(train, Mesh(fsdp=4))) == {
        ("all_gather", FORWARD, "weights"): LAYERS + 1,
        ("all_gather", BACKWARD, "weights"): LAYERS + 1,
        ("reduce_scatter", BACKWARD, "gradients"): LAYERS + 1,
    }
    # FSDP2 keeps the root's group gathered, and two layers: one that runs, one that is fetched
    assert gathered(Layout(prefill), Mesh(fsdp=4)) == rest + 2 * block
    assert gathered(Layout(train), Mesh(fsdp=4)) == rest + 2 * block + 2 * block
    assert gathered(Layout(prefill), Mesh(tensor=4)) == 0


def test_copies_average_their_gradients_once_a_step(prefill: Graph, train: Graph) -> None:
    whole = held(Layout(train), Mesh(), "gradient")
    (kernel,) = collectives(train, Mesh(data=2))
    assert (kernel.name, kernel.bytes, kernel.size) == ("all_reduce", whole, (2, whole))
    (kernel,) = collectives(replace(train, passes=4), Mesh(data=2))
    assert kernel.bytes == whole / 4
    assert collectives(prefill, Mesh(data=2)) == collectives(prefill, Mesh()) == []


def test_degrees_that_do_not_divide_are_told(prefill: Graph) -> None:
    layout = Layout(prefill)
    assert [misfit(layout, degree) for degree in (1, 2, 4)] == [None, None, None]
    assert misfit(layout, 8) == f"{HEADS} heads and {KV_HEADS} key/value heads are not divisible by 8"
    model = llama()
    Quantize(scheme=SchemeName.int4_weight, group_size=128, symmetric=False).apply(model, context("weights"))
    grouped = Layout(traced(Prefill(batch_size=2, prompt_tokens=16), model))
    assert misfit(grouped, 2) is None
    assert misfit(grouped, 4) == "2 quantization groups of model.layers.0.mlp.down_proj are not divisible by 4"


def test_the_mesh_of_a_step() -> None:
    receipt = Shard(tensor=2, fsdp=4).apply(llama(), context("shard"))
    assert Mesh.of(receipt.decisions) == Mesh(tensor=2, fsdp=4)
    assert Mesh.of({}) == Mesh() and Mesh(tensor=2, fsdp=4, data=3).devices == 24
