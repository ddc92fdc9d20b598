"""Grouped attention against float64 arithmetic written out here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from optforge.kernels import dispatch
from optforge.kernels.attention import QUERIES, grouped_attention


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One head and one query at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    shared = q.shape[1] // k.shape[1]
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            for token in range(q.shape[2]):
                scores = (k[batch, head // shared, : token + 1] @ q[batch, head, token]) * scale
                out[batch, head, token] = torch.softmax(scores, 0) @ v[batch, head // shared, : token + 1]
    return out


def inputs(batch: int, heads: int, groups: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, tokens, heads, 16, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(batch, tokens, groups, 16, dtype=dtype).transpose(1, 2) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("tokens", [1, 7, QUERIES - 1, QUERIES, QUERIES + 1, 2 * QUERIES + 3])
@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 6, 2), (2, 4, 4), (2, 3, 1)])
def test_attention_equals_float64(batch: int, heads: int, groups: int, tokens: int) -> None:
    q, k, v = inputs(batch, heads, groups, tokens, torch.float32)
    found, expected = grouped_attention(q, k, v, 0.3), by_hand(q, k, v, 0.3)
    assert (found.double() - expected).norm() / expected.norm() < 1e-6


def test_bf16_is_as_close_as_its_rounding_of_scores_allows() -> None:
    q, k, v = inputs(1, 6, 2, 200, torch.bfloat16)
    expected = by_hand(q, k, v, 0.25)
    assert (grouped_attention(q, k, v, 0.25).double() - expected).norm() / expected.norm() < 6e-3


def test_lengths_share_one_compilation_after_the_second() -> None:
    torch._dynamo.reset()
    compiles: list[object] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        compiles.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, v: grouped_attention(q, k, v, 0.25), backend=backend, fullgraph=True)
    for tokens in (5, 9, 130, 300):
        q, k, v = inputs(1, 4, 2, tokens, torch.float32)
        assert torch.equal(compiled(q, k, v), grouped_attention(q, k, v, 0.25))
    assert len(compiles) == 2


def test_exported_programs_hold_no_operator_of_ours_and_count_as_attention_does() -> None:
    q, k, v = inputs(1, 4, 2, 32, torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return grouped_attention(q, k, v, 0.25)

    with dispatch.decompose():
        program = torch.export.export(Layer(), (q, k, v))
    assert not [node for node in program.graph.nodes if "optforge" in str(node.target)]
    assert torch.allclose(program.module()(q, k, v), grouped_attention(q, k, v, 0.25), atol=1e-6)
    with FlopCounterMode(display=False) as counter:
        grouped_attention(q, k, v, 0.25)
    assert counter.get_total_flops() == 2 * 4 * 32 * 32 * (16 + 16)
