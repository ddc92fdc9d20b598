"""The measured chooser: its arithmetic against brute force and direct measurement, its decisions on injected times."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import CPU, TinyLM, context, tiny_lm, token_ids

import optforge
from optforge import config, registry
from optforge.backends.cpu import CpuBackend
from optforge.calibrate.samples import Samples
from optforge.errors import PlanError
from optforge.kernels.linears import QuantizedLinear
from optforge.measure.compare import full_kl, log_probabilities
from optforge.measure.size import weight_bytes
from optforge.models.base import Loaded
from optforge.share import alias, on_meta
from optforge.spec import Hardware, Quality, QualityResult
from optforge.transforms.base import Context, Receipt, Touched, Transform
from optforge.transforms.choose import Choose, candidates, choice, costs, judge, knapsack, search, times
from optforge.transforms.choose.knapsack import Option
from optforge.transforms.quantize import Quantize, SchemeName, Tied

LIMITS = {"max_kl": 0.05, "max_perplexity_increase": 0.05}


# --- the path ----------------------------------------------------------------------------------------------------------


def brute(options: Mapping[str, Sequence[Option]], budget: float) -> float:
    """The largest gain of all assignments within the budget."""
    choices = [[None, *own] for own in options.values()]
    within = (
        sum(one.gain for one in taken if one)
        for taken in itertools.product(*choices)
        if sum(one.cost for one in taken if one) <= budget * (1 + 1e-12)
    )
    return max(within)


def drawn(layers: int, seed: int) -> dict[str, list[Option]]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(layers, 3, 2, generator=generator).tolist()
    return {
        f"l{i}": [Option(scheme=f"s{j}", gain=gain - 0.2, cost=cost**2) for j, (gain, cost) in enumerate(own)]
        for i, own in enumerate(values)
    }


@pytest.mark.parametrize("seed", range(5))
def test_every_prefix_of_the_path_is_the_best_assignment_of_its_cost(seed: int) -> None:
    """Held against all 4^6 assignments."""
    options = drawn(6, seed)
    moves = knapsack.path(options)
    for count in range(len(moves) + 1):
        taken = knapsack.assignment(moves[:count])
        chosen = [next(one for one in options[layer] if one.scheme == scheme) for layer, scheme in taken.items()]
        gain, cost = sum(one.gain for one in chosen), sum(one.cost for one in chosen)
        assert gain == pytest.approx(sum(move.gain for move in moves[:count]))
        assert cost == pytest.approx(sum(move.cost for move in moves[:count]), abs=1e-9)
        assert gain == pytest.approx(brute(options, cost)), "nothing gains more for as much"


def test_between_two_points_at_most_one_move_is_given_up() -> None:
    options = drawn(6, 7)
    moves = knapsack.path(options)
    costs_ = list(itertools.accumulate((move.cost for move in moves), initial=0.0))
    for budget in torch.linspace(0, costs_[-1], 23).tolist():
        count = max(index for index, cost in enumerate(costs_) if cost <= budget + 1e-12)
        gain = sum(move.gain for move in moves[:count])
        following = moves[count].gain if count < len(moves) else 0.0
        assert gain <= brute(options, budget) + 1e-9 <= gain + following + 2e-9


def test_what_gains_nothing_is_never_taken() -> None:
    options = {"a": [Option(scheme="slow", gain=-1.0, cost=0.0)], "b": [Option(scheme="even", gain=0.0, cost=0.0)]}
    assert knapsack.path(options) == []
    dear = {"a": [Option(scheme="x", gain=1.0, cost=1.0), Option(scheme="dominated", gain=0.9, cost=2.0)]}
    assert knapsack.assignment(knapsack.path(dear)) == {"a": "x"}


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_search_ends_at_the_last_prefix_within_however_wrong_the_scale(scale: float) -> None:
    """Strain is the true cost over its limit, 1.7 times the estimate and a little more for each layer."""
    moves = knapsack.path({f"l{i}": [Option(scheme="s", gain=1.0, cost=scale * (1 + i))] for i in range(60)})
    looks: list[int] = []

    def strain(count: int) -> float:
        looks.append(count)
        return float(sum(move.cost for move in moves[:count]) / scale * 1.7 + 0.3 * count) / 1000

    found = search.furthest(moves, strain)
    best = max(count for count in range(61) if strain(count) <= 1.0)
    assert strain(found) <= 1.0 and best - found <= 1
    assert len(looks) - 62 <= search.MOST


def test_the_search_knows_its_ends() -> None:
    moves = knapsack.path({f"l{i}": [Option(scheme="s", gain=1.0, cost=1.0)] for i in range(4)})
    assert search.furthest(moves, lambda _: 0.5) == 4
    assert search.furthest(moves, lambda _: 2.0) == 0
    assert search.furthest(moves, lambda count: float("inf") if count > 1 else 0.1) == 1
    assert search.furthest([], lambda _: 0.0) == 0


# --- strain ------------------------------------------------------------------------------------------------------------


def test_strain_is_the_largest_share_of_a_limit() -> None:
    found = QualityResult(kl=0.02, perplexity_increase=0.001, baseline_perplexity=20.0, agreement=0.97)
    assert judge.strain(found, None, {"max_kl": 0.04, "max_perplexity_increase": 0.01}) == pytest.approx(0.5)
    assert judge.strain(found, None, {"min_agreement": 0.9}) == pytest.approx(0.3)
    assert judge.strain(found, "outputs hold NaN", {}) == float("inf")
    assert judge.strain(QualityResult(sqnr_db=27.0), None, {"min_sqnr_db": 30.0}) == pytest.approx(10**0.3)
    careful = judge.cautious(found)
    assert careful.perplexity_increase == pytest.approx(0.0202, rel=1e-3), "exp(0.02) - 1: the KL is the better known"
    assert judge.cautious(found, floor=0.02).perplexity_increase == pytest.approx(0.001), "what was measured is the larger"
    scattered = judge.cautious(found, tokens=10_000).perplexity_increase
    assert scattered == pytest.approx(0.0222, rel=2e-3), "exp(0.02 + sqrt(2 x 0.02 / 10,000)) - 1"
    seen = QualityResult(kl=0.005, perplexity_increase=0.011, baseline_perplexity=20.0, count=10_000)
    expected = judge.cautious(seen, tokens=10_000).perplexity_increase
    assert expected == pytest.approx(0.011, rel=1e-2), "measured less one scatter of 0.001, and one of the run's own again"
    assert found.perplexity_increase == 0.001, "the result itself is as it was"


# --- costs -------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """TinyLM as transformers calls it."""

    def __init__(self, inner: TinyLM) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        return self.inner(input_ids)


def model(**options: Any) -> nn.Module:
    return Plain(tiny_lm(layers=3, width=64, heads=4, **options)).eval()


def examples(count: int, tokens: int = 32) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [((), {"input_ids": torch.randint(0, 64, (1, tokens), generator=generator), "use_cache": False}) for _ in range(count)]


def int4(**options: Any) -> Quantize:
    return Quantize(scheme=SchemeName.int4_weight, group_size=64, symmetric=False, **options)


def test_estimated_costs_agree_with_rounding_each_layer_alone() -> None:
    """Against the KL in float64 of the model with one layer rounded at a time."""
    original, taken = model(), examples(24)
    ctx = context(backend=CpuBackend())
    uniforms, _ = candidates.uniforms(original, {"int4_weight": int4()}, ctx)
    layers = {name: original.get_submodule(name) for name in uniforms["int4_weight"].layers}
    rounded = {"int4_weight": uniforms["int4_weight"].layers}
    seen = costs.observe(original, layers, rounded, taken, device=torch.device("cpu"), classes=True)
    assert seen.positions == 24 * 32
    estimated = {name: own["int4_weight"] for name, own in seen.costs().items()}
    measured = {}
    with torch.no_grad():
        for name in layers:
            tree = alias(original)
            candidates.rewrite(tree, {name: "int4_weight"}, {"int4_weight": int4()}, ctx)
            pairs = [(original(**kwargs)[0].double(), tree(**kwargs)[0].double()) for _, kwargs in taken]
            measured[name] = float(torch.stack([_kl(a, b).mean() for a, b in pairs]).mean())
    ratios = torch.tensor([estimated[name] / measured[name] for name in layers])
    assert 0.8 < float(ratios.median()) < 1.25
    assert float(ratios.min()) > 0.5 and float(ratios.max()) < 2.0
    assert not any(parameter.grad is not None for parameter in original.parameters())
    assert all(not module._forward_hooks for module in original.modules())


def _kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def test_the_first_order_is_the_slope_of_the_loss() -> None:
    """Half of a small change of one layer, held against the loss of the true labels with the layer so changed."""
    original, taken = model().double(), examples(4)
    layer = original.get_submodule("inner.layers.1.mlp.up_proj")
    other = nn.Linear(64, 128, bias=False).double()
    other.weight = nn.Parameter(layer.weight.detach() + 1e-6 * torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).double())
    labels = lambda example: torch.cat([example[1]["input_ids"][:, 1:], torch.tensor([[-1]])], 1).flatten()  # noqa: E731
    seen = costs.observe(original, {"a": layer}, {"s": {"a": other}}, taken, device=torch.device("cpu"), classes=True, labels=labels)

    def likelihood() -> float:
        with torch.no_grad():
            logs = [original(**kwargs)[0, :-1].log_softmax(-1).gather(-1, kwargs["input_ids"][0, 1:, None]) for _, kwargs in taken]
        return float(torch.cat(logs).sum())

    before = likelihood()
    layer.weight = other.weight
    assert seen.first["a"]["s"] == pytest.approx(likelihood() - before, rel=1e-2)
    assert seen.labelled == 4 * 31


def test_without_classes_the_cost_is_the_squared_relative_error() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).eval()
    other = nn.Linear(32, 48)
    other.load_state_dict({key: value + 1e-3 * torch.randn_like(value) for key, value in original[0].state_dict().items()})
    taken = [((torch.randn(16, 32),), {}) for _ in range(64)]
    seen = costs.observe(original, {"0": original[0]}, {"s": {"0": other}}, taken, device=torch.device("cpu"), classes=False)
    with torch.no_grad():
        pairs = [(original(x), original[2](torch.tanh(other(x)))) for (x,), _ in taken]
    exact = sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(a.square().sum()) for a, _ in pairs)
    assert seen.costs()["0"]["s"] == pytest.approx(exact, rel=0.15)


# --- times -------------------------------------------------------------------------------------------------------------


def test_layers_that_do_the_same_work_share_a_figure() -> None:
    original = model()
    layers = {name: module for name, module in original.named_modules() if isinstance(module, nn.Linear)}
    found = times.sites(original, layers, lambda module: lambda: module(token_ids(2, 8)))
    assert set(found) == set(layers) and all(site.calls == 1 for site in found.values())
    assert {tuple(site.input.shape) for name, site in found.items() if name.endswith("q_proj")} == {(2, 8, 64)}
    groups = {tuple(sorted({name.rpartition(".")[2] for name in names})): len(names) for names in times.shapes(layers, found)}
    square = ("k_proj", "lm_head", "o_proj", "q_proj", "v_proj")  # the vocabulary is as large as the width
    assert groups == {square: 13, ("gate_proj", "up_proj"): 6, ("down_proj",): 3}


def test_the_prompt_that_makes_a_pass_ready_is_not_the_pass() -> None:
    original = model()
    layers = {name: module for name, module in original.named_modules() if isinstance(module, nn.Linear)}

    def once(module: nn.Module) -> Any:
        module(token_ids(1, 16))
        return lambda: module(token_ids(1, 1))

    assert {tuple(site.input.shape[:2]) for site in times.sites(original, layers, once).values()} == {(1, 1)}


def test_timed_weights_do_not_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 x 64 in fp32 takes 16 KiB, in int8 4.25 KiB with its scales: 256 KiB of those are 61 layers, in stacks of 4."""
    monkeypatch.setattr(times, "CACHES_BYTES", 256 * 1024)
    monkeypatch.setattr(times, "OPTIONS", dataclasses.replace(times.OPTIONS, warmup=1, min_rounds=3, max_s=0.01, batch_ms=0.1))
    original = model()
    ctx = context(backend=CpuBackend())
    uniforms, _ = candidates.uniforms(original, {"int8_weight": Quantize(scheme=SchemeName.int8_weight)}, ctx)
    names = [f"inner.layers.{i}.attention.q_proj" for i in range(3)]
    layers = {name: original.get_submodule(name) for name in names}
    found = times.sites(original, layers, lambda module: lambda: module(token_ids(1, 1)))
    rounded = {"int8_weight": uniforms["int8_weight"].layers}
    assert times._count([rounded["int8_weight"][names[0]]], 3, layers[names[0]]) == 64
    timed = times.measure(names, layers, rounded, found, ctx)["int8_weight"]
    assert timed.low <= timed.ratio <= timed.high and timed.before > 0


