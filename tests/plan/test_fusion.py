"""Which operators become one kernel and what it moves: by hand on small graphs, and against the kernels that Inductor makes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from math import prod

import llamas
import torch
from toys import CPU

from optforge.data.tokens import RandomTokens
from optforge.models.base import Loaded
from optforge.plan import graph as g
from optforge.plan.fusion import kernels
from optforge.plan.trace import trace
from optforge.workloads.prefill import Prefill

ROWS, WIDTH = 4, 64
FULL, ROW = 2 * ROWS * WIDTH, 2 * ROWS  # bytes in bf16


class Hand:
    """Writes a graph down operator by operator; a value's name stands for its key."""

    def __init__(self, **given: int) -> None:
        self.graph = g.Graph()
        self.keys: dict[str, int] = {}
        for name, size in given.items():
            role = "parameter" if name.startswith("weight") else "cache" if name.startswith("cache") else "input"
            self.value(name, size, role)

    def value(self, name: str, size: int, role: str = "value") -> int:
        if name not in self.keys:
            self.keys[name] = len(self.keys)
            self.graph.values[self.keys[name]] = g.Value(key=self.keys[name], bytes=size, role=role)
        return self.keys[name]

    def add(
        self,
        name: str,
        kind: str,
        reads: str,
        writes: str,
        size: tuple[int, ...] = (ROWS, WIDTH),
        *,
        module: str = "block.0",
        phase: str = g.FORWARD,
        touched: int | None = None,
        out: int | None = None,
    ) -> None:
        """`touched`: bytes of each read in place of the whole value. `out`: bytes written, else 2 an element of `size`."""
        made = 2 * prod(size) if out is None else out
        read = tuple(g.Access(key=self.keys[n], bytes=touched or self.graph.values[self.keys[n]].bytes) for n in reads.split())
        write = (g.Access(key=self.value(writes, made), bytes=made),)
        self.graph.operators.append(
            g.Operator(name=name, kind=kind, module=module, phase=phase, dtype="bf16", size=size, reads=read, writes=write)
        )

    def product(self, reads: str, writes: str, **rest: str) -> None:
        self.add("aten.mm", g.PRODUCT, reads, writes, out=FULL, **rest)  # type: ignore[arg-type]  # only module and phase are given

    def compiled(self, *outputs: str, regions: tuple[str, ...] = ("",)) -> list[g.Kernel]:
        self.graph.outputs = tuple(self.keys[name] for name in outputs)
        return kernels(self.graph, compiled=True, regions=regions)


def names(found: list[g.Kernel]) -> list[str]:
    return [kernel.name for kernel in found]


def test_eager_runs_one_kernel_an_operator() -> None:
    hand = Hand(x=FULL)
    hand.add("aten.neg", g.POINTWISE, "x", "a")
    hand.add("aten.exp", g.POINTWISE, "a", "b")
    found = kernels(hand.graph, compiled=False)
    assert [(kernel.name, kernel.bytes) for kernel in found] == [("aten.neg", 2 * FULL), ("aten.exp", 2 * FULL)]


def residual_norm(hand: Hand) -> None:
    hand.add("aten.add", g.POINTWISE, "x product", "sum")
    hand.add("aten.pow", g.POINTWISE, "sum", "square")
    hand.add("aten.mean", g.REDUCTION, "square", "mean", out=ROW)
    hand.add("aten.rsqrt", g.POINTWISE, "mean", "scale", (ROWS, 1))
    hand.add("aten.mul", g.POINTWISE, "sum scale", "scaled")
    hand.add("aten.mul", g.POINTWISE, "scaled weight", "normed")


