"""The command line, rewritten for Hydra: one function, held by a table of cases.

People write `steps.weights.group_size=64`, `'~steps.compile'` or `recipe=./shared/team.yaml`. Hydra wants
`++recipe.steps.weights.group_size=64`, and would load a shipped file of the same name for a path. Everything that Hydra
would answer late, with exit code 1, or not at all is refused here with the form to type.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.errors import HydraException

from optforge import recipe as recipes
from optforge.config import build, flags, paths, saved, steps, store
from optforge.config.flags import Arguments
from optforge.config.origins import as_typed
from optforge.errors import ConfigError, Problem, UserError
from optforge.safe_yaml import scalar
from optforge.spec import Json

_KEY = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?P<value>=.*)?", re.DOTALL)
_NUMBER_TO_HYDRA = re.compile(
    r"[-+]?[0-9][0-9_]*([eE][-+]?[0-9][0-9_]*|\.[0-9_]*([eE][-+]?[0-9_]+)?)?|[-+]?\.[0-9][0-9_]*([eE][-+]?[0-9_]+)?|nan|[-+]?inf",
    re.IGNORECASE,
)
_PIECES = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[,\[\]{}:])""")


def parse(argv: Sequence[str], *, cwd: Path, set_: Sequence[str] = (), drop: Sequence[str] = (), add: Sequence[str] = ()) -> Arguments:
    """Rewrites and checks a command line.

    Args:
        argv: overrides and flags in the order in which they were typed.
        cwd: the folder that relative paths mean.
        set_, drop, add: values of `--set STEP.KEY=VALUE`, `--drop STEP`, `--add STEP=KIND/OPTION`.

    Raises:
        ConfigError: with every problem at once, each with the form to type.
        TrustError: a run file names code and `trust=true` is not among the overrides.
    """
    arguments, texts = flags.split(argv, cwd)
    texts += [_set(text) for text in set_] + [_dropped(text) for text in drop] + [_added(text) for text in add]
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    rewritten: list[str] = []
    rewriter = _Rewriter(arguments, cwd)
    for text in sorted(texts, key=lambda text: not text.lstrip("+").startswith("recipe=")):
        try:
            key, override = rewriter.rewrite(text)
        except UserError as error:
            problems.extend(error.problems)
            continue
        if key in seen:
            problems.append(_twice(key, seen[key], text))
        seen[key] = text
        rewritten.append(override)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    trusted = "++trust=true" in rewritten
    for path in rewriter.run_files:
        saved.register(path, trusted=trusted)
    if arguments.config_file is not None:
        rewritten = [*saved.as_overrides(arguments.config_file, frozenset(seen), trusted=trusted), *rewritten]
    problems = _wrong_steps(seen, rewriter, added={_step_of(_added(text)) for text in add})
    if problems:
        raise ConfigError(*problems)
    folders = [*paths.plugin_dirs(), *([arguments.config_dir] if arguments.config_dir else [])]
    if folders and "hydra.searchpath" not in seen:
        rewritten.append(f"hydra.searchpath=[{','.join(store.quoted(f'file://{folder}') for folder in folders)}]")
    return replace(arguments, overrides=tuple(rewritten))


def choices(text: str, *, cwd: Path) -> list[str]:
    """The overrides that one with several values stands for, each as it would be typed alone; any other is itself alone."""
    key, equals, _ = text.partition("=")
    if not equals or key.startswith("~"):
        return [text]
    parsed = OverridesParser.create().parse_override(text)
    value = parsed.value()
    if isinstance(value, Glob):
        known = recipes.known(cwd, paths.recipes_dir()) if key == "recipe" else paths.option_files(key)
        return [f"{key}={name}" for name in value.filter(list(known))]
    return [f"{key}={one}" for one in parsed.sweep_string_iterator()] if parsed.is_discrete_sweep() else [text]


def _set(text: str) -> str:
    """`--set weights.group_size=64` as an override; `steps.` may stand before it."""
    bare = text.removeprefix("steps.")
    if not re.match(r"[^=.]+\.[^=]+=", bare):
        raise _refused(f"--set {text}", "is not of the form STEP.KEY=VALUE", "type --set weights.group_size=64")
    return f"steps.{bare}"


def _dropped(text: str) -> str:
    """`--drop compile` as an override."""
    bare = text.removeprefix("steps.")
    if not recipes.STEP_NAME.fullmatch(bare):
        raise _refused(f"--drop {text}", "is not the name of a step", "type --drop compile")
    return f"~steps.{bare}"


def _added(text: str) -> str:
    """`--add prune=prune/wanda` as an override; a whole step may stand there too."""
    name, equals, value = text.removeprefix("steps.").partition("=")
    if not equals or not value or not recipes.STEP_NAME.fullmatch(name):
        raise _refused(f"--add {text}", "is not of the form STEP=KIND/OPTION", "type --add prune=prune/wanda")
    return f"steps.{name}={value}" if value.startswith("{") else f"steps.{name}.use={value}"


