"""The folder of a job: its number, and a short name from what sets it apart from the other jobs of its sweep.

Override text is no folder name: it has slashes, brackets and any length. The name is for people, the number makes it
unique, and the full overrides stand in the job's status.json.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote

from optforge.preflight import slug

MAX_BYTES = 60
"""Of a job's whole folder name. File systems allow 255, but a name is also read, in tables and in paths."""
GROUPS = ("recipe", "model", "data", "workload", "hardware")
_HASH = 8


def folder_name(index: int, overrides: Sequence[str]) -> str:
    """`<index>_<short name>`, in at most 60 letters, digits and `._-`.

    Args:
        overrides: those that differ between jobs; empty for a sweep of one job.
    """
    prefix = f"{index}_"
    return prefix + short_name(overrides, MAX_BYTES - len(prefix))


def short_name(overrides: Sequence[str], limit: int = MAX_BYTES) -> str:
    """What sets a job apart, for people: `llama_fp8-h200`, `group_size=64` as `group_size-64`.

    Where something had to be cut off, a hash of the whole text ends it.
    """
    spoken = "-".join(filter(None, map(_spoken, overrides))) or "job"
    name = slug(spoken, limit)
    if len(name) < len(spoken):
        digest = hashlib.sha256("\0".join(overrides).encode()).hexdigest()[:_HASH]
        name = f"{name[: limit - _HASH - 1].rstrip('-._')}-{digest}"
    return name


def _spoken(override: str) -> str:
    """`steps.weights.group_size=64` as `group_size-64`, a chosen option as its bare name."""
    key, equals, value = override.lstrip("+~").partition("=")
    value = value.strip().strip("'\"")
    if key in GROUPS or key.startswith("hydra/"):
        return PurePosixPath(unquote(value)).stem if "/" in value else value
    last = re.split(r"[./]", key)[-1]
    value = re.sub(r"[^\w.]+", "-", value, flags=re.ASCII).strip("-")
    return f"{last}-{value}" if equals else f"no-{last}"
