"""The reported failures that a plan must tell before anything is loaded, each as the command that a user types."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from commands import SMALL, STRANGE, Plan, planner, recipe

from optforge import config
from optforge.plan.devices import detect


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    return planner(tmp_path, monkeypatch, capsys)


def strange(factory: str) -> tuple[str, ...]:
    return (*STRANGE, f"model.factory=strange_modules:{factory}")


@pytest.mark.case("B10")
def test_b10_experts_that_are_missed_show_their_share(plan: Plan, tmp_path: Path) -> None:
    """By hand, in elements: 4 x 128 x 64 + 4 x 64 x 64 = 49,152 of 49,152 + 64 x 4 + 64 x 64 = 53,504, which is 91.9%."""
    done = plan(recipe(tmp_path, "weights=quantize/int8_dynamic"), "hardware=h100", *strange("experts"))
    assert done.code == 0, done.errors
    assert done.said("missed") == "91.9% of the weight bytes are neither quantized nor ignored (above)"
    first = done.lines("missed")[0]
    assert "1.gate_up, 1 of 4x128x64, 61.2% of the weight bytes: a 3-D parameter" in first


@pytest.mark.case("B10")
def test_b10_strict_refuses_what_is_missed(plan: Plan, tmp_path: Path) -> None:
    done = plan(recipe(tmp_path, "weights=quantize/int8_dynamic"), "hardware=h100", *strange("experts"), "steps.weights.strict=true")
    assert (done.code, done.out, done.wrote) == (2, "", False)
    assert len(done.errors) == 2 and "1.gate_up" in done.errors[0] and "1.down" in done.errors[1]


@pytest.mark.case("B29")
def test_b29_sizes_that_no_fp8_product_takes_are_listed_and_stay_in_16_bits(plan: Plan, tmp_path: Path) -> None:
    done = plan(recipe(tmp_path, "weights=quantize/fp8_dynamic"), "hardware=h100", *strange("classifier"))
    assert done.code == 0, done.errors
    (line,) = done.lines("skipped")
    assert "1 module (1): its weight is 15x32, not a multiple of 16 both ways, which the fp8 product needs" in line


@pytest.mark.case("B32")
def test_b32_every_width_that_a_group_does_not_divide_is_told_at_once(plan: Plan, tmp_path: Path) -> None:
    done = plan(recipe(tmp_path, "weights=quantize/int4_weight"), "hardware=h100", *strange("widths"), "steps.weights.group_size=128")
    assert (done.code, done.out, done.wrote) == (2, "", False)
    assert len(done.errors) == 3
    expected = {"192": "sizes that fit: 192, 96, 64, 32, 16", "8640": "sizes that fit: 192, 96, 64, 32, 16", "50": "no size fits"}
    for line, (width, fits) in zip(done.errors, expected.items(), strict=True):
        assert f"layer by_width.{width}: group_size 128 does not divide its K={width}; {fits}" in line


@pytest.mark.case("B34")
def test_b34_groups_that_a_tensor_degree_would_cut_are_refused_with_the_numbers(plan: Plan, tmp_path: Path) -> None:
    """Llama-3-8B's 14,336 inputs of down_proj make 112 groups of 128, which 32 devices cannot share: 3.5 each."""
    steps = recipe(tmp_path, "weights=quantize/int4_weight", "shard=shard/tensor")
    asked = ("steps.weights.group_size=128", "steps.shard.tensor=32", "hardware.devices=32")
    done = plan(steps, "hardware=h100", "model=llama3_8b", "model.layers=2", *asked)
    assert (done.code, done.out, done.wrote) == (2, "", False)
    assert any("down_proj" in line and "448" in line and "128" in line for line in done.errors), done.errors


@pytest.mark.case("B39")
def test_b39_all_refused_is_exit_code_2_with_one_line_for_each_target(plan: Plan) -> None:
    done = plan("recipe=llama_fp8", "hardware=a100,t4", *SMALL, "downgrade=forbid")
    assert (done.code, done.out, done.wrote) == (2, "", False)
    assert len(done.errors) == 2
    for line, name, capability in zip(done.errors, ("a100", "t4"), ("8.0", "7.5"), strict=True):
        assert f"{name} has compute capability {capability}, fp8 matmul needs 8.9+" in line
        assert "int8_dynamic" in line and "fp8_weight" in line


@pytest.mark.case("B39")
def test_b39_fp8_on_an_a100_is_told_with_what_its_units_can_do(plan: Plan) -> None:
    done = plan("recipe=llama_fp8", "hardware=a100", *SMALL)
    assert done.code == 0, done.errors
    assert "a100 has no fp8 matrix units: fp8_dynamic runs as fp8_weight" in done.said("downgraded")
    first = done.lines("instead")[0]
    assert "quantize/int8_dynamic" in first and "624 TOP/s" in first, "an A100 multiplies int8 at 624 TOP/s (its data sheet)"


