"""Calibrated quantization of whole models: what is decided on samples, what is left and why, and that the result is one artifact."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llamas
import pytest
import torch
from torch import Tensor, nn
from toys import context

from optforge.backends.cpu import CpuBackend
from optforge.calibrate import kept
from optforge.calibrate.samples import Taken
from optforge.errors import DataError, PlanError, StepError
from optforge.kernels.linears import QuantizedLinear
from optforge.share import alias, on_meta
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.quantize import Quantize, SchemeName, Tied, block
from optforge.transforms.quantize.algorithms import Algorithm, Uncalibrated
from optforge.transforms.quantize.grids import Grid

CALIBRATED = (Algorithm.gptq, Algorithm.awq)


class Given:
    """Samples that a test made."""

    reason_against: str | None = None

    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def take(self, count: int, *, tokens: int, step: str) -> Taken:
        return Taken(examples=self.examples[:count], bad=[], source="a test")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "cache_dir", lambda: tmp_path)
    return tmp_path


def texts(count: int = 6, tokens: int = 24) -> list[Any]:
    ids = torch.randint(0, llamas.VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(3))
    return [((), {"input_ids": row[None], "use_cache": False}) for row in ids]


def rows(count: int = 8, columns: int = 64) -> list[Any]:
    draw = torch.Generator().manual_seed(4)
    mix = torch.randn(columns, columns, generator=draw)
    return [((torch.randn(16, columns, generator=draw) @ mix,), {}) for _ in range(count)]


def around(examples: list[Any]) -> Context:
    return context("weights", backend=CpuBackend(), samples=Given(examples))


def quantize(model: nn.Module, examples: list[Any], scheme: str = "int4_weight", **fields: Any) -> Receipt:
    sizes = {"group_size": 16, "symmetric": False} if scheme == "int4_weight" else {}
    return Quantize(scheme=SchemeName[scheme], **sizes | fields).apply(model, around(examples))


def logits(model: nn.Module, examples: list[Any]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(*args, **kwargs).logits.double() for args, kwargs in examples])


def rebuilt(model: nn.Module, fresh: nn.Module, receipt: Receipt) -> nn.Module:
    """As an artifact is loaded: the receipt from JSON, the structure on meta, the tensors assigned."""
    written = json.loads(json.dumps(dataclasses.asdict(receipt), allow_nan=False))
    read = Receipt(**{**written, "touched": [Touched(**touched) for touched in written["touched"]]})
    skeleton = on_meta(fresh)
    Quantize(scheme=SchemeName.int8_weight).replay(skeleton, read)
    skeleton.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        owner, _, local = name.rpartition(".")
        skeleton.get_submodule(owner)._buffers[local] = buffer
    return skeleton


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda a: a.name)
def test_the_baseline_is_untouched_the_plan_has_the_structure_and_the_receipt_rebuilds_it(algorithm: Algorithm) -> None:
    original, examples = llamas.module(), texts()
    before = {name: value.clone() for name, value in original.state_dict().items()}
    model, planned = alias(original), on_meta(original)
    fields = {"algorithm": algorithm, "ignore": ["lm_head"]}
    receipt = quantize(model, examples, **fields)
    assert all(torch.equal(before[name], value) for name, value in original.state_dict().items())
    step = Quantize(scheme=SchemeName.int4_weight, group_size=16, symmetric=False, **fields)
    foreseen = step.apply(planned, context("weights"))
    assert [touched.name for touched in foreseen.touched] == [touched.name for touched in receipt.touched[: len(foreseen.touched)]]
    assert foreseen.bytes_after == receipt.bytes_after
    shapes = [{name: (value.shape, value.dtype) for name, value in each.state_dict().items()} for each in (planned, model)]
    assert shapes[0] == shapes[1]
    assert torch.equal(logits(rebuilt(model, original, receipt), examples), logits(model, examples))


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("algorithm", CALIBRATED, ids=lambda a: a.name)
def test_a_calibrated_model_is_nearer_to_the_original_than_a_rounded_one(algorithm: Algorithm, packed: bool) -> None:
    from optforge.transforms.fuse.packing import pack_

    original, examples = llamas.module(), texts(16)
    if packed:
        for layer in original.model.layers:
            pack_(layer.self_attn, "qkv_proj", ["q_proj", "k_proj", "v_proj"])
            pack_(layer.mlp, "gate_up_proj", ["gate_proj", "up_proj"])
    expected = logits(original, examples)
    off = {}
    for each in (Algorithm.rtn, algorithm):
        quantize(model := alias(original), examples, algorithm=each, ignore=["lm_head"], act_order=True)
        off[each] = float((logits(model, examples) - expected).norm() / expected.norm())
    assert off[algorithm] < 0.95 * off[Algorithm.rtn]


def test_packed_layers_are_decided_as_they_are_apart() -> None:
    from optforge.transforms.fuse.packing import pack_

    apart, together, examples = llamas.module(), llamas.module(), texts()
    for layer in together.model.layers:
        pack_(layer.self_attn, "qkv_proj", ["q_proj", "k_proj", "v_proj"])
        pack_(layer.mlp, "gate_up_proj", ["gate_proj", "up_proj"])
    quantize(apart, examples, algorithm=Algorithm.gptq, ignore=["lm_head"])
    quantize(together, examples, algorithm=Algorithm.gptq, ignore=["lm_head"])
    first, second = apart.model.layers[0], together.model.layers[0]
    parts = [getattr(first.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(torch.cat(parts), second.self_attn.qkv_proj.weight)


@pytest.mark.parametrize("scheme", ["int8_weight", "int8_dynamic", "fp8_weight"])
def test_gptq_stores_eight_bits_too(scheme: str) -> None:
    original, examples = llamas.module(), texts(16)
    expected = logits(original, examples)
    off = {}
    for each in (Algorithm.rtn, Algorithm.gptq):
        receipt = quantize(model := alias(original), examples, scheme, algorithm=each, ignore=["lm_head"])
        off[each] = float((logits(model, examples) - expected).norm() / expected.norm())
        assert receipt.decisions["scheme"]["name"] == scheme
    assert off[Algorithm.gptq] < off[Algorithm.rtn] < 0.1


def test_smoothing_moves_the_range_of_inputs_into_weights_exactly() -> None:
    original, examples = llamas.module(), texts()
    with torch.no_grad():
        original.model.layers[0].input_layernorm.weight[::7] *= 20
    expected = logits(original, examples)
    receipt = quantize(model := alias(original), examples, "int8_dynamic", smooth=0.5, ignore=["lm_head"])
    carrier = next(touched for touched in receipt.touched if touched.name == "model.layers.0.input_layernorm")
    assert carrier.what == "carries the scales of q_proj, k_proj, v_proj"
    old, new = (each.model.layers[0] for each in (original, model))
    scales = old.input_layernorm.weight / new.input_layernorm.weight
    assert float((scales.amax() / scales.amin()).detach()) > 3
    wanted = old.self_attn.q_proj.weight * scales
    off = (new.self_attn.q_proj.dequantize() - wanted).abs()
    assert bool((off <= 0.5 * new.self_attn.q_proj.weight_scale * 1.001).all()), "the weight holds exactly what the norm gave away"
    plain = alias(original)
    quantize(plain, examples, "int8_dynamic", ignore=["lm_head"])
    errors = [float((logits(each, examples) - expected).norm()) for each in (model, plain)]
    assert errors[0] < errors[1]


def test_a_norm_in_bf16_gives_away_exactly_what_its_layers_take() -> None:
    original, examples = llamas.module(dtype=torch.bfloat16), texts()
    quantize(model := alias(original), examples, "int8_dynamic", smooth=0.5, ignore=["lm_head"])
    old, new = (each.model.layers[0] for each in (original, model))
    scales = old.input_layernorm.weight.float() / new.input_layernorm.weight.float()
    off = (new.self_attn.q_proj.dequantize() - old.self_attn.q_proj.weight.float() * scales).abs()
    assert bool((off <= 0.5 * new.self_attn.q_proj.weight_scale * 1.001).all())


@pytest.mark.parametrize("algorithm", CALIBRATED, ids=lambda a: a.name)
def test_blocks_that_were_decided_are_found_again_after_a_kill(algorithm: Algorithm, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = texts()
    expected, model = llamas.module(), llamas.module()
    decide, calls = block.Deciding.decide, []

    def killed(self: block.Deciding, *args: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decide(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(block.Deciding, "decide", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(model, examples, algorithm=algorithm, ignore=["lm_head"])
    resumed = quantize(model := llamas.module(), examples, algorithm=algorithm, ignore=["lm_head"])
    assert any(note.startswith("1 of 2 blocks") for note in resumed.notes)
    (cache / "file").write_text("no folder")
    monkeypatch.setattr(kept, "cache_dir", lambda: cache / "file" / "below")  # a cache that cannot be written is none
    fresh = quantize(expected, examples, algorithm=algorithm, ignore=["lm_head"])
    assert not any("blocks were decided" in note for note in fresh.notes)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())


def test_other_options_find_nothing_of_an_earlier_run() -> None:
    examples = texts()
    quantize(llamas.module(), examples, algorithm=Algorithm.gptq, ignore=["lm_head"])
    for fields in ({"damping": 0.02}, {"act_order": False}, {"clip": False}, {"group_size": 32}, {"ignore_extra": ["down_proj"]}):
        receipt = quantize(llamas.module(), examples, **{"algorithm": Algorithm.gptq, "ignore": ["lm_head"], **fields})
        assert not any("earlier run" in note for note in receipt.notes), fields


class TwoHeads(nn.Module):
    """The second head is never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(64, 16)

    def forward(self, x: Tensor, *, other: bool = False) -> Tensor:
        return (self.second if other else self.first)(self.body(x))


