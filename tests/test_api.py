"""OptForge from Python: `optimize`, `apply` and `load` on modules that live in this process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llamas
import pytest
import torch
from torch import nn
from toys import tiny_cnn
from transformers import LlamaForCausalLM

import optforge
from optforge.errors import ConfigError, ModelError, OutputError, PlanError
from optforge.kernels.linears import Int8DynamicLinear

QUICK = ("measure.max_s=0.2", "measure.min_rounds=2", "measure.warmup=1", "quality.tokens=256", "quality.generate=4")
MLP = (
    *QUICK,
    "~steps.fuse",
    "~steps.compile",
    "steps.weights.ignore=[]",
    "recipe.limits.max_kl=null",
    "recipe.limits.max_perplexity_increase=null",
)
LLAMA = (*QUICK, "workload.prompt_tokens=16", "~steps.compile")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def rows() -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def llama(seed: int = 0) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": True}
    return llamas.module(seed=seed, dtype=torch.bfloat16, **sizes, max_position_embeddings=2048)


def ids() -> torch.Tensor:
    return torch.arange(16)[None] * 7 % 256


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("training", [True, False])
def test_a_plain_module_is_optimized_and_left_as_it_was(training: bool) -> None:
    model = mlp().train(training)
    before = snapshot(model)
    optimized, report = optforge.optimize(model, recipe="llama_int8", hardware="cpu", example=rows(), overrides=MLP)
    assert report.status == "complete"
    assert [(step.name, step.use) for step in report.steps] == [("weights", "quantize/int8_dynamic")]
    assert [type(optimized[0]), type(optimized[2])] == [Int8DynamicLinear, Int8DynamicLinear]
    with torch.no_grad():
        error = (optimized(rows()) - model(rows())).norm() / model(rows()).norm()
    assert 0 < error < 0.05
    assert unchanged(model, before) and model.training is training and type(model[0]) is nn.Linear
    assert report.quality.relative_error == pytest.approx(error.item(), rel=0.5)


def test_a_cnn_in_training_mode_has_its_batch_norms_folded_in_the_result_alone() -> None:
    model = tiny_cnn().train()
    before = snapshot(model)
    images = torch.randn(2, 3, 16, 16)
    options = (*QUICK, "~steps.compile", "recipe.limits.min_agreement=null", "recipe.limits.max_top1_drop=null")
    optimized, report = optforge.optimize(model, recipe="vision_int8", hardware="cpu", example=images, overrides=options)
    assert report.status == "complete"
    assert not any(isinstance(module, nn.BatchNorm2d) for module in optimized.modules())
    assert unchanged(model, before), "running statistics must not move either"
    assert all(module.training for module in model.modules())
    model.eval()
    assert (optimized(images) - model(images)).norm() / model(images).norm() < 0.05


def test_a_limit_that_has_no_figure_here_says_how_to_drop_it() -> None:
    _, report = optforge.optimize(
        tiny_cnn(), recipe="vision_int8", hardware="cpu", example=torch.randn(2, 3, 16, 16), overrides=(*QUICK, "~steps.compile")
    )
    assert report.verdict == "failed_quality"
    assert any("recipe.limits.min_agreement=null" in sentence for sentence in report.quality.missed)


@pytest.mark.parametrize(
    "workload", [("workload.prompt_tokens=16",), ("workload=decode", "workload.context=8", "workload.new_tokens=2"), ("workload=forward",)]
)
@pytest.mark.parametrize("recipe", ["llama_int4", "llama_fp8"])
def test_a_language_model_runs_every_workload_without_a_tokenizer(recipe: str, workload: tuple[str, ...]) -> None:
    model = llama()
    before = snapshot(model)
    optimized, report = optforge.optimize(
        model, recipe=recipe, hardware="cpu", trained=False, overrides=(*QUICK, "~steps.compile", *workload)
    )
    assert report.status == "complete"
    assert report.quality is None and report.generations == []
    assert report.optimized.tokens_per_s > 0
    assert optimized.lm_head.weight is optimized.model.embed_tokens.weight
    assert unchanged(model, before) and model.lm_head.weight is model.model.embed_tokens.weight


class Letters:
    """A tokenizer of one token a byte: what a model of 256 tokens can be asked with."""

    eos_token_id = None
    pad_token_id = None
    bos_token_id = None

    def __call__(self, text: str, **_: object) -> dict[str, object]:
        found = list(text.encode("utf-8"))
        return {
            "input_ids": torch.tensor([found]) if _.get("return_tensors") == "pt" else found,
            "attention_mask": torch.ones(1, len(found)),
        }

    def encode(self, text: str, **_: object) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: torch.Tensor, **_: object) -> str:
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


@pytest.mark.slow
def test_a_tokenizer_brings_quality_and_two_generations() -> None:
    """Slow: it reads the text sample of the user's cache."""
    _, report = optforge.optimize(llama(), recipe="llama_int8", hardware="cpu", tokenizer=Letters(), overrides=LLAMA)
    assert report.quality.kl > 0
    assert report.quality.perplexity > 1
    assert report.data["name"] == "wikipedia"
    assert len(report.generations) == 2
    assert all(set(pair) == {"prompt", "baseline", "optimized"} for pair in report.generations)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    folder = tmp_path_factory.mktemp("saved") / "new" / "folder"
    model, _ = optforge.optimize(
        llama(), recipe="llama_int8", hardware="cpu", trained=False, overrides=(*LLAMA, "save=true"), folder=folder
    )
    return model, folder


