"""Quality against a baseline, each figure held against float64 arithmetic written out here."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import tiny_cnn, tiny_lm

from optforge.measure import limits
from optforge.measure.compare import IDENTICAL_DB, full_kl, top_kl
from optforge.measure.mode import evaluating
from optforge.measure.quality import QualityRun, generate
from optforge.models.base import Loaded
from optforge.spec import Quality, QualityResult

CPU = torch.device("cpu")
TOKENS, WINDOW = 48, 20  # the last window is shorter
OPTIONS = Quality(tokens=TOKENS, window=WINDOW, items=30)


@dataclasses.dataclass(frozen=True)
class Ids:
    """A data source of fixed token ids."""

    real: bool = True

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        return torch.randint(64, (count,), generator=torch.Generator().manual_seed(7))


@dataclasses.dataclass(frozen=True)
class Images:
    """A data source of fixed images, with or without labels."""

    real: bool = True
    labelled: bool = True

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        generator = torch.Generator().manual_seed(8)
        for _ in range(2):
            images = torch.randn(15, 3, 16, 16, generator=generator)
            yield images, torch.randint(10, (15,), generator=generator) if self.labelled else None


class WithHead(nn.Module):
    """A language model that names its last layer, as transformers models do; `scale` is applied after it."""

    def __init__(self, inner: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.lm_head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.scale * self.inner(input_ids)


def changed(model: nn.Module, amount: float = 0.2) -> nn.Module:
    """A copy with noise on its matrices."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                parameter.add_(amount * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return other


def quality(baseline: nn.Module | None, **options: Any) -> QualityRun:
    family = options.pop("family", "causal_lm")
    module = baseline if baseline is not None else tiny_lm()
    loaded = Loaded(
        module=module, family=family, name="toy", vocab_size=64, digest=options.pop("digest", None), **options.pop("loaded", {})
    )
    settings = {"data": Ids(), "limits": {}, "options": OPTIONS} | options
    run = QualityRun(baseline=baseline, loaded=loaded, data_name="toy data", device=CPU, **settings)
    if run.reason is None:
        run.prepare()
    return run


def windows() -> list[Tensor]:
    ids = Ids().tokens(None, TOKENS)  # type: ignore[arg-type]  # the toy source looks at no model
    return [ids[0:20], ids[20:40], ids[40:48]]


def exact(baseline: nn.Module, module: nn.Module) -> dict[str, float]:
    """All figures of a language model in float64, with all logits at once."""
    losses, baseline_losses, kl, agree = [], [], [], []
    signal = noise = 0.0
    for ids in windows():
        with torch.no_grad():
            expected, found = baseline(ids[None])[0].double(), module(ids[None])[0].double()
        p, q = expected.softmax(-1), found.softmax(-1)
        rows = torch.arange(len(ids) - 1)
        losses.append(-q[rows, ids[1:]].log())
        baseline_losses.append(-p[rows, ids[1:]].log())
        kl.append((p * (p / q).log()).sum(-1))
        agree.append((expected.argmax(-1) == found.argmax(-1)).double())
        signal += expected.square().sum().item()
        noise += (found - expected).square().sum().item()
    return {
        "perplexity": torch.cat(losses).mean().exp().item(),
        "baseline_perplexity": torch.cat(baseline_losses).mean().exp().item(),
        "kl": torch.cat(kl).mean().item(),
        "agreement": torch.cat(agree).mean().item(),
        "sqnr_db": 10 * math.log10(signal / noise),
    }


@pytest.mark.parametrize("wrap", [lambda model: model, WithHead, lambda model: WithHead(model, 0.5)])
def test_language_figures_are_those_of_float64_arithmetic(wrap: Any) -> None:
    model = tiny_lm()
    baseline, candidate = wrap(model), wrap(changed(model))
    result = quality(baseline).evaluate(candidate)
    for name, value in exact(baseline, candidate).items():
        assert getattr(result, name) == pytest.approx(value, rel=1e-4), name
    assert result.perplexity_increase == pytest.approx(result.perplexity / result.baseline_perplexity - 1)
    assert result.kl_kind == "full" and result.count == TOKENS and result.data == "toy data" and result.missed == []


@pytest.mark.parametrize(("scale", "kept"), [(1.0, 3), (0.5, 0)])
def test_the_last_layer_is_used_alone_only_where_it_makes_the_logits(scale: float, kept: int) -> None:
    run = quality(WithHead(tiny_lm(), scale))
    assert len(run.judge._hidden) == kept


def test_a_module_compared_with_itself_differs_in_nothing() -> None:
    model = tiny_lm()
    result = quality(model).evaluate(model)
    assert (result.kl, result.perplexity_increase, result.agreement, result.sqnr_db) == (0.0, 0.0, 1.0, IDENTICAL_DB)


