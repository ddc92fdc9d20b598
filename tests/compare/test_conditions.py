"""What was measured under different conditions is refused by name, each condition alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from fleets import CPU, Compare, Tree, faster, named, read, settings

from optforge.errors import ConfigError


def _set(*path: str, value: Any) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        node = tree
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


CHANGES = [
    ("device", _set("device", "name", value="h200"), ["cpu", "h200"]),
    ("device", _set("environment", "device", "cpu", value="Intel Xeon"), ["AMD EPYC", "Intel Xeon"]),
    ("device", _set("environment", "cores", value=64), ["cores 2", "cores 64"]),
    ("versions", _set("environment", "versions", "torch", value="2.11.0"), ["torch 2.13.0+cpu", "torch 2.11.0"]),
    ("versions", _set("environment", "versions", "triton", value=None), ["triton none"]),
    ("device software", _set("environment", "device", "compiler", value="clang 19"), ["clang 19"]),
    ("threads", _set("environment", "device", "threads", value=1), ["threads 2", "threads 1"]),
    ("model", _set("model", "digest", value="0" * 64), ["digest 000000000000"]),
    ("model", _set("model", "dtype", value="fp32"), ["dtype bf16", "dtype fp32"]),
    ("data", _set("data", "corpus", value="news"), ["corpus wikipedia", "corpus news"]),
    ("workload", _set("workload", "batch_size", value=4), ["batch_size 1", "batch_size 4"]),
    ("workload", _set("workload", "prompt_tokens", value=512), ["prompt_tokens 256", "prompt_tokens 512"]),
    ("measure", _set("settings", "measure", "min_rounds", value=2), ["min_rounds 8", "min_rounds 2"]),
    ("measure", _set("settings", "measure", "warmup", value=0), ["warmup 3", "warmup 0"]),
    ("quality", _set("settings", "quality", "tokens", value=512), ["tokens 4096", "tokens 512"]),
    ("evaluated on", _set("quality", "count", value=512), ["count 4096", "count 512"]),
    ("contended", _set("environment", "contended", value=True), ["no", "yes"]),
]


def _pair(change: Callable[[Tree], None]) -> tuple[Tree, Tree]:
    first = named("llama_int8")
    first["settings"] = settings(first)
    second = copy.deepcopy(first)
    second["recipe"]["name"] = second["settings"]["recipe"]["name"] = "other"
    change(second)
    return first, second


@pytest.mark.case("B87")
@pytest.mark.parametrize(("condition", "change", "said"), CHANGES, ids=[f"{name}-{said[-1]}" for name, _, said in CHANGES])
def test_each_condition_that_differs_is_refused_by_name(
    side_by_side: Compare, condition: str, change: Callable[[Tree], None], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        side_by_side(*_pair(change))
    (problem,) = caught.value.problems
    assert problem.where == condition
    assert "--anyway" in problem.fix
    assert all(part in problem.what for part in said)
    assert "llama_int8" in problem.what and "other" in problem.what


def test_all_that_differs_is_told_at_once_and_only_what_differs(side_by_side: Compare) -> None:
    def change(tree: Tree) -> None:
        for _, one, _ in CHANGES:
            one(tree)

    with pytest.raises(ConfigError) as caught:
        side_by_side(*_pair(change))
    assert [problem.where for problem in caught.value.problems] == list(dict.fromkeys(name for name, _, _ in CHANGES))
    model = next(problem for problem in caught.value.problems if problem.where == "model")
    assert "smollm2_135m" not in model.what  # both have it


def test_recipe_target_and_missing_quality_are_no_conditions(side_by_side: Compare) -> None:
    found = side_by_side(*map(read, CPU))  # five recipes, one for an A100, one that measures no quality
    assert found.differences == []
    assert {row.group for row in found.measured} == {""}


def test_anyway_compares_and_says_what_differs_with_a_letter_for_each_group(side_by_side: Compare) -> None:
    first, second = _pair(_set("workload", "batch_size", value=4))
    third = faster(second, 2)
    third["recipe"]["name"] = third["settings"]["recipe"]["name"] = "third"
    found = side_by_side(first, second, third, anyway=True)
    (difference,) = found.differences
    assert difference.condition == "workload"
    groups = {row.report.recipe["name"]: row.group for row in found.measured}
    assert groups == {"llama_int8": "A", "other": "B", "third": "B"}


def test_an_older_report_that_does_not_say_is_named_and_not_refused(side_by_side: Compare) -> None:
    first, second = _pair(lambda tree: tree.pop("settings"))
    found = side_by_side(first, second)
    assert any(note.startswith("measure is not recorded in other") for note in found.notes)


def test_a_run_without_figures_refuses_nobody(side_by_side: Compare) -> None:
    first, second = _pair(_set("workload", "batch_size", value=64))
    found = side_by_side(first, {**second, "status": "oom", "verdict": "oom", "optimized": None, "reason": "out of memory"})
    assert len(found.measured) == 1 and len(found.failed) == 1


def test_runs_that_were_all_disturbed_are_compared_and_it_is_said(side_by_side: Compare) -> None:
    first, second = _pair(lambda tree: None)
    for tree in (first, second):
        tree["environment"]["contended"] = True
    found = side_by_side(first, second)
    assert any("something else used the device" in note and "other" in note for note in found.notes)