def test_the_folder_holds_reports_and_the_artifact(saved: tuple[nn.Module, Path]) -> None:
    _, folder = saved
    assert {"report.json", "report.md", "report.html", "artifact"} == {path.name for path in folder.iterdir()}
    written = json.loads((folder / "report.json").read_text())
    assert (written["status"], written["command"]) == ("complete", "optforge.optimize")


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_saved_model_loads_bit_for_bit_into_a_fresh_module(saved: tuple[nn.Module, Path], on_meta: bool) -> None:
    model, folder = saved
    if on_meta:
        with torch.device("meta"):
            fresh = llama(seed=3)
    else:
        fresh = llama(seed=3)
    loaded = optforge.load(folder, model=fresh)
    assert loaded is fresh and not loaded.training
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_loading_without_the_module_says_which_one_to_give(saved: tuple[nn.Module, Path]) -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*no file describes.*model=module"):
        optforge.load(saved[1])


def test_loading_into_another_structure_is_refused(saved: tuple[nn.Module, Path]) -> None:
    with pytest.raises(ModelError, match=r"step fuse does not fit the Sequential that was given"):
        optforge.load(saved[1], model=mlp())


def test_compile_on_load_compiles_what_the_recipe_compiles(tmp_path: Path) -> None:
    options = [option for option in MLP if option != "~steps.compile"]
    options += ["save=true", "measure.attribution=ends"]
    optforge.optimize(mlp(), recipe="llama_int8", hardware="cpu", example=rows(), overrides=options, folder=tmp_path)
    plain, compiled = (optforge.load(tmp_path, model=mlp(), compile=asked) for asked in (False, True))
    assert (plain._compiled_call_impl is None, compiled._compiled_call_impl is None) == (True, False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows()), plain(rows()), rtol=1e-3, atol=1e-3)


@pytest.mark.case("B61")
def test_b61_an_artifact_that_missed_its_limits_is_kept_and_marked(tmp_path: Path) -> None:
    options = (*MLP, "save=true", "+recipe.limits.min_sqnr_db=200")
    model, report = optforge.optimize(mlp(), recipe="llama_int8", hardware="cpu", example=rows(), overrides=options, folder=tmp_path)
    assert report.verdict == "failed_quality"
    assert json.loads((tmp_path / "artifact/artifact.json").read_text())["verdict"] == "failed_quality"
    with pytest.warns(UserWarning, match="missed its limits of quality"):
        loaded = optforge.load(tmp_path, model=mlp())
    assert torch.equal(loaded(rows()), model(rows()))


