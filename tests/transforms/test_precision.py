"""Casting: what stays in fp32 and why it matters, ties, statistics, and every input dtype on every layer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import context, tiny_cnn, tiny_lm, token_ids

from optforge.errors import PlanError, SelectorError
from optforge.share import alias
from optforge.spec import Hardware, Scheme
from optforge.transforms.precision import Dtype, Precision


class Rotary(nn.Module):
    """Angles of positions, as rotary embeddings compute them, from a table in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(32) / 32), persistent=False)
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, positions: Tensor) -> Tensor:
        return positions[:, None].float() * self.inv_freq.float()


def example(*args: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return args, {}


@pytest.mark.case("B27")
def test_b27_rotary_tables_stay_exact() -> None:
    model = Rotary()
    positions = torch.arange(4096)
    exact = positions[:, None].double() / 10000 ** (torch.arange(32).double() / 32)
    Precision(dtype=Dtype.bf16).apply(model, context())
    assert model.inv_freq.dtype == torch.float32
    assert (model(positions) - exact).abs().max() < 1e-2
    assert (positions[:, None] * model.inv_freq.bfloat16().float() - exact).abs().max() > 1, "what the case warns of"
    assert model.window.dtype == torch.bfloat16


@pytest.mark.case("B27")
def test_b27_a_buffer_is_kept_by_name() -> None:
    model = Rotary()
    Precision(keep_fp32=["window", "rotary"]).apply(nn.ModuleDict({"rope": model}), context())
    assert model.window.dtype == torch.float32
    with pytest.raises(SelectorError, match="windw"):
        Precision(keep_fp32=["windw"]).apply(Rotary(), context())


@pytest.mark.case("B27")
def test_b27_a_table_rounded_before_is_told() -> None:
    model = Rotary().bfloat16()
    receipt = Precision().apply(model, context())
    assert any("inv_freq came in low precision" in note for note in receipt.notes)


@pytest.mark.case("B59")
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_b59_norms_take_both_dtypes(given: torch.dtype, autocast: bool, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(device)
    reference = F.layer_norm(torch.arange(8.0), (8,))
    Precision().apply(model, context())
    norm = model[1]
    assert {p.dtype for p in norm.parameters()} == {torch.float32}
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        out = norm(torch.arange(8, dtype=given, device=device))
        assert out.dtype == given
        torch.testing.assert_close(out.float().cpu(), reference, atol=1e-2, rtol=1e-2)
        assert model(torch.ones(2, 8, dtype=given, device=device)).isfinite().all()


def test_a_model_from_another_library_runs_with_its_norms_in_fp32() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = token_ids()
    with torch.no_grad():
        before = model(ids).logits
        Precision().apply(model, context(example=example(ids)))
        after = model(ids).logits
    assert after.dtype == torch.bfloat16
    assert model.model.norm.weight.dtype == model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert (after - before).norm() / before.norm() < 2e-2


def test_what_changed_and_by_how_many_bytes() -> None:
    model = tiny_lm(width=32, vocabulary=64)
    receipt = Precision().apply(model, context(example=example(token_ids())))
    # by hand: embedding and head 2 * 64 * 32; two layers of 4 * 32 * 32 + 3 * 32 * 64; all from 4 bytes to 2
    cast = 2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64)
    norms = 5 * 32 * 4
    assert receipt.bytes_before - receipt.bytes_after == 2 * cast
    assert receipt.total_bytes == 4 * cast + norms
    kept = {touched.name for touched in receipt.touched if touched.what == "runs in fp32"}
    assert kept == {"layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "norm"}
    for touched in receipt.touched:
        for name, dtype in touched.dtypes.items():
            assert str(model.get_submodule(touched.name).get_parameter(name).dtype) == f"torch.{dtype}" == "torch.bfloat16"


def test_bf16_weights_already_loaded_leave_only_the_norms_to_change() -> None:
    model = tiny_lm().bfloat16()
    receipt = Precision().apply(model, context(example=example(token_ids())))
    assert {touched.what for touched in receipt.touched} == {"runs in fp32"}
    assert receipt.notes == ["the weights are bf16 already: only what stays in fp32 changes"]
    assert receipt.bytes_after - receipt.bytes_before == 5 * 32 * 2


def test_ties_hold_and_an_alias_leaves_the_original_alone() -> None:
    model = tiny_lm(tied=True)
    before = model(token_ids())
    other = alias(model)
    Precision().apply(other, context(example=example(token_ids())))
    assert other.lm_head.weight is other.embed.weight and other.embed.weight.dtype == torch.bfloat16
    assert model.embed.weight.dtype == torch.float32 and torch.equal(model(token_ids()), before)


def test_a_tied_weight_is_kept_under_all_names_or_none() -> None:
    with pytest.raises(PlanError, match=r"keeps lm_head.weight, which is one tensor with embed.weight"):
        Precision(keep_fp32=["lm_head"]).apply(tiny_lm(tied=True), context())


def test_a_kept_module_runs_in_fp32_between_others() -> None:
    model = tiny_lm()
    receipt = Precision(keep_fp32=["norms", "lm_head", "layers.1"]).apply(model, context(example=example(token_ids())))
    assert receipt.decisions["modules"] == ["layers.0.norm1", "layers.0.norm2", "layers.1", "norm", "lm_head"]
    assert {p.dtype for p in model.layers[1].parameters()} == {torch.float32}
    assert model(token_ids()).dtype == torch.bfloat16


def test_half_of_a_module_cannot_be_kept() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8))
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.gain

    with pytest.raises(PlanError, match=r"keeps body.gain and not all that lies beneath body"):
        Precision(keep_fp32=["re:body"]).apply(nn.ModuleDict({"body": Scaled()}), context())


