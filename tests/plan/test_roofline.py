"""Predictions against arithmetic done by hand from published sizes and peaks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from optforge.plan.operations import Load
from optforge.plan.roofline import BASIS, load_of, predict, product_dtype, speedup
from optforge.spec import Hardware, Scheme
from optforge.workloads.decode import Decode
from optforge.workloads.forward import Forward
from optforge.workloads.prefill import Prefill

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "hardware"
INT8_WEIGHT = Scheme(name="int8_weight", weight_dtype="int8", weight_bits=8, granularity="channel")
INT8_DYNAMIC = replace(INT8_WEIGHT, name="int8_dynamic", activation_dtype="int8", activation_granularity="row")
FP8_DYNAMIC = replace(INT8_DYNAMIC, name="fp8_dynamic", weight_dtype="fp8", activation_dtype="fp8")
INT4_GROUP = Scheme(name="int4_weight", weight_dtype="int4", weight_bits=4, granularity="group", group_size=128, symmetric=True)
ONE_ROW = Load(kind="forward", batch=1)


def hardware(name: str) -> Hardware:
    return Hardware(**yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))


def linear(inputs: int = 4096, outputs: int = 4096, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def llama3_8b() -> nn.Module:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def test_one_linear_at_one_row_takes_the_time_of_reading_its_weights() -> None:
    found = predict(linear(), ONE_ROW, hardware("a100"), dtype="bf16")
    seconds = (4096 * 4096 * 2 + 2 * 4096 * 2) / 2039e9  # 33.57 MB: 16.46 us
    assert found.latency_ms == pytest.approx(1e3 * seconds)
    assert found.bound == "memory"
    assert found.items_per_s == pytest.approx(1 / seconds)
    assert found.weight_bytes == 33_554_432


def test_one_linear_at_many_rows_takes_the_time_of_its_arithmetic() -> None:
    found = predict(linear(), Load(kind="forward", batch=8192), hardware("a100"), dtype="bf16")
    assert found.latency_ms == pytest.approx(1e3 * 2 * 8192 * 4096 * 4096 / 312e12)
    assert found.bound == "arithmetic"


def test_a_small_linear_takes_one_launch_and_none_on_a_compiled_program() -> None:
    small = linear(16, 16)
    captured = predict(small, ONE_ROW, hardware("h200"), dtype="bf16")
    assert (captured.bound, captured.latency_ms, captured.launch_us) == ("launch", pytest.approx(2e-3), 2.0)
    assert predict(small, ONE_ROW, hardware("h200"), dtype="bf16", captured=False).latency_ms == pytest.approx(5e-3)
    assert predict(small, ONE_ROW, hardware("tpu_v5e"), dtype="bf16").bound == "memory"


def test_llama3_8b_decode_on_h200_from_published_sizes(llama3_8b: nn.Module) -> None:
    found = predict(llama3_8b, Load(kind="decode", batch=1, context=512, forwards=1), hardware("h200"), dtype="bf16")
    blocks = 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)  # q, o; k, v; gate, up, down
    weights = 2 * (blocks + 128256 * 4096)  # 15.01 GB with the head, without the embedding table
    cache = 2 * 32 * 8 * 128 * 513 * 2  # keys and values of 513 positions: 67 MB
    floor_ms = 1e3 * (weights + cache) / 4800e9  # 3.14 ms, 318 tokens/s
    assert found.latency_ms == pytest.approx(floor_ms, rel=0.04)  # the small k, v and attention kernels are launch-bound
    assert found.latency_ms >= floor_ms
    assert found.memory_ms == pytest.approx(floor_ms, rel=0.01)
    assert found.kv_cache_bytes == cache
    assert found.bound == "memory"
    assert found.tokens_per_s == pytest.approx(1e3 / found.latency_ms)
    assert found.weight_bytes == pytest.approx(16.06e9, rel=0.001)  # the published 8.03 B parameters


def test_prefill_flops_are_two_per_parameter_and_token(llama3_8b: nn.Module) -> None:
    found = predict(llama3_8b, Load(kind="prefill", batch=2, tokens_per_call=1024), hardware("h100"), dtype="bf16")
    products = 2 * 2 * 1024 * 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    attention = 32 * 4 * 2 * 32 * 128 * (1024 * 1025 // 2)  # q k and p v over the causal half
    head = 2 * 2 * 128256 * 4096  # the last position of both prompts
    assert found.flops == pytest.approx(products + attention + head, rel=1e-9)
    assert found.bound == "arithmetic"
    assert found.kv_cache_bytes is None


def test_decode_cache_traffic_grows_with_the_new_tokens(llama3_8b: nn.Module) -> None:
    load = Load(kind="decode", batch=3, context=100, forwards=4)
    row = next(row for row in predict(llama3_8b, load, hardware("h200"), dtype="bf16").rows if row.kind == "attention")
    positions = 101 + 102 + 103 + 104
    assert row.bytes == pytest.approx(32 * 3 * 2 * 128 * 2 * (8 * positions + 4 * 32))
    assert row.flops == pytest.approx(32 * 3 * 4 * 32 * 128 * positions)


def test_attention_window_caps_the_positions() -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
    config.sliding_window = 16
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    found = predict(model, Load(kind="decode", batch=1, context=1000), hardware("h200"), dtype="bf16")
    assert next(row for row in found.rows if row.kind == "attention").flops == 4 * 4 * 16 * 16


@pytest.mark.parametrize(
    ("scheme", "weight_bytes"),
    [(INT8_WEIGHT, 4096 * 4096 + 4 * 4096), (INT4_GROUP, 4096 * 4096 // 2 + 4 * 4096 * 32)],
)
def test_weight_only_schemes_shrink_the_bytes_and_keep_the_product(scheme: Scheme, weight_bytes: int) -> None:
    model = nn.Sequential(linear())
    found = predict(model, ONE_ROW, hardware("a100"), dtype="bf16", schemes={"0": scheme})
    assert found.latency_ms == pytest.approx(1e3 * (weight_bytes + 2 * 4096 * 2) / 2039e9)
    assert [row.dtype for row in found.rows] == ["bf16"]


def test_a_quantized_module_is_read_like_the_scheme_it_would_have() -> None:
    quantized = linear()
    quantized.weight = nn.Parameter(torch.empty(4096, 4096, dtype=torch.int8, device="meta"), requires_grad=False)
    quantized.weight_scale = nn.Parameter(torch.empty(4096, dtype=torch.float32, device="meta"), requires_grad=False)
    quantized.scheme = INT8_DYNAMIC
    model = nn.Sequential(quantized)
    asked = predict(nn.Sequential(linear()), Load(kind="forward", batch=4096), hardware("a100"), dtype="bf16", schemes={"0": INT8_DYNAMIC})
    found = predict(model, Load(kind="forward", batch=4096), hardware("a100"), dtype="bf16")
    assert found.latency_ms == asked.latency_ms == pytest.approx(1e3 * 2 * 4096**3 / 624e12)


def test_product_dtype_follows_the_units_of_the_hardware() -> None:
    assert product_dtype(hardware("a100"), INT8_DYNAMIC, "bf16") == "int8"
    assert product_dtype(hardware("a100"), FP8_DYNAMIC, "bf16") == "bf16"
    assert product_dtype(hardware("h100"), FP8_DYNAMIC, "bf16") == "fp8"
    assert product_dtype(hardware("h100"), INT4_GROUP, "bf16") == "bf16"
    assert product_dtype(hardware("t4"), None, "bf16") == "fp16"
    assert product_dtype(hardware("cpu"), None, "bf16") is None


def test_a_missing_unit_is_said() -> None:
    notes = predict(linear(), ONE_ROW, hardware("t4"), dtype="bf16").notes
    assert notes == ["t4 has no bf16 matrix units: those products are counted at its fp16 peak"]
    found = predict(nn.Sequential(linear()), ONE_ROW, hardware("a100"), dtype="bf16", schemes={"0": FP8_DYNAMIC})
    assert found.notes == ["a100 has no fp8 matrix units: those products are counted at its bf16 peak"]


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_unknown_peaks_give_no_figure_and_a_reason(name: str) -> None:
    found = predict(linear(), ONE_ROW, hardware(name), dtype="bf16")
    assert not found.known
    assert found.latency_ms is found.bound is found.items_per_s is found.memory_ms is None
    assert found.reason == f"the profile {name} has no published peaks"
    assert found.flops == 2 * 4096 * 4096  # what does not depend on the hardware is still told


def test_every_prediction_is_labelled_and_is_plain_data() -> None:
    found = predict(linear(), ONE_ROW, hardware("h200"), dtype="bf16")
    assert (found.label, found.basis) == ("predicted", BASIS)
    assert "upper bound" in BASIS
    assert json.loads(json.dumps(asdict(found), allow_nan=False))["rows"][0]["kind"] == "linear"


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_more_work_never_takes_less_time(llama3_8b: nn.Module, kind: str) -> None:
    sizes = [Load(kind=kind, batch=b, tokens_per_call=128 if kind == "prefill" else 1, context=64) for b in (1, 2, 8, 64, 512)]
    times = [predict(llama3_8b, load, hardware("mi300x"), dtype="bf16").latency_ms for load in sizes]
    assert times == sorted(times) and times[0] < times[-1]


def test_faster_hardware_is_never_predicted_slower(llama3_8b: nn.Module) -> None:
    load = Load(kind="prefill", batch=1, tokens_per_call=512)
    times = [predict(llama3_8b, load, hardware(name), dtype="bf16").latency_ms for name in ("b200", "h200", "h100", "h100_pcie", "a100")]
    assert times == sorted(times)


def test_convolutions_take_their_size_from_the_example() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False), nn.Flatten(), nn.Linear(64 * 16 * 16, 10, bias=False))
    model = model.to("meta", torch.bfloat16)
    example = ((torch.empty(2, 3, 32, 32, device="meta", dtype=torch.bfloat16),), {})
    found = predict(model, Load(kind="forward", batch=8), hardware("a100"), dtype="bf16", example=example)
    convolution = next(row for row in found.rows if row.kind == "convolution")
    assert convolution.flops == 2 * 8 * 16 * 16 * 64 * 3 * 3 * 3
    assert convolution.bytes == 2 * (64 * 3 * 3 * 3 + 8 * 3 * 32 * 32 + 8 * 64 * 16 * 16)
    assert next(row for row in found.rows if row.kind == "linear").flops == 2 * 8 * 64 * 16 * 16 * 10
    unsized = predict(model, Load(kind="forward", batch=8), hardware("a100"), dtype="bf16")
    assert unsized.reason == "the size of 0's input is unknown without an example"


def test_a_real_model_is_traced_on_meta_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    example = ((torch.empty(1, 1, 8, 8),), {})
    assert predict(model, ONE_ROW, hardware("a100"), dtype="fp32", example=example).known
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert not any(child._forward_hooks for child in model.modules())


def test_an_example_in_another_dtype_than_the_model_still_sizes_it() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3)).to("meta", torch.float16)
    example = ((torch.empty(1, 1, 8, 8, device="meta", dtype=torch.bfloat16),), {})
    assert predict(model, ONE_ROW, hardware("t4"), dtype="fp16", example=example).flops == 2 * 4 * 9 * 36


def test_transposed_linears_of_gpt2_are_counted() -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=32)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).to(torch.bfloat16)
    found = predict(model, Load(kind="prefill", batch=1, tokens_per_call=16), hardware("h200"), dtype="bf16")
    assert next(row for row in found.rows if row.kind == "linear").flops == 2 * 2 * 16 * 12 * 64 * 64
    assert next(row for row in found.rows if row.kind == "head").flops == 2 * 100 * 64


def test_parameters_outside_the_counted_modules_are_said() -> None:
    model = nn.Sequential(linear(64, 64))
    model.register_parameter("table", nn.Parameter(torch.empty(64, 64, dtype=torch.bfloat16, device="meta")))
    assert predict(model, ONE_ROW, hardware("h200"), dtype="bf16").notes == [
        "50% of the parameter bytes lie in modules that are not counted"
    ]


def test_fit_counts_weights_and_cache(llama3_8b: nn.Module) -> None:
    load = Load(kind="decode", batch=1, context=512)
    assert predict(llama3_8b, load, hardware("t4"), dtype="bf16").fits is False  # 16.06 GB of 16
    assert predict(llama3_8b, load, hardware("l4"), dtype="bf16").fits is True
    crowded = replace(load, batch=100, context=1024)  # 134 MB a sequence
    assert predict(llama3_8b, crowded, hardware("l4"), dtype="bf16").fits is False
    assert predict(llama3_8b, load, hardware("cpu"), dtype="bf16").fits is None


def test_loads_of_the_three_workloads(llama3_8b: nn.Module) -> None:
    assert load_of(Prefill(batch_size=2, prompt_tokens=64)) == Load(kind="prefill", batch=2, tokens_per_call=64)
    assert load_of(Decode(batch_size=2, context=9, new_tokens=5)) == Load(kind="decode", batch=2, context=9, forwards=5)
    forward = load_of(Forward(batch_size=4, sequence=16))
    assert predict(llama3_8b, forward, hardware("h200"), dtype="bf16").tokens_per_s
    items = predict(linear(), forward, hardware("h200"), dtype="bf16")
    assert items.flops == 2 * 4 * 4096 * 4096 and items.tokens_per_s is None
    example = ((torch.empty(7, 4096, device="meta", dtype=torch.bfloat16),), {})
    own = predict(linear(), load_of(Forward(), "module"), hardware("h200"), dtype="bf16", example=example)
    assert own.flops == 2 * 7 * 4096 * 4096


def test_speedup_is_the_ratio_of_the_times_and_none_where_one_is_unknown() -> None:
    slow, fast = (predict(linear(), ONE_ROW, hardware(name), dtype="bf16") for name in ("a100", "h200"))
    assert speedup(slow, fast) == pytest.approx(4800 / 2039)
    assert speedup(asdict(slow), asdict(fast)) == speedup(slow, fast)
    assert speedup(slow, predict(linear(), ONE_ROW, hardware("cpu"), dtype="bf16")) is None


def test_operations_agree_with_pytorchs_own_counter() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.ConvTranspose2d(16, 8, 2, stride=2),
        nn.Conv2d(8, 32, 5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 7),
    ).eval()
    images = torch.rand(3, 8, 20, 24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    found = predict(model, Load(kind="forward", batch=3), hardware("a100"), dtype="fp32", example=((images[:1],), {}))
    assert found.flops == counter.get_total_flops()


def test_packing_linears_saves_launches_and_input_reads_but_no_arithmetic() -> None:
    apart = nn.Sequential(linear(256, 256), linear(256, 64), linear(256, 64))
    packed = nn.Sequential(linear(256, 384))
    before, after = (predict(model, Load(kind="forward", batch=4), hardware("h200"), dtype="bf16") for model in (apart, packed))
    assert before.flops == after.flops
    assert (before.kernels, after.kernels) == (3, 1)
    assert before.bytes - after.bytes == 2 * 4 * 256 * 2
