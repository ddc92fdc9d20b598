"""Declares the ATen overloads that torchax 0.0.13 looks up by name and that PyTorch has removed.

PyTorch 2.13 has no overloads for named dimensions any more. torchax puts them into its tables while it is imported and
never calls them, so a declaration without an implementation is enough. Does nothing for overloads that are there.
"""

from __future__ import annotations

import torch

REMOVED = {
    "all": ("dimname", "dimname_out"),
    "index_add": ("dimname",),
    "index_copy": ("dimname",),
    "index_copy_": ("dimname",),
    "index_fill": ("Dimname_Scalar", "Dimname_Tensor"),
    "index_fill_": ("Dimname_Scalar", "Dimname_Tensor"),
    "norm": ("names_ScalarOpt_dim", "names_ScalarOpt_dim_dtype", "names_dtype_out", "names_out"),
    "prod": ("dim_Dimname",),
    "std": ("correction_names", "correction_names_out", "names_dim", "names_out"),
    "std_mean": ("correction_names", "names_dim"),
    "unbind": ("Dimname",),
}
"""Operator -> its removed overloads that torchax 0.0.13 names."""


def declare_removed() -> torch.library.Library | None:
    """Declares what is missing; the declarations live as long as the library that is returned. None where all are there."""
    missing = [(name, overload) for name, overloads in REMOVED.items() for overload in overloads if not _exists(name, overload)]
    if not missing:
        return None
    library = torch.library.Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    for name, overload in missing:
        library.define(f"{name}.{overload}(Tensor self) -> Tensor")  # type: ignore[no-untyped-call]  # as above
    return library


def _exists(name: str, overload: str) -> bool:
    return overload in getattr(torch.ops.aten, name).overloads()
