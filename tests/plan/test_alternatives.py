"""Alternatives to a step that the target cannot run as written: ranked by prediction, and named in the refusal (B39)."""

from __future__ import annotations

from dataclasses import replace

import llamas
import pytest
import torch
from torch import nn

from optforge import config
from optforge.data.tokens import RandomTokens
from optforge.plan.alternatives import alternatives, lacks, refusal
from optforge.plan.graph import Graph
from optforge.plan.roofline import CAPTURED, predict, speedup
from optforge.plan.trace import trace
from optforge.schemes import ENTRIES, SCHEMES
from optforge.share import on_meta
from optforge.spec import Hardware, Json, Step
from optforge.transforms.base import Context, Lowered
from optforge.transforms.quantize import Quantize, SchemeName
from optforge.workloads.decode import Decode
from optforge.workloads.prefill import Prefill

DATA = RandomTokens()
PREFILL = Prefill(batch_size=1, prompt_tokens=2048)
DECODE = Decode(batch_size=1, context=512, new_tokens=32)
Workload = Prefill | Decode


def step(use: str = "quantize/fp8_dynamic", ignore: tuple[str, ...] = ("lm_head",)) -> Step:
    option = use.partition("/")[2]
    transform = Quantize(scheme=SchemeName[option], ignore=list(ignore)) if option in SCHEMES else None
    return Step(name="weights", use=use, options={}, transform=transform)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8}
    return llamas.module("meta", dtype=torch.bfloat16, **sizes, vocab_size=32000, max_position_embeddings=4096)


def traced(module: nn.Module, workload: Workload, target: Hardware) -> Graph:
    return trace(llamas.loaded(module), workload, DATA, target)


def ranked_for(asked: Step, module: nn.Module, workload: Workload, target: Hardware) -> list[dict[str, Json]]:
    return alternatives(asked, module, traced(module, workload, target), target, dtype="bf16")


def options(ranked: list[dict[str, Json]]) -> list[str]:
    return [item["use"].removeprefix("quantize/") for item in ranked]


def test_int8_dynamic_comes_first_in_prefill_on_a100(llama: nn.Module) -> None:
    ranked = ranked_for(step(), llama, PREFILL, config.hardware("a100"))
    assert options(ranked)[0] == "int8_dynamic"
    assert "fp8_dynamic" not in options(ranked)
    assert 1.5 < ranked[0]["predicted_speedup"] < 2.0  # 624 / 312 on the linears, none on what lies between them
    assert ranked[0]["native"] is True
    assert ranked[0]["note"] == "a100 has int8 matrix units at 624 TOP/s"
    weight_only = next(item for item in ranked if item["use"] == "quantize/int4_weight")
    assert weight_only["predicted_speedup"] == pytest.approx(1.0, abs=0.02)
    assert (weight_only["native"], weight_only["note"]) == (False, "weights in 4 bits, products in bf16")


@pytest.mark.parametrize("name", ["a100", "h200", "l4", "t4", "mi300x"])
def test_int4_weight_comes_first_in_decode_at_one_sequence(llama: nn.Module, name: str) -> None:
    ranked = ranked_for(step(), llama, DECODE, config.hardware(name))
    assert options(ranked)[0] == "int4_weight"
    bits = {option: scheme.weight_bits for option, scheme in SCHEMES.items()}
    assert [bits[option] for option in options(ranked)] == sorted(bits[option] for option in options(ranked))


def test_fp8_is_offered_only_where_it_has_units(llama: nn.Module) -> None:
    offered = {name: options(ranked_for(step("quantize/int8_weight"), llama, PREFILL, config.hardware(name))) for name in ("h100", "a100")}
    assert "fp8_dynamic" in offered["h100"] and "fp8_dynamic" not in offered["a100"]
    assert "fp8_weight" in offered["a100"]


def test_the_ranking_is_by_predicted_speedup_and_leaves_the_model_alone(llama: nn.Module) -> None:
    before = {name: (tensor.dtype, tensor.shape) for name, tensor in llama.named_parameters()}
    ranked = ranked_for(step(), llama, DECODE, config.hardware("h100"))
    gains = [item["predicted_speedup"] for item in ranked]
    assert gains == sorted(gains, reverse=True)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in llama.named_parameters()} == before