@pytest.mark.case("B61")
def test_one_corrupt_scale_misses_the_limits_that_hold_in_every_run() -> None:
    torch.manual_seed(0)
    baseline = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    broken = copy.deepcopy(baseline)
    with torch.no_grad():
        broken[0].weight[3] *= 100
    run = quality(baseline, family="module", loaded={"example": ((torch.randn(8, 16),), {})})
    assert run.evaluate(copy.deepcopy(baseline)).missed == []
    (sentence,) = run.evaluate(broken).missed
    assert "relative error" in sentence and "max_relative_error 0.5" in sentence


@pytest.mark.case("B61")
def test_a_language_model_whose_loss_doubles_is_noticed_without_any_limit() -> None:
    model = tiny_lm()
    loud = WithHead(model, 40.0)
    result = quality(WithHead(model)).evaluate(loud)
    assert result.loss_increase is not None and result.loss_increase > 0.5
    assert any("loss" in sentence and "max_loss_increase" in sentence for sentence in result.missed)


@pytest.mark.case("B61")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_missed_with_a_sentence_and_null_figures(bad: float) -> None:
    model = tiny_lm()
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.lm_head.weight[5, 0] = bad
    result = quality(model, limits={"max_kl": 0.1}).evaluate(broken)
    assert "NaN or Inf at 48 of 48 positions" in result.missed[0]
    assert any("could not be measured" in sentence for sentence in result.missed)
    figures = [value for value in dataclasses.asdict(result).values() if isinstance(value, float)]
    assert all(math.isfinite(value) for value in figures) and result.perplexity is None


def test_each_missed_limit_is_a_sentence_with_both_numbers() -> None:
    result = QualityResult(perplexity_increase=0.023, kl=0.033, agreement=0.9, sqnr_db=20.0)
    bounds = {"max_perplexity_increase": 0.01, "max_kl": 0.05, "min_agreement": 0.95, "min_sqnr_db": 20.0}
    assert limits.missed(result, bounds) == [
        "perplexity +2.3% is over max_perplexity_increase 1.0%",
        "top-1 agreement 90.0% is under min_agreement 95.0%",
    ]


def test_every_limit_is_on_a_figure_that_exists() -> None:
    fields = {field.name for field in dataclasses.fields(QualityResult)}
    assert {limit.field for name, limit in limits.LIMITS.items() if name not in limits.METRICS} <= fields
    assert set(limits.METRICS) <= set(limits.LIMITS), "those on the user's own metric are worked out of its figures"


@pytest.mark.case("B56")
def test_evaluation_restores_each_training_flag_and_moves_no_statistic() -> None:
    model = tiny_cnn()
    model.train()
    model.stem.bn.eval()  # modules may differ
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)
    flags = {name: module.training for name, module in model.named_modules()}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    run = quality(model, family="image_classifier", data=Images())
    result = run.evaluate(model)
    assert result.agreement == 1.0 and result.sqnr_db == IDENTICAL_DB  # dropout would differ from call to call
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.case("B56")
def test_the_mode_is_restored_after_an_error_too() -> None:
    model = nn.Dropout().train()
    with pytest.raises(RuntimeError), evaluating(model):
        assert not model.training and not torch.is_grad_enabled()
        raise RuntimeError
    assert model.training and torch.is_grad_enabled()


def test_classifier_figures_are_those_of_float64_arithmetic() -> None:
    baseline = tiny_cnn()
    candidate = changed(baseline, 1.0)
    result = quality(baseline, family="image_classifier", data=Images()).evaluate(candidate)
    batches = list(Images().batches(None, 30, 15))  # type: ignore[arg-type]  # the toy source looks at no model
    images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
    with torch.no_grad():
        expected, found = baseline(images).double(), candidate(images).double()
    assert result.top1 == pytest.approx((found.argmax(-1) == labels).double().mean().item())
    assert result.baseline_top1 == pytest.approx((expected.argmax(-1) == labels).double().mean().item())
    assert result.top1_drop == pytest.approx(result.baseline_top1 - result.top1)
    assert result.agreement == pytest.approx((found.argmax(-1) == expected.argmax(-1)).double().mean().item())
    assert result.cross_entropy == pytest.approx(nn.functional.cross_entropy(found, labels).item(), rel=1e-4)
    noise = (found - expected).square().sum() / expected.square().sum()
    assert result.sqnr_db == pytest.approx(-10 * torch.log10(noise).item(), rel=1e-4)
    assert result.count == 30


