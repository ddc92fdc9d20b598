"""The selector: what an entry covers, what it refuses, and under which names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import TinyLM, context, tiny_lm, token_ids

from optforge.errors import EXIT_USER, SelectorError
from optforge.select import PARTS, original_name, repeated_blocks, select
from optforge.transforms.fuse import Fuse


def linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def tree(*paths: str) -> nn.Module:
    """A module with an `nn.Linear` at each dotted path."""
    root = nn.Module()
    for path in paths:
        *parents, last = path.split(".")
        module = root
        for name in parents:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        module.add_module(last, nn.Linear(2, 2))
    return root


def packed_lm() -> TinyLM:
    model = tiny_lm()
    Fuse().apply(model, context("fuse", ((token_ids(),), {})))
    return model


@pytest.mark.case("B01")
@pytest.mark.parametrize(
    ("targets", "ignore", "entry", "near"),
    [
        (["Linear"], ["lm_haed"], "lm_haed", "lm_head"),
        (["re:.*does_not_exist"], [], "re:.*does_not_exist", "fc1"),
        (["Linaer"], [], "Linaer", "Linear"),
    ],
)
def test_b01_an_entry_that_matches_nothing_is_an_error_with_near_names(
    targets: list[str], ignore: list[str], entry: str, near: str
) -> None:
    model = tree("fc1", "lm_head")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SelectorError, match="matches nothing") as caught:
        select(model, targets, ignore, step="weights", eligible=linear)
    (problem,) = caught.value.problems
    assert repr(entry) in problem.what and "weights" in problem.where and near in problem.fix
    assert caught.value.exit_code == EXIT_USER
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.case("B01")
def test_b01_every_wrong_entry_is_told_at_once() -> None:
    with pytest.raises(SelectorError) as caught:
        select(tree("fc1", "lm_head"), ["Linear"], ["lm_haed", "re:[", "a..b"], step="weights", eligible=linear)
    assert len(caught.value.problems) == 3


@pytest.mark.case("B01")
def test_b01_without_strict_what_matched_nothing_is_listed() -> None:
    chosen = select(tree("fc1"), ["Linear"], ["lm_head"], step="weights", eligible=linear, strict=False)
    assert chosen.unmatched == ["lm_head"] and list(chosen.chosen) == ["fc1"]


@pytest.mark.case("B03")
def test_b03_plain_entries_end_at_dots() -> None:
    model = tree("mlp.gate", "mlp.gate_proj", "layers.1.fc", "layers.10.fc")
    found = select(model, ["Linear"], ["mlp.gate", "layers.1"], step="weights", eligible=linear)
    assert found.ignored == ["mlp.gate", "layers.1.fc"]
    assert list(found.chosen) == ["mlp.gate_proj", "layers.10.fc"]


@pytest.mark.case("B03")
def test_b03_regular_expressions_match_whole_paths() -> None:
    model = tree("mlp.gate", "mlp.gate_proj")
    assert list(select(model, ["re:mlp\\.gate"], [], step="weights", eligible=linear).chosen) == ["mlp.gate"]
    with pytest.raises(SelectorError, match="'re:' matches the whole path"):
        select(model, ["re:gate"], [], step="weights", eligible=linear)


@pytest.mark.case("B05")
def test_b05_a_range_of_layers() -> None:
    model = tree(*(f"layers.{i}.{name}" for i in range(12) for name in ("up", "down")))
    found = select(model, ["Linear"], [r"re:layers\.([0-5])\..*"], step="weights", eligible=linear)
    assert found.ignored == [f"layers.{i}.{name}" for i in range(6) for name in ("up", "down")]
    assert list(found.chosen) == [f"layers.{i}.{name}" for i in range(6, 12) for name in ("up", "down")]


@pytest.mark.case("B05")
def test_b05_an_expression_that_names_only_a_container_is_not_silent() -> None:
    model = tree(*(f"layers.{i}.up" for i in range(12)))
    with pytest.raises(SelectorError, match=r"re:layers\\.\[0-5\]\\..\*"):
        select(model, ["Linear"], [r"re:layers\.[0-5]"], step="weights", eligible=linear)


@pytest.mark.case("B06")
def test_b06_ignored_names_are_told_apart_from_chosen_ones() -> None:
    found = select(tree("fc1", "fc2"), ["Linear"], ["fc2"], step="weights", eligible=linear)
    assert (list(found.chosen), found.ignored) == (["fc1"], ["fc2"])


@pytest.mark.case("B08")
def test_b08_to_leave_alone_wins_over_every_target() -> None:
    model = tree("time_embed.0", "time_embed.2", "blocks.0")
    for targets in (["Linear"], ["re:.*"], ["time_embed", "blocks"]):
        found = select(model, targets, ["re:time_embed.*"], step="weights", eligible=linear)
        assert list(found.chosen) == ["blocks.0"]


@pytest.mark.case("B12")
def test_b12_a_class_name_covers_subclasses_and_the_step_decides_what_it_can_change() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 8)})
    assert list(select(model, ["Linear"], [], step="s", eligible=linear).chosen) == ["attention.out_proj", "fc"]
    plain = select(model, ["Linear"], [], step="s", eligible=lambda _, module: type(module) is nn.Linear)
    assert list(plain.chosen) == ["fc"]


def test_a_target_that_the_step_cannot_change_is_an_error() -> None:
    with pytest.raises(SelectorError, match="none of which this step can change"):
        select(tiny_lm(), ["RMSNorm"], [], step="weights", eligible=linear)


def test_a_class_covers_what_lies_beneath_it() -> None:
    found = select(tiny_lm(), ["TinyMLP"], ["down_proj"], step="weights", eligible=linear)
    assert list(found.chosen) == [f"layers.{i}.mlp.{name}" for i in (0, 1) for name in ("gate_proj", "up_proj")]


@pytest.mark.case("B15")
def test_b15_names_are_the_same_under_a_compiled_wrapper() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torch.compile(model)
    found = select(compiled, ["0"], [], step="weights", eligible=linear)
    assert list(found.chosen) == ["0"] and found.chosen["0"] is model[0]
    model[0] = torch.compile(model[0])
    assert list(select(compiled, ["Linear"], [], step="weights", eligible=linear).chosen) == ["0"]
    assert original_name("_orig_mod.layers.1._orig_mod.fc") == "layers.1.fc"


def test_a_module_under_two_names_is_one_candidate_that_answers_to_both() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": shared, "second": shared, "other": nn.Linear(2, 2)})
    assert list(select(model, ["second"], [], step="s", eligible=linear).chosen) == ["first"]
    assert list(select(model, ["Linear"], ["second"], step="s", eligible=linear).chosen) == ["other"]


def test_a_packed_module_answers_to_its_own_name_and_to_all_of_its_parts() -> None:
    model = packed_lm()
    for targets in (["qkv_proj"], ["q_proj", "k_proj", "v_proj"], [r"re:.*\.[qkv]_proj"]):
        found = select(model, targets, [], step="weights", eligible=linear)
        assert list(found.chosen) == ["layers.0.attention.qkv_proj", "layers.1.attention.qkv_proj"]
    assert getattr(model.layers[0].attention.qkv_proj, PARTS) == ("q_proj", "k_proj", "v_proj")
    ignored = select(model, ["Linear"], ["q_proj", "k_proj", "v_proj"], step="weights", eligible=linear).ignored
    assert ignored == ["layers.0.attention.qkv_proj", "layers.1.attention.qkv_proj"]


@pytest.mark.parametrize(("targets", "ignore"), [(["Linear"], ["v_proj"]), (["q_proj", "k_proj"], [])])
def test_a_selection_that_splits_a_pack_is_refused_with_the_fix(targets: list[str], ignore: list[str]) -> None:
    with pytest.raises(SelectorError, match="select q_proj, k_proj and leave v_proj") as caught:
        select(packed_lm(), targets, ignore, step="weights", eligible=linear)
    assert {problem.where for problem in caught.value.problems} == {f"step weights, module layers.{i}.attention.qkv_proj" for i in (0, 1)}
    assert "add v_proj to the fuse step's ignore" in caught.value.problems[0].fix


def test_parts_themselves_are_never_chosen() -> None:
    names = select(packed_lm(), ["layers"], [], step="s").chosen
    assert not any(name.endswith(("q_proj", "k_proj", "v_proj", ".gate_proj", ".up_proj")) and "qkv" not in name for name in names)


def test_blocks_are_the_outermost_repeated_layers() -> None:
    model = tiny_lm(layers=3)
    assert list(repeated_blocks(model)) == ["layers.0", "layers.1", "layers.2"]
    model.layers[0].mlp.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert list(repeated_blocks(torch.compile(model))) == ["layers.0", "layers.1", "layers.2"]
    assert repeated_blocks(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]))) == {}
    assert repeated_blocks(nn.ModuleList([nn.Linear(2, 2)])) == {}
