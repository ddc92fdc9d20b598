"""Quantize: what is rounded, what is left and why, what is refused, and that the numbers are what rounding gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from toys import context

from optforge.errors import PlanError, SelectorError, StepError
from optforge.kernels import int4_weight
from optforge.kernels.linears import QuantizedEmbedding, QuantizedLinear
from optforge.share import on_meta
from optforge.spec import Hardware
from optforge.transforms.base import Receipt
from optforge.transforms.quantize import GROUP_SIZES, Activation, Misfit, Quantize, SchemeName, Tied
from optforge.transforms.quantize import verify as checks

SCHEMES = list(SchemeName)
LIMIT = {
    "int8_weight": 0.01,
    "int8_dynamic": 0.015,
    "int8_static": 1.0,
    "int4_weight": 0.12,
    "fp8_weight": 0.04,
    "fp8_dynamic": 0.06,
    "fp8_static": 0.06,
    "fp8_block_weight": 0.04,
    "fp8_block": 0.06,
    "mxfp8_weight": 0.05,
    "mxfp8": 0.07,
    "mxfp4_weight": 0.16,
    "mxfp4": 0.23,
    "nvfp4_weight": 0.14,
    "nvfp4": 0.19,
}
"""Largest relative error of one product on normal numbers. Rounding alone gives 0.006, 0.009, 0.09, 0.026 and 0.037 for the first
that are not static, 0.026 and 0.037 in fp8 blocks, 0.03 and 0.042 in mxfp8, 0.115 and 0.163 in mxfp4, 0.094 and 0.133 in nvfp4. A
static scheme without calibration takes steps of 1 (here, where nothing is calibrated)."""


def quantize(model: nn.Module, scheme: str = "int8_weight", **fields: Any) -> Receipt:
    if scheme == "int4_weight":
        fields = {"group_size": 32, "symmetric": False} | fields
    return Quantize(scheme=SchemeName[scheme], **fields).apply(model, context("weights"))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


class Conv1D(nn.Module):
    """GPT-2's layer: the weight is stored (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 128, 64))
        self.down = nn.Parameter(torch.randn(4, 64, 64))
        self.router = nn.Linear(64, 4)


