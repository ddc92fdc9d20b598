"""Convolutions and embeddings under every scheme: what they compute, what they keep, and what is left alone with its reason."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toys import context

from optforge.errors import PlanError, SelectorError
from optforge.kernels.convolutions import QuantizedConv2d, patches
from optforge.kernels.embeddings import QuantizedEmbedding
from optforge.schemes import ENTRIES, SCHEMES
from optforge.share import alias, on_meta
from optforge.transforms.base import Receipt
from optforge.transforms.quantize import Quantize, SchemeName, Tied

NAMES = list(SchemeName)
ROUNDING = {"int8": 0.01, "int4": 0.15, "fp8": 0.05, "fp4": 0.16}
"""Weight dtype -> largest relative error of a result on normal numbers."""


class Same(nn.Conv2d):
    """Pads by itself and hands the rest on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class ReadsItsWeight(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * 2, self.bias)


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(16, 32, 3, padding=1),
    "pointwise": lambda: nn.Conv2d(16, 32, 1, bias=False),
    "depthwise": lambda: nn.Conv2d(16, 16, 3, groups=16, stride=2, padding=1),
    "grouped, dilated, oblong": lambda: nn.Conv2d(16, 8, (3, 2), groups=4, dilation=(1, 2), padding="same"),
    "reflecting": lambda: nn.Conv2d(16, 8, 3, padding=1, padding_mode="reflect"),
    "padding by itself": lambda: Same(16, 8, 2, stride=2),
}


def quantize(model: nn.Module, scheme: SchemeName, **fields: object) -> Receipt:
    return Quantize(scheme=scheme, **fields).apply(model, context("weights"))  # type: ignore[arg-type]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).detach().norm() / expected.float().detach().norm())


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("scheme", NAMES, ids=lambda s: s.name)
def test_a_convolution_convolves_with_its_dequantized_weight(scheme: SchemeName, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(CONVOLUTIONS[kind]())
    original, skeleton, x = copy.deepcopy(model), on_meta(model), torch.randn(2, 16, 10, 10)
    receipt = quantize(model, scheme, targets=["Conv2d"])
    (conv,) = model
    assert isinstance(conv, QuantizedConv2d) and isinstance(conv, type(original[0]))
    stored = ENTRIES[scheme.name].weight_only or scheme.name
    stored = "fp8_weight" if "fp8_block" in stored else stored
    assert receipt.touched[0].what == conv.scheme.name == stored, "only linears round their activations"
    assert conv.weight.dtype in (torch.int8, torch.uint8) and conv.weight.shape[0] == conv.out_channels
    plain = copy.deepcopy(original)
    with torch.no_grad():
        plain[0].weight.copy_(conv.dequantize().reshape(plain[0].weight.shape))
        assert torch.allclose(model(x), plain(x), atol=1e-5)
    assert relative(model(x), original(x)) < ROUNDING[SCHEMES[stored].weight_dtype]
    assert copy.deepcopy(model).bfloat16()(x.bfloat16()).dtype is torch.bfloat16
    assert torch.equal(alias(model)(x), model(x))
    assert quantize(skeleton, scheme, targets=["Conv2d"]) == receipt
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    fresh = on_meta(original)
    Quantize(scheme=scheme).replay(fresh, receipt)
    fresh.load_state_dict(load_file(tmp_path / "weights.safetensors"), assign=True)
    assert torch.equal(fresh(x), model(x)) and type(fresh[0]) is type(conv)


@pytest.mark.parametrize("kind", [kind for kind in CONVOLUTIONS if kind != "padding by itself"])
def test_patches_are_the_rows_of_the_product(kind: str) -> None:
    """Against PyTorch's own convolution in float64."""
    torch.manual_seed(0)
    conv, x = CONVOLUTIONS[kind]().double(), torch.randn(2, 16, 9, 11, dtype=torch.float64)
    rows = patches(conv, x)
    weight = conv.weight.detach().flatten(1).reshape(conv.groups, -1, rows.shape[2])
    flat = torch.einsum("grk,gnk->rgn", rows, weight).flatten(1)
    expected = conv(x).detach() if conv.bias is None else (conv(x) - conv.bias[:, None, None]).detach()
    assert torch.allclose(flat, expected.permute(0, 2, 3, 1).reshape(flat.shape), atol=1e-10)


def test_a_convolution_that_reads_its_own_weight_is_left_and_named() -> None:
    model = nn.Sequential(ReadsItsWeight(4, 4, 1), nn.Conv2d(4, 4, 1))
    receipt = quantize(model, SchemeName.int8_weight, targets=["Conv2d"])
    assert receipt.skipped == {"0": "its class ReadsItsWeight has a forward of its own"} and type(model[0]) is ReadsItsWeight


def test_channels_last_weights_are_stored_in_the_order_of_their_indices() -> None:
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Conv2d(8, 8, 3)), nn.Sequential(nn.Conv2d(8, 8, 3))
    second.load_state_dict(first.state_dict())
    second.to(memory_format=torch.channels_last)
    for model in (first, second):
        quantize(model, SchemeName.int4_weight, targets=["Conv2d"])
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())


