"""Chooses modules by name or class: the one selector of every transform.

A plain entry names whole dotted components at the end of a path (`q_proj`, `mlp.gate`), or a class (`Linear`, base
classes count), and covers the module it names and all beneath it. An `re:` entry full-matches a path. Names are the
model's own, whatever ran before: the levels that `torch.compile` wraps in are left out, and a packed module also
answers to the names of the linears that it stands for. An entry that matches nothing is an error, because a
misspelled `ignore` would otherwise quantize the layer that the user wanted left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optforge.errors import Problem, SelectorError, near

if TYPE_CHECKING:
    from torch import nn

PARTS = "optforge_parts"
"""Attribute of a packed module: the local names, in its parent, of the modules that it stands for."""

_WRAPPER = "_orig_mod"
_REGEX = "re:"

Eligible = Callable[[str, "nn.Module"], bool]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a step works on. `chosen` maps each name to its module, in the model's order."""

    chosen: dict[str, nn.Module]
    ignored: list[str]
    """Eligible and targeted, but covered by an `ignore` entry."""
    unmatched: list[str] = field(default_factory=list)
    """`ignore` entries that matched nothing; always empty under `strict`."""


def select(
    model: nn.Module, targets: Sequence[str], ignore: Sequence[str], *, step: str, eligible: Eligible | None = None, strict: bool = True
) -> Selection:
    """The modules that `targets` cover and `ignore` does not.

    Args:
        model: any module tree, on any device; nothing in it is changed.
        targets: entries that choose; none choose nothing.
        ignore: entries that leave alone; they win over `targets`.
        step: the step's name, for error messages.
        eligible: whether the step can work on a module at all; the selection is made among these.
        strict: an `ignore` entry that matches nothing is an error; otherwise it is listed in `unmatched`.

    Raises:
        SelectorError: an entry matches nothing (up to three near names are given), is not a valid regular expression,
            or covers only some parts of a packed module. All problems are raised together.
    """
    tree = _Tree(model)
    candidates = [c for c in tree.candidates() if eligible is None or eligible(c.name, c.module)]
    problems: list[Problem] = []
    wanted = [e for text in targets if (e := _entry(text, tree, f"step {step}, targets", problems)) is not None]
    left = [e for text in ignore if (e := _entry(text, tree, f"step {step}, ignore", problems)) is not None]
    unmatched: list[str] = []
    for entry in wanted:
        problems.extend(_useless(entry, tree, candidates, f"step {step}, targets", required=True))
    for entry in left:
        if not entry.anchors and not strict:
            unmatched.append(entry.text)
            continue
        problems.extend(_useless(entry, tree, candidates, f"step {step}, ignore", required=False))
    chosen: dict[str, nn.Module] = {}
    ignored: list[str] = []
    for candidate in candidates:
        targeted = [unit for unit in candidate.units if _covered(unit.names, wanted)]
        taken = [unit for unit in targeted if not _covered(unit.names, left)]
        if len(taken) == len(candidate.units):
            chosen[candidate.name] = candidate.module
        elif taken:
            problems.append(_split(candidate, taken, step))
        elif targeted:
            ignored.append(candidate.name)
    if problems:
        raise SelectorError(*problems)
    return Selection(chosen=chosen, ignored=ignored, unmatched=unmatched)


def original_name(path: str) -> str:
    """A module path without the levels that `torch.compile` adds."""
    return ".".join(part for part in path.split(".") if part != _WRAPPER)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model by name: the elements of each outermost `nn.ModuleList` of two or more modules of
    one class. Empty when a model has none."""
    from torch import nn

    found: dict[str, nn.Module] = {}

    def visit(path: str, module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            found.update({_join(path, name): child for name, child in module.named_children()})
            return
        for name, child in module.named_children():
            visit(path if name == _WRAPPER else _join(path, name), child)

    visit("", model)
    return found


@dataclass(frozen=True)
class _Unit:
    """What an entry covers or does not: a module, or one part of a packed module, under all its names."""

    label: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Candidate:
    name: str
    module: nn.Module
    units: tuple[_Unit, ...]


class _Tree:
    """Every module of a model under its original names. A module registered twice has several names, one candidate."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.names: dict[int, list[str]] = {}
        self.standins: set[str] = set()
        for path, module in model.named_modules(remove_duplicate=False):
            if _WRAPPER in module._modules:
                continue
            name = original_name(path)
            self.modules[name] = module
            self.names.setdefault(id(module), []).append(name)
            self.standins.update(_part_names(name, module))

    def candidates(self) -> Iterator[_Candidate]:
        for name, module in self.modules.items():
            aliases = self.names[id(module)]
            if name != aliases[0] or name in self.standins:
                continue
            parts = _part_names(name, module)
            units = tuple(_Unit(part, (*aliases, part)) for part in parts) or (_Unit(name, tuple(aliases)),)
            yield _Candidate(name, module, units)

    def known(self, length: int) -> set[str]:
        """Class names, and the last `length` components of every path: what an entry could have meant."""
        tails = {".".join(name.split(".")[-length:]) for name in (*self.modules, *self.standins) if name}
        return tails | ({type(module).__name__ for module in self.modules.values()} if length == 1 else set())