class Tie(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def test_layers_with_the_same_problem_are_told_in_one_line() -> None:
    model = on_meta(nn.Sequential(*(nn.Linear(64, 64) for _ in range(5))))
    with pytest.raises(PlanError) as misfit:
        Quantize(scheme=SchemeName.int4_weight, group_size=48).apply(model, context("one"))
    assert [problem.where for problem in misfit.value.problems] == ["step one, layers 0, 1, 2, 3 and 1 more"]
    Quantize(scheme=SchemeName.int8_weight).apply(model, context("one"))
    with pytest.raises(PlanError) as twice:
        Quantize(scheme=SchemeName.fp8_weight).apply(model, context("two"))
    assert [problem.what for problem in twice.value.problems] == ["layers 0, 1, 2, 3 and 1 more are already int8 (step one)"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_off_by_no_more_than_rounding(scheme: SchemeName, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(192, 96).to(dtype)
    x = torch.randn(2, 5, 192).to(dtype)
    expected = x.double() @ linear.weight.double().t() + linear.bias.double()
    quantize(model := nn.Sequential(linear), scheme.name)
    y = model(x)
    assert y.dtype is dtype and y.shape == (2, 5, 96)
    assert relative(y.double(), expected) < LIMIT[scheme.name]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_names_stay_scales_stay_fp32_and_integers_survive_a_cast(scheme: SchemeName) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    quantize(model, scheme.name)
    stored = {key: value.clone() for key, value in model.state_dict().items()}
    assert {"0.weight", "0.weight_scale", "0.bias"} <= stored.keys()
    for cast in (copy.deepcopy(model).to(torch.bfloat16), copy.deepcopy(model).half()):
        for key, value in cast.state_dict().items():
            assert key == "0.bias" or (value.dtype is stored[key].dtype and torch.equal(value, stored[key])), key
        assert cast[0].bias.dtype is not torch.float32
        assert cast(torch.randn(3, 64).to(cast[0].bias.dtype)).isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_a_model_replayed_on_meta_takes_the_saved_tensors_and_gives_the_same_bits(scheme: SchemeName, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 32)))
    skeleton = on_meta(model)
    receipt = quantize(model, scheme.name)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    Quantize(scheme=scheme).replay(skeleton, receipt)
    skeleton.load_state_dict(load_file(tmp_path / "weights.safetensors"), assign=True)
    x = torch.randn(4, 64)
    assert torch.equal(skeleton(x), model(x))
    emptied = on_meta(model).to_empty(device="cpu")
    emptied.load_state_dict(model.state_dict())
    assert torch.equal(emptied(x), model(x))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_meta_gives_the_same_receipt(scheme: SchemeName) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    planned = quantize(on_meta(model), scheme.name)
    assert planned == quantize(model, scheme.name)
    assert planned.bytes_before == 2 * 64 * 32 * 4


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.case("B46")
def test_b46_a_zero_row_comes_back_as_zeros_under_a_positive_scale(scheme: SchemeName) -> None:
    linear = nn.Linear(64, 32)
    with torch.no_grad():
        linear.weight[3] = 0
        linear.weight[16:, 32:] = 0
    quantize(nn.Sequential(linear), scheme.name)
    assert isinstance(linear, QuantizedLinear)
    assert bool((linear.weight_scale > 0).all()) and bool(linear.weight_scale.isfinite().all())
    assert bool((linear.dequantize()[3] == 0).all()) and bool((linear.dequantize()[16:, 32:] == 0).all())
    assert torch.equal(linear(torch.randn(2, 64))[:, 3], linear.bias[3].expand(2))


@pytest.mark.case("B10")
def test_b10_experts_kept_as_one_parameter_are_named_with_their_share() -> None:
    receipt = quantize(Experts())
    assert [touched.name for touched in receipt.touched] == ["router"]
    assert "4x128x64, 66% of the model's bytes" in receipt.skipped["gate_up"] and "4x64x64, 33%" in receipt.skipped["down"]
    assert receipt.bytes_before / receipt.total_bytes == pytest.approx(4 * 64 / (4 * 128 * 64 + 4 * 64 * 64 + 4 * 64 + 4))
    with pytest.raises(PlanError, match="gate_up") as refused:
        quantize(nn.ModuleDict({"moe": Experts()}), strict=True)
    assert len(refused.value.problems) == 2
    assert quantize(nn.ModuleDict({"moe": Experts(), "other": nn.Linear(64, 4)}), ignore=["moe"]).skipped == {}


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.case("B11")
def test_b11_conv1d_is_quantized_like_the_equal_linear(scheme: SchemeName) -> None:
    torch.manual_seed(0)
    conv = nn.Sequential(Conv1D(64, 16))
    linear = nn.Sequential(nn.Linear(64, 16))
    linear.load_state_dict({"0.weight": conv[0].weight.detach().t(), "0.bias": conv[0].bias.detach()})
    x = torch.randn(5, 64)
    expected = conv(x)
    receipt = quantize(conv, scheme.name)
    quantize(linear, scheme.name)
    assert torch.equal(conv(x), linear(x)) and relative(conv(x), expected) < LIMIT[scheme.name]
    if "block" not in scheme.name:
        assert conv[0].weight_scale.shape[0] == 16, "a scale per output channel, not per input"
    fresh = nn.Sequential(Conv1D(64, 16)).to("meta")
    Quantize(scheme=scheme).replay(fresh, receipt)
    fresh.load_state_dict(conv.state_dict(), assign=True)
    assert torch.equal(fresh(x), conv(x))


@pytest.mark.case("B11")
def test_b11_the_conv1d_of_transformers() -> None:
    from transformers.pytorch_utils import Conv1D as Gpt2Layer

    torch.manual_seed(0)
    model = nn.Sequential(Gpt2Layer(8, 64))
    x = torch.randn(2, 3, 64)
    expected = model(x)
    quantize(model)
    assert relative(model(x), expected) < 0.01


@pytest.mark.case("B12")
def test_b12_attention_of_pytorch_is_left_alone_and_said() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4, batch_first=True), "out": nn.Linear(64, 8)}).eval()
    x = torch.randn(2, 5, 64)
    expected = model["attention"](x, x, x)[0]
    receipt = quantize(model)
    assert torch.equal(model["attention"](x, x, x)[0], expected)
    assert receipt.skipped.keys() == {"attention.in_proj_weight", "attention.out_proj"}
    assert "bare parameter" in receipt.skipped["attention.in_proj_weight"] and "never calls it" in receipt.skipped["attention.out_proj"]


