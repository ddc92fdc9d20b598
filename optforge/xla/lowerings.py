"""JAX forms of the ATen operators that quantized layers trace to and torchax 0.0.13 has none for."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Puts them into torchax's table. Its own are put there first, when its environment is made."""
    import jax
    import jax.numpy as jnp
    from torchax.ops import mappings, ops_registry

    def int_mm(a: Any, b: Any) -> Any:
        """int8 [rows, K] @ int8 [K, N] in int32, exact."""
        return jax.lax.dot(a, b, preferred_element_type=jnp.int32)

    def view_as_dtype(x: Any, dtype: torch.dtype) -> Any:
        """The same bits as another dtype of the same width (fp8 is stored as uint8)."""
        return jax.lax.bitcast_convert_type(x, mappings.t2j_dtype(dtype))

    ops_registry.register_torch_dispatch_op(torch.ops.aten._int_mm, int_mm)
    ops_registry.register_torch_dispatch_op(torch.ops.aten.view.dtype, view_as_dtype)
