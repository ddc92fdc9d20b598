"""Packing and folding: found by data flow, equal in result, safe from stale products, and refused with a reason."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import TinyLM, context, tiny_cnn, tiny_lm, token_ids, with_statistics

from optforge.backends.cpu import CpuBackend
from optforge.errors import PlanError, SelectorError, StepError
from optforge.select import PARTS, repeated_blocks
from optforge.share import alias, on_meta
from optforge.transforms.base import Receipt
from optforge.transforms.fuse import Attention, Fuse, Pattern
from optforge.transforms.fuse.packing import joined_name

CONV_BN = Fuse(pattern=Pattern.conv_bn)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def fuse(model: nn.Module, *args: Tensor, **fields: object) -> Receipt:
    """Fuses on a device, as in a run; `args` are one forward pass."""
    return Fuse(**fields).apply(model, context("fuse", (args, {}) if args else None, backend=CpuBackend()))


def products(model: nn.Module, call: Callable[[], object]) -> int:
    """Matrix products that a call does."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::linear")


class OneLayer(nn.Module):
    """A model that is one repeated layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, *args: Tensor) -> Tensor:
        return self.layers[0](*args)


def from_transformers(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = dict(SIZES)
    if name == "Phi":
        del sizes["head_dim"], sizes["num_key_value_heads"]
    if name == "Phi3":
        sizes["pad_token_id"] = 0
    if name == "GPT2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**sizes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    return model


@pytest.mark.parametrize(
    ("family", "attention", "mlp"),
    [
        ("Llama", 3, 2),
        ("Mistral", 3, 2),
        ("Qwen2", 3, 2),
        ("Qwen3", 3, 2),
        ("Gemma2", 3, 2),
        ("Gemma3Text", 3, 2),
        ("Phi", 3, 0),
    ],
)
def test_families_of_models_are_packed_by_structure(family: str, attention: int, mlp: int) -> None:
    model, ids = from_transformers(family), token_ids()
    with torch.no_grad():
        before = model(ids).logits
        separate = products(model, lambda: model(ids))
        receipt = fuse(model)
        after = model(ids).logits
        together = products(model, lambda: model(ids))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-6)
    assert separate - together == 3 * (attention - 1 + max(mlp - 1, 0))
    expected = {f"model.layers.{i}.self_attn.qkv_proj": [f"model.layers.{i}.self_attn.{x}_proj" for x in "qkv"] for i in range(3)}
    if mlp:
        expected |= {f"model.layers.{i}.mlp.gate_up_proj": [f"model.layers.{i}.mlp.{x}_proj" for x in ("gate", "up")] for i in range(3)}
    assert receipt.renamed == expected


@pytest.mark.parametrize(("family", "why"), [("GPT2", "hold no nn.Linear"), ("Phi3", "no other linear of its module reads the same input")])
def test_a_model_that_is_packed_already_is_an_error_that_says_so(family: str, why: str) -> None:
    model = from_transformers(family)
    with pytest.raises(PlanError, match=why):
        fuse(model, attention=Attention.keep)


def test_the_plan_on_meta_decides_what_the_run_does() -> None:
    model = tiny_lm()
    planned = Fuse().apply(on_meta(model), context("fuse", ((token_ids(device="meta"),), {})))
    done = fuse(model, token_ids())
    assert (planned.renamed, planned.skipped, planned.decisions) == (done.renamed, done.skipped, done.decisions)
    assert set(done.skipped) == {f"layers.{i}.{name}" for i in (0, 1) for name in ("attention.o_proj", "mlp.down_proj")}


def test_packed_weights_are_the_parts_below_one_another_and_are_stored_once() -> None:
    model = tiny_lm()
    parts = [model.layers[0].attention.get_submodule(f"{x}_proj").weight.clone() for x in "qkv"]
    bytes_before = sum(p.numel() for p in model.parameters())
    fuse(model, token_ids())
    packed = model.layers[0].attention.qkv_proj
    assert torch.equal(packed.weight, torch.cat(parts)) and getattr(packed, PARTS) == ("q_proj", "k_proj", "v_proj")
    assert sum(p.numel() for p in model.parameters()) == bytes_before
    assert not any(".q_proj" in key or ".up_proj" in key for key in model.state_dict())
    assert torch.equal(model.layers[0].attention.k_proj.weight, parts[1])
    assert model.layers[0].attention.k_proj.out_features == 32


def test_one_compile_for_thirty_blocks_and_one_product_each(fresh_compiler: None) -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    model = tiny_lm(layers=30)
    fuse(model, token_ids())
    with torch.no_grad():
        expected = model(token_ids())
    seen = EagerAndRecordGraphs()
    for block in repeated_blocks(model).values():
        block.compile(backend=seen, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(model(token_ids()), expected)
    (graph,) = seen.graphs
    assert sum("linear" in str(node.target) for node in graph.graph.nodes) == 4, "q/k/v, o, gate/up, down"


def test_gradients_reach_the_packed_weight() -> None:
    model, ids = tiny_lm(), token_ids()
    model(ids).square().sum().backward()
    parts = [model.layers[1].attention.get_submodule(f"{x}_proj").weight.grad for x in "qkv"]
    packed = tiny_lm()
    fuse(packed, ids)
    packed(ids).square().sum().backward()
    torch.testing.assert_close(packed.layers[1].attention.qkv_proj.weight.grad, torch.cat(parts), atol=1e-4, rtol=1e-4)


# What must never give a stale result.


def test_a_part_called_alone_or_with_another_input_computes_its_own_rows() -> None:
    reference, model = tiny_lm(), tiny_lm()
    fuse(model, token_ids())
    x, y = torch.randn(2, 3, 32).unbind(0)
    attention, plain = model.layers[0].attention, reference.layers[0].attention
    with torch.inference_mode():
        torch.testing.assert_close(attention.q_proj(x), plain.q_proj(x))
        x.mul_(2)  # the same object with other values
        torch.testing.assert_close(attention.k_proj(x), plain.k_proj(x))
        torch.testing.assert_close(attention.v_proj(y), plain.v_proj(y))
    assert attention._optforge_packs[0].held is None


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("in the middle")

    reference, model = tiny_lm(), tiny_lm()
    fuse(model, token_ids())
    attention, x = model.layers[0].attention, torch.randn(1, 3, 32)
    part, attention.v_proj = attention.v_proj, Fails()
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="in the middle"):
            attention(x)
        assert attention._optforge_packs[0].held is None
        attention.v_proj = part
        x.add_(1)
        torch.testing.assert_close(attention(x), reference.layers[0].attention(x))


def test_cross_attention_after_self_attention() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            memory = x if other is None else other
            return F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(memory), self.v_proj(memory))

    torch.manual_seed(0)
    model = OneLayer(Cross())
    reference = copy.deepcopy(model.layers[0])
    x, other = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    fuse(model, x)
    torch.testing.assert_close(model.layers[0](x, other), reference(x, other))
    torch.testing.assert_close(model.layers[0](x), reference(x))


def test_threads_that_run_one_model_do_not_mix_their_products() -> None:
    model = tiny_lm()
    fuse(model, token_ids())
    inputs = [torch.randint(0, 64, (1, 4 + i), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    with torch.no_grad():
        expected = [model(ids) for ids in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(30):
                if not torch.allclose(model(inputs[index]), expected[index], atol=1e-5):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_references_follow_copies_replacements_and_casts() -> None:
    model, ids = tiny_lm(), token_ids()
    fuse(model, ids)
    expected = model(ids)
    for other in (copy.deepcopy(model), alias(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids), expected)
        other.layers[0].attention.qkv_proj.weight = nn.Parameter(torch.zeros(96, 32))
        assert not torch.equal(other(ids), expected), "a copy's parts read the copy's weight"
        assert torch.equal(model(ids), expected)
    double = copy.deepcopy(model).double()
    torch.testing.assert_close(double(ids), expected.double(), atol=1e-4, rtol=1e-4)
    replaced = copy.deepcopy(model)
    for block in replaced.layers:
        block.attention.qkv_proj = nn.Sequential(block.attention.qkv_proj)
    assert torch.equal(replaced(ids), expected)


def test_a_packed_linear_that_becomes_another_class_is_used_as_it_is_then() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model, reference = tiny_lm(), tiny_lm()
    fuse(model, token_ids())
    attention, plain, x = model.layers[0].attention, reference.layers[0].attention, torch.randn(1, 3, 32)
    attention.qkv_proj.__class__ = Doubled
    torch.testing.assert_close(attention.v_proj(x), 2 * plain.v_proj(x))
    for name in ("q_proj", "k_proj", "v_proj"):
        plain.get_submodule(name).weight.data *= 2
    torch.testing.assert_close(attention(x), plain(x))


# What is left apart, and why.


def skipped(change: Callable[[TinyLM], object], ids: Tensor | None = None) -> dict[str, str]:
    model = tiny_lm()
    change(model)
    return fuse(model, token_ids() if ids is None else ids).skipped


def share_k(model: TinyLM) -> None:
    model.layers[0].attention.k_proj.weight = model.layers[1].attention.k_proj.weight


def test_what_cannot_be_packed_is_skipped_with_its_reason() -> None:
    attention = "layers.0.attention"
    assert "shared" in skipped(share_k)[f"{attention}.k_proj"]
    hooked = skipped(lambda m: m.layers[0].attention.k_proj.register_forward_hook(lambda *_: None))
    assert "hooks" in hooked[f"{attention}.k_proj"]
    normed = skipped(lambda m: nn.utils.parametrizations.weight_norm(m.layers[0].attention.k_proj))
    assert "parametrization" in normed[f"{attention}.k_proj"]

    def reclass(model: TinyLM) -> None:
        model.layers[0].attention.k_proj.__class__ = type("Mine", (nn.Linear,), {})

    assert "Mine is not a plain nn.Linear" in skipped(reclass)[f"{attention}.k_proj"]


def test_bias_or_not_and_dtypes_stay_apart() -> None:
    model = tiny_lm()
    attention = model.layers[0].attention
    attention.k_proj.bias = nn.Parameter(torch.randn(32))
    receipt = fuse(model, token_ids())
    assert receipt.renamed["layers.0.attention.qv_proj"] == ["layers.0.attention.q_proj", "layers.0.attention.v_proj"]
    assert "no other linear" in receipt.skipped["layers.0.attention.k_proj"]


def test_an_input_changed_in_place_between_two_linears_keeps_them_apart() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            y = self.a(x) + self.b(x)
            x.mul_(3)
            return y + self.c(x)

    model, x = OneLayer(Changes()), torch.randn(2, 4)
    before = model(x)
    receipt = fuse(model, x)
    assert receipt.renamed == {"layers.0.a_b": ["layers.0.a", "layers.0.b"]}
    torch.testing.assert_close(model(x), before)


def test_ignored_linears_stay_apart_and_a_wrong_name_is_an_error() -> None:
    model = tiny_lm()
    receipt = fuse(model, token_ids(), ignore=["v_proj"])
    assert receipt.renamed["layers.0.attention.qk_proj"] == ["layers.0.attention.q_proj", "layers.0.attention.k_proj"]
    assert receipt.ignored == ["layers.0.attention.v_proj", "layers.1.attention.v_proj"]
    with pytest.raises(SelectorError, match="did you mean"):
        fuse(tiny_lm(), token_ids(), ignore=["v_prj"])


def test_without_an_example_the_error_says_what_to_give() -> None:
    with pytest.raises(PlanError, match="example="):
        fuse(tiny_lm())


def test_a_second_time_there_is_nothing_left_to_do() -> None:
    model = tiny_lm()
    fuse(model, token_ids())
    expected = model(token_ids())
    with pytest.raises(PlanError, match="packed already"):
        fuse(model, token_ids())
    assert torch.equal(model(token_ids()), expected)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (["q_proj", "k_proj", "v_proj"], "qkv_proj"),
        (["gate_proj", "up_proj"], "gate_up_proj"),
        (["query", "key", "value"], "query_key_value"),
        (["w1", "w3"], "w1_w3"),
        (["to_q", "to_k"], "to_q_to_k"),
    ],
)
def test_names_of_packs(parts: list[str], name: str) -> None:
    assert joined_name(parts, nn.Module()) == name
    taken = nn.Module()
    taken.add_module(name, nn.Identity())
    assert joined_name(parts, taken) == f"{name}_packed"


# Batch norms.


class TwoPaths(nn.Module):
    """A convolution that runs with and without its batch norm, one whose output is read twice, and one that can be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.bn_twice = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.skip, self.bn_skip = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.good, self.bn_good = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.alone = nn.BatchNorm2d(3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        skip = self.skip(x)
        return self.bn_twice(self.twice(x)), self.twice(y), self.bn_skip(skip) + skip, self.bn_good(self.good(x)), self.alone(y)


@pytest.mark.case("B57")
def test_b57_a_convolution_with_another_reader_is_left_alone() -> None:
    torch.manual_seed(0)
    model = with_statistics(TwoPaths()).eval()
    x, y = torch.randn(2, 2, 3, 8, 8).unbind(0)
    before = model(x, y)
    receipt = CONV_BN.apply(model, context("fold", ((x, y), {}), backend=CpuBackend()))
    for old, new in zip(before, model(x, y), strict=True):
        torch.testing.assert_close(new, old, atol=1e-5, rtol=0)
    assert receipt.renamed == {"good": ["good", "bn_good"]} and isinstance(model.bn_good, nn.Identity)
    assert "runs 2 times" in receipt.skipped["bn_twice"]
    assert "reads the convolution's output too" in receipt.skipped["bn_skip"]
    assert "does not follow a convolution" in receipt.skipped["alone"]


def test_folding_by_hand_on_one_channel() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1, eps=0.0)).eval()
    values = {"0.weight": 3.0, "0.bias": 1.0, "1.running_mean": 2.0, "1.running_var": 4.0, "1.weight": 5.0, "1.bias": 7.0}
    model.load_state_dict({**model.state_dict(), **{k: torch.full_like(model.state_dict()[k], v) for k, v in values.items()}})
    CONV_BN.apply(model, context("fold", ((torch.ones(1, 1, 2),), {}), backend=CpuBackend()))
    # scale 5 / sqrt(4) = 2.5; weight 3 * 2.5; bias (1 - 2) * 2.5 + 7
    assert (model[0].weight.item(), model[0].bias.item()) == (7.5, 4.5)


