"""Shell completion of overrides: `recipe=<TAB>` offers recipes, `hardware=<TAB>` offers hardware."""

from __future__ import annotations

import typer

NOUNS = ("recipes", "transforms", "hardware", "models", "workloads", "backends", "data", "schemes")
"""What `optforge list` can list."""
GROUPS = ("recipe", "hardware", "model", "workload", "data")


def complete_override(ctx: typer.Context, args: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Candidates for the word under the cursor, each with its one-line description.

    Bash takes `=` for the end of a word, so `recipe=lla` arrives there as three words and wants a bare value back; zsh
    and fish send it whole and want it whole.
    """
    words = [*(ctx.params.get("overrides") or ())]
    if incomplete == "=" or (words and words[-1] == "="):
        typed = "" if incomplete == "=" else incomplete
        group = words[-2] if words and words[-1] == "=" and len(words) > 1 else (words[-1] if words else "")
        return _values(group, typed)
    if words and words[-1] in GROUPS and incomplete == "":
        return _values(words[-1], "")
    group, found, typed = incomplete.partition("=")
    if not found:
        return [(f"{name}=", f"choose the {name}") for name in GROUPS]
    return [(f"{group}={value}", text) for value, text in _values(group, typed)]


def complete_noun(incomplete: str) -> list[str]:
    """What can stand after `optforge list`."""
    return [noun for noun in NOUNS if noun.startswith(incomplete)]


def _values(group: str, typed: str) -> list[tuple[str, str]]:
    """Options of a group; after a comma (a sweep) what stands before it is kept."""
    if group not in GROUPS:
        return []
    from optforge import config

    kept, comma, _ = typed.rpartition(",")
    return [(f"{kept}{comma}{option.name}", option.description) for option in config.options(group)]