@pytest.mark.case("B12")
def test_b12_an_encoder_layer_runs_on_its_fast_path_afterwards() -> None:
    model = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 8)]).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = model[0](x)
        receipt = quantize(model)
        assert torch.equal(model[0](x), expected)
    assert {"0.linear1", "0.linear2"} <= receipt.skipped.keys()


@pytest.mark.case("B13")
def test_b13_a_group_size_that_fits_nothing_is_refused_with_those_that_fit() -> None:
    model = nn.Sequential(nn.Linear(288, 288), nn.Linear(288, 288))
    with pytest.raises(PlanError) as refused:
        quantize(model, "int4_weight", group_size=256)
    assert [str(problem) for problem in refused.value.problems] == [
        "step weights, layers 0, 1: group_size 256 does not divide its K=288; sizes that fit: 96, 32, 16"
    ]
    assert type(model[0]) is nn.Linear and type(model[1]) is nn.Linear


@pytest.mark.case("B32")
def test_b32_every_misfit_is_named_before_any_change_and_on_misfit_is_honoured() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(192, 32), nn.Linear(8640, 32), nn.Linear(50, 32), nn.Linear(256, 32))

    original = model()
    with pytest.raises(PlanError) as refused:
        quantize(refused_model := model(), "int4_weight", group_size=128)
    text = str(refused.value)
    assert all(part in text for part in ("layer 0", "K=192", "layer 1", "K=8640", "layer 2", "K=50")) and "layer 3" not in text
    assert "sizes that fit: 192, 96, 64, 32, 16" in text and "no size fits" in text
    assert all(type(layer) is nn.Linear for layer in refused_model)
    receipt = quantize(skipped := model(), "int4_weight", group_size=128, on_misfit=Misfit.skip)
    assert receipt.skipped.keys() == {"0", "1", "2"} and isinstance(skipped[3], QuantizedLinear)
    receipt = quantize(padded := model(), "int4_weight", group_size=128, on_misfit=Misfit.pad)
    assert not receipt.skipped
    assert padded[2].weight.shape == (32, 25) and padded[0].weight_scale.shape == (32, 2)
    for layer, float_layer in zip(padded, original, strict=True):
        x = torch.randn(4, float_layer.in_features)
        assert relative(layer(x), float_layer(x)) < 0.15


@pytest.mark.parametrize("policy", list(Tied), ids=lambda p: p.name)
@pytest.mark.case("B16")
def test_b16_a_tied_head_follows_the_policy(policy: Tied) -> None:
    torch.manual_seed(0)
    model = Tie()
    ids = torch.arange(10)[None]
    expected, weight = model(ids), model.embedding.weight
    extra = nn.ModuleDict({"lm": model, "other": nn.Linear(64, 64)})
    receipt = quantize(extra, tied=policy)
    assert relative(model(ids), expected) < 0.02
    if policy is Tied.skip:
        assert model.head.weight is model.embedding.weight is weight
        assert "tied to lm.embedding" in receipt.skipped["lm.head"]
    elif policy is Tied.untie:
        assert model.embedding.weight is weight and model.head.weight.dtype is torch.int8
        assert "no longer is" in receipt.notes[0]
    else:
        assert isinstance(model.embedding, QuantizedEmbedding)
        assert model.embedding.weight is model.head.weight and model.embedding.weight_scale is model.head.weight_scale
        assert model.bfloat16()(ids).dtype is torch.bfloat16
        assert model.float()(ids).dtype is torch.float32
    fresh = on_meta(nn.ModuleDict({"lm": Tie(), "other": nn.Linear(64, 64)}))
    Quantize(scheme=SchemeName.int8_weight).replay(fresh, receipt)
    assert (fresh.lm.head.weight is fresh.lm.embedding.weight) == (policy is not Tied.untie)


