"""Checkpoints for transformers: every scheme reloaded by transformers itself, and the layout held against compressed-tensors' own code."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from llamas import llama
from safetensors import safe_open
from subjects import logits, optimized, ready, subject
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from optforge import atomic
from optforge.errors import ModelError
from optforge.export import FORMATS, export
from optforge.export.compressed_tensors import pack_words
from optforge.kernels.linears import quantize_
from optforge.kernels.rounding import int8_range
from optforge.models.base import Loaded
from optforge.schemes import SCHEMES as SCHEMES_BY_NAME
from optforge.transforms.quantize import Misfit, Quantize, SchemeName, Tied

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: pip install 'optforge[export]'")

CT, HF = FORMATS["compressed_tensors"], FORMATS["huggingface"]
SCHEMES: dict[str, dict[str, Any]] = {
    "int8_weight": {},
    "int8_dynamic": {},
    "fp8_weight": {},
    "fp8_dynamic": {},
    "int4_weight": {"group_size": 32, "symmetric": False},
}
ROUNDED = {"int8_dynamic": 2e-2, "fp8_dynamic": 5e-2}
"""Schemes whose activations each engine rounds by its own rule, and how far that moves a tiny model's logits."""
SUM_ORDER = 1e-5
"""What fp32 sums in another order move the logits by."""


