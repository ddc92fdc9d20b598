"""Zeroing single weights: which go, what the others do about it, what is left alone, and that zeros stay zeros afterwards."""

from __future__ import annotations

import itertools
from typing import Any

import llamas
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as torch_prune
from torch.utils.flop_counter import FlopCounterMode
from toys import CPU, FixedSamples, context, tiny_cnn, tiny_lm, token_ids

from optforge.backends.cpu import CpuBackend
from optforge.config.steps import step
from optforge.errors import PlanError, SelectorError, StepError
from optforge.measure import sparsity
from optforge.share import alias, on_meta
from optforge.transforms.base import Context, Receipt
from optforge.transforms.prune import sparse, sparsegpt

PATTERNS = {"2:4": (2, 4), "4:8": (4, 8)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that an earlier test pruned must not be found again."""
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path / "cache"))


class Classifier(nn.Module):
    """TinyLM of the cases: Embedding(1000, 64), Linear(64, 64), Linear(64, 1000)."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.inner = nn.Linear(64, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.embed(ids))))


def running(name: str = "sparse", examples: list[Any] | None = None, **fields: Any) -> Context:
    return context(name, backend=CpuBackend(), samples=FixedSamples(examples) if examples is not None else None, **fields)


def apply(model: nn.Module, use: str = "prune/magnitude", examples: list[Any] | None = None, **options: Any) -> Receipt:
    transform = step("sparse", {"use": use, **options}).transform
    with torch.no_grad():
        return transform.apply(model, running(examples=examples))


def linear(*size: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(*size))


def inputs(rows: int, width: int, count: int = 4, seed: int = 1) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.1, 3, width)
    return [((torch.randn(rows, width, generator=draw) * scale,), {}) for _ in range(count)]


@pytest.mark.parametrize("sparsity_of", [0.1, 0.3, 0.5, 0.77])
def test_magnitude_zeroes_exactly_the_smallest_of_a_layer(sparsity_of: float) -> None:
    model = linear(24, 10)
    before = model[0].weight.detach().clone()
    receipt = apply(model, sparsity=sparsity_of)
    count = round(240 * sparsity_of)
    threshold = before.abs().flatten().double().sort().values[count - 1]
    assert torch.equal(model[0].weight, torch.where(before.abs().double() <= threshold, 0.0, before))
    assert receipt.decisions["zeros"] == {"0": count / 240}
    assert receipt.touched[0].what == f"magnitude, {count / 240:.1%} zero"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_zeroes_the_smallest_of_each_group(pattern: str) -> None:
    zeros, of = PATTERNS[pattern]
    model = linear(16, 6)
    before = model[0].weight.detach().clone()
    apply(model, pattern=pattern)
    for row, start in itertools.product(range(6), range(0, 16, of)):
        group, found = before[row, start : start + of], model[0].weight[row, start : start + of]
        kept = set(group.abs().argsort(descending=True)[: of - zeros].tolist())
        assert [index for index in range(of) if found[index] != 0] == sorted(kept)
        assert all(found[index] == group[index] for index in kept)


def test_wanda_zeroes_in_each_row_the_smallest_products_with_the_input_norm() -> None:
    model, examples = linear(12, 5), inputs(7, 12)
    before = model[0].weight.detach().clone()
    norm = torch.cat([args[0] for args, _ in examples]).double().norm(dim=0)
    apply(model, "prune/wanda", examples, sparsity=0.25)
    for row in range(5):
        gone = set((before[row].double().abs() * norm).argsort()[:3].tolist())
        assert {index for index in range(12) if model[0].weight[row, index] == 0} == gone


def best_error(weight: Tensor, x: Tensor, gone: Tensor) -> float:
    """The smallest squared output error of a row whose zeros are given, by least squares in float64."""
    total = 0.0
    for row in range(weight.shape[0]):
        kept = ~gone[row]
        target = x @ weight[row]
        solved = torch.linalg.lstsq(x[:, kept], target[:, None]).solution if bool(kept.any()) else torch.zeros(0, 1, dtype=x.dtype)
        total += float((x[:, kept] @ solved - target[:, None]).square().sum())
    return total


