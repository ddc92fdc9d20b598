"""Models of transformers: structure from a config alone, weights from checked files, ties and rotary tables right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import Touch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from optforge.errors import ModelError, TrustError
from optforge.models.hf import HuggingFace
from optforge.models.llama import Llama, Size
from optforge.pretrained import random_state, skeleton


def tiny_config(tied: bool = True) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=tied,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize(
    ("size", "parameters"),
    # as their model cards count them: 1.24, 8.03 and 70.6 billion
    [(Size.llama3_1b, 1_235_814_400), (Size.llama3_8b, 8_030_261_248), (Size.llama3_70b, 70_553_706_496)],
)
def test_llama_shapes_have_the_published_number_of_parameters(size: Size, parameters: int) -> None:
    loaded = Llama(size=size).skeleton()
    assert sum(parameter.numel() for parameter in loaded.module.parameters()) == parameters
    assert loaded.weights == "random"
    assert {parameter.device.type for parameter in loaded.module.parameters()} == {"meta"}


@pytest.mark.case("B20")
def test_a_folder_gives_the_saved_models_logits_with_its_tie(folder: Path) -> None:
    loaded = HuggingFace(path=str(folder), dtype="fp32").load()
    model = loaded.module
    assert loaded.family == "causal_lm" and loaded.vocab_size == 64
    assert model.lm_head.weight is model.model.embed_tokens.weight
    saved = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, saved(input_ids=ids).logits)


def test_rotary_tables_are_computed_and_not_left_on_meta(folder: Path) -> None:
    model = HuggingFace(path=str(folder)).load().module
    by_hand = torch.tensor([10_000.0 ** (-2 * i / 8) for i in range(4)])  # head size 8; Su et al. 2021, equation 15
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, by_hand)
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.case("B69")
def test_a_compiled_models_checkpoint_loads(folder: Path) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    save_file({f"_orig_mod.{name}": tensor for name, tensor in state.items()}, file)
    loaded = HuggingFace(path=str(folder), dtype="fp32").load()
    assert torch.equal(loaded.module.model.norm.weight, state["model.norm.weight"])


def test_missing_and_foreign_tensors_are_refused_and_not_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.mlp.extra.weight"] = state.pop("model.layers.0.mlp.up_proj.weight")
    save_file(state, file)
    with pytest.raises(ModelError) as caught:
        HuggingFace(path=str(folder)).load()
    message = str(caught.value)
    assert "missing: model.layers.0.mlp.up_proj.weight" in message and "not the model's: model.layers.0.mlp.extra.weight" in message


@pytest.mark.case("B49")
def test_a_checkpoint_with_nan_is_refused_by_name(folder: Path) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    state["model.norm.weight"][3] = float("nan")
    save_file(state, file)
    with pytest.raises(ModelError, match=r"model.norm.weight \(1 NaN, 0 Inf of 32\)"):
        HuggingFace(path=str(folder)).load()


@pytest.mark.case("B80")
def test_a_hostile_bin_file_is_never_run(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Touch(tmp_path / "victim")}, folder / "pytorch_model.bin")
    with pytest.raises(TrustError):
        HuggingFace(path=str(folder)).load()
    assert not (tmp_path / "victim").exists()


@pytest.mark.case("B80")
def test_code_beside_a_checkpoint_is_not_imported(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'victim')!r}, 'w')\n")
    with pytest.raises(TrustError, match=r"model\.trust=true"):
        HuggingFace(path=str(folder)).skeleton()
    assert not (tmp_path / "victim").exists()


def test_an_image_classifier_is_told_from_its_config(tmp_path: Path) -> None:
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=16)
    ViTForImageClassification(config).save_pretrained(tmp_path)
    loaded = HuggingFace(path=str(tmp_path), dtype="fp32").load()
    assert loaded.family == "image_classifier" and loaded.image_shape == (3, 32, 32)
    assert loaded.module(torch.zeros(2, *loaded.image_shape)).logits.shape[0] == 2


def test_a_hub_name_needs_consent_before_any_download() -> None:
    problems = list(HuggingFace(path="nobody-of-that-name/nothing").check())
    assert [problem.where for problem in problems] == ["model.path"]
    assert "allow_download=true" in problems[0].fix
    with pytest.raises(ModelError, match="allow_download=true"):
        HuggingFace(path="nobody-of-that-name/nothing").load()


def test_random_weights_have_the_usual_spread_and_norms_of_one() -> None:
    structure = skeleton(LlamaForCausalLM, tiny_config(tied=False), "bf16")
    state = random_state(structure, seed=3)
    assert torch.equal(state["model.norm.weight"], torch.ones(32, dtype=torch.bfloat16))
    weights = torch.cat([value.float().flatten() for value in state.values() if value.dim() == 2])
    assert weights.std().item() == pytest.approx(0.02, rel=0.05) and abs(weights.mean().item()) < 1e-3
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], state["model.layers.1.mlp.up_proj.weight"])
    assert all(torch.equal(value, state[name]) for name, value in random_state(structure, seed=3).items())