def _step_of(override: str) -> str:
    return override.removeprefix("steps.").partition("=")[0].partition(".")[0]


def _wrong_steps(seen: dict[str, str], rewriter: _Rewriter, *, added: set[str]) -> list[Problem]:
    """Steps that are dropped and not there, or added and there already."""
    if not (rewriter.chosen or rewriter.has_run_file):
        return []
    known = rewriter.steps()
    dropped = [key.removeprefix("recipe.steps.") for key, text in seen.items() if key.startswith("recipe.steps.") and text.startswith("~")]
    given = {_step_of(text.lstrip("+")) for text in seen.values() if text.lstrip("+").startswith("steps.")}
    problems = [steps.no_such_step(name, known) for name in dropped if "." not in name and name not in known and name not in given]
    return problems + [
        Problem(where=f"--add {name}", what="the recipe has a step of that name", fix=f"type --set {name}.use=KIND/OPTION to change it")
        for name in sorted(added & set(known))
    ]


def _twice(key: str, first: str, second: str) -> Problem:
    fix = "keep one; a recipe builds on another with extends" if key == "recipe" else "keep one"
    return Problem(where=as_typed(key), what=f"is given twice, as {first} and as {second}", fix=fix)


def _refused(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(where=where, what=what, fix=fix))


class _Rewriter:
    """Rewrites one override at a time; knows the names that options can have."""

    def __init__(self, arguments: Arguments, cwd: Path) -> None:
        self._arguments = arguments
        self._cwd = cwd
        self._parser = OverridesParser.create()
        self.chosen: list[str] = []
        """Option names of the recipes that the command line chooses."""
        self.run_files: list[Path] = []
        """Saved runs whose sections are chosen by option name, in a command line that was rewritten before."""

    def rewrite(self, text: str) -> tuple[str, str]:
        """The full dotted key and the override as Hydra takes it.

        Raises:
            ConfigError
        """
        match = _KEY.fullmatch(text)
        assert match is not None  # every part of the pattern may be empty
        sign, key, value = match["sign"] or "", match["key"].strip(), match["value"]
        key = f"recipe.{key}" if key == "steps" or key.startswith("steps.") else key
        self._check_key(text, sign, key, value)
        if key.startswith(("hydra.", "hydra/")) or key == "hydra":
            self._parsed(text)
            return key, text
        if sign == "~" and value is not None:
            raise _refused(text, "what is dropped takes no value", f"type {shlex.quote(text.partition('=')[0])}")
        if sign == "~":
            return key, f"~{key}"
        if key in build.SECTIONS and not str(value).startswith("={"):
            return key, self._choice(key, text, str(value)[1:])
        parsed = self._parsed(f"{key}{value}", shown=text)
        if parsed.is_sweep_override() and not self._arguments.multirun:
            listed = f"{text.partition('=')[0]}=[{str(value)[1:]}]"
            raise _refused(text, "several values are a sweep", f"add -m, or write {shlex.quote(listed)} for one list")
        return key, f"++{key}={_keep_text(str(value)[1:])}"

    def _check_key(self, text: str, sign: str, key: str, value: str | None) -> None:
        """Refuses a key that no run can have, before Hydra advises to add a plus."""
        self._check_numbers(text, key)
        if "@" in key or (":" in key and not key.startswith("hydra")):
            raise _refused(text, "packages have no use here", "type <group>=<option>")
        if not key or (value is None and sign != "~"):
            raise _refused(text.strip(), "is not of the form key=value", f"type {self._meant(text)}")
        if sign == "~" and key in build.SECTIONS:
            raise _refused(text, f"a run needs its {key}", f"type {key}=NAME")
        first = re.split(r"[./]", key)[0]
        if first in ("limits", "goal"):
            raise _refused(text, f"unknown key {first!r}", f"type recipe.{text.lstrip('+~')}")
        if first not in build.TOP and first != "hydra":
            raise ConfigError(build.unknown_top(first, text))

    def _check_numbers(self, text: str, key: str) -> None:
        if re.fullmatch(r"(recipe\.)?(steps|transforms)(\[|\.)-?[0-9]+.*", key):
            names = list(self.steps())
            shown = f"; the {len(names)} steps of this recipe are {', '.join(names)}" if names else ""
            raise _refused(text, f"steps have names, not numbers{shown}", f"type steps.{names[0] if names else '<name>'}.<key>=VALUE")
        if re.search(r"\[|\]|\.-?[0-9]+(\.|$)", key):
            raise _refused(text, "one element of a list cannot be changed alone", "write the whole list: <key>=[a,b]")

    def _meant(self, text: str) -> str:
        """What a word without `=` was likely meant as."""
        if text in build.SECTIONS:
            return f"{text}=NAME"
        group = next((group for group in build.SECTIONS if text in self._known(group)), None)
        return f"{group or 'recipe'}={text}" if group or (text and recipes.is_path(text)) else "key=value"

    @property
    def has_run_file(self) -> bool:
        return self._arguments.config_file is not None

    def steps(self) -> dict[str, Json]:
        """Steps that any of the chosen recipes has."""
        found: dict[str, Json] = {}
        for option in self.chosen:
            found |= store.load_recipe(option, cwd=self._cwd).steps
        if not self.chosen and self._arguments.config_file is not None:
            found |= saved.recipe_of(self._arguments.config_file).steps
        return found

    def _parsed(self, override: str, shown: str | None = None) -> Override:
        """The override as Hydra's grammar reads it; where it cannot, the quoted form to paste."""
        shown = shown or override
        key, _, value = shown.partition("=")
        try:
            return self._parser.parse_override(override)
        except HydraException as error:
            for form in _quoted_forms(value):
                if self._readable(f"{key}={form}"):
                    raise _refused(shown, "is not quoted as an override must be", f"type {shlex.quote(f'{key}={form}')}") from error
            raise _refused(shown, f"cannot be read ({str(error).splitlines()[0]})", "type key=value") from error

    def _readable(self, override: str) -> bool:
        try:
            self._parser.parse_override(override.lstrip("+"))
        except HydraException:
            return False
        return True

    def _choice(self, group: str, text: str, value: str) -> str:
        """A group override with every option checked, and every path of a recipe under its own option name."""
        if value in ("", "None", "null", "[]"):
            what = f"needs the name of a {group}, got {value or 'nothing'}"
            raise _refused(text, what, f"type {group}=NAME; see optforge list {paths.PLURALS[group]}")
        parsed = self._parsed(f"{group}={value}", shown=text)
        names = list(_names(parsed, list(self._known(group))))
        if names == [""]:
            fix = "several are a sweep: a,b with -m; a recipe builds on another with extends"
            raise _refused(text, f"one {group} is chosen by one name", fix)
        if parsed.is_sweep_override() and not self._arguments.multirun:
            raise _refused(text, "several values are a sweep", "add -m")
        options = [self._option(group, name) for name in names]
        return f"{group}={','.join(store.quoted(option) if re.search(r'[^A-Za-z0-9_./%-]', option) else option for option in options)}"

    def _option(self, group: str, name: str) -> str:
        run_file = store.run_file_of(name)
        if run_file is not None:
            self.run_files.append(run_file)
            return name
        if group == "recipe":
            self.chosen.append(store.register_recipe(name, cwd=self._cwd))
            return self.chosen[-1]
        if group == "hardware" and (recipes.is_path(name) or store.file_of(name)):
            return store.register_hardware(name, cwd=self._cwd)
        known = self._known(group)
        if name in known:
            return name
        raise ConfigError(paths.unknown_option(group, name, known))

    def _known(self, group: str) -> dict[str, Path]:
        if group == "recipe":
            return {name: found[0] for name, found in recipes.known(self._cwd, paths.recipes_dir()).items()}
        extra = (self._arguments.config_dir,) if self._arguments.config_dir else ()
        return paths.option_files(group, extra)


