"""The order in which a recipe's steps run, and the orders that are refused.

Phases decide (precision before fusion before pruning before quantization ... compile last); within a phase the written
order holds, and `after`/`before` move a step further. Some written orders are mistakes that no sorting may hide, such as
pruning what is already quantized: those are refused with both names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optforge.errors import PlanError, Problem, near
from optforge.spec import Step
from optforge.transforms.base import Phase


@dataclass(frozen=True, kw_only=True)
class Order:
    """Steps in the order they run, and why a step stands elsewhere than written."""

    steps: tuple[Step, ...]
    moved: dict[str, str]


REFUSED: dict[tuple[str, str], str] = {
    ("quantize", "prune"): "a mask cannot reach weights that are already quantized",
    ("shard", "quantize"): "sharded weights cannot be quantized: shard must be the last weight transform",
    ("quantize", "heal"): "weights that are already quantized have no gradient",
    ("shard", "heal"): "sharded weights cannot be healed: shard must be the last weight transform",
    ("shard", "prune"): "sharded weights cannot be pruned: shard must be the last weight transform",
    ("shard", "fp8_training"): "the products of sharded weights cannot be replaced: shard must be the last weight transform",
    ("shard", "adapter"): "sharded weights cannot get adapters: shard must be the last weight transform",
    ("quantize", "fp8_training"): "weights that are already quantized have no gradient",
    ("shard", "shard"): "one step decides the whole mesh: write its degrees together, as in use: shard/mesh",
    ("shard", "fuse"): "sharded weights cannot be fused: shard must be the last weight transform",
}
"""(kind written first, kind written later) -> why sorting them silently would hide a mistake."""


def phase(step: Step) -> Phase:
    """The phase of a step's transform."""
    found: Phase = step.transform.phase
    return found


def order(steps: Sequence[Step], *, reorder: str = "allow") -> Order:
    """Steps in run order.

    Raises:
        PlanError: with every problem at once: a refused order, an unknown name in `after` or `before`, a constraint
            against the phases, a cycle, or, under `reorder: forbid`, any step that would have to move.
    """
    problems = [*_unknown(steps), *_refused(steps), *_against_phases(steps)]
    if problems:
        raise PlanError(*problems)
    ordered = _sort(steps)
    moved = _moves(steps, ordered)
    if moved and reorder == "forbid":
        names = ", ".join(step.name for step in ordered)
        raise PlanError(
            *(
                Problem(where=f"step {name}", what=f"{why}, and reorder is forbid", fix=f"write the steps in the order {names}")
                for name, why in moved.items()
            )
        )
    return Order(steps=tuple(ordered), moved=moved)


def _constraints(steps: Sequence[Step]) -> list[tuple[str, str]]:
    """Pairs (first, second) that `after` and `before` demand."""
    pairs = [(name, step.name) for step in steps for name in step.after]
    return pairs + [(step.name, name) for step in steps for name in step.before]


def _unknown(steps: Sequence[Step]) -> list[Problem]:
    known = [step.name for step in steps]
    return [
        Problem(
            where=f"step {step.name}",
            what=f"{field} names {name!r}, which is no step of this recipe",
            fix=near(name, known) or f"steps: {', '.join(known)}",
        )
        for step in steps
        for field, names in (("after", step.after), ("before", step.before))
        for name in names
        if name not in known
    ]


def _refused(steps: Sequence[Step]) -> list[Problem]:
    """Pairs that are written the wrong way round; one that `after` or `before` puts right is no mistake."""
    meant = set(_constraints(steps))
    return [
        Problem(
            where=f"steps {earlier.name} and {later.name}",
            what=f"{later.kind} is written after {earlier.kind}: {why}",
            fix=_corrected(steps, earlier, later),
        )
        for index, later in enumerate(steps)
        for earlier in steps[:index]
        if (why := REFUSED.get((earlier.kind, later.kind))) and (later.name, earlier.name) not in meant
    ]


def _corrected(steps: Sequence[Step], earlier: Step, later: Step) -> str:
    """What to write in the recipe, and what to type where it cannot be changed."""
    if later.kind == earlier.kind:
        return f"drop one, '~steps.{later.name}'"
    right = ", ".join(step.name for step in sorted(steps, key=phase))
    return f"write {later.name} before {earlier.name} ({right}), or type steps.{later.name}.before=[{earlier.name}]"


def _against_phases(steps: Sequence[Step]) -> list[Problem]:
    by_name = {step.name: step for step in steps}
    return [
        Problem(
            where=f"steps {first} and {second}",
            what=f"{second} is to run after {first}, but {by_name[second].kind} always runs before {by_name[first].kind}",
            fix=f"drop the after or before between {first} and {second}",
        )
        for first, second in _constraints(steps)
        if first in by_name and second in by_name and phase(by_name[first]) > phase(by_name[second])
    ]


def _sort(steps: Sequence[Step]) -> list[Step]:
    """Topological order that takes, of the steps whose predecessors are done, the one of the lowest phase written first."""
    waits: dict[str, set[str]] = {step.name: set() for step in steps}
    for first, second in _constraints(steps):
        waits[second].add(first)
    rank = {step.name: (phase(step), index) for index, step in enumerate(steps)}
    left, done = list(steps), list[Step]()
    while left:
        ready = [step for step in left if not waits[step.name] & {other.name for other in left}]
        if not ready:
            names = ", ".join(step.name for step in left)
            raise PlanError(Problem(where=f"steps {names}", what="after and before form a circle", fix="drop one of them"))
        chosen = min(ready, key=lambda step: rank[step.name])
        left.remove(chosen)
        done.append(chosen)
    return done


def _moves(written: Sequence[Step], ordered: Sequence[Step]) -> dict[str, str]:
    """For each step that overtakes one written above it: which, and why."""
    position = {step.name: index for index, step in enumerate(ordered)}
    moved = {}
    for index, step in enumerate(written):
        overtaken = [above for above in written[:index] if position[above.name] > position[step.name]]
        if overtaken:
            names = ", ".join(above.name for above in overtaken)
            kinds = ", ".join(dict.fromkeys(above.kind for above in overtaken))
            constrained = any((step.name, above.name) in _constraints(written) for above in overtaken)
            why = "as before/after ask" if constrained else f"{step.kind} always runs before {kinds}"
            moved[step.name] = f"runs before {names}: {why}"
    return moved
