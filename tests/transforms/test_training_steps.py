"""Steps of a training: how weights are rounded, what is computed again, what the optimizer keeps, and what is refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import llamas
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import GPU, context, tiny_cnn, tiny_lm, token_ids

from optforge import config
from optforge.backends.base import CompileOptions
from optforge.backends.cpu import CpuBackend
from optforge.compiling import Family, compile_
from optforge.config.steps import step
from optforge.data.tokens import RandomTokens
from optforge.errors import PlanError
from optforge.models.base import Loaded
from optforge.plan.memory import Stage, parts
from optforge.plan.trace import trace
from optforge.training import optimizers
from optforge.training.optimizers import stochastic_bf16
from optforge.training.settings import Settings, master_of, settings_of
from optforge.transforms.base import Context
from optforge.workloads.train import Train, TrainWork


def training(**fields: Any) -> Context:
    ids = llamas.config().vocab_size // 3 + torch.arange(16).reshape(2, 8)
    return context("x", ((), {"input_ids": ids}), workload="train", backend=CpuBackend(), **fields)


def apply(model: nn.Module, use: str, ctx: Context | None = None, **options: Any) -> Any:
    with torch.no_grad():
        return step("x", {"use": use, **options}).transform.apply(model, ctx or training())


def work(loaded: Loaded, **options: Any) -> TrainWork:
    chosen = {"batch_size": 2, "sequence": 16, "warmup": 0, "clip": None, **options}
    return Train(**chosen).prepare(loaded, RandomTokens(), torch.device("cpu"))


# --- precision -----------------------------------------------------------------------------------------------------


def test_masters_are_the_weights_as_loaded_and_a_step_is_that_of_a_loop_by_hand() -> None:
    loaded, plain = llamas.llama(), llamas.module()
    apply(loaded.module, "precision/bf16_masters", keep_fp32=[])
    weight = loaded.module.lm_head.weight
    assert weight.dtype == torch.bfloat16 and torch.equal(master_of(weight), plain.lm_head.weight)
    masters = [parameter.detach().clone().requires_grad_() for parameter in plain.parameters()]
    low = copy.deepcopy(plain).to(torch.bfloat16).train()
    trained, optimizer = work(loaded), torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.01)
    batches = trained.stream.again()
    for _ in range(3):
        ids = batches.next().kwargs["input_ids"]
        low.zero_grad()
        low(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for master, parameter in zip(masters, low.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, low.parameters(), strict=True):
                parameter.copy_(master)
        trained.run(loaded.module)
    found = [master for chunk in trained.trainer(loaded.module).optimizer.held for master in chunk]
    for ours, theirs in zip(found, masters, strict=True):
        torch.testing.assert_close(ours, theirs.detach().flatten(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(loaded.module.parameters(), low.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    assert master_of(weight) is None, "the optimizer has them now"


@pytest.mark.parametrize("settings", [Settings(masters=True), Settings(stochastic=True)])
def test_large_weights_are_updated_in_pieces(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element has one update of its own, so that cutting a weight changes nothing but what lies in fp32 at once."""

    def trained(piece: int, weight: Tensor) -> Tensor:
        monkeypatch.setattr(optimizers, "PIECE", piece)
        parameter = nn.Parameter(weight.clone())
        optimizer = optimizers.make([parameter], "adamw", settings, optimizers.Rates(learning_rate=0.5, weight_decay=0.0))
        for _ in range(3):
            parameter.grad = torch.sign(weight)
            optimizer.step()
        return parameter.detach()

    for weight in (torch.randn(7, 9).bfloat16(), torch.randn(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last)):
        torch.testing.assert_close(trained(16, weight), trained(1 << 20, weight), rtol=2**-6, atol=2**-6)


def test_packing_keeps_the_masters_of_its_parts() -> None:
    model = tiny_lm()
    ctx = replace(training(), example=((token_ids(),), {}))
    apply(model, "precision/bf16_masters", ctx, keep_fp32=[])
    parts_ = [master_of(getattr(model.layers[0].attention, f"{name}_proj").weight) for name in "qkv"]
    apply(model, "fuse/decoder", ctx, attention="keep")
    assert torch.equal(master_of(model.layers[0].attention.qkv_proj.weight), torch.cat(parts_))


def test_stochastic_rounding_is_right_on_average_and_exact_where_nothing_is_cut() -> None:
    draw = torch.Generator().manual_seed(0)
    value = torch.tensor([1.0 + 2**-9, -1.0 - 2**-10, 3.0e-39, 0.0, float("inf"), float("-inf")])
    many = stochastic_bf16(value.expand(40_000, -1).contiguous(), draw)
    assert {float(x) for x in many[:, 0].unique()} == {1.0, 1.0 + 2**-7}
    mean = many.double().mean(0)
    assert mean[0] == pytest.approx(1.0 + 2**-9, abs=2**-7 * 0.5 / 200 * 5)  # five deviations of the mean of 40,000 draws
    assert mean[1] == pytest.approx(-1.0 - 2**-10, abs=2**-7 * 0.5 / 200 * 5)
    assert torch.equal(many[0, 3:].float(), value[3:])
    exact = torch.randn(64).bfloat16()
    assert torch.equal(stochastic_bf16(exact.float(), draw), exact)
    assert stochastic_bf16(torch.tensor([float("nan")]), draw).isnan().all()


