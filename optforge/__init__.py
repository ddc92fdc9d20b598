"""OptForge makes a PyTorch model faster or smaller from a declarative recipe, and proves by measurement that it did.

Importing this package loads no torch: the functions below import what they need when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optforge.api import apply, load, optimize

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "load", "optimize"]


def __getattr__(name: str) -> Any:
    if name in ("apply", "load", "optimize"):
        from optforge import api

        return getattr(api, name)
    raise AttributeError(f"module 'optforge' has no attribute {name!r}")