def test_a_norm_with_the_sum_before_it_is_one_kernel_that_moves_each_value_once() -> None:
    hand = Hand(x=FULL, product=FULL, weight=2 * WIDTH, weight_up=2 * WIDTH * WIDTH)
    residual_norm(hand)
    hand.product("normed weight_up", "up")
    hand.add("aten.add", g.POINTWISE, "sum up", "out")
    norm, product, last = hand.compiled("out")
    assert (norm.kind, norm.name, norm.operators) == (g.REDUCTION, "aten.add + 5", 6)
    assert norm.bytes == 2 * FULL + 2 * WIDTH + 2 * FULL  # reads x, the product and the weight; writes the sum and what is normed
    assert (product.kind, last.name) == (g.PRODUCT, "aten.add")


def test_a_value_that_nobody_else_wants_is_not_written() -> None:
    hand = Hand(x=FULL, product=FULL, weight=2 * WIDTH)
    residual_norm(hand)
    (norm,) = hand.compiled("normed")
    assert norm.bytes == 2 * FULL + 2 * WIDTH + FULL


def test_a_gate_is_one_kernel_though_a_product_runs_between() -> None:
    hand = Hand(x=FULL, weight_gate=99, weight_up=99)
    hand.product("x weight_gate", "gate")
    hand.add("aten.silu", g.POINTWISE, "gate", "active")
    hand.product("x weight_up", "up")
    hand.add("aten.mul", g.POINTWISE, "active up", "out")
    found = hand.compiled("out")
    assert sorted(names(found)) == ["aten.mm", "aten.mm", "aten.silu + 1"]
    assert next(kernel for kernel in found if kernel.operators == 2).bytes == 3 * FULL


def test_nothing_merges_across_a_product_that_needs_one_half_and_is_needed_by_the_other() -> None:
    hand = Hand(x=FULL, weight=99)
    hand.add("aten.relu", g.POINTWISE, "x", "a")
    hand.product("a weight", "b")
    hand.add("aten.add", g.POINTWISE, "a b", "out")
    assert names(hand.compiled("out")) == ["aten.relu", "aten.mm", "aten.add"]