def test_small_updates_arrive_with_stochastic_rounding_and_with_masters_and_are_lost_without() -> None:
    """An update of 1/2000 of a weight is an eighth of a bf16 step: rounded to nearest it never arrives."""

    def moved(settings: Settings) -> float:
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        rates = optimizers.Rates(learning_rate=1 / 2000, weight_decay=0.0)
        optimizer = optimizers.make([weight], "sgd", settings, rates)
        for _ in range(16):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return 1 - float(weight.detach().float().mean())

    assert moved(Settings()) == 0.0
    assert moved(Settings(stochastic=True)) == pytest.approx(16 / 2000, rel=0.1)
    assert moved(Settings(masters=True)) == pytest.approx(16 / 2000, abs=2**-9)


def test_what_each_way_holds_between_two_steps() -> None:
    sizes = {}
    for use in ("bf16_masters", "bf16_stochastic", "bf16_autocast", "bf16"):
        loaded = llamas.llama()
        apply(loaded.module, f"precision/{use}", keep_fp32=[])
        trained = work(loaded)
        assert torch.isfinite(trained.run(loaded.module))
        trained.run(loaded.module)
        held = trained.held_bytes(loaded.module)
        count = sum(parameter.numel() for parameter in loaded.module.parameters())
        sizes[use] = (held["gradients"] / count, held["optimizer"] / count)
        state = sum(Train().state_bytes(parameter, settings_of(loaded.module)) for parameter in loaded.module.parameters())
        assert held["optimizer"] == state, "the plan's formula is what lies there"
    assert sizes == {"bf16_masters": (2, 12), "bf16_stochastic": (2, 4), "bf16_autocast": (4, 8), "bf16": (2, 4)}


@pytest.mark.parametrize("use", ["bf16_masters", "bf16_stochastic"])
def test_a_training_in_bf16_goes_on_from_a_stored_state(use: str) -> None:
    whole, part, again = (llamas.llama(seed=seed) for seed in (0, 0, 3))
    for loaded in (whole, part, again):
        apply(loaded.module, f"precision/{use}", keep_fp32=[])
    trained = work(whole)
    expected = [float(trained.run(whole.module)) for _ in range(4)]
    for _ in range(2):
        trained.run(part.module)
    stored = copy.deepcopy(trained.trainer(part.module).state_dict())
    trainer = trained.trainer(again.module)
    trainer.load_state_dict(stored)
    assert [float(trainer.step()) for _ in range(2)] == expected[2:]


def test_fp16_is_not_trained_and_training_options_need_a_training() -> None:
    fp16 = step("x", {"use": "precision/fp16"}).transform
    assert "underflow" in str(next(fp16.check(training())))
    masters = step("x", {"use": "precision/bf16_masters"}).transform
    assert "workload is forward" in str(next(masters.check(context("x"))))
    lowered = masters.lower(config.hardware("t4"))
    assert (lowered.runs_as, lowered.transform.dtype.name, lowered.transform.training.name) == ("fp32", "fp32", "plain")


