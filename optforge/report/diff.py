"""Marks the words in which two texts differ, for the two generations side by side."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

Run = tuple[str, bool]
"""A stretch of text, and whether the other side lacks it."""


def words(before: str, after: str) -> tuple[list[Run], list[Run]]:
    """Both texts cut into stretches; joined again they are the texts, to the character."""
    first, second = re.findall(r"\s+|\S+", before), re.findall(r"\s+|\S+", after)
    left: list[Run] = []
    right: list[Run] = []
    for tag, i1, i2, j1, j2 in SequenceMatcher(a=first, b=second, autojunk=False).get_opcodes():
        if i2 > i1:
            left.append(("".join(first[i1:i2]), tag != "equal"))
        if j2 > j1:
            right.append(("".join(second[j1:j2]), tag != "equal"))
    return left, right
