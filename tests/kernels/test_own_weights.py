"""Weights that a module reads itself: experts in one 3-D parameter and PyTorch's attention, quantized by name or named with a reason."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import context

from optforge.errors import PlanError
from optforge.kernels.parameters import QuantizedParameters, Stored
from optforge.measure.work import compute_dtype
from optforge.rows import Applied, verify
from optforge.share import alias, on_meta
from optforge.transforms.base import Receipt, Touched
from optforge.transforms.quantize import Quantize, SchemeName

NAMES = list(SchemeName)
ROUNDING = {"int8": 0.015, "int4": 0.16, "fp8": 0.06, "fp4": 0.2}


class Experts(nn.Module):
    """As transformers keeps them: [experts, out, in] each, indexed by the expert that a token goes to."""

    def __init__(self, experts: int = 4, width: int = 64, hidden: int = 64) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width) / 8)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) / 8)
        self.down_bias = nn.Parameter(torch.randn(experts, width))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        gate, up = nn.functional.linear(x, self.gate_up_proj[expert]).chunk(2, -1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert]) + self.down_bias[expert]

    def together(self, x: Tensor) -> Tensor:
        """Every expert on its share of the tokens, as one batched product."""
        return torch.bmm(x.view(self.gate_up_proj.shape[0], -1, x.shape[-1]), self.gate_up_proj.transpose(1, 2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, int(self.router(x).mean(0).argmax()))


def quantize(model: nn.Module, scheme: SchemeName, **fields: Any) -> Receipt:
    return Quantize(scheme=scheme, **fields).apply(model, context("weights"))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).detach().norm() / expected.float().detach().norm())


@pytest.mark.parametrize("scheme", NAMES, ids=lambda s: s.name)
@pytest.mark.case("B10")
def test_b10_targeted_experts_are_quantized_and_each_is_brought_back_alone(scheme: SchemeName, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Block()
    original, skeleton, x = copy.deepcopy(model), on_meta(model), torch.randn(8, 64)
    receipt = quantize(model, scheme, targets=["experts", "router"])
    assert {touched.name for touched in receipt.touched} >= {"experts"} and not receipt.skipped.keys() & {"experts.gate_up_proj"}
    assert receipt.bytes_after < 0.6 * receipt.bytes_before
    experts = model.experts
    assert isinstance(experts, QuantizedParameters) and isinstance(experts, Experts)
    assert not experts._parameters["gate_up_proj"].is_floating_point() and experts._parameters["down_bias"].is_floating_point()
    whole = [Stored(experts, name).dequantize() for name in ("gate_up_proj", "down_proj")]
    assert torch.equal(experts.gate_up_proj[2], whole[0][2])
    assert torch.equal(experts.down_proj[torch.tensor([1, 3])], whole[1][[1, 3]])
    monkeypatch.setattr(Stored, "dequantize", lambda self: pytest.fail("one expert must not bring back all"))
    limit = ROUNDING[experts.scheme.weight_dtype]
    for expert in range(4):
        assert relative(experts(x, expert), original.experts(x, expert)) < 2 * limit
    monkeypatch.undo()
    assert relative(experts.together(x), original.experts.together(x)) < limit
    assert quantize(skeleton, scheme, targets=["experts", "router"]) == receipt


def test_experts_are_saved_loaded_copied_and_cast() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"moe": Experts()}), torch.randn(3, 64)
    original = copy.deepcopy(model)
    receipt = quantize(model, SchemeName.nvfp4, targets=["moe"])
    expected = model["moe"](x, 1)
    for other in (copy.deepcopy(model), alias(model)):
        assert torch.equal(other["moe"](x, 1), expected)
    written = json.loads(json.dumps(asdict(receipt)))
    fresh = on_meta(original)
    Quantize(scheme=SchemeName.nvfp4).replay(fresh, Receipt(**{**written, "touched": [Touched(**one) for one in written["touched"]]}))
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(fresh["moe"](x, 1), expected)
    verify(model, [Applied(planned=SimpleNamespace(name="weights"), receipt=receipt, seconds=0.0)])  # type: ignore[arg-type]
    cast = copy.deepcopy(model).bfloat16()
    assert cast["moe"](x.bfloat16(), 1).dtype is torch.bfloat16 and relative(cast["moe"](x.bfloat16(), 1), expected) < 0.02
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in cast.state_dict().items() if key != "moe.down_bias")
    assert compute_dtype(cast) is torch.bfloat16


@pytest.mark.case("B63")
def test_b63_experts_are_not_quantized_twice_and_group_sizes_are_checked() -> None:
    model = nn.ModuleDict({"moe": Experts(hidden=48)})
    with pytest.raises(PlanError, match="layer moe: group_size 64 does not divide its K=48"):
        quantize(model, SchemeName.int4_weight, group_size=64, targets=["moe"])
    quantize(model, SchemeName.int8_weight, targets=["moe"])
    with pytest.raises(PlanError, match=r"layer moe is already int8 \(step weights\)"):
        quantize(model, SchemeName.int8_weight, targets=["moe"])


@pytest.mark.case("B10")
def test_b10_experts_of_transformers() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = Qwen3MoeForCausalLM(config).eval()
        model.set_experts_implementation(implementation)
        ids = torch.randint(0, 64, (2, 9))
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            receipt = quantize(model, SchemeName.int8_weight, targets=["Linear", "Qwen3MoeExperts"])
            error = relative(model(input_ids=ids).logits, expected)
        named = {touched.name for touched in receipt.touched}
        assert {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"} <= named
        assert error < 0.03, implementation
        assert receipt.bytes_before / receipt.total_bytes > 0.8


@pytest.mark.parametrize("scheme", ["int8_weight", "int4_weight", "fp8_weight", "mxfp4_weight"])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 48, "vdim": 48}], ids=["packed", "separate"])
@pytest.mark.case("B12")
def test_b12_targeted_attention_of_pytorch(scheme: str, sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4, batch_first=True, **sizes), "out": nn.Linear(64, 8)}).eval()
    x = torch.randn(2, 5, 64)
    other = torch.randn(2, 5, 48) if sizes else x
    with torch.no_grad():
        expected = model["attention"](x, other, other)[0]
        receipt = quantize(model, SchemeName[scheme], targets=["Linear", "MultiheadAttention"])
        found = model["attention"](x, other, other)[0]
    assert {touched.name for touched in receipt.touched} == {"attention", "attention.out_proj", "out"} and receipt.skipped == {}
    assert relative(found, expected) < 3 * ROUNDING[scheme.split("_", maxsplit=1)[0].replace("mxfp4", "fp4")]
    assert not model["attention"].out_proj._parameters["weight"].is_floating_point()


@pytest.mark.case("B12")
def test_b12_an_encoder_layer_leaves_its_fast_path_when_its_attention_is_quantized() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)]).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = model[0](x)
        receipt = quantize(model, SchemeName.int8_weight, targets=["MultiheadAttention"])
        assert relative(model[0](x), expected) < 0.02
    assert "0.self_attn" in {touched.name for touched in receipt.touched}