def test_a_good_artifact_loads_without_a_word(saved: tuple[nn.Module, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = optforge.load(saved[1], model=llama())
    assert not any(parameter.is_meta for parameter in loaded.parameters())


@pytest.mark.case("B17")
def test_b17_an_artifact_that_grew_ends_with_the_warning_tie_broken(tmp_path: Path) -> None:
    options = (*LLAMA, "~steps.fuse", "save=true", "steps.weights={use: quantize/int8_weight, targets: [lm_head], ignore: [], tied: untie}")
    _, report = optforge.optimize(llama(), recipe="llama_int8", hardware="cpu", trained=False, overrides=options, folder=tmp_path)
    assert any("tie broken: lm_head.weight no longer is model.embed_tokens.weight" in warning for warning in report.warnings)
    assert report.warnings == json.loads((tmp_path / "report.json").read_text())["warnings"]
    options = (*options[:-1], "steps.weights={use: quantize/int8_weight, targets: [lm_head], ignore: [], tied: both}")
    _, report = optforge.optimize(llama(), recipe="llama_int8", hardware="cpu", trained=False, overrides=options, folder=tmp_path)
    assert not any("tie broken" in warning for warning in report.warnings)
    assert report.artifact["aliases"]["lm_head.weight"] == "model.embed_tokens.weight", "the matrix is stored once"


class Stages:
    """A progress display that remembers."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[None]:
        self.seen.append(name)
        yield

    def advance(self, amount: int = 1) -> None: ...

    def note(self, text: str) -> None: ...


def test_progress_names_the_stages() -> None:
    progress = Stages()
    optforge.optimize(mlp(), recipe="llama_int8", hardware="cpu", example=rows(), overrides=MLP, progress=progress)
    assert progress.seen[-1] == "step weights (quantize/int8_dynamic)"
    assert "baseline, as loaded" in progress.seen


def test_what_must_be_changed_is_told_before_anything_runs() -> None:
    def call(model: nn.Module, **options: object) -> None:
        optforge.optimize(model, **{"recipe": "llama_int8", "hardware": "cpu", "example": rows(), **options})

    with pytest.raises(PlanError, match="Sequential needs one example of its arguments; pass example="):
        call(mlp(), example=None)
    with torch.device("meta"):
        bare = mlp()
    with pytest.raises(PlanError, match=r"on the meta device and have no values: 0\.weight"):
        call(bare)
    with pytest.raises(ConfigError, match="did you mean llama_int8"):
        call(mlp(), recipe="llama_int9")
    with pytest.raises(OutputError, match="save=true and export need a folder"):
        call(mlp(), overrides=["save=true"])
    with pytest.raises(ConfigError, match="model is an argument of this call"):
        call(mlp(), overrides=["model=smollm2_135m"])
    with pytest.raises(ConfigError, match="model is an argument"):
        call(mlp(), overrides=["model.dtype=fp16"])
    with pytest.raises(OutputError, match=r"/proc/x.*cannot be written.*give folder"):
        call(mlp(), folder="/proc/x", overrides=MLP)


def test_every_step_is_checked_before_the_first_is_planned() -> None:
    options = (*QUICK, "steps.compile.mode=reduce_overhead", "steps.weights={use: quantize/int4_weight, group_size: 3}")
    with pytest.raises(PlanError) as caught:
        optforge.optimize(llama(), recipe="llama_int8", hardware="cpu", trained=False, overrides=options)
    assert "CUDA graphs" in str(caught.value)
    assert "group_size" in str(caught.value)


@pytest.mark.parametrize("training", [True, False])
def test_apply_rewrites_in_place_and_keeps_the_mode(training: bool) -> None:
    model, images = tiny_cnn(), torch.randn(2, 3, 16, 16)
    expected = model(images)
    model.train(training)
    receipts = optforge.apply(model, "vision_int8", hardware="cpu", example=images, overrides=["~steps.compile"])
    assert list(receipts) == ["fuse", "weights"]
    assert isinstance(model.head, Int8DynamicLinear)
    assert all(module.training is training for module in model.modules())
    assert (model.eval()(images) - expected).norm() / expected.norm() < 0.05


def test_apply_gives_what_optimize_gives() -> None:
    applied = llama()
    optforge.apply(applied, "llama_int8", hardware="cpu", overrides=["~steps.compile"])
    optimized, _ = optforge.optimize(llama(), recipe="llama_int8", hardware="cpu", trained=False, overrides=LLAMA)
    assert torch.equal(applied.eval()(ids()).logits, optimized(ids()).logits)


@pytest.mark.case("B63")
def test_b63_apply_refuses_a_model_that_is_quantized_and_leaves_it(tmp_path: Path) -> None:
    model = mlp()
    options = ["~steps.fuse", "~steps.compile", "steps.weights.ignore=[]"]
    optforge.apply(model, "llama_int8", hardware="cpu", example=rows(), overrides=options)
    before = snapshot(model)
    with pytest.raises(PlanError, match=r"layers? 0.* already int8"):
        optforge.apply(model, "llama_int8", hardware="cpu", example=rows(), overrides=options)
    assert unchanged(model, before)


@pytest.mark.case("B63")
def test_b63_a_second_quantize_step_on_the_same_layers_is_refused_while_planning() -> None:
    again = "steps.again={use: quantize/int8_weight, ignore: []}"
    with pytest.raises(PlanError, match=r"step again: layers? 0.* already int8 \(step weights\)"):
        optforge.optimize(mlp(), recipe="llama_int8", hardware="cpu", example=rows(), overrides=[*MLP, again])
    options = [*MLP, "steps.weights.targets=['0']", "steps.again={use: quantize/int8_weight, targets: ['2'], ignore: []}"]
    _, report = optforge.optimize(mlp(), recipe="llama_int8", hardware="cpu", example=rows(), overrides=options)
    assert [[touched["name"] for touched in step.receipt["touched"]] for step in report.steps] == [["0"], ["2"]]
