"""Where each value of a composed run came from, and how a message names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from optforge.recipe import RecipeFile

COMMAND_LINE = "command line"


def as_typed(key: str) -> str:
    """A dotted key as it is typed: `steps.` is short for `recipe.steps.`."""
    return key.removeprefix("recipe.") if key.startswith("recipe.steps") else key


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the values of a composed run came from."""

    base: str = ""
    """What wrote a key that nothing below names: conf/config.yaml, or a saved run's file."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """Group -> option name."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Group -> file of its option."""
    recipe: RecipeFile | None = None
    overridden: frozenset[str] = frozenset()
    """Dotted keys given on the command line."""
    extra: tuple[Path, ...] = ()
    """Folders of the user's own option files."""

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from."""
        if any(key == given or key.startswith(f"{given}.") for given in self.overridden):
            return COMMAND_LINE
        group, _, rest = key.partition(".")
        if group == "recipe" and self.recipe is not None:
            return self.in_recipe(rest)
        return self.files.get(group, self.base)

    def in_recipe(self, key: str) -> str:
        """The recipe file that wrote a key below `recipe.`, or the nearest key above it."""
        if self.recipe is None:
            return self.base
        while key and key not in self.recipe.origins:
            key = key.rpartition(".")[0]
        return self.recipe.origins.get(key, self.recipe.source)

    def where(self, key: str) -> str:
        """A dotted key as a message names it: as it is typed, with the file that holds it."""
        origin = self.origin(key)
        shown = as_typed(key)
        return shown if not origin or origin == COMMAND_LINE else f"{shown} (in {origin})"