@dataclass(frozen=True)
class _Entry:
    """An entry of `targets` or `ignore` and the names it matches itself (what lies beneath them is covered too, unless
    the entry is a regular expression)."""

    text: str
    pattern: re.Pattern[str] | None
    anchors: frozenset[str]

    def covers(self, name: str) -> bool:
        if self.pattern is not None:
            return name in self.anchors
        return name in self.anchors or any(name[:i] in self.anchors for i in _dots(name)) or "" in self.anchors


def _entry(text: str, tree: _Tree, where: str, problems: list[Problem]) -> _Entry | None:
    """The parsed entry, or None and a problem."""
    names = [*tree.modules, *(name for name in tree.standins if name not in tree.modules)]
    if text.startswith(_REGEX):
        try:
            pattern = re.compile(text[len(_REGEX) :])
        except re.error as error:
            problems.append(Problem(where=where, what=f"{text!r} is not a regular expression: {error}", fix="correct it after 're:'"))
            return None
        return _Entry(text, pattern, frozenset(name for name in names if pattern.fullmatch(name)))
    if not text or not all(text.split(".")):
        problems.append(
            Problem(where=where, what=f"{text!r} is not a module name", fix="write whole names joined by dots, or 're:<pattern>'")
        )
        return None
    by_name = (name for name in names if name == text or name.endswith("." + text))
    by_class = (name for name, module in tree.modules.items() if name not in tree.standins and _is_a(module, text))
    return _Entry(text, None, frozenset((*by_name, *by_class)))


def _useless(entry: _Entry, tree: _Tree, candidates: list[_Candidate], where: str, *, required: bool) -> Iterator[Problem]:
    """Says so when an entry can have no effect."""
    if not entry.anchors:
        yield Problem(where=where, what=f"{entry.text!r} matches nothing in the model", fix=_hint(entry, tree))
        return
    if any(_covered(unit.names, [entry]) for candidate in candidates for unit in candidate.units):
        return
    shown = ", ".join(sorted(entry.anchors)[:3])
    beneath = [c.name for c in candidates if any(c.name[:i] in entry.anchors for i in _dots(c.name))]
    if beneath:
        fix = f"to cover what lies beneath, write '{entry.text}\\..*' (that is how {beneath[0]} is reached)"
        yield Problem(where=where, what=f"{entry.text!r} matches only {shown}, which this step cannot change", fix=fix)
    elif required:
        count = len(entry.anchors)
        what = f"{entry.text!r} matches {count} module{'s' * (count > 1)} ({shown}), none of which this step can change"
        yield Problem(where=where, what=what, fix="name modules that it works on, or take the entry out")


def _hint(entry: _Entry, tree: _Tree) -> str:
    """What the user may have meant."""
    if entry.pattern is None:
        length = entry.text.count(".") + 1
        return near(entry.text, tree.known(length)) or near(entry.text.split(".")[-1], tree.known(1)) or _examples(tree)
    inside = [name for name in tree.modules if entry.pattern.search(name)]
    if inside:
        return f"'re:' matches the whole path: write 're:.*{entry.pattern.pattern}.*' to match {inside[0]}"
    words = re.findall(r"[A-Za-z_]\w+", entry.pattern.pattern)
    return (near(words[-1], tree.known(1)) if words else "") or _examples(tree)


def _examples(tree: _Tree) -> str:
    leaves = [name for name, module in tree.modules.items() if name and not module._modules]
    return f"names in the model are, for example, {', '.join(leaves[:3])}" if leaves else "the model has no named modules"


def _split(candidate: _Candidate, taken: list[_Unit], step: str) -> Problem:
    """The refusal of an entry that covers only some parts of a packed module."""
    local = {unit: unit.label.rsplit(".", 1)[-1] for unit in candidate.units}
    inside = [local[unit] for unit in taken]
    outside = [local[unit] for unit in candidate.units if unit not in taken]
    return Problem(
        where=f"step {step}, module {candidate.name}",
        what=f"the entries select {', '.join(inside)} and leave {', '.join(outside)}, but these are packed into one product",
        fix=f"name all of {', '.join(local.values())}, or add {' and '.join(outside)} to the fuse step's ignore so that they stay apart",
    )


def _covered(names: Iterable[str], entries: list[_Entry]) -> bool:
    return any(entry.covers(name) for entry in entries for name in names)


def _part_names(name: str, module: nn.Module) -> tuple[str, ...]:
    """Full names of the modules that a packed module stands for; empty for any other module."""
    parent = name.rpartition(".")[0]
    return tuple(_join(parent, part) for part in getattr(module, PARTS, ()))


def _is_a(module: nn.Module, class_name: str) -> bool:
    return any(cls.__name__ == class_name for cls in type(module).__mro__[:-1])


def _dots(name: str) -> Iterator[int]:
    return (i for i, char in enumerate(name) if char == ".")


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