@pytest.mark.case("B55")
@pytest.mark.parametrize("algorithm", CALIBRATED, ids=lambda a: a.name)
def test_b55_a_layer_without_data_is_kept_and_named_or_refused(algorithm: Algorithm) -> None:
    torch.manual_seed(0)
    model, strict = TwoHeads(), TwoHeads()
    receipt = quantize(model, rows(), algorithm=algorithm)
    assert receipt.skipped.keys() == {"second"} and "no calibration sample reaches it" in receipt.skipped["second"]
    assert type(model.second) is nn.Linear and isinstance(model.first, QuantizedLinear)
    assert set(receipt.decisions["layers"]) == {"body", "first"}
    with pytest.raises(PlanError, match="no calibration sample reaches layer second"):
        quantize(strict, rows(), algorithm=algorithm, uncalibrated=Uncalibrated.error)


@pytest.mark.case("B52")
def test_b52_no_data_is_said_before_anything_runs() -> None:
    step = Quantize(scheme=SchemeName.int4_weight, group_size=16, algorithm=Algorithm.gptq)
    samples = Given([])
    samples.reason_against = "data=random_tokens is random"
    (problem,) = step.check(context("weights", samples=samples))
    assert problem.what == "gptq needs data to calibrate on, and data=random_tokens is random"
    assert "calibration.factory" in problem.fix and "steps.weights.algorithm=rtn" in problem.fix
    with pytest.raises(DataError, match="gptq needs data to calibrate on, and there is none here"):
        step.apply(nn.Sequential(nn.Linear(64, 64)), context("weights", backend=CpuBackend()))
    for free in (Algorithm.rtn, Algorithm.hqq):
        assert list(dataclasses.replace(step, algorithm=free).check(context("weights", samples=samples))) == []