@pytest.mark.parametrize("scheme", ["int4_weight", "fp8_weight", "int8_dynamic"])
@pytest.mark.case("B16")
def test_b16_an_embedding_shares_every_storage(scheme: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"lm": Tie()})
    ids = torch.arange(10)[None]
    expected = model.lm.embedding(ids)
    quantize(model, scheme, tied=Tied.both)
    assert torch.equal(model.lm.embedding(ids)[0], model.lm.head.dequantize()[:10])
    assert relative(model.lm.embedding(ids), expected) < LIMIT[scheme]


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (parametrizations.weight_norm, "WeightNorm"),
        (weight_norm, "weight norm"),
        (parametrizations.orthogonal, "Orthogonal"),
    ],
)
@pytest.mark.case("B23")
def test_b23_a_parametrised_layer_is_refused_by_name_and_kind(wrap: Any, kind: str) -> None:
    with pytest.raises(PlanError, match=f"layer 1 is parametrised by {kind}; fold it first"):
        quantize(nn.Sequential(nn.Linear(64, 64), wrap(nn.Linear(64, 64))))


@pytest.mark.case("B24")
def test_b24_a_pruning_mask_is_refused_until_it_is_folded() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(PlanError, match=r"layer 0 is parametrised by a pruning mask; fold it first: torch\.nn\.utils\.prune\.remove"):
        quantize(model)
    prune.remove(model[0], "weight")
    quantize(model)
    assert int((model[0].weight == 0).sum()) >= 64 * 64 // 2


@pytest.mark.case("B26")
def test_b26_a_transposed_weight_is_stored_contiguous(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transposed, plain = nn.Linear(64, 64), nn.Linear(64, 64)
    transposed.weight = nn.Parameter(torch.randn(64, 64).t())
    plain.load_state_dict({"weight": transposed.weight.detach().contiguous(), "bias": transposed.bias})
    for scheme in SCHEMES:
        first, second = nn.Sequential(copy.deepcopy(transposed)), nn.Sequential(copy.deepcopy(plain))
        quantize(first, scheme.name)
        quantize(second, scheme.name)
        assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())
        save_file(first.state_dict(), tmp_path / f"{scheme.name}.safetensors")


@pytest.mark.case("B29")
def test_b29_layers_that_the_fp8_product_refuses_stay_and_are_listed() -> None:
    model = nn.Sequential(nn.Linear(32, 15), nn.Linear(768, 2), nn.Linear(32, 32))
    receipt = quantize(on_meta(model), "fp8_dynamic")
    assert receipt == quantize(model, "fp8_dynamic")
    assert receipt.skipped.keys() == {"0", "1"} and all("not a multiple of 16" in reason for reason in receipt.skipped.values())
    assert model[0](torch.randn(3, 32)).shape == (3, 15)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.case("B30")
def test_b30_every_number_of_rows(scheme: SchemeName) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    model = nn.Sequential(copy.deepcopy(linear))
    quantize(model, scheme.name)
    for rows in (1, 3, 15, 16, 17):
        x = torch.randn(rows, 64)
        assert relative(model(x), linear(x)) < 1.5 * LIMIT[scheme.name]


@pytest.mark.case("B33")
def test_b33_only_group_sizes_that_the_kernel_takes_are_accepted() -> None:
    assert GROUP_SIZES == int4_weight.GROUP_SIZES
    for size in (*GROUP_SIZES, None):
        assert not list(Quantize(scheme=SchemeName.int4_weight, group_size=size).check(context()))
    for size in (0, -32, 8, 48, 100, 512):
        (problem,) = Quantize(scheme=SchemeName.int4_weight, group_size=size).check(context("weights"))
        assert f"group_size {size} has no kernel" in problem.what and "128" in problem.fix


@pytest.mark.case("B33")
def test_b33_a_wrong_product_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from optforge.kernels.linears import Int4WeightLinear

    right = Int4WeightLinear._product
    monkeypatch.setattr(Int4WeightLinear, "_product", lambda self, x: right(self, x) * (1.33 if x.shape[0] > 1 else 1))
    with pytest.raises(StepError, match="0 with 17 rows differs from its own dequantized weight"):
        quantize(nn.Sequential(nn.Linear(64, 64)), "int4_weight")


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.case("B33")
def test_b33_a_wrongly_stored_weight_fails_the_step(scheme: SchemeName) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    original = linear.weight.detach().clone()
    quantize(nn.Sequential(linear), scheme.name)
    assert isinstance(linear, QuantizedLinear)
    checks.verify_storage(linear, original, "0", "weights")
    with pytest.raises(StepError, match="further from its weight than rounding explains"):
        checks.verify_storage(linear, original.roll(1, 0), "0", "weights")
    no_number = float("inf") if linear.weight_scale.is_floating_point() else {"mx": 0xFF, "nv": 0x7F}[scheme.name[:2]]
    linear.weight_scale.data[0] = no_number
    with pytest.raises(StepError, match=r"not finite"):
        checks.verify_storage(linear, original, "0", "weights")