def reloaded(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    assert not any(found.values())
    return model.eval()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fused", [True, False])
def test_transformers_computes_what_the_optimized_model_does(tmp_path: Path, scheme: str, fused: bool) -> None:
    loaded = optimized(scheme, fused=fused, **SCHEMES[scheme])
    CT.write(subject(loaded), tmp_path)
    assert distance(logits(reloaded(tmp_path)), logits(loaded.module)) < ROUNDED.get(scheme, SUM_ORDER)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"group_size": 16, "symmetric": True}, {"weight_packed", "weight_scale", "weight_shape"}),
        ({"group_size": None, "symmetric": True}, {"weight_packed", "weight_scale", "weight_shape"}),
        ({"group_size": None, "symmetric": False}, {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"}),
    ],
)
def test_int4_with_and_without_groups_and_zero_points(tmp_path: Path, options: dict[str, Any], names: set[str]) -> None:
    loaded = optimized("int4_weight", **options)
    CT.write(subject(loaded), tmp_path)
    q = "model.layers.1.self_attn.q_proj."
    assert {name.removeprefix(q) for name in stored(tmp_path) if name.startswith(q)} == names
    assert distance(logits(reloaded(tmp_path)), logits(loaded.module)) < SUM_ORDER


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 33])
def test_words_are_packed_as_their_reference_packs_them(bits: int, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = torch.randint(0, 2**bits, (5, columns), generator=torch.Generator().manual_seed(0))
    signed = (values - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack_words(values.to(torch.uint8), bits), pack_to_int32(signed, bits))
    down = pack_words(values.to(torch.uint8).t(), bits).t()
    assert torch.equal(down, pack_to_int32(signed, bits, packed_dim=0))


def test_the_config_names_what_is_quantized_and_what_is_not(tmp_path: Path) -> None:
    CT.write(subject(optimized("int8_dynamic")), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config["quantization_config"]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "optforge" not in json.dumps(config)
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["format"] == "int-quantized"
    assert settings["ignore"] == ["lm_head"]
    (group,) = settings["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["input_activations"] == {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": True, "strategy": "token"}


def test_two_schemes_in_one_model_are_two_groups(tmp_path: Path) -> None:
    loaded = optimized(None)
    Quantize(scheme=SchemeName.int4_weight, group_size=32, targets=["mlp"]).apply(loaded.module, ready())
    Quantize(scheme=SchemeName.int8_weight, targets=["self_attn"]).apply(loaded.module, ready())
    CT.write(subject(loaded), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert sorted(len(group["targets"]) for group in settings["config_groups"].values()) == [6, 8]
    assert distance(logits(reloaded(tmp_path)), logits(loaded.module)) < SUM_ORDER


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_stored_once(tmp_path: Path, tied: bool) -> None:
    loaded = optimized("int8_weight", sizes={"tie_word_embeddings": tied})
    for fmt in (CT, HF):
        folder = tmp_path / fmt.name
        folder.mkdir()
        fmt.write(subject(loaded), folder)
        assert ("lm_head.weight" in stored(folder)) is not tied
        again = reloaded(folder)
        assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
        assert distance(logits(again), logits(loaded.module)) < SUM_ORDER


def test_a_head_that_was_untied_is_its_own_tensor(tmp_path: Path) -> None:
    loaded = llama(tie_word_embeddings=True)
    Quantize(scheme=SchemeName.int8_weight, tied=Tied.untie).apply(loaded.module, ready())
    CT.write(subject(loaded), tmp_path)
    assert "lm_head.weight_packed" in stored(tmp_path)
    assert distance(logits(reloaded(tmp_path)), logits(loaded.module)) < SUM_ORDER


def test_plain_weights_have_the_dtype_and_the_values_of_the_stored_ones(tmp_path: Path) -> None:
    loaded = optimized("int4_weight", group_size=32, dtype=torch.bfloat16)
    HF.write(subject(loaded, torch.bfloat16), tmp_path)
    weights = stored(tmp_path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    packed = loaded.module.model.layers[0].self_attn.qkv_proj.dequantize().to(torch.bfloat16)
    parts = [weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(torch.cat(parts), packed)
    assert distance(logits(reloaded(tmp_path, torch.bfloat16)), logits(loaded.module)) < 2e-2


def test_a_model_that_was_only_fused_is_a_plain_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    plain, loaded = llama(), optimized(None)
    HF.write(subject(loaded), tmp_path)
    kept = plain.module.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in stored(tmp_path).items())


def test_a_large_checkpoint_is_sharded_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optforge.export.weights.SHARD_BYTES", 30_000)
    loaded = optimized("int8_weight")
    HF.write(subject(loaded), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert distance(logits(reloaded(tmp_path)), logits(loaded.module)) < SUM_ORDER


@pytest.mark.case("B26")
def test_b26_weights_that_are_not_contiguous_are_stored_as_a_contiguous_copy_would_be(tmp_path: Path) -> None:
    loaded = llama()
    for layer in loaded.module.model.layers:
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight.detach().t().contiguous().t())
    assert not loaded.module.model.layers[0].mlp.down_proj.weight.is_contiguous()
    HF.write(subject(loaded), tmp_path)
    assert distance(logits(reloaded(tmp_path)), logits(llama().module)) < SUM_ORDER


def gpt2() -> Loaded:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0)
    return Loaded(module=GPT2LMHeadModel(config).eval(), family="causal_lm", name="gpt2", vocab_size=128, weights="random")


def test_gpt2_goes_back_into_its_transposed_layers(tmp_path: Path) -> None:
    loaded = gpt2()
    Quantize(scheme=SchemeName.int8_weight, ignore=["lm_head"]).apply(loaded.module, ready())
    HF.write(subject(loaded), tmp_path)
    assert stored(tmp_path)["transformer.h.0.attn.c_attn.weight"].shape == (32, 96)
    assert distance(logits(reloaded(tmp_path)), logits(loaded.module)) < SUM_ORDER


# --- what the formats refuse, by name, before anything is written ------------------------------------------------------


def refusal(loaded: Loaded, fmt: Any = CT) -> str:
    return "\n".join(map(str, fmt.refusals(subject(loaded))))


def test_layers_that_are_no_linears_are_refused_by_name() -> None:
    loaded = gpt2()
    Quantize(scheme=SchemeName.int8_weight, ignore=["lm_head"]).apply(loaded.module, ready())
    assert "8 layers (transformer.h.0.attn.c_attn, transformer.h.0.attn.c_proj" in refusal(loaded)
    assert "quantized Conv1D" in refusal(loaded)


def test_an_embedding_that_shares_quantized_storage_is_refused() -> None:
    loaded = llama(tie_word_embeddings=True)
    Quantize(scheme=SchemeName.int8_weight, tied=Tied.both).apply(loaded.module, ready())
    assert "model.embed_tokens" in refusal(loaded)
    assert refusal(loaded, HF) == ""


def test_a_short_last_group_is_refused() -> None:
    loaded = llama(hidden_size=48, num_attention_heads=4, num_key_value_heads=4)
    Quantize(scheme=SchemeName.int4_weight, group_size=32, on_misfit=Misfit.pad, ignore=["lm_head"]).apply(loaded.module, ready())
    assert "48 columns are no multiple of the group size 32" in refusal(loaded)


def test_a_model_without_quantized_layers_is_sent_to_the_plain_format() -> None:
    assert "export: [huggingface]" in refusal(llama())


def test_a_module_that_transformers_does_not_know_is_refused() -> None:
    module = nn.Sequential(nn.Linear(8, 8))
    loaded = Loaded(module=module, family="module", name="own", example=((torch.zeros(2, 8),), {}))
    assert "Sequential is no model of transformers" in refusal(loaded, HF)


def test_a_model_whose_shapes_left_its_config_is_refused_with_both_shapes() -> None:
    loaded = llama()
    mlp = loaded.module.model.layers[1].mlp
    mlp.down_proj = nn.Linear(60, 32, bias=False)
    assert "model.layers.1.mlp.down_proj.weight [32, 60] for [32, 64]" in refusal(loaded, HF)


@pytest.mark.case("B79")
def test_b79_tensors_that_no_file_format_holds_are_refused_by_name(tmp_path: Path) -> None:
    class Wrapped(torch.Tensor):
        pass

    loaded = llama()
    loaded.module.model.norm.weight = nn.Parameter(torch.ones(32).as_subclass(Wrapped))
    with pytest.raises(ModelError, match=r"model\.norm\.weight: is a .*Wrapped"):
        export(subject(loaded), "huggingface", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    with atomic.folder(tmp_path / "out", 0) as folder:
        HF.write(subject(optimized(None)), folder)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o644}, modes


def under(scheme: str, **sizes: Any) -> Loaded:
    """A tiny Llama whose projections are under a scheme with calibrated or squared scales."""
    loaded = optimized(None, sizes=sizes)
    seen: dict[str, float] = {}
    linears = {name: module for name, module in loaded.module.named_modules() if type(module) is nn.Linear and name != "lm_head"}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: float(args[0].abs().max())}))
        for name, module in linears.items()
    ]
    logits(loaded.module)
    for hook in hooks:
        hook.remove()
    for name, module in linears.items():
        static = SCHEMES_BY_NAME[scheme].static
        scale, offset = int8_range(-seen[name], seen[name]) if scheme.startswith("int8") else (seen[name] / 448, 0.0)
        inputs = {"input_scale": torch.tensor([scale]), "input_offset": torch.tensor([offset])}
        if not scheme.startswith("int8"):
            del inputs["input_offset"]
        quantize_(module, module.weight, SCHEMES_BY_NAME[scheme], step="weights", input_scales=inputs if static else None)
    return loaded


@pytest.mark.parametrize(("scheme", "width"), [("int8_static", 32), ("fp8_static", 32), ("fp8_block", 256), ("fp8_block_weight", 256)])
def test_calibrated_inputs_and_square_blocks(tmp_path: Path, scheme: str, width: int) -> None:
    loaded = under(
        scheme, hidden_size=width, intermediate_size=2 * width, head_dim=width // 2, num_attention_heads=4, num_key_value_heads=2
    )
    assert not list(CT.refusals(subject(loaded)))
    CT.write(subject(loaded), tmp_path)
    assert distance(logits(reloaded(tmp_path)), logits(loaded.module)) < (5e-2 if "weight" not in scheme else SUM_ORDER)


def test_blocks_that_reach_over_the_border_of_two_packed_layers_are_refused() -> None:
    loaded = under("fp8_block", hidden_size=96, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4)
    assert "blocks of 128 rows reach over the border" in refusal(loaded)


@pytest.mark.parametrize("scheme", ["mxfp4_weight", "nvfp4", "mxfp8"])
def test_schemes_that_the_format_is_not_written_for_are_refused_by_name(scheme: str) -> None:
    assert f"scheme {scheme}" in refusal(under(scheme))