def test_a_group_size_that_does_not_divide_a_kernel_is_told_with_its_length() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8))
    with pytest.raises(PlanError, match="layer 0: group_size 32 does not divide its K=9"):
        quantize(model, SchemeName.int4_weight, group_size=32, targets=["Conv2d"])


@pytest.mark.parametrize("scheme", NAMES, ids=lambda s: s.name)
def test_an_embedding_hands_out_the_rows_of_its_dequantized_table(scheme: SchemeName) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(50, 64, padding_idx=0), "other": nn.Linear(64, 64)}).bfloat16()
    original = copy.deepcopy(model["table"])
    skeleton = on_meta(model)
    receipt = quantize(model, scheme, targets=["Embedding"])
    table = model["table"]
    assert isinstance(table, QuantizedEmbedding) and type(model["other"]) is nn.Linear
    ids = torch.randint(0, 50, (3, 7))
    assert table(ids).dtype is torch.bfloat16 and torch.equal(table(ids), table.dequantize()[ids].bfloat16())
    assert relative(table(ids), original(ids)) < ROUNDING[table.scheme.weight_dtype]
    assert table(ids).shape == (3, 7, 64) and table(torch.zeros(0, dtype=torch.long)).shape == (0, 64)
    assert not bool(table(torch.zeros(2, dtype=torch.long)).any()), "padding stays zero"
    assert quantize(skeleton, scheme, targets=["Embedding"]) == receipt
    Quantize(scheme=scheme).replay(fresh := on_meta(nn.ModuleDict({"table": original, "other": nn.Linear(64, 64)})), receipt)
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(fresh["table"](ids), table(ids))


def test_an_embedding_that_renormalizes_is_left_and_named() -> None:
    model = nn.ModuleDict({"one": nn.Embedding(8, 8, max_norm=1.0), "two": nn.Embedding(8, 8)})
    assert "max_norm" in quantize(model, SchemeName.int8_weight, targets=["Embedding"]).skipped["one"]


class Tie(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("targets", [["Linear", "Embedding"], ["Embedding"]])
@pytest.mark.parametrize("policy", list(Tied), ids=lambda p: p.name)
@pytest.mark.case("B16")
def test_b16_a_targeted_embedding_follows_the_policy_of_its_tie(policy: Tied, targets: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"lm": Tie(), "more": nn.Embedding(8, 64), "other": nn.Linear(64, 64)})
    receipt = quantize(model, SchemeName.int8_weight, targets=targets, tied=policy)
    head, embedding = model["lm"].head, model["lm"].embedding
    if policy is Tied.skip or (policy is Tied.both and targets == ["Embedding"]):
        assert head.weight is embedding.weight and "tied to" in receipt.skipped["lm.embedding"]
    elif policy is Tied.both:
        assert head.weight is embedding.weight and embedding.weight.dtype is torch.int8
    else:
        assert embedding.weight.dtype is torch.int8
        assert head.weight.dtype is (torch.int8 if "Linear" in targets else torch.float32)
        assert any("no longer is" in note for note in receipt.notes)


@pytest.mark.case("B96")
def test_b96_an_empty_batch_and_empty_layers() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 8, 1), "none": nn.Embedding(0, 8), "some": nn.Embedding(8, 8)})
    receipt = quantize(model, SchemeName.int8_weight, targets=["Conv2d", "Embedding"])
    assert receipt.skipped.keys() == {"none"} and "no elements" in receipt.skipped["none"]
    assert model["conv"](torch.zeros(0, 4, 5, 5)).shape == (0, 8, 5, 5)


def test_other_convolutions_are_no_targets() -> None:
    with pytest.raises(SelectorError):
        quantize(nn.Sequential(nn.Conv1d(4, 4, 1)), SchemeName.int8_weight, targets=["Conv1d"])