# --- checkpointing -------------------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> tuple[list[Tensor], int]:
    """Gradients of one pass, and the bytes that autograd kept for them."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.train().zero_grad()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=token_ids(4, 32), labels=token_ids(4, 32), use_cache=False).loss
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()], sum(size for key, size in kept.items() if key not in weights)


def test_checkpointing_keeps_less_and_gives_the_same_gradients_to_the_bit() -> None:
    expected, everything = gradients(llamas.module())
    held = {}
    for use in ("full", "selective"):
        model = llamas.module()
        receipt = apply(model, f"checkpointing/{use}")
        assert [touched.name for touched in receipt.touched] == ["model.layers.0", "model.layers.1"]
        found, held[use] = gradients(model)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert held["full"] < 0.6 * everything
    assert apply(llamas.module(), "checkpointing/full", share=0.5).decisions["blocks"] == ["model.layers.0"]
    with pytest.raises(PlanError, match="repeated layers"):
        apply(tiny_cnn(), "checkpointing/full")


def test_the_plan_knows_what_is_not_kept() -> None:
    def activations(*uses: str) -> float:
        loaded = llamas.llama("meta")
        for use in uses:
            apply(loaded.module, use, replace(training(), backend=None))
        graph = trace(loaded, Train(batch_size=8, sequence=64), RandomTokens(), config.hardware("h200"))
        assert graph.unknown is None
        return parts(Stage(name="x", graph=graph), config.hardware("h200"))[0]["activations"]

    assert activations("checkpointing/full") < 0.8 * activations()


def test_the_plan_knows_the_states_of_each_optimizer() -> None:
    def states(*uses: str) -> float:
        loaded = llamas.llama("meta")
        for use in uses:
            apply(loaded.module, use, replace(training(), backend=None))
        graph = trace(loaded, Train(batch_size=1, sequence=8), RandomTokens(), config.hardware("h200"))
        return parts(Stage(name="x", graph=graph), config.hardware("h200"))[0]["optimizer"]

    count = sum(parameter.numel() for parameter in llamas.module("meta").parameters())
    assert states() == 8 * count
    assert states("precision/bf16_stochastic") < 4.1 * count  # norms stay in fp32
    low = sum(2 * (p.numel() + p.numel() // 64 + 1024) if p.numel() >= 4096 else 8 * p.numel() for p in llamas.module("meta").parameters())
    assert states("optimizer/adamw_8bit") == low


def test_offloaded_states_lie_nowhere_on_the_device_and_a_step_is_the_same() -> None:
    there, here = llamas.llama(), llamas.llama()
    for loaded, use in ((there, "optimizer/adamw_offload"), (here, "optimizer/adamw")):
        apply(loaded.module, "precision/bf16_masters")
        apply(loaded.module, use, replace(training(), target=GPU))
    trained = work(there)
    for _ in range(3):
        assert float(trained.run(there.module)) == float(trained.run(here.module))
    assert all(torch.equal(a, b) for a, b in zip(there.module.parameters(), here.module.parameters(), strict=True))
    assert trained.held_bytes(there.module)["optimizer"] == 0 < trained.held_bytes(here.module)["optimizer"]
    assert sum(Train().state_bytes(parameter, settings_of(there.module)) for parameter in there.module.parameters()) == 0
    (problem,) = step("x", {"use": "optimizer/adamw_offload"}).transform.check(training())
    assert "the target is the host" in str(problem)
    random = llamas.module()
    apply(random, "precision/bf16_stochastic")
    with pytest.raises(PlanError, match="stochastic rounding keeps none"):
        apply(random, "optimizer/adamw_offload", replace(training(), target=GPU))


@pytest.mark.slow
def test_states_in_8_bits_hold_what_the_formula_says_and_learn() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    loaded = llamas.llama(**sizes)
    apply(loaded.module, "optimizer/adamw_8bit")
    trained = work(loaded, steps=1, learning_rate=1e-3)
    losses = [float(trained.run(loaded.module)) for _ in range(6)]
    assert losses[-1] < losses[0]
    expected = sum(Train().state_bytes(parameter, settings_of(loaded.module)) for parameter in loaded.module.parameters())
    assert trained.held_bytes(loaded.module)["optimizer"] == expected


# --- loss ----------------------------------------------------------------------------------------------------------


def test_the_loss_in_chunks_is_the_models_own_with_its_gradients() -> None:
    expected, _ = gradients(llamas.module())
    model = llamas.module()
    receipt = apply(model, "loss/linear_cross_entropy")
    assert receipt.kernels == {"optforge::linear_cross_entropy": 1}
    found, _ = gradients(model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert model.eval()(input_ids=token_ids()).logits.shape == (2, 8, llamas.VOCABULARY)
    tied = llamas.module(tie_word_embeddings=True)
    apply(tied, "loss/linear_cross_entropy")
    assert gradients(tied)[0][0].abs().sum() > 0


def test_a_head_that_does_more_is_refused() -> None:
    model = llamas.module()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(PlanError, match="final_logit_softcapping"):
        apply(model, "loss/linear_cross_entropy")
    with pytest.raises(PlanError, match="a language model of transformers"):
        apply(tiny_lm(), "loss/linear_cross_entropy")


# --- adapters and fp8 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [None, "quantize/int8_weight", "quantize/int4_weight"])
def test_adapters_over_frozen_weights_by_hand(scheme: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False))
    ctx = replace(training(), example=((torch.randn(4, 64),), {}), later=("adapter",))
    if scheme is not None:
        assert not list(step("x", {"use": scheme}).transform.check(ctx))
        apply(model, scheme, ctx, **({"group_size": 32} if "int4" in scheme else {}))
    weights = [(each.dequantize() if scheme else each.weight).detach().float().clone() for each in model]
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    receipt = apply(model, "adapter/lora", ctx, rank=4, alpha=8.0)
    assert [t.what.startswith("lora, rank 4, over") for t in receipt.touched] == [True] * 2
    for each in model:
        nn.init.normal_(each.lora_up)
    x = torch.randn(4, 64, requires_grad=True)
    with torch.enable_grad():
        model(x).square().sum().backward()
        z = x.detach().clone().requires_grad_()
        downs, ups = ([getattr(each, name).detach().clone().requires_grad_() for each in model] for name in ("lora_down", "lora_up"))
        y = z
        for weight, down, up in zip(weights, downs, ups, strict=True):
            y = F.linear(y, weight) + 2.0 * F.linear(F.linear(y, down), up)
        y.square().sum().backward()
    for each, down, up in zip(model, downs, ups, strict=True):
        torch.testing.assert_close(each.lora_down.grad, down.grad, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(each.lora_up.grad, up.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(x.grad, z.grad, rtol=2e-2, atol=2e-2)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {f"{i}.lora_{n}" for i in "01" for n in ("down", "up")}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


def test_fp8_products_learn_as_plain_ones_and_are_planned_away_where_there_are_none() -> None:
    loaded, plain = llamas.llama(), llamas.llama()
    receipt = apply(loaded.module, "fp8_training/row", replace(training(), target=GPU), smallest=0, ignore=["lm_head"])
    assert len(receipt.touched) == 14 and receipt.ignored == ["lm_head"] and "emulates" in receipt.notes[0]
    trained = work(plain, learning_rate=1e-3)
    expected = [float(trained.run(plain.module)) for _ in range(6)]
    found = [float(trained.run(loaded.module)) for _ in range(6)]
    assert found == pytest.approx(expected, rel=2e-2) and found != expected
    transform = step("x", {"use": "fp8_training/row"}).transform
    assert transform.lower(config.hardware("h100")) is None
    for name in ("a100", "cpu", "mi300x"):
        lowered = transform.lower(config.hardware(name))
        assert lowered.runs_as == "none" and "dtype of the weights" in lowered.reason
    small = apply(llamas.module(), "fp8_training/tensor", replace(training(), target=GPU))
    assert small.touched == [] and "fewer than smallest" in small.skipped["lm_head"]


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "model"])
@pytest.mark.parametrize(
    "uses",
    [
        ("quantize/int8_weight", "loss/linear_cross_entropy", "adapter/lora", "checkpointing/full"),
        ("precision/bf16_masters", "loss/linear_cross_entropy", "fp8_training/row"),
        ("precision/bf16_masters", "fp8_training/tensor", "checkpointing/selective"),
        ("precision/bf16_autocast", "fuse/decoder", "loss/linear_cross_entropy", "checkpointing/full"),
    ],
    ids=" ".join,
)
def test_steps_compile_together_with_their_backward_passes(uses: tuple[str, ...], scope: str, fresh_compiler: None) -> None:
    options: dict[str, dict[str, Any]] = {
        "fp8_training": {"smallest": 0, "ignore": ["lm_head"]},
        "quantize": {"ignore": ["lm_head"]},
        "adapter": {"ignore": ["lm_head"]},
        "fuse": {"attention": "keep"},
    }
    eager, compiled = llamas.llama(), llamas.llama()
    for loaded in (eager, compiled):
        for use in uses:
            apply(loaded.module, use, replace(training(), target=GPU), **options.get(use.partition("/")[0], {}))
    family = Family()
    for module in [compiled.module] if scope == "model" else compiled.module.model.layers:
        compile_(module, CompileOptions(engine="aot_eager", family=family))
    trained = work(eager)
    expected, found = trained.probe(eager.module), trained.probe(compiled.module)
    assert (found - expected).norm() < 2e-3 * expected.norm()
    losses = [[float(trained.run(loaded.module)) for _ in range(3)] for loaded in (eager, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("rotate/hadamard", "rotations"),
        ("kv_cache/int8", "keeps no KV cache"),
        ("quantize/int8_weight", "have no gradient"),
        ("prune/magnitude", "fill the zeros again"),
        ("precision/fp16", "underflow"),
    ],
)
def test_what_does_not_hold_in_a_training_is_refused_by_name(use: str, told: str) -> None:
    assert told in " ".join(str(problem) for problem in step("x", {"use": use}).transform.check(training()))


def test_folded_batch_norms_are_refused() -> None:
    ctx = replace(training(), example=((torch.randn(2, 3, 16, 16),), {}))
    with pytest.raises(PlanError, match="batch's own statistics"):
        apply(tiny_cnn(), "fuse/conv_bn", ctx)


@pytest.mark.parametrize("use", ["checkpointing/full", "optimizer/adamw", "loss/linear_cross_entropy", "adapter/lora", "fp8_training/row"])
def test_steps_of_a_training_are_refused_elsewhere(use: str) -> None:
    (problem, *_) = step("x", {"use": use}).transform.check(replace(context("x"), workload="prefill"))
    assert ("workload is prefill" in str(problem) and "~steps.x" in str(problem)) or "quantize/fp8_dynamic" in str(problem)