@pytest.mark.case("B46")
def test_b46_weights_that_overflow_fail_the_step() -> None:
    linear = nn.Linear(64, 32)
    with torch.no_grad():
        linear.weight[0, :2] = torch.tensor([3e38, -3e38])
    with pytest.raises(StepError, match="not finite"):
        quantize(nn.Sequential(linear), "int4_weight")


@pytest.mark.parametrize("meta", [False, True], ids=["weights", "plan"])
@pytest.mark.case("B63")
def test_b63_a_layer_is_not_quantized_twice(meta: bool) -> None:
    model: nn.Module = nn.ModuleDict({"first": nn.Linear(64, 64), "second": nn.Linear(64, 64)})
    model = on_meta(model) if meta else model
    Quantize(scheme=SchemeName.int8_weight, targets=["first"]).apply(model, context("one"))
    stored = model["first"].weight
    with pytest.raises(PlanError, match=r"layer first is already int8 \(step one\)"):
        Quantize(scheme=SchemeName.int8_weight).apply(model, context("two"))
    assert type(model["second"]) is nn.Linear
    receipt = Quantize(scheme=SchemeName.fp8_weight, targets=["second"]).apply(model, context("two"))
    assert [touched.name for touched in receipt.touched] == ["second"] and model["first"].weight is stored


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.case("B96")
def test_b96_no_rows_and_no_outputs(scheme: SchemeName) -> None:
    model = nn.ModuleDict({"some": nn.Linear(64, 16), "none": nn.Linear(64, 0), "nothing": nn.Linear(0, 64)})
    receipt = quantize(model, scheme.name)
    assert receipt.skipped.keys() == {"none", "nothing"} and "no elements" in receipt.skipped["none"]
    assert model["some"](torch.zeros(0, 64)).shape == (0, 16)
    assert model["some"](torch.zeros(2, 0, 64)).shape == (2, 0, 16)


def test_a_linear_with_a_forward_of_its_own_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    receipt = quantize(nn.Sequential(Doubled(64, 64), nn.Linear(64, 64)))
    assert receipt.skipped == {"0": "its class Doubled has a forward of its own"}


@pytest.mark.parametrize("fields", [{"group_size": 64}, {"symmetric": False}, {"activation": Activation.tensor}])
def test_fields_that_do_not_apply_are_refused(fields: dict[str, Any]) -> None:
    (problem,) = Quantize(scheme=SchemeName.int8_weight, **fields).check(context())
    assert "does not apply to int8_weight" in problem.what


def test_a_selector_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(SelectorError, match="lm_haed"):
        quantize(nn.ModuleDict({"lm_head": nn.Linear(64, 64), "other": nn.Linear(64, 64)}), ignore=["lm_haed"])


@pytest.mark.parametrize(
    ("scheme", "peaks", "runs_as"),
    [
        ("fp8_dynamic", {"bf16": 312e12, "int8": 624e12}, "fp8_weight"),
        ("fp8_dynamic", {"bf16": 989e12, "fp8": 1979e12}, None),
        ("int8_dynamic", {"bf16": 2.5e15, "fp8": 5e15}, "int8_weight"),
        ("int8_dynamic", {"bf16": 312e12, "int8": 624e12}, None),
        ("fp8_weight", {"bf16": 312e12}, None),
    ],
)
def test_a_target_without_units_stores_only(scheme: str, peaks: dict[str, float], runs_as: str | None) -> None:
    target = Hardware(name="a100", backend="nvidia", arch="sm_80", peak_flops=peaks)
    lowered = Quantize(scheme=SchemeName[scheme]).lower(target)
    assert (lowered and lowered.runs_as) == runs_as
    if lowered:
        unit = scheme.partition("_")[0]
        assert lowered.reason == f"a100 has no {unit} matrix units: {scheme} runs as {runs_as}"
        assert lowered.transform.scheme.name == runs_as


def test_the_cpu_multiplies_int8_and_not_fp8() -> None:
    cpu = Hardware(name="cpu", backend="cpu", arch="cpu")
    assert Quantize(scheme=SchemeName.int8_dynamic).lower(cpu) is None
    assert Quantize(scheme=SchemeName.fp8_dynamic).lower(cpu) is not None
