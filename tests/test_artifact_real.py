"""Artifacts with the real transforms, models and configuration: what a run saves, another process loads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from optforge import artifact, config, registry
from optforge.errors import TrustError
from optforge.spec import Run
from optforge.transforms.base import Context

HERE = str(Path(__file__).parent)
LLAMA = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny_llama() -> nn.Module:
    """A tied two-layer Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=128)
    return LlamaForCausalLM(settings).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` as a folder that transformers wrote."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_llama().save_pretrained(folder)
    return folder


def composed(tmp_path: Path, model: list[str], *steps: str) -> Run:
    (tmp_path / "own.yaml").write_text("name: own\nsteps: {" + ", ".join(steps) + "}\n")
    argv = ["recipe=./own.yaml", "hardware=cpu", "data=random_tokens", "workload=prefill", *model]
    return config.compose(config.parse(argv, cwd=tmp_path), cwd=tmp_path)


def hf(checkpoint: Path) -> list[str]:
    return ["model=hf", f"model.path={checkpoint}", "model.dtype=bf16"]


def transformed(run: Run) -> tuple[nn.Module, list[dict]]:
    """The model with every step applied on the CPU, and the receipts as the engine keeps them."""
    model = run.model.source.load(0).module
    example = ((), {"input_ids": torch.arange(16).view(1, 16)})
    receipts = []
    for step in run.recipe.steps:
        cpu = registry.get("backends", "cpu")()
        ctx = Context(step=step.name, target=run.hardware, device=run.hardware, backend=cpu, example=example)
        with torch.no_grad():
            receipt = step.transform.apply(model, ctx)
        assert receipt.touched
        receipts.append({"step": step.name, "use": step.use, "options": dict(step.options), "receipt": asdict(receipt)})
    return model.eval(), receipts


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 19).view(1, 16)).logits


RECIPES = {
    "nothing": (),
    "precision": ("cast: {use: precision/bf16}",),
    "fuse": ("fuse: {use: fuse/decoder}",),
    "int8_weight": ("fuse: {use: fuse/decoder}", "weights: {use: quantize/int8_weight, ignore: [lm_head, down_proj]}"),
    "int8_dynamic": ("weights: {use: quantize/int8_dynamic, ignore: [lm_head]}",),
    "int4_weight": ("cast: {use: precision/bf16}", "weights: {use: quantize/int4_weight, group_size: 32, ignore: [lm_head]}"),
    "fp8_weight": ("fuse: {use: fuse/decoder}", "weights: {use: quantize/fp8_weight, ignore: [lm_head]}"),
    "fp8_dynamic": ("weights: {use: quantize/fp8_dynamic, ignore: [lm_head]}",),
}


@pytest.mark.case("B78")
@pytest.mark.case("B16")
@pytest.mark.parametrize("steps", RECIPES.values(), ids=RECIPES)
def test_b78_load_gives_the_same_outputs_bit_for_bit(tmp_path: Path, checkpoint: Path, steps: tuple[str, ...]) -> None:
    run = composed(tmp_path, hf(checkpoint), *steps)
    model, receipts = transformed(run)
    summary = artifact.save(
        model, tmp_path, run_yaml=config.to_yaml(run), receipts=receipts, ties_before={"lm_head.weight": "model.embed_tokens.weight"}
    )
    assert summary["warnings"] == [] and summary["ties_broken"] == []
    loaded = artifact.load(tmp_path)
    assert loaded is not model and torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert {n: (t.dtype, type(t)) for n, t in loaded.named_parameters()} == {n: (t.dtype, type(t)) for n, t in model.named_parameters()}
    assert {n: type(m) for n, m in loaded.named_modules()} == {n: type(m) for n, m in model.named_modules()}


@pytest.mark.case("B06")
def test_b06_layers_that_the_recipe_ignores_are_on_disk_as_they_came(tmp_path: Path, checkpoint: Path) -> None:
    from safetensors import safe_open

    run = composed(tmp_path, hf(checkpoint), "weights: {use: quantize/int8_weight, ignore: [lm_head, down_proj]}")
    before = run.model.source.load(0).module.state_dict()
    model, receipts = transformed(run)
    artifact.save(model, tmp_path, run_yaml=config.to_yaml(run), receipts=receipts)
    with safe_open(tmp_path / "artifact/model.safetensors", framework="pt") as reader:
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.down_proj.weight"
            assert reader.get_tensor(name).dtype is torch.bfloat16
            assert torch.equal(reader.get_tensor(name).view(torch.int16), before[name].view(torch.int16))
            assert reader.get_tensor(f"model.layers.{layer}.mlp.up_proj.weight").dtype is torch.int8


@pytest.mark.case("B78")
@pytest.mark.slow
def test_b78_a_fresh_process_answers_the_same(tmp_path: Path, checkpoint: Path) -> None:
    run = composed(tmp_path, hf(checkpoint), *RECIPES["int8_weight"])
    model, receipts = transformed(run)
    artifact.save(model, tmp_path, run_yaml=config.to_yaml(run), receipts=receipts)
    program = f"""
        import optforge, torch
        from test_artifact_real import logits
        torch.save(logits(optforge.load({str(tmp_path)!r})), {str(tmp_path / "out.pt")!r})
    """
    environment = {**os.environ, "PYTHONPATH": HERE}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=environment)
    assert torch.equal(torch.load(tmp_path / "out.pt"), logits(model))


@pytest.mark.case("B69")
@pytest.mark.slow
def test_b69_saved_compiled_loads_uncompiled_and_compiled(tmp_path: Path, checkpoint: Path) -> None:
    run = composed(tmp_path, hf(checkpoint), *RECIPES["int8_weight"], "compile: {use: compile/inductor}")
    model, receipts = transformed(run)
    artifact.save(model, tmp_path, run_yaml=config.to_yaml(run), receipts=receipts)
    plain, compiled = artifact.load(tmp_path), artifact.load(tmp_path, compile=True)
    assert set(plain.state_dict()) == set(model.state_dict()) and not any("_orig_mod" in name for name in plain.state_dict())
    compiled_modules = [module for module in compiled.modules() if module._compiled_call_impl is not None]
    assert compiled_modules and not [module for module in plain.modules() if module._compiled_call_impl is not None]
    assert torch.allclose(logits(compiled), logits(model), atol=0.05)


def test_a_run_that_names_code_loads_only_with_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    run = composed(tmp_path, ["model=module", "model.factory=test_artifact_real:tiny_llama", "model.family=causal_lm"])
    model = run.model.source.load(0).module
    artifact.save(model, tmp_path, run_yaml=config.to_yaml(run), receipts=[])
    with pytest.raises(TrustError, match="test_artifact_real:tiny_llama"):
        artifact.load(tmp_path)
    assert torch.equal(logits(artifact.load(tmp_path, trust=True)), logits(model))
