"""Configurations that were measured on this machine: one JSON file for each device and set of versions, in the user's cache folder.

The name holds a hash of the kernels' sources and of the versions of PyTorch and Triton, since any of them can make another
configuration the best. Nothing is asked of a device here.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from optforge import atomic
from optforge.cache import cache_dir
from optforge.errors import OutputError, Problem
from optforge.kernels.configurations import Config, Device

FORMAT = 1
SOURCES = ("few_rows.py", "split_attention.py", "argmax_kernel.py", "ptx.py")
"""Files whose change makes measured configurations void."""


def path(device: Device) -> Path:
    """Where the measured configurations of `device` lie, or would lie."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return cache_dir() / "tuned" / f"{name}-{_versions()}.json"


@cache
def kept(device: Device) -> dict[str, Config]:
    """Key of a shape -> its configuration; empty where nothing was tuned, or the file is damaged."""
    try:
        found: dict[str, Any] = json.loads(path(device).read_text(encoding="utf-8"))["shapes"]
        return {key: {name: int(value) for name, value in entry["config"].items()} for key, entry in found.items()}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(device: Device, shapes: dict[str, dict[str, Any]]) -> Path:
    """Adds measured shapes (key -> {config, microseconds, floor_share, ...}) to the file; hands back its path.

    Raises:
        OutputError: the cache folder cannot be written.
    """
    file = path(device)
    try:
        before = json.loads(file.read_text(encoding="utf-8"))["shapes"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        before = {}
    facts = {"format": FORMAT, "device": device.name, "arch": device.arch, **versions(), "shapes": before | shapes}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(file, facts)
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise OutputError(Problem(where=str(file), what=what, fix="free space there, or set OPTFORGE_CACHE to another folder")) from error
    kept.cache_clear()
    return file


@cache
def versions() -> dict[str, str]:
    """What a measured configuration depends on beside the device."""
    digest = hashlib.sha256()
    for name in SOURCES:
        file = Path(__file__).with_name(name)
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.exists() else b""))
    return {"torch": _version("torch"), "triton": _version("triton"), "kernels": digest.hexdigest()[:12]}


def _versions() -> str:
    return hashlib.sha256(json.dumps([FORMAT, versions()], sort_keys=True).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
