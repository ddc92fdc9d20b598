"""The order of steps: sorted by phase, moved with a notice, refused where sorting would hide a mistake."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import pytest

from optforge.errors import PlanError
from optforge.plan.order import order
from optforge.spec import Step
from optforge.transforms.base import Phase

PHASES = {
    "precision": Phase.PRECISION,
    "fuse": Phase.FUSE,
    "prune": Phase.PRUNE,
    "quantize": Phase.QUANTIZE,
    "shard": Phase.SHARD,
    "compile": Phase.COMPILE,
}


@dataclass(frozen=True)
class Stub:
    """Only the phase matters to the order."""

    phase: Phase
    kind: ClassVar[str] = "stub"


def step(use: str, name: str | None = None, **fields: object) -> Step:
    kind = use.split("/", maxsplit=1)[0]
    return Step(name=name or kind, use=use, options={}, transform=Stub(PHASES[kind]), **fields)  # type: ignore[arg-type]


def names(steps: list[Step], **options: str) -> list[str]:
    return [found.name for found in order(steps, **options).steps]


@pytest.mark.case("B71")
@pytest.mark.case("B68")
@pytest.mark.parametrize("written", list(permutations(["precision", "fuse", "quantize", "compile"])))
def test_b71_every_permutation_runs_in_the_same_order(written: tuple[str, ...]) -> None:
    found = order([step(f"{kind}/x") for kind in written])
    assert [one.name for one in found.steps] == ["precision", "fuse", "quantize", "compile"]
    assert bool(found.moved) == (list(written) != ["precision", "fuse", "quantize", "compile"])


@pytest.mark.case("B68")
def test_b68_compile_before_quantize_is_moved_with_a_notice() -> None:
    found = order([step("compile/inductor"), step("quantize/int8_weight")])
    assert [one.name for one in found.steps] == ["quantize", "compile"]
    assert found.moved == {"quantize": "runs before compile: quantize always runs before compile"}


def test_reorder_forbid_names_both_and_the_right_order() -> None:
    with pytest.raises(PlanError, match=r"step quantize: runs before compile.*write the steps in the order quantize, compile"):
        order([step("compile/inductor"), step("quantize/int8_weight")], reorder="forbid")


@pytest.mark.case("B65")
def test_b65_prune_after_quantize_is_refused_with_the_fix() -> None:
    with pytest.raises(PlanError, match=r"steps weights and sparse: prune is written after quantize.*write sparse before weights"):
        order([step("quantize/int8_weight", "weights"), step("prune/magnitude", "sparse")])
    assert names([step("prune/magnitude", "sparse"), step("quantize/int8_weight", "weights")]) == ["sparse", "weights"]


@pytest.mark.case("B72")
def test_b72_quantize_after_shard_is_refused() -> None:
    with pytest.raises(PlanError, match="shard must be the last weight transform"):
        order([step("shard/fsdp"), step("quantize/int8_weight")])


def test_written_order_holds_within_a_phase_and_after_and_before_move() -> None:
    first, second, third = step("quantize/a", "a"), step("quantize/b", "b"), step("quantize/c", "c")
    assert names([first, second, third]) == ["a", "b", "c"]
    assert names([step("quantize/a", "a", after=("c",)), second, third]) == ["b", "c", "a"]
    assert names([first, second, step("quantize/c", "c", before=("a",))]) == ["b", "c", "a"]


def test_all_problems_come_at_once() -> None:
    steps = [step("compile/x", "late", before=("early",)), step("quantize/x", "early", after=("erly",))]
    with pytest.raises(PlanError) as caught:
        order(steps)
    text = str(caught.value)
    assert "after names 'erly', which is no step of this recipe; did you mean early?" in text
    assert "early is to run after late" in text


def test_a_constraint_against_the_phases_names_both() -> None:
    with pytest.raises(PlanError, match=r"steps late and early: early is to run after late, but quantize always runs before compile"):
        order([step("compile/x", "late"), step("quantize/x", "early", after=("late",))])


def test_a_circle_is_refused() -> None:
    with pytest.raises(PlanError, match="form a circle"):
        order([step("quantize/a", "a", after=("b",)), step("quantize/b", "b", after=("a",))])