def test_without_labels_there_is_agreement_and_no_top1() -> None:
    result = quality(tiny_cnn(), family="image_classifier", data=Images(labelled=False)).evaluate(tiny_cnn())
    assert result.agreement == 1.0
    assert result.top1 is None and result.top1_drop is None and result.cross_entropy is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_candidate_in_another_dtype_gets_inputs_of_its_own(dtype: torch.dtype) -> None:
    result = quality(tiny_cnn(), family="image_classifier", data=Images()).evaluate(tiny_cnn().to(dtype))
    assert result.sqnr_db is not None and result.sqnr_db > 25


@pytest.mark.parametrize(
    ("loaded", "data", "reason"),
    [({"weights": "random"}, Ids(), "the weights are random"), ({}, Ids(real=False), "the data is random")],
)
def test_no_quality_is_claimed_on_random_weights_or_data(loaded: dict[str, Any], data: Ids, reason: str) -> None:
    assert quality(tiny_lm(), loaded=loaded, data=data).reason == reason


def test_a_baseline_that_does_not_fit_is_compared_through_cached_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    model = tiny_lm()
    candidate = changed(model)
    assert "no earlier run" in (quality(None, digest="d").reason or "")
    full = quality(model, digest="d").evaluate(candidate)
    assert quality(None, digest="other weights").reason is not None
    cached = quality(None, digest="d").evaluate(candidate)
    # the toy's 64 classes all fit into the 128 kept, so the bound is the divergence itself
    assert cached.kl_kind == "top128" and cached.kl == pytest.approx(full.kl, rel=1e-3)
    assert cached.agreement == full.agreement and cached.sqnr_db is None
    assert cached.perplexity == full.perplexity and cached.baseline_perplexity == pytest.approx(full.baseline_perplexity)


@pytest.mark.parametrize("kept", [1, 5, 100, 300])
def test_merging_the_rest_into_one_bin_gives_a_lower_bound(kept: int) -> None:
    generator = torch.Generator().manual_seed(1)
    reference = (3 * torch.randn(16, 300, generator=generator)).log_softmax(-1)
    found = (3 * torch.randn(16, 300, generator=generator)).log_softmax(-1)
    values, classes = reference.topk(kept)
    bound, whole = top_kl(values, classes, found), full_kl(reference, found)
    p, q = reference.double().exp(), found.double().exp()
    by_hand = []
    for row in range(16):
        inside = classes[row]
        rest_p, rest_q = 1 - p[row, inside].sum(), 1 - q[row, inside].sum()
        tail = rest_p * (rest_p / rest_q).log() if kept < 300 else torch.tensor(0.0)
        by_hand.append((p[row, inside] * (p[row, inside] / q[row, inside]).log()).sum() + tail)
    torch.testing.assert_close(bound.double(), torch.stack(by_hand).double(), rtol=1e-3, atol=1e-4)
    assert bool((bound <= whole + 1e-3).all())


def half(model: nn.Module, loaded: Loaded) -> float:
    """A metric of the user's own."""
    return 0.5 if loaded.name == "toy" else 0.0


def test_a_metric_of_the_users_own_is_measured_and_held() -> None:
    options = Quality(tokens=TOKENS, window=WINDOW, metric="test_quality:half")
    result = quality(tiny_lm(), options=options, limits={"min_metric": 0.75}).evaluate(tiny_lm())
    assert result.metric == result.baseline_metric == 0.5
    assert result.missed == ["metric 0.5 is under min_metric 0.75"]


class Letters:
    """A tokenizer of single characters."""

    def __init__(self, end: int | None = None) -> None:
        self.eos_token_id = end

    def __call__(self, text: str, **_: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) - ord("0") for letter in text]])}

    def decode(self, ids: Tensor) -> str:
        return "".join(chr(int(each) + ord("0")) for each in ids)


def test_generation_takes_the_most_likely_token_each_time_and_stops_at_the_end() -> None:
    model = tiny_lm()
    loaded = Loaded(module=model, family="causal_lm", name="toy", tokenizer=Letters(), vocab_size=64)
    ids = [0, 5]
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    expected = Letters().decode(torch.tensor(ids[2:]))
    assert generate(model, loaded, "05", 4) == expected == generate(model, loaded, "05", 4)
    loaded.tokenizer = Letters(end=ids[4])
    assert generate(model, loaded, "05", 4) == expected[: ids[2:].index(ids[4])]


def test_classes_that_both_exclude_add_no_divergence() -> None:
    reference, found = torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([[0.5, 0.5, -math.inf]])
    p, q = reference[:, :2].softmax(-1), found[:, :2].softmax(-1)
    by_hand = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(full_kl(reference.log_softmax(-1), found.log_softmax(-1)), by_hand)
    assert torch.isinf(full_kl(torch.zeros(1, 3).log_softmax(-1), found.log_softmax(-1))).all()
