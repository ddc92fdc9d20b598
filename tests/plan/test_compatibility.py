"""The compatibility page is made by the plan: what it says, and that the committed page says the same."""

from __future__ import annotations

from pathlib import Path

from catalogue import HARDWARE, RECIPES, planned

from optforge.errors import PlanError, Problem, UserError
from optforge.plan import compatibility
from optforge.plan.compatibility import Cell

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_committed_page_is_what_the_plans_say() -> None:
    """The fix: `python -m optforge.plan.compatibility > docs/compatibility.md`."""
    cells = {name: {recipe: _cell(recipe, name) for recipe in RECIPES} for name in HARDWARE}
    assert PAGE.read_text(encoding="utf-8") == compatibility.render(cells)


def _cell(recipe: str, hardware: str) -> Cell:
    found = planned(recipe, hardware)
    return compatibility.refused(found) if isinstance(found, UserError) else compatibility.of_plan(found)


def test_the_page_names_what_vendors_document() -> None:
    """No fp8 units before Ada and Hopper (compute capability 8.9) and none on a TPU v5e; MI300 and H100 have them."""
    lines = {line.split("`")[1]: line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")}
    columns = {name: RECIPES.index(name) + 2 for name in RECIPES}
    fp8 = {name: line.split("|")[columns["llama_fp8"]].strip() for name, line in lines.items()}
    assert all(fp8[name].startswith("fp8_weight") for name in ("a100", "t4", "tpu_v5e"))
    assert all(fp8[name] == "native" for name in ("h100", "l40s", "mi300x", "b200"))


def test_profiles_that_lack_the_same_share_a_reason_and_a_refusal_is_told() -> None:
    refused = compatibility.refused(PlanError(Problem(where="step weights", what="group 128 does not divide 50", fix="use 16")))
    lacks = {
        name: Cell(status="downgraded", runs_as=("fp8_weight",), reasons=(f"{name} has no fp8 matrix units",)) for name in ("a100", "t4")
    }
    page = compatibility.render({"a100": {"x": lacks["a100"], "y": refused}, "t4": {"x": lacks["t4"], "y": Cell(status="native")}})
    assert "| `a100` | fp8_weight (1) | **refused** (2) |" in page
    assert "| `t4` | fp8_weight (1) | native |" in page
    assert page.splitlines()[-2:] == ["1. the target has no fp8 matrix units", "2. step weights: group 128 does not divide 50"]
