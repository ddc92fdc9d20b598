"""What quantization misses is asked of every parameter, so that experts in one tensor show as the share they are (B10)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optforge import config
from optforge.plan.coverage import missed
from optforge.transforms.base import Context, Receipt
from optforge.transforms.quantize import Quantize, SchemeName


class Experts(nn.Module):
    """The case's module: fused gate and up, down, and a router; the experts are no linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(4, 128, 64))
        self.down = nn.Parameter(torch.empty(4, 64, 64))
        self.router = nn.Linear(64, 4, bias=False)


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Experts() for _ in range(blocks))
        self.head = nn.Linear(64, 100, bias=False)


def quantized(model: nn.Module, **options: object) -> Receipt:
    cpu = config.hardware("cpu")
    return Quantize(scheme=SchemeName.int8_dynamic, **options).apply(model, Context(step="weights", target=cpu, device=cpu))  # type: ignore[arg-type]


@pytest.mark.case("B10")
def test_b10_experts_of_every_layer_are_one_row_with_the_share_of_all_bytes() -> None:
    """By hand, in elements: a block has 4 x 128 x 64 + 4 x 64 x 64 + 64 x 4 = 49,408; embedding and head 6,400 each."""
    with torch.device("meta"):
        model = Model(3)
    total = 3 * 49_408 + 2 * 6_400
    rows = missed(model, [quantized(model)])
    assert [(row.pattern, row.count, row.shape) for row in rows] == [
        ("blocks.*.gate_up", 3, [4, 128, 64]),
        ("blocks.*.down", 3, [4, 64, 64]),
        ("embed.weight", 1, [100, 64]),
    ]
    assert [row.share for row in rows] == pytest.approx([3 * 32_768 / total, 3 * 16_384 / total, 6_400 / total])
    assert rows[0].bytes == 3 * 32_768 * 4
    assert "3-D parameter" in rows[0].reason and "looked up" in rows[2].reason


def test_what_the_recipe_says_to_ignore_is_not_missed() -> None:
    model = Model(1)
    ignore = ["blocks", "Embedding"]
    receipt = quantized(model, ignore=["blocks"])
    assert [row.pattern for row in missed(model, [receipt])] == ["blocks.0.gate_up", "blocks.0.down", "embed.weight"]
    assert missed(model, [receipt], ignore) == []


def test_what_another_quantize_step_changed_is_not_missed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    first, second = quantized(model, targets=["0"]), quantized(model, targets=["1"])
    assert [row.pattern for row in missed(model, [first])] == []
    assert missed(model, [first, second]) == []


def test_without_a_quantize_step_nothing_is_missed() -> None:
    assert missed(Model(1), []) == []


def test_a_weight_that_is_tied_to_an_ignored_head_is_ignored() -> None:
    model = Model(1)
    model.head.weight = model.embed.weight
    receipt = quantized(model, ignore=["head", "blocks"])
    assert missed(model, [receipt], ["head", "blocks"]) == []