def error(weight: Tensor, found: Tensor, x: Tensor) -> float:
    return float((x @ (found.double() - weight).t()).square().sum())


def correlated(rows: int, columns: int) -> Tensor:
    """Inputs with one direction that all columns share, as the residual stream of a decoder has them: float64 [rows, columns]."""
    draw = torch.Generator().manual_seed(0)
    shared = 2 * torch.randn(rows, 1, generator=draw).double()
    return shared + torch.randn(rows, columns, generator=draw).double()


@pytest.mark.parametrize("pattern", [None, (2, 4), (4, 8)])
def test_sparsegpt_comes_near_the_best_weights_for_its_zeros(pattern: tuple[int, int] | None) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).double()
    x = correlated(400, 32)
    gram = (x.t() @ x / 400).float()
    found = {}
    for rounds in (0, 64):
        solved = sparsegpt.prune(weight.float(), gram, sparsity=0.5, pattern=pattern, damping=1e-5, block_columns=16, rounds=rounds)
        assert solved is not None
        found[rounds] = solved.weight
    gone = found[0] == 0
    assert torch.equal(gone, found[64] == 0) and int(gone.sum()) == 6 * 16
    if pattern is not None:
        assert bool((gone.reshape(6, -1, pattern[1]).sum(2) == pattern[0]).all())
    best, masked = best_error(weight, x, gone), error(weight, torch.where(gone, 0.0, weight), x)
    assert best * 0.999 <= error(weight, found[0], x) < 0.4 * masked, "no weights with these zeros do better than least squares"
    assert error(weight, found[64], x) == pytest.approx(best, rel=1e-2)


