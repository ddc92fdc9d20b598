"""Shapes that the target or the mesh cannot run: the plan lists all of them at once, with values that fit, and exits 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import llamas
import pytest

from optforge import config
from optforge.errors import PlanError
from optforge.plan.make import Plan, make

RECIPE = """name: misfit
description: steps that a test puts together
goal: memory
steps:
{steps}
"""


def folder(tmp_path: Path, **sizes: object) -> Path:
    """A decoder's config alone: a plan reads no weights."""
    own = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 2048}
    llamas.config(**{**own, **sizes}).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def arguments(tmp_path: Path, *steps: str, **sizes: object) -> list[str]:
    recipe = tmp_path / "misfit.yaml"
    recipe.write_text(RECIPE.format(steps="\n".join(f"  {step}" for step in steps)))
    model = ["model=hf", f"model.path={folder(tmp_path, **sizes)}", "data=random_tokens"]
    return [f"recipe={recipe}", "hardware=h100", *model, "workload=prefill", "workload.prompt_tokens=32"]


def plan(tmp_path: Path, *steps: str, **sizes: object) -> Plan:
    run = config.compose(config.parse(arguments(tmp_path, *steps, **sizes), cwd=tmp_path), cwd=tmp_path)
    return make(run, executes=False)


def problems(tmp_path: Path, *steps: str, **sizes: object) -> list[str]:
    with pytest.raises(PlanError) as refused:
        plan(tmp_path, *steps, **sizes)
    return [str(problem) for problem in refused.value.problems]


INT4 = "weights: {use: quantize/int4_weight, group_size: 128, ignore: [lm_head]}"


