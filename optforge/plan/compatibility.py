"""Generates docs/compatibility.md: what becomes of every recipe on every hardware profile, as the plan itself finds.

Nothing is written by hand, so the page cannot promise what the plan refuses; a test holds the committed file against it.

    python -m optforge.plan.compatibility > docs/compatibility.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optforge import config
from optforge.errors import UserError
from optforge.plan.make import Plan, make
from optforge.spec import Run

NATIVE, DOWNGRADED, REFUSED = "native", "downgraded", "refused"
LANGUAGE = ("model=llama3_1b", "model.layers=2")
"""Two layers of a published shape: every size that a target may refuse, in a hundredth of a second."""
VISION = ("model=fashion_cnn",)
TRAINING = ("_train", "_lora")
"""Ends of the names of recipes that are for workload=train."""
THIS_MACHINE = ("auto",)
"""Profiles that describe whatever machine reads them."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What becomes of one recipe on one profile."""

    status: str
    runs_as: tuple[str, ...] = ()
    """`downgraded`: the options that run instead."""
    reasons: tuple[str, ...] = ()


def recipes() -> list[str]:
    """The shipped recipes."""
    shipped = {path.stem for path in config.recipes_dir().glob("*.yaml")}
    return [option.name for option in config.options("recipe", cwd=config.recipes_dir()) if option.name in shipped]


def hardware() -> list[str]:
    return [option.name for option in config.options("hardware") if option.name not in THIS_MACHINE]


def composed(recipe: str) -> Run:
    """The run of a recipe on the small model that it is for; the hardware is put in later."""
    model = VISION if recipe.startswith("vision") else LANGUAGE
    workload = ("workload=train",) if recipe.endswith(TRAINING) else ()
    cwd = config.recipes_dir()
    return config.compose(config.parse([f"recipe={recipe}", "hardware=cpu", *model, *workload], cwd=cwd), cwd=cwd)


def cell(run: Run) -> Cell:
    """What the plan of a run says."""
    try:
        return of_plan(make(run, executes=False))
    except UserError as error:
        return refused(error)


def refused(error: UserError) -> Cell:
    return Cell(status=REFUSED, reasons=tuple(f"{problem.where}: {problem.what}" for problem in error.problems))


def of_plan(plan: Plan) -> Cell:
    if not plan.downgrades:
        return Cell(status=NATIVE)
    runs_as = tuple(item.runs_as.partition("/")[2] for item in plan.downgrades)
    return Cell(status=DOWNGRADED, runs_as=runs_as, reasons=tuple(item.reason for item in plan.downgrades))


def table() -> dict[str, dict[str, Cell]]:
    """hardware -> recipe -> cell."""
    runs = {name: composed(name) for name in recipes()}
    return {name: {recipe: cell(replace(run, hardware=config.hardware(name))) for recipe, run in runs.items()} for name in hardware()}


def render(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """The page, as Markdown."""
    names = list(next(iter(cells.values())))
    reasons = list(dict.fromkeys(_reason(name, cell) for name, row in cells.items() for cell in row.values() if cell.reasons))
    lines = [
        "# Compatibility",
        "",
        "What becomes of each recipe on each hardware profile, as the plan finds it on a small model. Generated, not written:",
        "`python -m optforge.plan.compatibility > docs/compatibility.md`. A test holds this page against the plan.",
        "",
        "- **native**: every step runs as the recipe says.",
        "- an option's name: the target turns a step into that one, for the reason of the number. The run says so as well.",
        "- **refused**: the plan refuses the recipe, for the reason of the number.",
        "",
        "Whether it fits and whether it pays depend on the model and the workload: ask `optforge plan` ([plan.md](plan.md)).",
        "",
        *_rows(names, cells, reasons),
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)),
    ]
    return "\n".join(lines) + "\n"


def _rows(names: Sequence[str], cells: Mapping[str, Mapping[str, Cell]], reasons: Sequence[str]) -> Iterator[str]:
    yield f"| hardware | {' | '.join(f'`{name}`' for name in names)} |"
    yield f"|---{'|---' * len(names)}|"
    for name, row in cells.items():
        yield f"| `{name}` | {' | '.join(_text(name, row[recipe], reasons) for recipe in names)} |"


def _text(name: str, cell: Cell, reasons: Sequence[str]) -> str:
    if cell.status == NATIVE:
        return NATIVE
    number = reasons.index(_reason(name, cell)) + 1
    what = ", ".join(cell.runs_as) if cell.status == DOWNGRADED else f"**{REFUSED}**"
    return f"{what} ({number})"


def _reason(name: str, cell: Cell) -> str:
    """The reason without the profile's own name, so that profiles that lack the same share it."""
    return "; ".join(reason.replace(f"{name} has", "the target has").replace(name, "the target") for reason in cell.reasons)


def main(path: str | None = None) -> None:
    text = render(table())
    if path is None:
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