def test_sparsegpt_with_one_column_block_is_the_exact_solution_for_the_last_columns() -> None:
    """With the zeros all in the first column, the later ones can make up for it fully: least squares, by hand."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(4, 8, generator=draw).double()
    weight[:, 0] *= 1e-3
    x = torch.randn(50, 8, generator=draw).double()
    gram = (x.t() @ x / 50).float()
    found = sparsegpt.prune(weight.float(), gram, sparsity=1 / 8, pattern=None, damping=1e-6, block_columns=8)
    assert found is not None and bool((found.weight[:, 0] == 0).all())
    gone = found.weight == 0
    assert error(weight, found.weight, x) == pytest.approx(best_error(weight, x, gone), rel=1e-3)


@pytest.mark.case("B51")
def test_b51_two_samples_and_a_dead_column_prune_without_a_linear_algebra_error() -> None:
    model = linear(64, 64)
    examples = inputs(1, 64, count=2)
    for args, _ in examples:
        args[0][:, 5] = 0
    receipt = apply(model, "prune/sparsegpt", examples, sparsity=0.5)
    weight = model[0].weight
    assert bool((weight[:, 5] == 0).all()) and bool(weight.isfinite().all())
    assert int((weight == 0).sum()) >= 64 * 32
    assert receipt.touched


def test_too_little_data_for_the_damping_is_said() -> None:
    gram = torch.zeros(8, 8)
    assert sparsegpt.prune(torch.ones(2, 8), gram, sparsity=0.5, pattern=None, damping=0.01, block_columns=8) is None
    model = linear(8, 4)
    receipt = apply(model, "prune/sparsegpt", [((torch.zeros(3, 8),), {})], sparsity=0.5)
    assert any("singular" in note and "Wanda" in note for note in receipt.notes)
    assert sparsity.share(model, ["0"]) == 0.5
    again = apply(linear(8, 4), "prune/sparsegpt", [((torch.zeros(3, 8),), {})], sparsity=0.5)
    assert again.notes == receipt.notes, "also where the block comes from the cache"


@pytest.mark.case("B49")
@pytest.mark.parametrize("use", ["prune/magnitude", "prune/wanda", "prune/sparsegpt"])
def test_b49_nan_is_never_kept_as_the_largest(use: str) -> None:
    model = linear(16, 8)
    with torch.no_grad():
        model[0].weight[2, 3] = torch.nan
        model[0].weight[4, 5] = torch.inf
    receipt = apply(model, use, inputs(9, 16), sparsity=0.25)
    assert model[0].weight[2, 3] == 0
    assert model[0].weight[4, 5] == torch.inf
    assert "0 holds 2 values that are not finite; NaN was pruned first" in receipt.notes


@pytest.mark.case("B24")
def test_b24_masks_of_torch_are_folded_and_said() -> None:
    model = linear(16, 8)
    torch_prune.l1_unstructured(model[0], "weight", 0.5)
    torch_prune.random_unstructured(model[0], "bias", 0.25)
    expected = {name: getattr(model[0], name).detach().clone() for name in ("weight", "bias")}
    receipt = apply(model, sparsity=0.75)
    assert not any(key.endswith(("_orig", "_mask")) for key in model.state_dict())
    assert not model[0]._forward_pre_hooks
    assert receipt.notes == ["folded 2 pruning masks of torch.nn.utils.prune (0.weight, 0.bias)"]
    assert torch.equal(model[0].bias, expected["bias"])
    assert bool((model[0].weight[expected["weight"] == 0] == 0).all()) and sparsity.share(model, ["0"]) == 0.75


@pytest.mark.case("B24")
def test_b24_a_masked_model_is_folded_before_any_transform() -> None:
    """As a live module with gradients, whose masked weight PyTorch refuses to copy."""
    from optforge.models.given import GivenModel

    model = linear(16, 8)
    torch_prune.l1_unstructured(model[0], "weight", 0.5)
    x = torch.randn(3, 16)
    expected = model(x)
    given = GivenModel(module=model, example=((x,), {}))
    for loaded in (given.skeleton(), given.load()):
        assert {name for name, _ in loaded.module.named_parameters()} == {"0.weight", "0.bias"}
        assert any("folded 1 pruning mask " in note for note in loaded.notes)
    assert torch.equal(given.load().module(x), expected)
    assert hasattr(model[0], "weight_mask"), "the caller's own module is as it was"


@pytest.mark.case("B23")
@pytest.mark.parametrize("form", ["new", "old"])
def test_b23_a_weight_normalized_layer_is_refused_by_name(form: str) -> None:
    model = linear(64, 64)
    parametrizations.weight_norm(model[0]) if form == "new" else nn.utils.weight_norm(model[0])
    with pytest.raises(PlanError, match=r"step sparse, 0: the weight is parametrised by .*[Ww]eight.*[Nn]orm.*fold it first"):
        apply(model)


@pytest.mark.case("B36")
def test_b36_a_cpu_keeps_dense_weights_and_says_so_and_widths_that_do_not_divide_are_named() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 50), nn.Linear(50, 8)).half()
    receipt = apply(model, pattern="2:4")
    assert [touched.name for touched in receipt.touched] == ["0", "1"]
    assert receipt.skipped == {"2": "2:4 needs inputs in groups of 4, and it has 50"}
    assert receipt.notes == ["2 layers stay dense, with zeros in them: no sparse kernel on cpu"]
    assert type(model[0]) is nn.Linear and receipt.kernels == {}
    assert apply(nn.Sequential(nn.Linear(50, 8)), pattern="2:4").touched == [], "which the engine refuses with the reason"


@pytest.mark.case("B37")
def test_b37_a_weight_that_is_not_2_4_is_refused_with_the_share_of_bad_groups() -> None:
    weight = torch.ones(4, 8)
    weight[:3, :2] = 0
    weight[:3, 4:6] = 0
    with pytest.raises(StepError, match=r"step sparse, 0.*25\.0% of its groups of 4 have fewer than two zeros"):
        sparse.require_2_4(weight, "0", "sparse")
    weight[3, 1::2] = 0
    sparse.require_2_4(weight, "0", "sparse")


def test_the_sparse_storage_is_planned_for_a_gpu_that_multiplies_it() -> None:
    import dataclasses

    from optforge.spec import Hardware

    gpu = Hardware(name="h200", backend="nvidia", arch="sm_90")
    planned = on_meta(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40)).bfloat16())
    transform = step("sparse", {"use": "prune/magnitude", "pattern": "2:4"}).transform
    ctx = dataclasses.replace(context("sparse"), target=gpu, device=gpu, workload="prefill")
    receipt = transform.apply(planned, ctx)
    assert type(planned[0]) is sparse.SparseLinear and planned[0].weight.shape == (64, 36)
    assert receipt.bytes_after == receipt.bytes_before - 64 * 28 * 2
    assert "1 stays dense, with zeros in it: the kernel needs sizes that 32 divides, and it is 40x64" in receipt.notes
    x = torch.empty(7, 64, device="meta", dtype=torch.bfloat16)
    assert planned[0](x).shape == (7, 64), "the plan can trace it"
    with FlopCounterMode(display=False) as counted:
        planned[0](x)
    assert counted.get_total_flops() == 8 * 64 * 64, "half of the dense product's, of rows filled up to 8"
    rebuilt = on_meta(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40)).bfloat16())
    transform.replay(rebuilt, receipt)
    assert {k: v.shape for k, v in rebuilt.state_dict().items()} == {k: v.shape for k, v in planned.state_dict().items()}
    for fields, why in (({"later": ("quantize", "compile")}, "a later quantize step rewrites them"), ({"workload": "decode"}, "few rows")):
        model = on_meta(nn.Sequential(nn.Linear(64, 64)).bfloat16())
        notes = transform.apply(model, dataclasses.replace(ctx, **fields)).notes
        assert type(model[0]) is nn.Linear and why in notes[0]


def test_convolutions_are_pruned_along_their_input_channels() -> None:
    model = tiny_cnn()
    before = model.body[0].weight.detach().clone()
    receipt = apply(model, pattern="2:4")
    assert {touched.name for touched in receipt.touched} == {"body.0", "head"}
    assert receipt.skipped["depthwise.conv"] == "2:4 needs inputs in groups of 4, and it has 1"
    groups = model.body[0].weight.reshape(16, 2, 4)
    assert bool(((groups == 0).sum(2) == 2).all())
    kept = groups != 0
    assert torch.equal(groups[kept], before.reshape(16, 2, 4)[kept])


def test_wanda_measures_the_patches_of_a_convolution() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1))
    images = [((torch.randn(1, 3, 9, 9),), {}) for _ in range(3)]
    before = model[0].weight.detach().clone()
    squares = torch.zeros(3, 3, 3)
    for (image,), _ in images:  # each kernel position by hand
        padded = torch.nn.functional.pad(image[0], (1, 1, 1, 1))
        for y, x in itertools.product(range(0, 9, 2), repeat=2):
            squares += padded[:, y : y + 3, x : x + 3].square()
    apply(model, "prune/wanda", images, sparsity=1 / 3)
    for channel in range(5):
        score = (before[channel].abs() * squares.sqrt()).flatten()
        assert set(score.argsort()[:9].tolist()) == set((model[0].weight[channel].flatten() == 0).nonzero().flatten().tolist())


def test_tied_heads_quantized_layers_and_bare_parameters() -> None:
    model = Classifier(tied=True)
    assert apply(model).skipped == {"head": "its weight is tied to embed"}
    mixed = nn.Sequential(nn.Linear(64, 64), nn.MultiheadAttention(32, 4))
    assert "bare parameter of MultiheadAttention" in apply(mixed).skipped["1.in_proj_weight"]


@pytest.mark.case("B65")
def test_b65_a_quantized_layer_is_refused_with_the_order() -> None:
    model = linear(64, 64)
    step("weights", {"use": "quantize/int8_weight"}).transform.apply(model, running("weights"))
    with pytest.raises(PlanError, match=r"already int8 \(step weights\).*write sparse before weights"):
        apply(model)


def test_a_second_time_changes_nothing_and_zeros_are_never_filled() -> None:
    model, examples = linear(32, 16), inputs(40, 32)
    apply(model, sparsity=0.4)
    gone = model[0].weight == 0
    for use in ("prune/magnitude", "prune/wanda", "prune/sparsegpt"):
        assert "zero already" in apply(alias(model), use, examples, sparsity=0.3).skipped["0"]
        again = alias(model)
        apply(again, use, examples, sparsity=0.6)
        assert bool((again[0].weight[gone] == 0).all()), use


def test_blocks_are_pruned_in_order_packed_linears_too_and_a_second_run_takes_them_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, llamas.VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
    examples = [((), {"input_ids": row[None], "use_cache": False}) for row in ids]
    results = []
    for packed in (False, True, True):
        model = llamas.module()
        if packed:
            example = ((), {"input_ids": ids[:1], "use_cache": False})
            step("fuse", {"use": "fuse/decoder", "attention": "keep"}).transform.apply(
                model, context("fuse", example, backend=CpuBackend())
            )
        solved: list[int] = []
        real = sparsegpt.prune
        monkeypatch.setattr(
            sparsegpt, "prune", lambda *args, real=real, solved=solved, **kwargs: (solved.append(1), real(*args, **kwargs))[1]
        )
        receipt = apply(model, "prune/sparsegpt", examples, sparsity=0.5, ignore=["lm_head"])
        monkeypatch.setattr(sparsegpt, "prune", real)
        results.append((model, receipt, len(solved)))
    (plain, _, _), (packed_model, receipt, first), (again, _, second) = results
    assert "model.layers.0.self_attn.qkv_proj" in receipt.decisions["zeros"]
    assert first == 2 * 4 and second == 0, "each block has four products, and the second run finds all of them"
    assert all(torch.equal(a, b) for a, b in zip(packed_model.state_dict().values(), again.state_dict().values(), strict=True))
    with torch.no_grad():
        outputs = [model(input_ids=ids, use_cache=False).logits for model in (llamas.module(), plain, packed_model)]
    errors = [float((output - outputs[0]).norm() / outputs[0].norm()) for output in outputs[1:]]
    assert errors[0] < 0.8 and errors[1] < 0.8


def test_options_that_contradict_each_other_are_told_together() -> None:
    transform = step("sparse", {"use": "prune/magnitude", "sparsity": 1.5, "pattern": "2:4", "samples": 0}).transform
    told = "\n".join(f"{problem.what} {problem.fix}" for problem in transform.check(context("sparse", workload="train")))
    assert "sparsity 1.5 is no share" in told and "2:4 zeroes half" in told
    assert "training would fill the zeros" in told and "samples must be at least 1" in told
    kernel = step("sparse", {"use": "prune/magnitude", "pattern": "2:4", "kernel": "sparse"}).transform
    assert [problem.fix for problem in kernel.check(context("sparse", later=("quantize",)))] == ["write steps.sparse.kernel=dense"]


def test_data_that_is_missing_is_told_with_what_needs_none() -> None:
    with pytest.raises(PlanError, match=r"wanda needs samples.*prune/magnitude"):
        apply(linear(8, 8), "prune/wanda")
    with pytest.raises(SelectorError, match="did you mean"):
        apply(tiny_lm(), ignore=["lm_heed"])
    assert apply(tiny_lm(), "prune/wanda", [((token_ids(),), {})]).touched
    assert CPU.backend == "cpu"