# --- the choice, on injected times -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids:
    """Token ids without end; called real, as the toy's weights are called trained."""

    real: bool = True

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path / "cache"))


def live(original: nn.Module, limits: Mapping[str, float] = LIMITS, *, weights: str = "trained", **fields: Any) -> Context:
    """What a run offers a step."""
    loaded = Loaded(module=original, family="causal_lm", name="toy", vocab_size=64, weights=weights)
    samples = Samples(loaded=loaded, data=Ids(), data_name="ids", quality=Quality(tokens=64, window=32))  # type: ignore[arg-type]
    values = {"backend": CpuBackend(), "samples": samples, "limits": limits, "once": lambda m: lambda: m(token_ids(1, 4))}
    return context("weights", ((token_ids(),), {}), **{**values, **fields})


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, float]]]:
    """End of a layer's name -> scheme -> how many times faster it is; a call takes 10 us as it is. `calls` counts the measurements."""
    table: dict[str, dict[str, float]] = {"": {"int8_dynamic": 2.0, "int4_weight": 3.0}}

    def measure(names: Sequence[str], layers: Any, rounded: Mapping[str, Any], found: Any, ctx: Context) -> dict[str, times.Time]:
        table.setdefault("calls", {})["count"] = table.get("calls", {}).get("count", 0) + 1
        own = next(speeds for end, speeds in table.items() if end != "calls" and any(name.endswith(end) for name in names))
        return {
            scheme: times.Time(seconds=1e-5 / ratio, before=1e-5, low=0.99 * ratio, high=1.01 * ratio)
            for scheme, ratio in own.items()
            if scheme in rounded
        }

    monkeypatch.setattr(choice.times, "measure", measure)
    yield table