@pytest.mark.case("B51")
def test_b51_two_samples_and_a_dead_column_raise_the_damping_of_that_layer_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    few = [((torch.cat([torch.zeros(1, 1), torch.randn(1, 63)], 1),), {}) for _ in range(2)]
    receipt = quantize(model, few, algorithm=Algorithm.gptq, damping=0)
    raised = [note for note in receipt.notes if "damping was raised to" in note]
    assert [note.partition(":")[0] for note in raised] == ["0", "2"]
    assert model(few[0][0][0]).isfinite().all()
    assert quantize(nn.Sequential(nn.Linear(64, 64)), few, algorithm=Algorithm.gptq).notes == ["calibrated on 2 samples of a test"]


@pytest.mark.case("B51")
def test_b51_a_layer_that_cannot_be_solved_is_rounded_and_the_others_go_on() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e25  # finite, and its square is not

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), Large(), nn.Linear(64, 64))
    rounded = copy.deepcopy(layers)
    receipt = quantize(layers, rows(), algorithm=Algorithm.gptq)
    quantize(rounded, rows())
    (note,) = [note for note in receipt.notes if "rounded to nearest" in note]
    assert note.startswith("2: rounded to nearest, its inputs' second moments cannot be factorized")
    assert torch.equal(layers[2].weight, rounded[2].weight) and not torch.equal(layers[0].weight, rounded[0].weight)


@pytest.mark.case("B66")
@pytest.mark.parametrize("fields", [{"algorithm": each} for each in Algorithm] + [{"smooth": 0.5}], ids=str)
@pytest.mark.parametrize("scheme", ["int4_weight", "int8_dynamic", "fp8_weight"])
def test_b66_two_of_four_are_zero_after_every_algorithm(scheme: str, fields: dict[str, Any]) -> None:
    if (scheme != "int8_dynamic" and "smooth" in fields) or (scheme != "int4_weight" and fields.get("algorithm") is Algorithm.hqq):
        pytest.skip("refused by check")
    original, examples = llamas.module(), texts()
    zeros = {}
    for name, module in original.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            small = module.weight.detach().reshape(-1, 4).abs().argsort(1).argsort(1) < 2
            zeros[name] = small.reshape(module.weight.shape)
            module.weight = nn.Parameter(module.weight.detach() * ~zeros[name])
    quantize(model := alias(original), examples, scheme, ignore=["lm_head"], **fields)
    for name, at in zeros.items():
        assert bool((model.get_submodule(name).dequantize()[at] == 0).all()), name