@pytest.mark.case("B29")
def test_b29_sizes_that_fp8_cannot_multiply_stay_in_16_bits_and_are_listed(tmp_path: Path) -> None:
    made = plan(tmp_path, "weights: {use: quantize/fp8_dynamic}", intermediate_size=250, vocab_size=15)
    (step,) = made.steps
    layers = [f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")]
    assert sorted(step.receipt.skipped) == sorted(["lm_head", *layers])
    assert all("not a multiple of 16" in reason for reason in step.receipt.skipped.values())
    assert len(step.receipt.touched) == 8, "q, k, v and o of both layers"


@pytest.mark.case("B29")
def test_b29_parts_of_a_split_that_fp8_cannot_multiply_are_refused(tmp_path: Path) -> None:
    told = problems(
        tmp_path, "weights: {use: quantize/fp8_dynamic}", "shard: {use: shard/tensor, tensor: 4}", intermediate_size=32, vocab_size=96
    )
    assert [line.split("; ")[0] for line in told] == [
        "step shard, layers model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj, model.layers.1.mlp.gate_proj, "
        "model.layers.1.mlp.up_proj: its N = 32 / tensor=4 = 8 is no multiple of 16",
        "step shard, layers model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj: its K = 32 / tensor=4 = 8 is no multiple of 16",
        "step shard, layer lm_head: its N = 96 / tensor=4 = 24 is no multiple of 16",
    ]
    assert all(line.endswith("degrees that fit everything: 2") for line in told)


@pytest.mark.case("B73")
@pytest.mark.parametrize(("scheme", "multiple"), [("fp8_block_weight", 128), ("mxfp4_weight", 32), ("nvfp4_weight", 16)])
def test_b73_a_block_that_a_split_would_cut_is_refused_with_the_degrees_that_fit(tmp_path: Path, scheme: str, multiple: int) -> None:
    step = f"weights: {{use: quantize/{scheme}, ignore: [lm_head]}}"
    sizes = {"hidden_size": 8 * multiple, "intermediate_size": 2 * multiple, "num_attention_heads": 8, "num_key_value_heads": 8}
    told = problems(tmp_path, step, "shard: {use: shard/tensor, tensor: 4}", **sizes)
    assert told and all(f"/ tensor=4 = {multiple // 2} is no multiple of {multiple}" in line for line in told)
    assert all(line.endswith("degrees that fit everything: 2") for line in told)
    (weights, _) = plan(tmp_path, step, "shard: {use: shard/tensor, tensor: 2}", **sizes).steps
    assert weights.receipt.touched


@pytest.mark.case("B32")
def test_b32_every_width_that_the_group_does_not_divide_is_told_at_once(tmp_path: Path) -> None:
    told = problems(tmp_path, INT4, hidden_size=192, intermediate_size=8640)
    assert told == [
        "step weights, layers model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj, "
        "model.layers.0.self_attn.o_proj and 8 more: group_size 128 does not divide its K=192; sizes that fit: 192, 96, 64, 32, 16",
        "step weights, layers model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj: group_size 128 does not divide its K=8640; "
        "sizes that fit: 192, 96, 64, 32, 16",
    ]


@pytest.mark.case("B32")
@pytest.mark.parametrize("policy", ["skip", "pad"])
def test_b32_on_misfit_is_honoured(tmp_path: Path, policy: str) -> None:
    step = INT4.replace("ignore", f"on_misfit: {policy}, ignore")
    made = plan(tmp_path, step, hidden_size=256, intermediate_size=192)
    skipped = made.steps[0].receipt.skipped
    assert sorted(skipped) == ([f"model.layers.{i}.mlp.down_proj" for i in (0, 1)] if policy == "skip" else [])
    assert all("group_size 128 does not divide its K=192" in reason for reason in skipped.values())


@pytest.mark.case("B34")
def test_b34_groups_that_a_split_would_cut_are_refused_with_the_numbers(tmp_path: Path) -> None:
    told = problems(tmp_path, INT4, "shard: {use: shard/tensor, tensor: 2}", hidden_size=256, intermediate_size=13_696)
    assert told == [
        "step shard, layers model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj: "
        "its K = 13696 / tensor=2 = 6848 is no multiple of 128; no degree above 1 fits everything: use shard/fsdp; "
        "group sizes that fit here: 64, 32, 16"
    ]
    assert 13_696 % 128 == 0 and 13_696 // 2 % 128 == 64 and 6848 % 64 == 0 and 6848 % 96 != 0


@pytest.mark.case("B34")
def test_b34_a_group_that_fits_the_split_is_planned(tmp_path: Path) -> None:
    made = plan(tmp_path, INT4.replace("128", "64"), "shard: {use: shard/tensor, tensor: 2}", hidden_size=256, intermediate_size=13_696)
    assert made.steps[-1].receipt.decisions["parameters"]["model.layers.0.mlp.down_proj.weight_scale"]["tensor"] == 1


@pytest.mark.case("B111")
def test_b111_heads_kv_heads_and_vocabulary_are_told_with_the_degrees_that_fit(tmp_path: Path) -> None:
    told = problems(tmp_path, "shard: {use: shard/tensor, tensor: 3}", num_attention_heads=4, num_key_value_heads=2, vocab_size=250)
    assert [line for line in told if "the model" in line] == [
        "step shard, the model: the number of attention heads 4 is not divisible by tensor=3; degrees that fit everything: 2",
        "step shard, the model: the number of key/value heads 2 is not divisible by tensor=3; degrees that fit everything: 2",
        "step shard, the model: the vocabulary of 250 is not divisible by tensor=3; degrees that fit everything: 2",
    ]


def test_problems_of_different_steps_are_told_together(tmp_path: Path) -> None:
    told = problems(
        tmp_path,
        INT4.replace("{use", "{strict: false, use"),
        "shard: {use: shard/tensor, tensor: 3}",
        intermediate_size=200,
        vocab_size=250,
    )
    assert any(line.startswith("step weights") and "K=200" in line for line in told)
    assert any(line.startswith("step shard") and "vocabulary of 250" in line for line in told)
    assert any(line.startswith("step shard") and "attention heads 4" in line for line in told)


@pytest.mark.case("B19")
def test_b19_a_tie_under_fsdp_is_planned_in_one_group(tmp_path: Path) -> None:
    made = plan(tmp_path, "shard: {use: shard/fsdp}", tie_word_embeddings=True)
    receipt = made.steps[-1].receipt
    assert any("model.embed_tokens.weight" in note and "lm_head.weight" in note and "one FSDP group" in note for note in receipt.notes)


def test_quantized_weights_are_not_trained(tmp_path: Path) -> None:
    run = config.compose(
        config.parse([*arguments(tmp_path, INT4)[:-2], "workload=train", "workload.sequence=16"], cwd=tmp_path), cwd=tmp_path
    )
    with pytest.raises(PlanError, match="int4_weight have no gradient"):
        make(run, executes=False)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--add", "shard=shard/fsdp", "workload=decode"], "keeps a KV cache, which fsdp and data do not divide yet"),
        (["--add", "shard=shard/tensor", "save=true"], "each of 2 processes holds a part of the model"),
    ],
)
def test_what_can_only_be_planned_is_refused_by_run_in_one_line(tmp_path: Path, extra: list[str], told: str) -> None:
    command = [sys.executable, "-m", "optforge", "run", "recipe=baseline", "hardware=cpu", "model=hf", f"model.path={folder(tmp_path)}"]
    command += ["data=random_tokens", *extra]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(lines) == 1 and told in lines[0]


@pytest.mark.case("B52")
@pytest.mark.parametrize(
    ("lines", "instead"),
    [
        (["step: {use: prune/wanda}"], "steps.step.use=prune/magnitude"),
        (["step: {use: prune/layers}"], ""),
        (["sparse: {use: prune/magnitude}", "step: {use: heal/lora}"], ""),
        (["step: {use: quantize/auto, max_weight_bytes: 1000000}"], ""),
    ],
)
def test_b52_a_step_that_needs_data_is_refused_in_the_plan_for_random_data(lines: list[str], instead: str, tmp_path: Path) -> None:
    (said,) = problems(tmp_path, *lines)
    assert said.startswith("step step: needs data to calibrate on, and data=random_tokens is random; data=wikipedia")
    assert said.endswith(instead)