def test_a_cycle_through_two_kernels_is_seen() -> None:
    hand = Hand(x=FULL, y=FULL, weight=99)
    hand.add("aten.relu", g.POINTWISE, "x", "a")
    hand.product("a weight", "b")
    hand.add("aten.neg", g.POINTWISE, "b", "c", (ROWS, WIDTH // 2))  # of another size: no part of either
    hand.product("c weight", "d")
    hand.add("aten.add", g.POINTWISE, "a d", "out")
    assert len(hand.compiled("out")) == 5


def test_a_cycle_through_a_kernel_that_grew_later_is_seen() -> None:
    """`b` joins `a` and brings the first product before it, and so before the second product, which reads `a`."""
    hand = Hand(x=FULL, y=FULL, weight=99)
    hand.add("aten.neg", g.POINTWISE, "x", "r")
    hand.product("r weight", "first")
    hand.add("aten.exp", g.POINTWISE, "y", "a")
    hand.product("a weight", "second")
    hand.add("aten.add", g.POINTWISE, "y first", "b")
    hand.add("aten.mul", g.POINTWISE, "r second", "out")
    assert sorted(names(hand.compiled("out", "b"))) == ["aten.exp + 1", "aten.mm", "aten.mm", "aten.mul", "aten.neg"]


def test_nested_regions_are_told_apart_by_the_innermost() -> None:
    hand = Hand(x=FULL)
    for number, module in enumerate(("layers.0.mlp", "layers.0.mlp.act", "layers.0", "layers.0.norm")):
        hand.add("aten.neg", g.POINTWISE, "x" if not number else f"v{number - 1}", f"v{number}", module=module)
    assert [kernel.operators for kernel in hand.compiled("v3", regions=("layers.0", "layers.0.mlp"))] == [2, 2]


def test_regions_keep_apart_and_what_lies_in_none_runs_by_itself() -> None:
    hand = Hand(x=FULL)
    for number, module in enumerate(("embed", "embed", "layers.0", "layers.0.norm", "layers.1", "layers.10", "head")):
        hand.add("aten.neg", g.POINTWISE, "x" if not number else f"v{number - 1}", f"v{number}", module=module)
    assert [kernel.operators for kernel in hand.compiled("v6")] == [7]
    by_block = hand.compiled("v6", regions=("layers.0", "layers.1"))
    assert [kernel.operators for kernel in by_block] == [1, 1, 2, 1, 1, 1]
    assert by_block[2].module == "layers.0"


def test_phases_keep_apart_and_the_update_is_never_compiled() -> None:
    hand = Hand(x=FULL)
    hand.add("aten.neg", g.POINTWISE, "x", "a")
    hand.add("aten.neg", g.POINTWISE, "a", "b", module="", phase=g.BACKWARD)
    hand.add("aten.mul", g.POINTWISE, "b", "c", module="", phase=g.BACKWARD)
    hand.add("aten.mul", g.POINTWISE, "c", "d", module="", phase=g.UPDATE)
    hand.add("aten.mul", g.POINTWISE, "d", "e", module="", phase=g.UPDATE)
    assert [(kernel.phase, kernel.operators) for kernel in hand.compiled("e", regions=("block.0",))] == [
        (g.FORWARD, 1),
        (g.BACKWARD, 2),
        (g.UPDATE, 1),
        (g.UPDATE, 1),
    ]


def test_a_cache_is_written_by_its_new_row_alone() -> None:
    positions, row = 100, 2 * WIDTH
    hand = Hand(x=row, cache_keys=positions * row)
    hand.add("aten.mul", g.POINTWISE, "x", "rotated", (1, WIDTH))
    hand.add("aten.index_copy_", g.COPY, "rotated", "cache_keys", (positions, WIDTH), out=row)
    hand.add("aten.scaled_dot_product_attention", g.ATTENTION, "cache_keys", "out", (1, 1, 1, 1, positions, WIDTH), out=row)
    write, attention = hand.compiled("out")
    assert (write.name, write.bytes) == ("aten.mul + 1", 2 * row)
    assert attention.bytes == positions * row + row


def test_writing_over_a_value_waits_for_its_readers() -> None:
    hand = Hand(x=FULL, weight=99)
    hand.add("aten.relu", g.POINTWISE, "x", "a")
    hand.product("a weight", "b")
    hand.add("aten.mul_", g.POINTWISE, "x", "a")  # what the product reads must still stand when it runs
    assert names(hand.compiled("a", "b")) == ["aten.relu", "aten.mm", "aten.mul_"]


def test_halves_of_a_packed_value_are_read_once() -> None:
    hand = Hand(packed=2 * FULL)
    hand.add("aten.silu", g.POINTWISE, "packed", "a", touched=FULL)
    hand.add("aten.mul", g.POINTWISE, "packed a", "out", touched=FULL)
    (found,) = hand.compiled("out")
    assert found.bytes == 2 * FULL + FULL


def test_a_larger_value_that_two_smaller_loops_read_in_parts_is_never_written() -> None:
    hand = Hand(sums=2 * FULL)
    hand.add("aten.mul", g.POINTWISE, "sums", "scaled", (ROWS, 2 * WIDTH))
    hand.add("aten.silu", g.POINTWISE, "scaled", "a", touched=FULL)
    hand.add("aten.mul", g.POINTWISE, "scaled a", "out", touched=FULL)
    (found,) = hand.compiled("out")
    assert found.bytes == 2 * FULL + FULL


def test_a_larger_value_that_more_than_two_loops_read_in_parts_is_written() -> None:
    hand = Hand(sums=3 * FULL)
    hand.add("aten.mul", g.POINTWISE, "sums", "scaled", (ROWS, 3 * WIDTH))
    for part in ("a", "b", "c"):
        hand.add("aten.silu", g.POINTWISE, "scaled", part, touched=FULL)
    assert names(hand.compiled("a", "b", "c"))[0] == "aten.mul"


def test_what_spreads_a_row_over_a_matrix_is_done_where_it_is_read() -> None:
    """The offsets of rounded rows are known before the product; the matrix that they are spread over is wanted after it."""
    hand = Hand(x=FULL, weight=99, weight_sum=2 * WIDTH)
    hand.add("aten.amax", g.REDUCTION, "x", "offset", out=ROW)
    hand.add("aten.mul", g.POINTWISE, "x offset", "rounded")
    hand.add("aten.mul", g.POINTWISE, "offset weight_sum", "spread")
    hand.product("rounded weight", "product")
    hand.add("aten.add", g.POINTWISE, "product spread", "out")
    before, _, after = hand.compiled("out")
    assert before.bytes == FULL + FULL + ROW  # reads x, writes what is rounded and the offsets
    assert after.bytes == FULL + ROW + 2 * WIDTH + FULL


def test_sibling_modules_that_round_one_input_do_it_once_when_compiled() -> None:
    hand = Hand(x=FULL, weight=99)
    for name in ("q", "k", "v"):
        hand.add("aten.round", g.POINTWISE, "x", f"{name}8", module=f"attn.{name}")
        hand.product(f"{name}8 weight", name, module=f"attn.{name}")
    assert Counter(names(hand.compiled("q", "k", "v"))) == {"aten.round": 1, "aten.mm": 3}
    assert Counter(names(kernels(hand.graph, compiled=False)))["aten.round"] == 3


def test_sibling_modules_that_add_to_one_value_each_do_so() -> None:
    hand = Hand(x=FULL, total=FULL)
    for module in ("attn.q", "attn.k"):
        hand.add("aten.add_", g.POINTWISE, "total x", "total", module=module)
    assert sum(kernel.operators for kernel in hand.compiled("total")) == 2


def test_a_merged_kernel_that_rounds_is_of_the_narrow_dtype() -> None:
    hand = Hand(x=FULL)
    hand.add("aten.round", g.POINTWISE, "x", "rounded", out=FULL // 2)
    hand.add("aten.mul", g.POINTWISE, "rounded x", "out")
    hand.graph.operators[0] = replace(hand.graph.operators[0], dtype="int8")
    (found,) = hand.compiled("out", "rounded")
    assert (found.operators, found.dtype) == (2, "int8")


def test_what_follows_a_reduction_of_the_whole_tensor_is_another_kernel() -> None:
    many = 1 << 16
    hand = Hand(x=2 * many)
    hand.add("aten.amax", g.REDUCTION, "x", "largest", (many,), out=2)
    hand.add("aten.div", g.POINTWISE, "x largest", "out", (many,))
    assert names(hand.compiled("out")) == ["aten.amax", "aten.div"]


def test_what_follows_a_long_row_is_another_kernel_also_where_the_reduction_was_merged() -> None:
    many = 1 << 16
    hand = Hand(x=2 * many)
    hand.add("aten.abs", g.POINTWISE, "x", "size", (many,))
    hand.add("aten.amax", g.REDUCTION, "size", "largest", (many,), out=2)
    hand.add("aten.div", g.POINTWISE, "x largest", "out", (many,))
    assert names(hand.compiled("out")) == ["aten.abs + 1", "aten.div"]


def test_reductions_to_other_rows_are_kernels_of_their_own() -> None:
    hand = Hand(x=FULL)
    hand.add("aten.sum", g.REDUCTION, "x", "rows", out=ROW)
    hand.add("aten.mul", g.POINTWISE, "x rows", "scaled")
    hand.add("aten.sum", g.REDUCTION, "scaled", "columns", out=2 * WIDTH)
    assert names(hand.compiled("columns")) == ["aten.sum + 1", "aten.sum"]


def test_two_caches_are_never_written_by_one_kernel() -> None:
    """Keys and values are rotated or not, then stored; what is made of both for one store is written for the other."""
    hand = Hand(x=FULL, cache_keys=FULL, cache_values=FULL)
    hand.add("aten.neg", g.POINTWISE, "x", "made")
    hand.add("aten.index_copy_", g.POINTWISE, "made", "cache_keys")
    hand.add("aten.index_copy_", g.POINTWISE, "made", "cache_values")
    found = hand.compiled()
    assert names(found) == ["aten.neg + 1", "aten.index_copy_"]
    # reads x, writes what it made and the keys; reads what was made, writes the values
    assert [kernel.bytes for kernel in found] == [3 * FULL, 2 * FULL]


# --- against Inductor ---------------------------------------------------------------------------------------------

DATA = RandomTokens()
TOKENS = 64


def llama(device: str) -> Loaded:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000}
    return llamas.llama(device, dtype=torch.bfloat16, **sizes)


def of_inductor() -> tuple[Counter[str], int]:
    """Kinds of calls in the program that Inductor writes for one decoder block, and the loops in them."""
    from torch._inductor import config as inductor
    from torch._inductor import metrics
    from torch._inductor.utils import run_and_get_code

    model = llama("cpu").module
    for layer in model.model.layers:
        layer.compile()
    torch._dynamo.reset()
    metrics.reset()
    with torch.no_grad(), inductor.patch(fx_graph_cache=False):
        _, (code,) = run_and_get_code(lambda: model(torch.randint(0, 1000, (1, TOKENS)), use_cache=False))
    called = code[code.index("def call(") :]
    found = {
        "product": r"extern_kernels\.\w*mm\(",
        "attention": r"torch\.ops\.aten\._scaled_dot_product\w+\.default\(",
        "fused": r"^ +cpp_fused\w+\(",
    }
    return Counter(
        {kind: len(re.findall(pattern, called, re.MULTILINE)) for kind, pattern in found.items()}
    ), metrics.generated_kernel_count


def test_a_decoder_block_makes_the_kernels_that_inductor_makes() -> None:
    traced = trace(llama("meta"), Prefill(batch_size=1, prompt_tokens=TOKENS), DATA, CPU)
    blocks = ("model.layers.0", "model.layers.1")
    block = [kernel for kernel in kernels(traced, compiled=True, regions=blocks) if kernel.module.startswith("model.layers.0")]
    counted = Counter(kernel.kind if kernel.kind in (g.PRODUCT, g.ATTENTION) else "fused" for kernel in block)
    calls, loops = of_inductor()
    assert (counted["product"], counted["attention"]) == (calls["product"], calls["attention"]) == (7, 1)
    # two norms, the rotation of queries and that of keys, the gate, the last sum. On a CPU Inductor joins both rotations, and writes
    # what they concatenate (two loops each for queries and keys) in calls of their own
    assert counted["fused"] == 6
    assert calls["fused"] == counted["fused"] - 1 + 2
    assert counted["fused"] <= loops - 4 <= 2 * counted["fused"]


def test_a_large_decoder_takes_a_moment() -> None:
    """70B decodes in some 9,000 operators; fusing must stay far below a second."""
    import time

    hand = Hand(x=FULL, weight=99)
    previous = "x"
    for block in range(700):
        hand.add("aten.add", g.POINTWISE, f"{previous} x", f"s{block}", module=f"layers.{block}")
        for step in range(12):
            before = f"s{block}" if not step else f"s{block}_{step - 1}"
            hand.add("aten.mul", g.POINTWISE, before, f"s{block}_{step}", module=f"layers.{block}")
        hand.product(f"s{block}_11 weight", f"p{block}", module=f"layers.{block}")
        previous = f"p{block}"
    begun = time.perf_counter()
    found = hand.compiled(previous)
    assert time.perf_counter() - begun < 5
    assert len(found) == 1400


def test_kernels_of_equal_graphs_are_equal() -> None:
    hand = Hand(x=FULL)
    hand.add("aten.neg", g.POINTWISE, "x", "a")
    assert kernels(replace(hand.graph), compiled=True) == hand.compiled("a")