@pytest.mark.case("B96")
def test_b96_an_empty_batch_says_nothing_and_breaks_nothing() -> None:
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))
    second.load_state_dict(first.state_dict())
    quantize(first, [*rows(), ((torch.zeros(0, 64),), {})], algorithm=Algorithm.gptq)
    quantize(second, rows(), algorithm=Algorithm.gptq)
    assert torch.equal(first[0].weight, second[0].weight)
    assert first(torch.zeros(0, 64)).shape == (0, 64)
    only = quantize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 0)), rows(), algorithm=Algorithm.gptq)
    assert only.skipped.keys() == {"1"}


@pytest.mark.case("B63")
def test_b63_a_second_calibrated_step_is_refused_at_plan_time() -> None:
    model = on_meta(nn.Sequential(nn.Linear(64, 64)))
    step = Quantize(scheme=SchemeName.int8_weight, algorithm=Algorithm.gptq)
    step.apply(model, context("first"))
    with pytest.raises(PlanError, match=r"layer 0 is already int8 \(step first\)"):
        step.apply(model, context("second"))


@pytest.mark.case("B32")
def test_b32_misfits_are_named_before_any_sample_is_read() -> None:
    class Unread(Given):
        def take(self, count: int, *, tokens: int, step: str) -> Taken:
            raise AssertionError("nothing is calibrated before the plan is sound")

    model = nn.Sequential(nn.Linear(192, 32), nn.Linear(50, 32))
    ctx = context("weights", backend=CpuBackend(), samples=Unread([]))
    with pytest.raises(PlanError, match="K=192"):
        Quantize(scheme=SchemeName.int4_weight, group_size=128, algorithm=Algorithm.gptq).apply(model, ctx)


@pytest.mark.case("B49")
@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda a: a.name)
def test_b49_nan_in_a_weight_stops_the_step(algorithm: Algorithm) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[3, 5] = float("nan")
    with pytest.raises(StepError, match="not finite"):
        quantize(model, rows(), algorithm=algorithm)


@pytest.mark.case("B33")
def test_b33_storage_that_is_not_what_was_decided_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Grid.store

    def wrong(self: Grid, weight: Tensor) -> Any:
        return store(self, weight.roll(1, 0))

    monkeypatch.setattr(Grid, "store", wrong)
    with pytest.raises(StepError, match="away from the values that were decided for it"):
        quantize(nn.Sequential(nn.Linear(64, 64)), rows(), algorithm=Algorithm.gptq)


def test_a_head_outside_the_blocks_is_calibrated_and_untied() -> None:
    original, examples = llamas.module(tie_word_embeddings=True), texts()
    receipt = quantize(model := alias(original), examples, algorithm=Algorithm.gptq, tied=Tied.untie)
    assert "lm_head" in receipt.decisions["layers"] and isinstance(model.lm_head, QuantizedLinear)
    assert torch.equal(original.lm_head.weight, model.model.embed_tokens.weight)
    assert torch.equal(logits(rebuilt(model, original, receipt), examples), logits(model, examples))


def test_what_scales_cannot_be_folded_before_is_named() -> None:
    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(Gelu() for _ in range(3))})
    model.forward = lambda x: [x := layer(x) for layer in model["layers"]][-1]  # type: ignore[method-assign]
    receipt = quantize(model, rows(), algorithm=Algorithm.awq)
    assert "down: no scales for its inputs, since nothing before it can carry a factor for each of its inputs (3 blocks)" in receipt.notes
    carriers = [touched for touched in receipt.touched if touched.what == "carries the scales of up"]
    assert carriers and all(touched.name.endswith(".norm") for touched in carriers)


