"""What a reader needs to repeat a figure: versions, machine, device, settings."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from optforge import __version__
from optforge.backends.base import Backend
from optforge.spec import Json

PACKAGES = ("torch", "triton", "transformers", "torchao", "lightning", "hydra-core", "omegaconf", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that decide a figure; None for one that is not installed."""
    found: dict[str, str | None] = {"optforge": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def collect(backend: Backend) -> dict[str, Json]:
    """Versions, operating system, and what the backend knows of its device."""
    facts: dict[str, Any] = dict(backend.environment())
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "backend": backend.name,
        "device": facts,
    }
