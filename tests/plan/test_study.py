"""A study puts the parts together: rows that build on one another, comma lists, refusals, and what each width can show."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest
from catalogue import composed
from commands import SMALL, Plan, planner, recipe

from optforge import config
from optforge.plan import make
from optforge.plan.study import study
from optforge.report import schema


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    return planner(tmp_path, monkeypatch, capsys)


def test_rows_build_on_one_another_and_are_compared_with_the_compiled_baseline(plan: Plan) -> None:
    """The figures of the table are held against each other by hand: ratios of the latencies, weights by element counts."""
    found = plan("recipe=llama_fp8", "hardware=h100", *SMALL, "workload=decode").plans[0]
    rows = found["speed"]["rows"]
    assert [row["name"] for row in rows] == ["as loaded", "compiled baseline", "fuse", "weights"]
    assert [row["mode"] for row in rows] == ["eager", "compiled", "compiled", "compiled"]
    for before, row in itertools.pairwise(rows):
        assert row["vs_previous"] == pytest.approx(before["latency_ms"] / row["latency_ms"])
        assert row["vs_reference"] == pytest.approx(rows[1]["latency_ms"] / row["latency_ms"])
    assert all(row["latency_ms"] >= row["ideal_ms"] for row in rows)
    # two layers of width 2,048: q, k, v, o, gate, up, down in one byte and four bytes of scale for each output
    elements = 2 * (2048 * 3072 + 2048 * 2048 + 3 * 2048 * 8192)
    outputs = 2 * (3072 + 2048 + 2 * 8192 + 2048)
    weights = [row["parts"]["weights"] for row in found["fit"]["rows"]]
    assert weights[0] - weights[-1] == pytest.approx(2 * elements - (elements + 4 * outputs), rel=1e-6)
    assert found["steps"][1]["share"] == pytest.approx(2 * elements / found["weight_bytes"])


def test_the_whole_recipe_is_priced_as_the_graph_that_is_captured(plan: Plan) -> None:
    compiled, captured = (
        plan("recipe=llama_bf16", "hardware=h100", *SMALL, "workload=decode", f"steps.compile.use={use}", f"output_dir={folder}")
        for use, folder in (("compile/inductor", "a"), ("compile/inductor_reduce_overhead", "b"))
    )
    modes = [
        json.loads(next((done.folder / name).rglob("plan.json")).read_text())["plans"][0]
        for done, name in ((compiled, "a"), (captured, "b"))
    ]
    assert [one["speed"]["rows"][-1]["mode"] for one in modes] == ["compiled", "captured"]
    assert modes[1]["speed"]["rows"][-1]["latency_ms"] <= modes[0]["speed"]["rows"][-1]["latency_ms"]


def test_sharding_divides_what_each_device_holds_and_adds_what_it_sends(plan: Plan, tmp_path: Path) -> None:
    done = plan(recipe(tmp_path, "shard=shard/tensor"), "hardware=h100", *SMALL, "workload=decode", "steps.shard.tensor=4")
    assert done.code == 0, done.errors
    (found,) = done.plans
    one, four = (row["parts"]["weights"] for row in found["fit"]["rows"])
    assert found["fit"]["devices"] == 4 and one / 4 < four < one / 3.9
    rows = found["speed"]["rows"]
    assert rows[-1]["devices"] == 4 and rows[-1]["vs_reference"] < 4
    assert found["verdict"]["command"].startswith("optforge run ")


def test_what_moved_is_told_with_its_reason(plan: Plan, tmp_path: Path) -> None:
    done = plan(recipe(tmp_path, "weights=quantize/int8_dynamic", "fuse=fuse/decoder"), "hardware=h100", *SMALL)
    assert done.said("moved") == "fuse runs before weights: fuse always runs before quantize"
    assert [step["name"] for step in done.plans[0]["steps"]] == ["fuse", "weights"]


def test_the_next_command_is_the_run_that_was_planned(plan: Plan, tmp_path: Path) -> None:
    done = plan("recipe=llama_int4", "hardware=a100", *SMALL, "--set", "weights.group_size=32", "--drop", "compile")
    assert done.code == 0, done.errors
    (found,) = done.plans
    assert found["kernels"] is None and found["xla"] is None, "--no-kernels"
    command = shlex.split(found["verdict"]["command"])
    assert command[:2] == ["optforge", "run"] and "--no-kernels" not in command
    at = command.index("--set")
    arguments = config.parse([*command[2:at]], cwd=tmp_path, set_=[command[at + 1]], drop=[command[at + 3]])
    run = config.compose(arguments, cwd=tmp_path)
    assert [step.name for step in run.recipe.steps] == ["fuse", "weights"]
    assert run.recipe.steps[1].options["group_size"] == 32 and run.hardware.name == "a100"


def test_comma_lists_are_one_table_and_each_plan_has_its_own_command(plan: Plan, tmp_path: Path) -> None:
    done = plan("hardware=a100,h100", "recipe=llama_fp8,llama_int8", *SMALL, "workload=decode")
    assert done.code == 0, done.errors
    lines = done.out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("recipe"))
    rows = [line.split() for line in lines[head + 1 : head + 5]]
    assert [row[:2] for row in rows] == [["llama_fp8", "a100"], ["llama_fp8", "h100"], ["llama_int8", "a100"], ["llama_int8", "h100"]]
    assert rows[0][-1] == "fp8_weight" and rows[1][-1] == "yes"
    assert next((tmp_path / "outputs/plans").rglob("plan.json")).parent.parent.name == "a100-h100"
    for found in done.plans:
        assert f"recipe={found['recipe']['name']}" in found["command"] and f"hardware={found['target']['name']}" in found["command"]
    assert [line.split()[1:3] for line in done.lines("next")] == [["optforge", "run"]] * 4


def test_a_target_that_refuses_is_a_row_and_the_others_go_on(plan: Plan) -> None:
    done = plan("recipe=llama_fp8", "hardware=a100,h100", *SMALL, "downgrade=forbid")
    assert (done.code, done.errors) == (0, [])
    assert "llama_fp8 for a100: step weights: a100 has compute capability 8.0, fp8 matmul needs 8.9+" in done.said("refused")
    assert [found["status"] for found in done.plans] == ["refused", "planned"]
    assert done.plans[0]["refused"][0]["fix"].startswith("alternatives: ")


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("hardware", ["a100", "a100,h100,mi300x"])
def test_nothing_is_wider_than_the_terminal_but_what_can_be_pasted(plan: Plan, hardware: str, columns: int) -> None:
    done = plan("recipe=llama_fp8", f"hardware={hardware}", *SMALL, "workload=decode", columns=columns)
    wide = [line for line in done.out.splitlines() if len(line.rstrip()) > columns]
    assert all(line.startswith(("next ", "plan:", "Plan ")) or " optforge run " in line for line in wide), wide


def test_every_figure_of_a_plan_stands_under_a_label(plan: Plan) -> None:
    done = plan("recipe=llama_int8", "hardware=h100", *SMALL, kernels=True)
    found = done.plans[0]
    assert found["speed"]["label"] == found["fit"]["label"] == "predicted"
    heads = [line for line in done.out.splitlines() if line[:2] in ("1 ", "2 ", "3 ", "4 ", "5 ")]
    assert "predicted" in heads[1] and "predicted" in heads[2] and heads[3].startswith("4 Kernels, compiled here for sm_90")
    assert "every figure is predicted" in done.out.splitlines()[1]


def test_a_plan_knows_nothing_of_the_machine_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler here is no reason not to plan for a target; `make` with `executes` would refuse (B92)."""
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    run = composed("llama_bf16")
    assert study(make.make(run, executes=False), kernels=False, xla=False).status == "planned"


def test_the_committed_schema_is_the_generated_one() -> None:
    """The fix: `python -m optforge.report.schema plan > docs/plan.schema.json`."""
    committed = Path(__file__).parents[2] / "docs" / "plan.schema.json"
    assert json.loads(committed.read_text(encoding="utf-8")) == schema.plan_schema()