@pytest.mark.parametrize("scheme", ["int4_weight", "int8_weight"])
def test_convolutions_are_decided_on_their_patches_and_grouped_ones_on_each_groups_own(scheme: str) -> None:
    from toys import tiny_cnn

    draw = torch.Generator().manual_seed(2)
    smooth = nn.functional.interpolate(torch.randn(24, 1, 3, 5, 5, generator=draw).flatten(0, 1), (16, 16), mode="bilinear")
    examples = [((image[None],), {}) for image in smooth]
    original = tiny_cnn()
    expected = original(smooth).detach()
    off = {}
    fields = {"targets": ["Conv2d", "Linear"]} | ({"group_size": None} if scheme == "int4_weight" else {})
    for algorithm in (Algorithm.rtn, Algorithm.gptq):
        receipt = quantize(model := alias(original), examples, scheme, algorithm=algorithm, **fields)
        off[algorithm] = float((model(smooth) - expected).norm() / expected.norm())
        assert len(receipt.touched) == 4 and receipt.skipped == {}
    assert off[Algorithm.gptq] < 0.8 * off[Algorithm.rtn]


def test_a_table_among_the_targets_is_rounded_and_that_is_said() -> None:
    model = llamas.module()
    receipt = quantize(model, texts(), algorithm=Algorithm.gptq, targets=["Linear", "Embedding"], ignore=["lm_head"])
    assert "model.embed_tokens: rounded to nearest, since gptq decides linear layers and convolutions" in receipt.notes
    assert "model.embed_tokens" in receipt.decisions["layers"]


def told(**fields: Any) -> list[str]:
    return [f"{problem.what}; {problem.fix}" for problem in Quantize(**fields).check(context("weights"))]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scheme": SchemeName.mxfp4_weight, "algorithm": Algorithm.gptq}, "gptq cannot decide the scales of mxfp4_weight"),
        ({"scheme": SchemeName.int8_weight, "algorithm": Algorithm.hqq}, "hqq moves zero points and scales of int4 weights"),
        ({"scheme": SchemeName.int8_weight, "smooth": 0.5}, "int8_weight rounds none"),
        ({"scheme": SchemeName.int8_dynamic, "smooth": 1.5}, "smooth 1.5 is not from 0 to 1"),
        ({"scheme": SchemeName.int8_dynamic, "smooth": 0.5, "algorithm": Algorithm.awq}, "awq searches the scales that smooth would set"),
        ({"scheme": SchemeName.int8_weight, "samples": 0}, "samples 0 of sample_tokens 512 are nothing to calibrate on"),
        ({"scheme": SchemeName.int8_weight, "damping": -1.0}, "damping -1 is no share"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_type(fields: dict[str, Any], said: str) -> None:
    (text,) = told(**fields)
    assert said in text and text.partition("; ")[2]


def test_a_target_without_units_needs_no_smoothing() -> None:
    from optforge.spec import Hardware

    lowered = Quantize(scheme=SchemeName.fp8_dynamic, smooth=0.5).lower(Hardware(name="cpu", backend="cpu", arch="cpu"))
    assert lowered is not None and list(lowered.transform.check(context("weights"))) == []


def test_the_walk_is_one_pass_over_the_samples_per_block_and_one_to_feed_the_next() -> None:
    model, examples, calls = llamas.module(), texts(), []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(None))
    quantize(model, examples, algorithm=Algorithm.gptq, ignore=["lm_head"])
    assert len(calls) <= 2 * len(examples) + 2


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Any]:
    from optforge import config

    run = config.compose(config.parse(["recipe=baseline", "hardware=cpu"], cwd=Path.cwd()), cwd=Path.cwd())
    if list(run.model.source.check()) or list(run.data.source.check()):
        pytest.skip("SmolLM2 or the articles are not here: optforge fetch")
    yield run, run.model.source.load(0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_on_trained_weights_gptq_and_awq_win_back_a_good_part_of_what_rounding_loses(smollm2: Any) -> None:
    """1,024 tokens apart from 4 samples; benchmarks/compression.py has the whole figures."""
    from optforge.calibrate.samples import Samples
    from optforge.measure.language import logits_of

    run, loaded = smollm2
    samples = Samples.of(run, loaded)
    windows = run.data.source.tokens(loaded, 1024, 0).reshape(-1, 512)

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            parts = [nn.functional.cross_entropy(logits_of(model, ids[None])[0, :-1].float(), ids[1:]) for ids in windows]
        return float(torch.stack(parts).mean())

    found = {}
    for algorithm in (Algorithm.rtn, *CALIBRATED):
        model = alias(loaded.module)
        step = Quantize(scheme=SchemeName.int4_weight, group_size=64, symmetric=False, algorithm=algorithm, ignore=["lm_head"], samples=4)
        step.apply(model, context("weights", backend=CpuBackend(), samples=samples))
        found[algorithm] = loss(model)
    base = loss(loaded.module)
    for algorithm in CALIBRATED:
        assert found[algorithm] - base < 0.8 * (found[Algorithm.rtn] - base)