def _names(parsed: Override, known: list[str]) -> Iterator[str]:
    """The option names that a group override chooses, one or a sweep; one empty name where it is a list or a mapping."""
    value = parsed.value()
    if isinstance(value, ChoiceSweep):
        yield from (str(getattr(item, "text", item)) for item in value.list)
    elif isinstance(value, Glob):
        yield from value.filter(known)
    else:
        yield str(value) if isinstance(value, str | int | float) else ""


def _quoted_forms(value: str) -> Iterator[str]:
    """Forms in which Hydra may be able to read `value`: a mapping without quotes around its keys, a list with each item
    in quotes, or all of it as one text."""
    bare = value.strip()
    if bare.startswith("{") and bare.endswith("}"):
        yield re.sub(r"""(['"])([\w.-]+)\1(\s*:)""", r"\2\3", bare)
    elif bare.startswith("[") and bare.endswith("]"):
        yield f"[{','.join(store.quoted(item.strip()) for item in bare[1:-1].split(','))}]"
    else:
        yield store.quoted(value)


def _keep_text(value: str) -> str:
    """Puts quotes around what Hydra would read as a number that may not be meant: `695e0514`, `1_000`, `nan`.

    The type of the field then decides, as it does for a file.
    """
    if "(" in value:
        return value
    pieces = _PIECES.split(value)
    in_braces = 0
    for index, piece in enumerate(pieces):
        in_braces += (piece == "{") - (piece == "}")
        bare = piece.strip()
        alone = not any(":" in beside for beside in pieces[max(index - 1, 0) : index + 2]) or in_braces
        if alone and _NUMBER_TO_HYDRA.fullmatch(bare) and isinstance(scalar(bare), str):
            pieces[index] = piece.replace(bare, f"'{bare}'")
    return "".join(pieces)
