"""The traced graph: operators, sizes and bytes, held against PyTorch's own counter and against counts by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import llamas
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from toys import CPU, GPU

from optforge import config
from optforge.data.tokens import RandomTokens
from optforge.models.base import Loaded
from optforge.plan import graph as g
from optforge.plan import memo
from optforge.plan.make import make
from optforge.plan.roofline import predict
from optforge.plan.trace import trace
from optforge.workloads.decode import Decode
from optforge.workloads.forward import Forward
from optforge.workloads.prefill import Prefill

DATA = RandomTokens()


def llama(layers: int = 2, device: str = "meta") -> Loaded:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "max_position_embeddings": 256}
    return llamas.llama(device, dtype=torch.bfloat16, **sizes)


def module(net: nn.Module, *args: Tensor) -> Loaded:
    return Loaded(module=net.to("meta").eval(), family="module", name="net", example=(args, {}))


def test_products_have_the_flops_that_pytorch_counts() -> None:
    loaded = llama()
    traced = trace(loaded, Prefill(batch_size=2, prompt_tokens=16), DATA, GPU)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        llama(device="cpu").module(input_ids=torch.zeros(2, 16, dtype=torch.int64), use_cache=False, logits_to_keep=1)
    # PyTorch counts attention in full, whichever way it is dispatched; the graph counts what causality leaves
    attention = [op for op in traced.operators if op.kind == g.ATTENTION]
    full = 4.0 * 2 * 4 * 16 * 16 * 16 * len(attention)
    assert sum(op.flops for op in attention) == pytest.approx(full * 17 / 32)
    others = sum(op.flops for op in traced.operators if op.kind != g.ATTENTION)
    assert others + full == counter.get_total_flops()


def test_a_product_is_named_sized_and_weighed() -> None:
    traced = trace(module(nn.Sequential(nn.Linear(8, 4)), torch.zeros(3, 8)), Forward(), DATA, CPU)
    (product,) = [op for op in traced.operators if op.kind == g.PRODUCT]
    assert (product.name, product.module, product.dtype, product.size) == ("aten.addmm", "0", "fp32", (1, 3, 4, 8))
    assert product.flops == 2 * 3 * 4 * 8
    assert product.bytes == 4 * (3 * 8 + 8 * 4 + 4 + 3 * 4)
    assert traced.bytes_of("parameter") == 4 * (8 * 4 + 4)
    assert len(traced.outputs) == 1


def test_views_are_no_operators_and_an_expanded_tensor_is_read_once() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, 1, 8).transpose(0, 1).expand(3, 2, 8) + 1.0

    traced = trace(module(Net(), torch.zeros(2, 8)), Forward(), DATA, CPU)
    (add,) = traced.operators
    assert add.kind == g.POINTWISE
    assert add.bytes == 4 * (2 * 8 + 3 * 2 * 8)


def test_decode_is_one_step_over_a_static_cache() -> None:
    traced = trace(llama(3), Decode(batch_size=2, context=10, new_tokens=6), DATA, GPU)
    assert traced.unknown is None
    assert (traced.passes, traced.unit, traced.units) == (6, "tokens", 12)
    assert traced.bytes_of("cache") == 3 * 2 * (2 * 2 * 16 * 16) * 2  # layers, key and value, [batch, heads, positions, width], bf16
    attention = [op for op in traced.operators if op.kind == g.ATTENTION]
    assert [(op.size[3], op.size[4], op.detail) for op in attention] == [(1, 16, "masked")] * 3
    written = [op for op in traced.operators if op.name == "aten.index_copy_"]
    assert [sum(access.bytes for access in op.writes) for op in written] == [2 * 2 * 16 * 2] * 6  # one position, not the whole cache
    assert traced.prompt is not None
    assert [op.size[3] for op in traced.prompt.operators if op.kind == g.ATTENTION] == [10] * 3


def test_prefill_asks_for_the_last_logits_alone_and_needs_no_mask() -> None:
    traced = trace(llama(), Prefill(batch_size=2, prompt_tokens=16), DATA, GPU)
    assert [op.detail for op in traced.operators if op.kind == g.ATTENTION] == ["causal"] * 2
    head = [op for op in traced.operators if op.module == "lm_head" and op.kind == g.PRODUCT]
    assert [op.size[1:] for op in head] == [(2, 128, 64)]


@pytest.mark.parametrize(
    ("recipe", "hardware", "expected"),
    [
        ("llama_int4", "a100", {"optforge.int4_weight": 8}),
        ("llama_fp8", "a100", {"optforge.fp8_weight": 8}),
        ("llama_fp8", "h100", {"aten._scaled_mm": 8}),
        ("llama_fp8", "mi300x", {"aten._scaled_mm": 8}),
        ("llama_int8", "cpu", {"optforge.grouped_attention": 2}),
        ("llama_int4", "tpu_v5e", {"optforge.int4_weight": 0}),
    ],
)
def test_the_operators_are_those_of_the_target(recipe: str, hardware: str, expected: dict[str, int], tmp_path: Path) -> None:
    llama().module.config.save_pretrained(tmp_path)
    words = [f"recipe={recipe}", f"hardware={hardware}", "model=hf", f"model.path={tmp_path}", "data=random_tokens"]
    planned = make(config.compose(config.parse(words, cwd=tmp_path), cwd=tmp_path))
    last = planned.steps[-1].graph
    assert last.unknown is None
    names = Counter(op.name for op in last.operators)
    assert {name: names[name] for name in expected} == expected


def test_an_operator_without_a_fake_is_named_and_the_rest_stands() -> None:
    library = torch.library.Library("opttest", "DEF")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x * 2, "CPU")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(torch.ops.opttest.mystery(self.first(x)))
            return result

    traced = trace(module(Net(), torch.zeros(2, 8)), Forward(), DATA, CPU)
    assert [op.kind for op in traced.operators] == [g.PRODUCT, g.UNKNOWN, g.PRODUCT]
    assert [op.name for op in traced.unknown_operators()] == ["opttest.mystery"]
    assert "opttest.mystery" in traced.notes[0] and "register_fake" in traced.notes[0]


def test_an_index_by_a_mask_is_not_called_an_operator_without_a_fake() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(x[x[:, 0] > 0])
            return result

    traced = trace(module(Net(), torch.zeros(2, 8)), Forward(), DATA, CPU)
    assert [op.why for op in traced.unknown_operators()] == ["has an output whose size depends on values"]
    assert not any("register_fake" in note for note in traced.notes)


def test_a_model_that_reads_values_ends_the_graph_and_says_where() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            return y if y.sum() > 0 else -y

    traced = trace(module(Net(), torch.zeros(2, 8)), Forward(), DATA, CPU)
    assert traced.unknown is not None and "cannot be followed" in traced.unknown
    assert traced.operators[0].kind == g.PRODUCT
    assert not predict(traced, config.hardware("h100"), mode="eager").top, "no shares of a pass that was not seen whole"


def test_positions_are_known_though_nothing_is_computed() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            steps = torch.arange(x.shape[0], device=x.device)
            return x + 1 if bool((steps[1:] - steps[:-1] == 1).all()) else x * x * x

    traced = trace(module(Net(), torch.zeros(4, 8)), Forward(), DATA, CPU)
    assert traced.unknown is None
    assert traced.operators[-1].name == "aten.add"


def test_what_is_remembered_is_what_would_be_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(graph: g.Graph) -> list[object]:
        return [(op.name, op.kind, op.dtype, op.size, op.flops, op.reads, op.writes, op.module) for op in graph.operators]

    workload = Prefill(batch_size=2, prompt_tokens=16)
    remembered = [trace(llama(), workload, DATA, GPU) for _ in range(2)][-1]
    monkeypatch.setattr(memo, "key", lambda *_: None)
    worked_out = trace(llama(), workload, DATA, GPU)
    assert told(remembered) == told(worked_out)
    assert remembered.values == worked_out.values