def test_images_in_fp32_still_go_in() -> None:
    model, image = tiny_cnn(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = model(image)
    Precision().apply(model, context(example=example(image)))
    assert model.stem.bn.running_mean.dtype == torch.float32
    for given in (image, image.bfloat16()):
        torch.testing.assert_close(model(given).float(), before, atol=5e-2, rtol=5e-2)
    receipt = Precision(dtype=Dtype.fp32).apply(model, context(example=example(image)))
    assert receipt.touched and model(image.bfloat16()).dtype == torch.float32 and len(model._forward_pre_hooks) == 1


def test_quantized_storage_and_8_bit_floats_are_left_alone() -> None:
    model = nn.ModuleDict({"quantized": nn.Linear(8, 8), "plain": nn.Linear(8, 8)})
    model["quantized"].scheme = Scheme(name="int8_weight", weight_dtype="int8", weight_bits=8, granularity="channel")
    model["plain"].register_buffer("bits", torch.ones(4).to(torch.float8_e4m3fn))
    model["plain"].register_buffer("complex", torch.ones(4, dtype=torch.complex64))
    receipt = Precision().apply(model, context())
    assert model["quantized"].weight.dtype == torch.float32
    assert "quantized already" in receipt.skipped["quantized"]
    assert (model["plain"].bits.dtype, model["plain"].complex.dtype) == (torch.float8_e4m3fn, torch.complex64)


def test_copies_and_pickles_keep_norms_in_fp32() -> None:
    model = tiny_lm()
    Precision().apply(model, context(example=example(token_ids())))
    expected = model(token_ids())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(token_ids()), expected)
        assert type(other.norm) is type(model.norm) and isinstance(other.norm, nn.RMSNorm)


def test_recurrent_layers_keep_their_flat_weights() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    before = model(x)[0]
    Precision().apply(model, context(example=example(x)))
    torch.testing.assert_close(model(x)[0].float(), before, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("peaks", "runs_as"), [({"fp32": 1.0, "fp16": 2.0}, "fp16"), ({"fp32": 1.0}, "fp32"), ({"bf16": 1.0}, None), ({}, None)]
)
def test_a_target_without_the_units_gets_the_next_dtype(peaks: dict[str, float], runs_as: str | None) -> None:
    lowered = Precision(keep_fp32=["norms"]).lower(Hardware(name="old", backend="nvidia", arch="sm_75", peak_flops=peaks))
    assert (lowered and lowered.runs_as) == runs_as
    if lowered is not None:
        assert lowered.transform == Precision(dtype=Dtype[runs_as], keep_fp32=["norms"]) and "old has no bf16" in lowered.reason