def test_a_residual_network_with_depthwise_convolutions_folds_whole() -> None:
    model, image = tiny_cnn(), torch.randn(2, 3, 16, 16)
    before = model(image)
    original = alias(model)
    planned = CONV_BN.apply(on_meta(model), context("fold", ((image.to("meta"),), {})))
    receipt = CONV_BN.apply(model, context("fold", ((image,), {}), backend=CpuBackend()))
    torch.testing.assert_close(model(image), before, atol=1e-5, rtol=1e-5)
    assert receipt.decisions == planned.decisions and receipt.skipped == {}
    assert receipt.decisions["folds"] == [["stem.conv", "stem.bn"], ["depthwise.conv", "depthwise.bn"], ["body.0", "body.1"]]
    assert torch.equal(original(image), before), "the tree that shares the tensors is as it was"


def test_folds_are_ignored_or_refused_with_reasons() -> None:
    image = torch.randn(2, 3, 16, 16)
    receipt = Fuse(pattern=Pattern.conv_bn, ignore=["stem"]).apply(tiny_cnn(), context("fold", ((image,), {}), backend=CpuBackend()))
    assert receipt.ignored == ["stem.bn"] and len(receipt.touched) == 2
    with pytest.raises(PlanError, match=r"call model.eval\(\) first"):
        CONV_BN.apply(tiny_cnn().train(), context("fold", ((image,), {}), backend=CpuBackend()))
    with pytest.raises(PlanError, match="no batch norm"):
        CONV_BN.apply(tiny_lm(), context("fold", ((token_ids(),), {}), backend=CpuBackend()))


def test_a_rewrite_that_changes_the_output_is_found() -> None:
    class ForgetsBias(nn.Conv2d):
        """A convolution whose forward never adds its bias."""

        def forward(self, input: Tensor) -> Tensor:
            return F.conv2d(input, self.weight, None, self.stride, self.padding, self.dilation, self.groups)

    torch.manual_seed(0)
    model = with_statistics(nn.Sequential(ForgetsBias(3, 4, 3, bias=False), nn.BatchNorm2d(4))).eval()
    with pytest.raises(StepError, match="changed by"):
        CONV_BN.apply(model, context("fold", ((torch.randn(1, 3, 8, 8),), {}), backend=CpuBackend()))