def chooser(**options: Any) -> Choose:
    return Choose(**{"schemes": ["int8_dynamic", "int4_weight"], "samples": 4, "sample_tokens": 32, **options})


def chosen(receipt: Receipt) -> dict[str, str]:
    return {row["layer"]: row["choice"] for row in receipt.decisions["table"] if row["choice"]}


def test_the_option_maps_to_its_own_class() -> None:
    step = config.step("weights", {"use": "quantize/auto", "schemes": ["int8_dynamic"]})
    assert isinstance(step.transform, Choose) and isinstance(step.transform, Transform)
    assert step.kind == "quantize" and registry.transform("quantize/int8_weight") is Quantize
    assert "quantize/auto" not in registry.kinds()


def test_wide_limits_take_the_fastest_scheme_everywhere(speeds: dict[str, dict[str, float]]) -> None:
    original = model()
    tree = alias(original)
    receipt = chooser().apply(tree, live(original, {"max_kl": 100.0}))
    assert set(chosen(receipt).values()) == {"int4_weight"}
    layers = [module for module in tree.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == len(receipt.touched) == 22
    assert {module.scheme.name for module in layers} == {"int4_weight"}


def test_within_tight_limits_the_measured_quality_holds(speeds: dict[str, dict[str, float]]) -> None:
    """The KL on the samples is measured here again, apart from the code that chose."""
    original = model()
    tree = alias(original)
    limit = 0.0003
    ctx = live(original, {"max_kl": limit})
    receipt = chooser().apply(tree, ctx)
    table = {row["layer"]: row for row in receipt.decisions["table"]}
    assert len(chosen(receipt)) > 0 and "int8_dynamic" in set(chosen(receipt).values())
    assert set(chosen(receipt).values()) != {"int4_weight"}
    assert ctx.samples is not None
    with torch.no_grad():
        kls = [
            full_kl(log_probabilities(original(**kwargs)[0]), log_probabilities(tree(**kwargs)[0]))
            for _, kwargs in ctx.samples.take(4, tokens=32, step="x").examples
        ]
    assert float(torch.cat(kls).mean()) <= limit
    assert all(row["candidates"]["int4_weight"]["cost"] > row["candidates"]["int8_dynamic"]["cost"] for row in table.values())
    assert any("of the limits" in note for note in receipt.notes)


def test_a_layer_that_would_be_slower_stays_as_it_is(speeds: dict[str, dict[str, float]]) -> None:
    """B45: the times are injected. What is slower on this device is not taken, and the receipt has both numbers."""
    speeds.clear()
    speeds.update({"down_proj": {"int8_dynamic": 0.5, "int4_weight": 0.7}, "": {"int8_dynamic": 1.5, "int4_weight": 0.9}})
    original = model()
    tree = alias(original)
    receipt = chooser().apply(tree, live(original, {"max_kl": 100.0}))
    assert set(chosen(receipt).values()) == {"int8_dynamic"}
    assert not any(name.endswith("down_proj") for name in chosen(receipt))
    reason = receipt.skipped["inner.layers.0.mlp.down_proj"]
    assert reason == "no candidate is faster here: int4_weight 0.70x (0.69 to 0.71)"
    row = next(row for row in receipt.decisions["table"] if row["layer"] == "inner.layers.0.mlp.down_proj")
    assert row["microseconds"] == pytest.approx(10.0)
    assert row["candidates"]["int8_dynamic"]["microseconds"] == pytest.approx(20.0)


def test_where_nothing_is_faster_nothing_is_touched_and_the_reason_is_given(speeds: dict[str, dict[str, float]]) -> None:
    """B45 again, of all layers: the engine refuses the step with these reasons, and no slower model comes out."""
    speeds.clear()
    speeds.update({"": {"int8_dynamic": 0.4, "int4_weight": 0.9}})
    receipt = chooser().apply(alias(original := model()), live(original))
    assert receipt.touched == []
    assert set(receipt.skipped.values()) == {"no candidate is faster here: int4_weight 0.90x (0.89 to 0.91)"}


def test_a_layer_that_no_pass_calls_stays_as_it_is(speeds: dict[str, dict[str, float]]) -> None:
    original = model()
    ctx = live(original, {"max_kl": 100.0}, once=lambda m: lambda: m.inner.layers[0](m.inner.embed(token_ids(1, 4))))
    receipt = chooser().apply(alias(original), ctx)
    assert all(name.startswith("inner.layers.0.") for name in chosen(receipt))
    assert receipt.skipped["inner.lm_head"] == "no pass of the workload calls it"


def test_random_weights_are_chosen_for_by_time_alone(speeds: dict[str, dict[str, float]]) -> None:
    original = model()
    receipt = chooser().apply(alias(original), live(original, {"max_kl": 1e-9}, weights="random"))
    assert set(chosen(receipt).values()) == {"int4_weight"}
    assert any("random weights" in note for note in receipt.notes)


def test_a_limit_on_the_weights_is_kept_at_the_least_cost(speeds: dict[str, dict[str, float]]) -> None:
    original = model()
    limit = weight_bytes(original) * 2 // 3
    tree = alias(original)
    receipt = chooser(max_weight_bytes=limit).apply(tree, live(original, {}))
    assert weight_bytes(tree) <= limit
    assert 0 < len(chosen(receipt)) < 22 and "calls" not in speeds, "time was not measured"
    table = {row["layer"]: row["candidates"] for row in receipt.decisions["table"]}
    taken = sum(table[layer][scheme]["cost"] for layer, scheme in chosen(receipt).items())
    uniform = sum(own["int4_weight"]["cost"] for own in table.values())
    assert taken < uniform / 2
    with pytest.raises(PlanError, match="the smallest choice takes") as refused:
        chooser(max_weight_bytes=1000).apply(alias(original), live(original, {}))
    least = int(refused.value.problems[0].fix.partition("=")[2])
    tree = alias(original)
    chooser(max_weight_bytes=least).apply(tree, live(original, {}))
    assert weight_bytes(tree) <= least


# --- what is remembered ------------------------------------------------------------------------------------------------


def test_a_choice_is_remembered_for_the_same_and_for_nothing_else(
    speeds: dict[str, dict[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    """B87: equal structure and names with other weights, one other option, other limits: each is a choice of its own."""

    def measured(original: nn.Module, limits: Mapping[str, float] = LIMITS, **options: Any) -> tuple[bool, Receipt]:
        speeds.pop("calls", None)
        receipt = chooser(**options).apply(alias(original), live(original, limits))
        return "calls" in speeds, receipt

    first = model()
    with caplog.at_level("INFO", logger="optforge"):
        again, receipt = measured(first)
        assert again and "choice not there yet" in caplog.text
        again, second = measured(first)
        assert not again and "choice found" in caplog.text
    assert chosen(second) == chosen(receipt) and "remembered" in " ".join(second.notes)
    other = model()
    with torch.no_grad():
        other.get_submodule("inner.layers.0.mlp.up_proj").weight[0, 0] += 1e-3
    assert measured(other)[0]
    assert measured(first, group_size=32)[0] and measured(first, {"max_kl": 0.04})[0] and measured(first, samples=3)[0]
    assert not measured(first)[0]


def test_a_damaged_file_is_no_choice(speeds: dict[str, dict[str, float]], tmp_path: Path) -> None:
    original = model()
    receipt = chooser().apply(alias(original), live(original))
    (path,) = (tmp_path / "cache" / "chosen").glob("*.json")
    path.write_text('{"assigned": {')
    speeds.pop("calls")
    assert chosen(chooser().apply(alias(original), live(original))) == chosen(receipt) and "calls" in speeds


# --- planning, replaying, refusing -------------------------------------------------------------------------------------


def test_a_plan_shows_a_structure_and_says_what_it_cannot() -> None:
    meta = on_meta(model())
    before = weight_bytes(meta)
    receipt = chooser().apply(meta, context("weights", limits=LIMITS))
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert {touched.what for touched in receipt.touched} == {"int8_dynamic"}
    assert receipt.bytes_before - receipt.bytes_after == before - weight_bytes(meta)
    assert receipt.notes[0].startswith("planned as int8_dynamic on 22 layers") and "the run measures" in receipt.notes[0]
    smallest = weight_bytes(on_meta(model()))
    decode = Choose().apply(on_meta(model()), context("weights", limits=LIMITS, workload="decode"))
    assert {touched.what for touched in decode.touched} == {"int8_weight"}, "few rows: activations stay as they are"
    assert "all int4_weight" in receipt.notes[1] and f"{smallest / 1e6:,.0f} MB" in receipt.notes[1]


def test_candidates_without_units_are_left_out_with_the_reason() -> None:
    old = Hardware(name="v100", backend="nvidia", arch="sm_70", peak_flops={"fp16": 1e14})
    ctx = dataclasses.replace(context("weights", limits=LIMITS), target=old)
    receipt = Choose().apply(on_meta(model()), ctx)
    assert {touched.what for touched in receipt.touched} == {"int8_weight"}
    assert any("int8_dynamic is no candidate: v100 has no int8" in note for note in receipt.notes)
    assert list(Choose().steps(old)) == ["int8_dynamic", "fp8_dynamic", "int8_weight", "int4_weight", "fp8_weight"]
    assert list(Choose().steps(CPU)) == ["int8_dynamic", "int8_weight"], "what is emulated saves memory and no time"
    assert "int4_weight" in Choose(max_weight_bytes=1).steps(CPU)
    with pytest.raises(PlanError, match="no scheme fits a layer of this model"):
        Choose(schemes=["int8_dynamic"]).apply(on_meta(model()), ctx)


def test_the_receipt_rebuilds_the_mixture_bit_for_bit(speeds: dict[str, dict[str, float]]) -> None:
    speeds.clear()
    speeds.update({"down_proj": {"int4_weight": 2.0}, "q_proj": {"int8_dynamic": 0.5}, "": {"int8_dynamic": 2.0, "int4_weight": 1.5}})
    original = model()
    tree = alias(original)
    receipt = chooser().apply(tree, live(original, {"max_kl": 100.0}))
    assert set(chosen(receipt).values()) == {"int8_dynamic", "int4_weight"}
    written = json.loads(json.dumps(dataclasses.asdict(receipt), allow_nan=False))
    loaded = Receipt(**{**written, "touched": [Touched(**touched) for touched in written["touched"]]})
    rebuilt = on_meta(original)
    chooser().replay(rebuilt, loaded)
    rebuilt.load_state_dict(tree.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(rebuilt(token_ids()), tree(token_ids()))
    assert [type(m) for m in rebuilt.modules()] == [type(m) for m in tree.modules()]
    assert torch.equal(original(token_ids()), model()(token_ids())), "what it shares tensors with is as it was"


def test_a_second_time_is_refused(speeds: dict[str, dict[str, float]]) -> None:
    original = model()
    tree = alias(original)
    chooser().apply(tree, live(original, {"max_kl": 100.0}))
    with pytest.raises(PlanError, match="already"):
        chooser().apply(tree, live(tree, {"max_kl": 100.0}))


def test_a_tied_head_follows_the_policy(speeds: dict[str, dict[str, float]]) -> None:
    original = model(tied=True)
    tree = alias(original)
    receipt = chooser(tied=Tied.untie).apply(tree, live(original, {"max_kl": 100.0}))
    assert "inner.lm_head" in chosen(receipt)
    saved = sum(row["candidates"][row["choice"]]["saved_bytes"] for row in receipt.decisions["table"])
    assert weight_bytes(tree) == weight_bytes(original) - saved, "the head's own copy counts"
    tree = alias(original)
    receipt = chooser().apply(tree, live(original, {"max_kl": 100.0}))
    assert "tied to" in receipt.skipped["inner.lm_head"]


def test_what_has_nothing_to_measure_with_says_so() -> None:
    original = model()
    with pytest.raises(PlanError, match="neither a workload nor data"):
        chooser().apply(alias(original), context("weights", limits=LIMITS, backend=CpuBackend()))


@pytest.mark.parametrize(
    ("options", "fields", "told"),
    [
        ({}, {"limits": {}}, "has no limit to choose within"),
        ({}, {"limits": {"min_metric": 1.0}}, "has no limit to choose within"),
        ({"schemes": ["int8_dynamik"]}, {}, "unknown scheme 'int8_dynamik'"),
        ({"group_size": 7}, {}, "group_size 7 has no kernel"),
        ({"samples": 0}, {}, "must be 1 or more, is 0"),
        ({}, {"workload": "train"}, "no gradient"),
    ],
)
def test_what_is_wrong_is_told_while_planning(options: dict[str, Any], fields: dict[str, Any], told: str) -> None:
    problems = list(chooser(**options).check(context("weights", **{"limits": LIMITS, **fields})))
    assert any(told in problem.what and (problem.fix or "must be" in told) for problem in problems), problems
    assert list(chooser().check(context("weights", limits=LIMITS))) == []
    assert list(chooser(max_weight_bytes=10**9).check(context("weights"))) == []


RECIPE = """
name: chosen
steps: {weights: {use: quantize/auto, schemes: [int8_weight, int4_weight], samples: 1}}
limits: {max_relative_error: 0.05}
"""


def test_a_run_offers_what_the_choice_needs_and_its_artifact_loads(speeds: dict[str, dict[str, float]], tmp_path: Path) -> None:
    """The whole way: plan on meta, one pass of the workload, measured quality, report, saved tensors, replay from the receipt."""
    speeds.clear()
    speeds.update({"": {"int8_weight": 1.5, "int4_weight": 3.0}})
    (tmp_path / "chosen.yaml").write_text(RECIPE)
    torch.manual_seed(0)
    original = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)), nn.Linear(64, 64)).eval()
    x = torch.randn(32, 64)
    module, report = optforge.optimize(
        original,
        tmp_path / "chosen.yaml",
        hardware="cpu",
        example=x,
        overrides=["save=true", "measure.max_s=0.05", "measure.warmup=1"],
        folder=tmp_path / "run",
    )
    (step,) = report.steps
    assert step.receipt is not None and step.quality is not None and step.quality.relative_error is not None
    assert step.quality.missed == [] and step.quality.relative_error <= 0.05
    schemes = {row["layer"]: row["choice"] for row in step.receipt["decisions"]["table"]}
    assert {"int8_weight"} < set(schemes.values()), "int4 everywhere is over the limit, int8 everywhere is not the fastest"
    loaded = optforge.load(tmp_path / "run", model=copy.deepcopy(original))
    with torch.no_grad():
        assert torch.equal(loaded(x), module(x))
