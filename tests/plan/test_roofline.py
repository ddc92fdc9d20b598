"""Predictions against arithmetic done by hand from published sizes and peaks."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import llamas
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from optforge import config
from optforge.data.tokens import RandomTokens
from optforge.measure.machine.point import Overheads, Point
from optforge.models.base import Loaded
from optforge.plan import graph as g
from optforge.plan.calibration import Band, Calibration
from optforge.plan.price import product_dtype
from optforge.plan.roofline import BASIS, CAPTURED, COMPILED, EAGER, Prediction, predict, speedup
from optforge.plan.trace import trace
from optforge.spec import Hardware, Scheme
from optforge.workloads.decode import Decode
from optforge.workloads.forward import Forward
from optforge.workloads.prefill import Prefill

DATA = RandomTokens()
INT8_WEIGHT = Scheme(name="int8_weight", weight_dtype="int8", weight_bits=8, granularity="channel")
INT8_DYNAMIC = replace(INT8_WEIGHT, name="int8_dynamic", activation_dtype="int8", activation_granularity="row")
FP8_DYNAMIC = replace(INT8_DYNAMIC, name="fp8_dynamic", weight_dtype="fp8", activation_dtype="fp8")
INT4_GROUP = Scheme(name="int4_weight", weight_dtype="int4", weight_bits=4, granularity="group", group_size=128, symmetric=True)
MACHINE = Hardware(
    name="machine",
    backend="nvidia",
    arch="sm_90",
    peak_flops={"bf16": 1e14, "int8": 2e14},
    bandwidth_bytes_per_s=1e12,
    memory_bytes=10**9,
    link_bytes_per_s=1e11,
)
"""Round figures, for counts by hand."""


def net(module: nn.Module, *shape: int, on: Hardware = MACHINE, dtype: torch.dtype = torch.bfloat16) -> g.Graph:
    """The graph of one call of a module on one tensor."""
    example = ((torch.empty(*shape, dtype=dtype, device="meta"),), {})
    return trace(Loaded(module=module.to("meta", dtype).eval(), family="module", name="net", example=example), Forward(), DATA, on)


def linear(inputs: int = 4096, outputs: int = 4096) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="meta"))


def llama(**sizes: int) -> Loaded:
    return llamas.llama("meta", dtype=torch.bfloat16, **{"max_position_embeddings": 4096, **sizes})


@pytest.fixture(scope="module")
def llama3_8b() -> Loaded:
    return llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
    )


def row(found: Prediction, kind: str) -> dict[str, object]:
    return asdict(next(row for row in found.rows if row.kind == kind))


# --- the bound ----------------------------------------------------------------------------------------------------


def test_two_layers_by_hand() -> None:
    """64 rows through 256 -> 512 -> 128 with a ReLU: three kernels, all of them shorter than the shortest."""
    graph = net(nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 128, bias=False)), 64, 256)
    found = predict(graph, MACHINE, mode=CAPTURED)
    first, relu, last = 2 * (64 * 256 + 256 * 512 + 64 * 512), 2 * (2 * 64 * 512), 2 * (64 * 512 + 512 * 128 + 64 * 128)
    assert found.flops == 2 * 64 * 256 * 512 + 2 * 64 * 512 * 128
    assert found.bytes == first + relu + last
    assert found.kernels == 3
    assert found.memory_ms == found.ideal_ms == pytest.approx(1e3 * (first + relu + last) / 1e12)
    assert (found.bound, found.latency_ms) == ("launch", pytest.approx(3 * 2e-3))
    assert found.items_per_s == pytest.approx(64 / 6e-6)


def test_one_linear_at_one_row_takes_the_time_of_reading_its_weights() -> None:
    found = predict(net(linear(), 1, 4096), config.hardware("a100"), mode=CAPTURED)
    seconds = (4096 * 4096 * 2 + 2 * 4096 * 2) / 2039e9  # 33.57 MB: 16.46 us
    assert found.latency_ms == pytest.approx(1e3 * seconds)
    assert found.bound == "memory"
    assert found.weight_bytes == 33_554_432
    assert found.mbu == pytest.approx(33_554_432 / 33_570_816)  # all but the input and the output is weight


def test_one_linear_at_many_rows_takes_the_time_of_its_arithmetic() -> None:
    found = predict(net(linear(), 8192, 4096), config.hardware("a100"), mode=CAPTURED)
    assert found.latency_ms == pytest.approx(1e3 * 2 * 8192 * 4096 * 4096 / 312e12)
    assert (found.bound, found.mfu) == ("arithmetic", pytest.approx(1.0))


def test_the_host_sets_the_time_of_small_kernels_unless_a_graph_was_captured() -> None:
    graph = net(linear(16, 16), 1, 16)
    assert predict(graph, config.hardware("h200"), mode=CAPTURED).latency_ms == pytest.approx(2e-3)
    eager = predict(graph, config.hardware("h200"), mode=EAGER)
    assert (eager.bound, eager.latency_ms, eager.launch_ms) == ("launch", pytest.approx(5e-3), pytest.approx(5e-3))
    assert predict(graph, config.hardware("tpu_v5e"), mode=COMPILED).bound == "memory"


def test_llama3_8b_decode_on_h200_from_published_sizes(llama3_8b: Loaded) -> None:
    """One token after 512: the published 8.03 B parameters are 16.06 GB, of which the embedding table is looked up and not read."""
    h200 = config.hardware("h200")
    found = predict(trace(llama3_8b, Decode(context=512, new_tokens=1), DATA, h200), h200, mode=CAPTURED)
    assert found.weight_bytes == pytest.approx(16.06e9, rel=0.001)
    blocks = 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)  # q, o; k, v; gate, up, down
    weights = 2 * (blocks + 128256 * 4096)  # 15.01 GB with the head
    cache = 2 * 32 * 8 * 128 * 513 * 2  # keys and values of 513 positions: 67 MB
    floor_ms = 1e3 * (weights + cache) / 4800e9  # 3.14 ms, 318 tokens/s
    assert found.kv_cache_bytes == cache
    assert found.mbu == pytest.approx(floor_ms / found.latency_ms, rel=0.001)
    # transformers writes keys and values out for each of the four query heads that share them, and reads them again: 0.54 GB
    copies = 32 * 2 * 2 * (4 * 8 * 128 * 513 * 2)
    assert found.memory_ms == pytest.approx(floor_ms + 1e3 * copies / 4800e9, rel=0.01)
    assert found.latency_ms == pytest.approx(found.memory_ms, rel=0.2)  # kernels too small to fill the device take the rest
    assert found.bound == "memory"
    assert found.tokens_per_s == pytest.approx(1e3 / found.latency_ms)


def test_prefill_flops_are_two_per_parameter_and_token(llama3_8b: Loaded) -> None:
    h100 = config.hardware("h100")
    found = predict(trace(llama3_8b, Prefill(batch_size=2, prompt_tokens=1024), DATA, h100), h100, mode=COMPILED)
    products = 2 * 2 * 1024 * 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    attention = 32 * 4 * 2 * 32 * 128 * (1024 * 1025 // 2)  # q k and p v over the causal half
    head = 2 * 2 * 128256 * 4096  # the last position of both prompts
    assert found.flops == pytest.approx(products + attention + head, rel=1e-6)
    assert found.bound == "arithmetic"
    assert found.kv_cache_bytes is None
    assert 0.8 < found.mfu <= 1


def test_a_decoder_block_has_the_flops_that_pytorch_counts() -> None:
    loaded = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_key_value_heads=4, vocab_size=32)
    real = loaded.module.to_empty(device="cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        real(input_ids=torch.zeros(2, 16, dtype=torch.int64), use_cache=False, logits_to_keep=1)
    loaded = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_key_value_heads=4, vocab_size=32)
    found = predict(trace(loaded, Prefill(batch_size=2, prompt_tokens=16), DATA, MACHINE), MACHINE, mode=EAGER)
    attention = float(row(found, g.ATTENTION)["flops"])  # type: ignore[arg-type]  # a figure
    assert attention == 4 * 2 * 4 * 16 * (16 * 17 / 2)  # PyTorch counts the other half of the scores as well
    assert found.flops - attention == counter.get_total_flops() - 4 * 2 * 4 * 16 * 16 * 16


def test_a_call_of_decode_takes_as_many_passes_as_tokens() -> None:
    loaded = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_key_value_heads=4, vocab_size=32)
    one, four = (trace(loaded, Decode(batch_size=3, context=5, new_tokens=n), DATA, MACHINE) for n in (1, 4))
    first, second = (predict(replace(graph, passes=n), MACHINE, mode=EAGER) for graph, n in ((one, 1), (four, 4)))
    assert second.kernels == 4 * first.kernels
    assert second.latency_ms == pytest.approx(4 * first.latency_ms)
    assert second.tokens_per_s == pytest.approx(first.tokens_per_s)


def test_what_a_compiler_merges_is_never_slower(llama3_8b: Loaded) -> None:
    h200 = config.hardware("h200")
    graph = trace(llama3_8b, Prefill(batch_size=1, prompt_tokens=128), DATA, h200)
    times = [predict(graph, h200, mode=mode).latency_ms for mode in (EAGER, COMPILED, CAPTURED)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    blocks = [f"model.layers.{number}" for number in range(32)]
    by_block = predict(graph, h200, mode=COMPILED, regions=blocks)
    assert predict(graph, h200, mode=COMPILED).kernels < by_block.kernels < predict(graph, h200, mode=EAGER).kernels


@pytest.mark.parametrize("workload", [Prefill(prompt_tokens=64), Decode()])
def test_more_work_never_takes_less_time(workload: Prefill | Decode) -> None:
    loaded = llama(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=8, vocab_size=1000)
    mi300x = config.hardware("mi300x")
    graphs = [trace(loaded, replace(workload, batch_size=batch), DATA, mi300x) for batch in (1, 2, 8, 64, 512)]
    for mode in (EAGER, COMPILED, CAPTURED):
        found = [predict(graph, mi300x, mode=mode) for graph in graphs]
        ideal = [item.ideal_ms for item in found]
        assert ideal == sorted(ideal) and ideal[0] < ideal[-1]
        assert found[0].latency_ms <= found[-1].latency_ms


def test_more_bandwidth_or_arithmetic_is_never_slower(llama3_8b: Loaded) -> None:
    graph = trace(llama3_8b, Prefill(batch_size=1, prompt_tokens=512), DATA, config.hardware("h200"))
    named = [predict(graph, config.hardware(name), mode=CAPTURED).latency_ms for name in ("b200", "h200", "h100", "h100_pcie", "a100")]
    assert named == sorted(named)
    for faster in (1.0, 2.0, 4.0, 1000.0):
        quick = replace(MACHINE, bandwidth_bytes_per_s=1e12 * faster)
        sharp = replace(MACHINE, peak_flops={"bf16": 1e14 * faster})
        slowest = predict(graph, MACHINE, mode=CAPTURED).latency_ms
        assert max(predict(graph, better, mode=CAPTURED).latency_ms for better in (quick, sharp)) <= slowest


# --- schemes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "weight_bytes"),
    [(INT8_WEIGHT, 4096 * 4096 + 4 * 4096), (INT4_GROUP, 4096 * 4096 // 2 + 4 * 4096 * 32)],
)
def test_weight_only_schemes_shrink_the_bytes_and_keep_the_product(scheme: Scheme, weight_bytes: int) -> None:
    a100 = config.hardware("a100")
    found = predict(net(linear(), 1, 4096, on=a100), a100, mode=CAPTURED, schemes={"0": scheme})
    assert found.latency_ms == pytest.approx(1e3 * (weight_bytes + 2 * 4096 * 2) / 2039e9)
    assert found.weight_bytes == weight_bytes
    assert [row.dtype for row in found.rows] == ["bf16"]


def test_dynamic_schemes_multiply_in_low_precision_and_round_before_and_scale_after() -> None:
    a100 = config.hardware("a100")
    found = predict(net(linear(), 4096, 4096, on=a100), a100, mode=COMPILED, schemes={"0": INT8_DYNAMIC})
    product, rounding, scaling = 2 * 4096**3 / 624e12, 3 * 4096**2 / 2039e9, 6 * 4096**2 / 2039e9
    assert found.latency_ms == pytest.approx(1e3 * (product + rounding + scaling))
    assert row(found, g.PRODUCT)["dtype"] == "int8"


def test_a_quantized_module_reads_the_bytes_of_its_scheme() -> None:
    from optforge.kernels.linears import quantize_

    a100, asked = config.hardware("a100"), net(linear(), 64, 4096)
    for scheme in (INT8_WEIGHT, INT4_GROUP):
        real = linear().to(torch.bfloat16)
        quantize_(real[0], real[0].weight, scheme, step="weights")
        found = predict(net_as_it_is(real, 64, 4096, on=a100), a100, mode=COMPILED)
        predicted = predict(asked, a100, mode=COMPILED, schemes={"0": scheme})
        assert (found.bytes, found.flops, found.weight_bytes) == (predicted.bytes, predicted.flops, predicted.weight_bytes)


def net_as_it_is(module: nn.Module, *shape: int, on: Hardware) -> g.Graph:
    example = ((torch.empty(*shape, dtype=torch.bfloat16, device="meta"),), {})
    return trace(Loaded(module=module.eval(), family="module", name="net", example=example), Forward(), DATA, on)


def test_product_dtype_follows_the_units_of_the_hardware() -> None:
    assert product_dtype(config.hardware("a100"), INT8_DYNAMIC, "bf16") == "int8"
    assert product_dtype(config.hardware("a100"), FP8_DYNAMIC, "bf16") == "bf16"
    assert product_dtype(config.hardware("h100"), FP8_DYNAMIC, "bf16") == "fp8"
    assert product_dtype(config.hardware("h100"), INT4_GROUP, "bf16") == "bf16"
    assert product_dtype(config.hardware("t4"), None, "bf16") == "fp16"
    assert product_dtype(config.hardware("cpu"), None, "bf16") is None


def test_a_missing_unit_is_said() -> None:
    found = predict(net(linear(), 1, 4096), config.hardware("t4"), mode=COMPILED)
    assert found.notes == ["t4 has no bf16 matrix units: those products are counted at its fp16 peak"]
    assert row(found, g.PRODUCT)["dtype"] == "fp16"


# --- what is not known --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_unknown_peaks_give_no_figure_and_a_reason(name: str) -> None:
    found = predict(net(linear(), 1, 4096), config.hardware(name), mode=COMPILED)
    assert not found.known
    assert found.latency_ms is found.bound is found.items_per_s is found.memory_ms is found.ideal_ms is found.mfu is found.mbu is None
    assert found.reason == f"the profile {name} has no published peaks"
    assert found.flops == 2 * 4096 * 4096  # what does not depend on the hardware is still told
    assert found.top == []


def test_what_the_profile_lacks_is_named() -> None:
    graph = net(linear(), 1, 4096)
    slow = predict(graph, replace(MACHINE, bandwidth_bytes_per_s=None), mode=COMPILED)
    assert slow.reason == "the profile machine has no memory bandwidth: set hardware.bandwidth_bytes_per_s"
    odd = predict(graph, replace(MACHINE, peak_flops={"fp8": 1e14}), mode=COMPILED)
    assert odd.reason == "the profile machine has no peak for bf16 products"


def collective(size: float) -> g.Kernel:
    return g.Kernel(kind=g.COLLECTIVE, name="all_reduce", module="", phase=g.FORWARD, dtype="bf16", size=(8,), flops=0.0, bytes=size)


def test_collectives_take_their_bytes_over_the_links() -> None:
    graph = net(linear(), 64, 4096)
    alone = predict(graph, MACHINE, mode=CAPTURED)
    found = predict(graph, MACHINE, mode=CAPTURED, collectives=[collective(1e9)] * 3)
    assert found.latency_ms == pytest.approx(alone.latency_ms + 3 * 1e3 * 1e9 / 1e11)
    assert found.bound == "links"
    assert found.top[0]["name"] == "all_reduce" and found.top[0]["count"] == 3
    unlinked = predict(graph, replace(MACHINE, link_bytes_per_s=None), mode=CAPTURED, collectives=[collective(1e9)])
    assert unlinked.latency_ms is None
    assert unlinked.reason == "the profile machine has no link bandwidth for its collectives: set hardware.link_bytes_per_s"


def test_an_operator_of_unknown_work_leaves_a_lower_bound() -> None:
    graph = net(linear(), 64, 4096)
    mystery = replace(graph.operators[0], name="mylib.mystery", kind=g.UNKNOWN, flops=0.0, why="no fake implementation")
    found = predict(replace(graph, operators=[*graph.operators, mystery]), MACHINE, mode=CAPTURED)
    assert found.partial and found.known
    assert found.latency_ms == predict(graph, MACHINE, mode=CAPTURED).latency_ms
    assert found.notes == ["the time is a lower bound: the work of mylib.mystery (no fake implementation) is unknown"]
    assert not predict(graph, MACHINE, mode=CAPTURED).partial


def test_a_trace_that_ended_early_gives_no_time() -> None:
    found = predict(replace(net(linear(), 1, 4096), unknown="it reads a value"), MACHINE, mode=EAGER)
    assert (found.known, found.latency_ms, found.reason) == (False, None, "it reads a value")
    assert predict(g.Graph(), MACHINE, mode=EAGER).reason == "the model has no operation that the roofline knows"


def test_fit_counts_weights_and_cache(llama3_8b: Loaded) -> None:
    graph = trace(llama3_8b, Decode(context=512, new_tokens=1), DATA, MACHINE)
    assert predict(graph, config.hardware("t4"), mode=EAGER).fits is False  # 16.06 GB of 16
    assert predict(graph, config.hardware("l4"), mode=EAGER).fits is True
    crowded = trace(llama3_8b, Decode(batch_size=100, context=1024, new_tokens=1), DATA, MACHINE)  # 134 MB a sequence
    assert predict(crowded, config.hardware("l4"), mode=EAGER).fits is False
    assert predict(graph, config.hardware("cpu"), mode=EAGER).fits is None


def test_every_prediction_is_labelled_and_is_plain_data() -> None:
    found = predict(net(linear(), 1, 4096), config.hardware("h200"), mode=CAPTURED)
    assert (found.label, found.basis) == ("predicted", BASIS)
    assert "upper bound" in BASIS
    plain = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert plain["rows"][0]["kind"] == "product"
    assert plain["top"][0]["share"] == 1.0
    assert found.low_ms is found.high_ms is found.band is None  # without measurements nobody knows how far it is off


def test_the_ten_costliest_kernels_put_equal_ones_together() -> None:
    loaded = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_key_value_heads=4, vocab_size=50_000)
    found = predict(trace(loaded, Prefill(batch_size=1, prompt_tokens=8), DATA, MACHINE), MACHINE, mode=COMPILED)
    assert (found.top[0]["module"], found.top[0]["count"]) == ("lm_head", 1)
    assert len(found.top) == 10
    gate = next(item for item in found.top if item["module"] == "model.layers.*.mlp.gate_proj")
    assert (gate["count"], gate["flops"]) == (3, 3 * 2 * 8 * 64 * 128)
    assert sum(item["share"] for item in found.top) <= 1


def test_speedup_is_the_ratio_of_the_times_and_none_where_one_is_unknown() -> None:
    graph = net(linear(), 1, 4096)
    slow, fast, unknown = (predict(graph, config.hardware(name), mode=CAPTURED) for name in ("a100", "h200", "cpu"))
    assert speedup(slow, fast) == pytest.approx(4800 / 2039)
    assert speedup(asdict(slow), asdict(fast)) == speedup(slow, fast)
    assert speedup(slow, unknown) is None


# --- calibrated ---------------------------------------------------------------------------------------------------


def calibration(share: float, *, exact: bool = True, **overheads: float) -> Calibration:
    """A device on which every product at 64 x 4096 x 4096 took its roofline over `share`."""
    moved = 2 * (64 * 4096 + 4096 * 4096 + 64 * 4096)
    point = Point(
        kind=g.PRODUCT, name="aten.mm", dtype="bf16", size=(1, 64, 4096, 4096), bytes=float(moved), seconds=moved / 1e12 / share, spread=0.0
    )
    none = dict.fromkeys((item.name for item in fields(Overheads)), 0.0)
    return Calibration(
        name="machine",
        device="A Machine",
        hardware=MACHINE,
        exact=exact,
        source="2026",
        overheads=Overheads(**{**none, **overheads}),
        points=(point,),
    )


BYTES = 2 * (64 * 4096 + 4096 * 4096 + 64 * 4096)


def test_a_calibrated_kernel_takes_its_roofline_over_the_share_that_was_reached() -> None:
    graph = net(linear(), 64, 4096)
    found = predict(graph, MACHINE, mode=CAPTURED, calibration=calibration(0.5))
    assert found.latency_ms == pytest.approx(1e3 * BYTES / 1e12 / 0.5)
    assert found.ideal_ms == pytest.approx(1e3 * BYTES / 1e12)
    assert "A Machine" in found.basis and "upper bound" not in found.basis
    assert "not of this device" in predict(graph, MACHINE, mode=CAPTURED, calibration=calibration(0.5, exact=False)).basis


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99, 1.0])
def test_a_calibrated_time_is_never_below_the_bound(share: float) -> None:
    graph = net(linear(), 64, 4096)
    for mode in (EAGER, COMPILED, CAPTURED):
        bound, found = predict(graph, MACHINE, mode=mode), predict(graph, MACHINE, mode=mode, calibration=calibration(share))
        assert bound.ideal_ms <= bound.latency_ms <= found.latency_ms


def test_a_gpu_hides_the_faster_of_host_and_device_and_a_cpu_adds_them() -> None:
    graph = net(nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(3)]), 64, 4096)
    work, cpu = BYTES / 1e12, replace(MACHINE, backend="cpu")
    for host in (1e-6, 1e-3):
        known = calibration(1.0, eager_operator=host, compiled_kernel=host / 2, compiled_region=7e-6)
        assert predict(graph, MACHINE, mode=EAGER, calibration=known).latency_ms == pytest.approx(1e3 * 3 * max(work, host))
        assert predict(graph, cpu, mode=EAGER, calibration=known).latency_ms == pytest.approx(1e3 * 3 * (work + host))
        launches = 3 * host / 2 + 7e-6
        assert predict(graph, MACHINE, mode=COMPILED, calibration=known).latency_ms == pytest.approx(1e3 * max(3 * work, launches))
        assert predict(graph, cpu, mode=COMPILED, calibration=known).latency_ms == pytest.approx(1e3 * (3 * work + launches))
        assert predict(graph, MACHINE, mode=EAGER, calibration=known).bound == ("memory" if host < work else "launch")


def test_regions_are_entered_one_by_one_and_the_rest_is_launched_eagerly() -> None:
    graph = net(nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(3)]), 64, 4096)
    known = calibration(1.0, eager_operator=1e-3, compiled_kernel=1e-4, compiled_region=1e-2)
    found = predict(graph, replace(MACHINE, backend="cpu"), mode=COMPILED, regions=["0", "2"], calibration=known)
    assert found.latency_ms == pytest.approx(1e3 * (3 * BYTES / 1e12 + 2 * 1e-2 + 2 * 1e-4 + 1e-3))


def test_a_captured_graph_costs_its_replay_and_a_gap_a_kernel() -> None:
    graph = net(nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(3)]), 64, 4096)
    known = calibration(1.0, eager_operator=1.0, compiled_kernel=1.0, captured_kernel=1e-5, call=1e-6)
    assert predict(graph, MACHINE, mode=CAPTURED, calibration=known).latency_ms == pytest.approx(1e3 * 3 * (BYTES / 1e12 + 1e-5))
    slow = calibration(1.0, captured_kernel=1e-5, call=1e-3)
    assert predict(graph, MACHINE, mode=CAPTURED, calibration=slow).latency_ms == pytest.approx(1.0)


def test_the_error_band_lies_about_the_time() -> None:
    band = Band(workload="forward", points=12, median_error=0.08, p90_error=0.2, source="2026")
    found = predict(net(linear(), 64, 4096), MACHINE, mode=CAPTURED, calibration=calibration(0.5), band=band)
    assert found.low_ms == pytest.approx(0.8 * found.latency_ms)
    assert found.high_ms == pytest.approx(1.2 * found.latency_ms)
    assert found.band is band


def test_backward_products_and_the_update_are_ordinary_kernels() -> None:
    graph = net(linear(), 64, 4096)
    forward = graph.operators[0]
    backward = replace(forward, phase=g.BACKWARD, module="")
    update = replace(forward, name="aten._fused_adamw_", kind=g.OPTIMIZER, phase=g.UPDATE, module="", flops=0.0)
    trained = replace(graph, operators=[forward, backward, backward, update], training=True)
    found = predict(trained, MACHINE, mode=CAPTURED)
    assert found.flops == 3 * 2 * 64 * 4096 * 4096
    assert row(found, g.OPTIMIZER)["count"] == 1
    eager_kernels = calibration(1.0, eager_operator=1.0, compiled_kernel=0.1)
    mixed = predict(trained, MACHINE, mode=COMPILED, regions=["0"], calibration=eager_kernels)
    assert mixed.latency_ms == pytest.approx(1e3 * (1.0 + 3 * 0.1))  # the update alone is launched eagerly