def test_ignored_layers_are_left_out_of_the_estimate(llama: nn.Module) -> None:
    ranked = ranked_for(step(), llama, PREFILL, config.hardware("a100"))
    narrowed = ranked_for(step(ignore=("lm_head", "mlp")), llama, PREFILL, config.hardware("a100"))
    assert narrowed[0]["predicted_speedup"] < ranked[0]["predicted_speedup"] - 0.2


def test_without_peaks_the_options_are_listed_without_figures(llama: nn.Module) -> None:
    ranked = ranked_for(step(), llama, PREFILL, config.hardware("cpu"))
    assert {item["predicted_speedup"] for item in ranked} == {None}
    assert options(ranked)[0] == "int8_dynamic"


def test_other_kinds_have_no_alternatives(llama: nn.Module) -> None:
    assert ranked_for(step("fuse/decoder"), llama, PREFILL, config.hardware("a100")) == []


@pytest.mark.case("B39")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a100", "a100 has compute capability 8.0, fp8 matmul needs 8.9+"),
        ("t4", "t4 has compute capability 7.5, fp8 matmul needs 8.9+"),
        ("cpu", "cpu has no fp8 matrix units"),
        ("tpu_v5e", "tpu_v5e has no fp8 matrix units"),
    ],
)
def test_B39_the_refusal_names_the_capability_and_the_alternatives(llama: nn.Module, name: str, sentence: str) -> None:
    target = config.hardware(name)
    ranked = ranked_for(step(), llama, PREFILL, target)
    lowered = step().transform.lower(target)
    problem = refusal(step(), lowered, target, ranked)
    assert str(problem).startswith(f"step weights: {sentence}; alternatives: int8_dynamic, fp8_weight")
    assert "CUDA version" not in str(problem)


@pytest.mark.parametrize("workload", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("option", sorted(name for name, entry in ENTRIES.items() if entry.kernel and not entry.scheme.static))
def test_an_alternative_is_predicted_as_the_quantized_model_itself(llama: nn.Module, option: str, workload: Workload) -> None:
    """Weight-only schemes to the byte. Dynamic ones round and scale in a few operators that the question leaves out, most of which a
    compiler merges; what differs is small beside the products."""
    target = config.hardware("h100")
    asked = step("quantize/int8_weight" if option != "int8_weight" else "quantize/int4_weight")
    ranked = {item["use"]: item["predicted_speedup"] for item in ranked_for(asked, llama, workload, target)}
    before, quantized = predict(traced(llama, workload, target), target, mode=CAPTURED), on_meta(llama)
    chosen = step(f"quantize/{option}").transform
    if option == "int4_weight":
        chosen = replace(chosen, group_size=SCHEMES[option].group_size, symmetric=SCHEMES[option].symmetric)
    chosen.apply(quantized, Context(step="weights", target=target, device=target))
    after = predict(traced(quantized.eval(), workload, target), target, mode=CAPTURED)
    close = 0.05 if SCHEMES[option].activation_dtype else 1e-9
    assert ranked[f"quantize/{option}"] == pytest.approx(speedup(before, after), rel=close)


def test_a_step_whose_selectors_are_wrong_is_left_to_its_own_check(llama: nn.Module) -> None:
    assert ranked_for(step(ignore=("lm_haed",)), llama, PREFILL, config.hardware("a100")) == []


@pytest.mark.case("B39")
def test_B39_a_blackwell_card_is_not_told_that_its_capability_is_too_low() -> None:
    assert lacks(config.hardware("b200"), "int4") == "b200 has no int4 matrix units"


def test_a_step_without_ranked_alternatives_names_what_runs_instead() -> None:
    bf16 = Step(name="cast", use="precision/bf16", options={}, transform=None)
    lowered = Lowered(requested="bf16", runs_as="fp16", transform=step().transform, reason="t4 has no bf16 matrix units")
    assert (
        str(refusal(bf16, lowered, config.hardware("t4"), []))
        == "step cast: t4 has no bf16 matrix units; type steps.cast.use=precision/fp16, or downgrade=allow"
    )