@pytest.mark.case("B40")
def test_b40_the_target_decides_the_8_bit_float(plan: Plan) -> None:
    done = plan("recipe=llama_fp8", "hardware=mi300x,h100", *SMALL)
    assert done.code == 0, done.errors
    amd, nvidia = ([note for step in one["steps"] for note in step["notes"]] for one in done.plans)
    assert "fp8 is stored as e4m3fnuz, largest value 240" in amd
    assert "fp8 is stored as e4m3fn, largest value 448" in nvidia


@pytest.mark.case("B41")
def test_b41_a_rocm_build_is_not_planned_as_an_nvidia_card(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """PyTorch for ROCm answers as `torch.cuda` and reports a capability that reads like Hopper's."""
    monkeypatch.setattr("torch.version.hip", "6.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 5))
    assert "nvidia" not in [device.backend.name for device in detect(config.hardware)]
    done = plan("recipe=llama_fp8", "hardware=mi300x", *SMALL, "workload=decode", "steps.weights.use=quantize/fp8_weight", kernels=True)
    assert done.code == 0, done.errors
    arches = {kernel["arch"] for kernel in done.plans[0]["kernels"]["rows"]}
    assert arches == {"gfx942"}, "compiled for the MI300, and for no CUDA arch"


@pytest.mark.case("B43")
def test_b43_a_tpu_without_the_extra_is_planned_and_told_what_brings_xlas_figures(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optforge.plan.xla.importlib.util.find_spec", lambda name: None)
    done = plan("recipe=llama_int8", "hardware=tpu_v6e", *SMALL, "workload=decode", kernels=True)
    assert done.code == 0, done.errors
    assert "pip install 'optforge[xla]'" in done.lines("unknown")[0]
    assert done.said("downgraded") == "nothing: every step runs as written"


@pytest.mark.case("B45")
def test_b45_a_predicted_slow_down_is_called_a_regression(plan: Plan) -> None:
    """A TPU v6e has no fp8 units: the weights are converted on the way, and the plan counts the bytes of that."""
    done = plan("recipe=llama_fp8", "hardware=tpu_v6e", *SMALL, "workload=decode")
    assert done.code == 0, done.errors
    assert any(line.startswith("5 Verdict: regression") for line in done.out.splitlines())
    row = next(line for line in done.lines("weights") if "tok/s" in line)
    assert row.rstrip().endswith("times: slower")
    assert ": slower, against the compiled baseline" in done.said("gain")


@pytest.mark.case("B111")
def test_b111_heads_that_do_not_divide_are_refused_with_the_degrees_that_do(plan: Plan, tmp_path: Path) -> None:
    """Llama-3.2-1B has 32 heads over 8 key/value heads: 3 devices share neither."""
    done = plan(recipe(tmp_path, "shard=shard/tensor"), "hardware=h100", *SMALL, "steps.shard.tensor=3")
    assert (done.code, done.out, done.wrote) == (2, "", False)
    told = " ".join(done.errors)
    assert "32" in told and "8" in told and "2, 4, 8" in told, done.errors


def test_an_operator_that_nobody_can_count_is_named_and_the_rest_stands(plan: Plan, tmp_path: Path) -> None:
    done = plan(recipe(tmp_path, "weights=quantize/int8_dynamic"), "hardware=h100", *strange("custom"))
    assert done.code == 0, done.errors
    assert done.said("unknown") == "the work of strange.mystery: the figures hold for the rest"
    (found,) = done.plans
    assert [(item["name"], item["count"]) for item in found["speed"]["unknown"]] == [("strange.mystery", 1)]
    assert found["steps"][0]["touched"] == 2
    assert all(row["partial"] and row["latency_ms"] > 0 for row in found["speed"]["rows"])


def test_a_module_without_an_example_is_refused_in_words(plan: Plan, tmp_path: Path) -> None:
    done = plan(recipe(tmp_path, "weights=quantize/int8_dynamic"), "hardware=h100", *strange("alone"))
    assert (done.code, done.out, done.wrote) == (2, "", False)
    (told,) = done.errors
    assert "the model comes with no example to run" in told and "model.factory" in told


def test_unknown_memory_is_asked_for(plan: Plan) -> None:
    done = plan("recipe=llama_int8", "hardware=h100", "hardware.memory_bytes=null", *SMALL)
    assert done.code == 0, done.errors
    assert done.said("fits").startswith("unknown: ") and "hardware.memory_bytes=" in done.said("fits")
    assert done.plans[0]["fit"]["fits"] is None


def test_what_does_not_fit_is_said_with_a_command_that_does(plan: Plan) -> None:
    """8.03 G parameters of Llama-3-8B in 2 bytes are more than the 16 GB of a T4."""
    done = plan("recipe=baseline", "hardware=t4", "model=llama3_8b", "workload=decode")
    assert done.code == 0, done.errors
    assert done.said("fits").startswith("no: ") and "5 Verdict: does not fit" in done.out.splitlines()
    command = shlex.split(done.plans[0]["verdict"]["command"])
    assert command[:6] == ["optforge", "run", "recipe=baseline", "hardware=t4", "model=llama3_8b", "workload=decode"]
    again = plan(*command[2:], "output_dir=again")
    assert again.said("fits").startswith("yes: "), again.out
