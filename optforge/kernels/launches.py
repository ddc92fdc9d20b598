"""What each operator of this package launches: the Triton kernel, its constants, and what the launcher finds out about its arguments.

Apart from the kernels, because a plan asks this for devices and on machines where there is no Triton. `weight_only.launch`
takes its constants from here, so what is planned and what is launched cannot be two things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

INT8, FP8, INT4 = 0, 1, 2
"""How a weight is stored (the kernels' KIND)."""

MATVEC_ROWS = 4
"""Most rows for the matrix-vector kernel; each row reads the weight again, through the cache."""

ALIGNMENT = 16
"""Triton compiles a kernel of its own for each set of arguments that are multiples of 16, and for an integer that is 1."""

SMALL = 2**31 - 1
"""Bytes of a storage up to which AMD's compiler addresses it with 32-bit offsets, in a kernel of its own again."""

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "u8": 1, "i8": 1}
"""Bytes of one element, by Triton's name of the dtype."""

Constants = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Product:
    """One call of a weight-only operator: its sizes and which optional arguments it has."""

    operator: str
    """A key of `DECLARED`: `int8_weight`, `int4_weight`, `fp8_weight`."""
    dtype: str
    """Of the activations: `bf16`, `fp16` or `fp32`."""
    rows: int
    outputs: int
    """N."""
    columns: int
    """K."""
    group: int = 0
    """int4: inputs that share a scale."""
    zero: bool = False
    """int4: groups have zero points."""
    bias: bool = False
    per_tensor: bool = False
    """One scale for the whole weight."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One compilation of a kernel, as the launcher asks for it."""

    kernel: str
    """Its address, `package.module:name`."""
    label: str
    """Storage, activations and tile in words."""
    signature: Mapping[str, str]
    """Argument -> Triton's type (`*bf16`, `i32`, `fp32`), or `constexpr` for what is compiled in."""
    constants: Mapping[str, int]
    """The values of the `constexpr` arguments."""
    aligned: tuple[str, ...]
    """Arguments that are multiples of 16."""
    small: tuple[str, ...]
    """Pointers into storages of at most 2 GB."""
    options: Mapping[str, int] = field(default_factory=dict)
    """`num_warps`, `num_stages` where the launch sets them; otherwise the compiler's own for the device."""

    @property
    def module(self) -> str:
        return self.kernel.partition(":")[0]

    @property
    def name(self) -> str:
        """The kernel's name, without its module."""
        return self.kernel.partition(":")[2]


def weight_only(kind: int, group: int, rows: int, *, zero: bool, bias: bool) -> tuple[str, Constants]:
    """The kernel of `weight_only.py` for so many rows, by name, and its constants.

    Args:
        kind: INT8, FP8 or INT4.
        group: the group size of int4, a multiple of 16.
    """
    flags = {"KIND": kind, "GROUP": group, "HAS_ZERO": zero, "HAS_BIAS": bias}
    if rows <= MATVEC_ROWS:
        return "matvec_kernel", flags | {"BLOCK_N": 8, "BLOCK_K": _block_k(group, 512) if kind == INT4 else 512}
    # short tiles for few rows, so that little of them is padding
    block_m = 16 if rows <= 16 else 64 if rows <= 128 else 128
    return "matmul_kernel", flags | {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": _block_k(group, 64) if kind == INT4 else 64}


def _block_k(group: int, most: int) -> int:
    """The longest step along K, at most `most`, that stays within one group: a power of two that divides `group`."""
    return min(group & -group, most)


STORED = {"int8_weight": (INT8, "i8"), "fp8_weight": (FP8, "u8"), "int4_weight": (INT4, "u8")}
"""Operator -> KIND and the dtype of its weight."""


def declared(product: Product) -> Configuration:
    """What a call of the operator compiles and launches. Tensors are taken as an allocator aligns them.

    Raises:
        KeyError: the operator launches no kernel of this package.
    """
    return DECLARED[product.operator](product)


def _weight_only(product: Product) -> Configuration:
    kind, stored = STORED[product.operator]
    name, constants = weight_only(kind, product.group, product.rows, zero=product.zero, bias=product.bias)
    row = -(-product.columns // 2) if kind == INT4 else product.columns
    groups = -(-product.columns // product.group) if kind == INT4 else 1
    scales = 1 if product.per_tensor else product.outputs * groups
    scale = ("fp32", scales)
    pointers = {
        "x_ptr": (product.dtype, product.rows * product.columns),
        "w_ptr": (stored, product.outputs * row),
        "scale_ptr": scale,
        "zero_ptr": ("u8", scales) if product.zero else scale,  # an argument that is not given is the scale once more
        "bias_ptr": (product.dtype, product.outputs) if product.bias else scale,
        "y_ptr": (product.dtype, product.rows * product.outputs),
    }
    integers = {"N": product.outputs, "K": product.columns, "stride_xm": product.columns, "stride_wn": row}
    integers["stride_sn"] = 0 if scales == 1 else groups
    if name == "matmul_kernel":
        integers["M"] = product.rows
    tile = " x ".join(str(constants[key]) for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if key in constants)
    return Configuration(
        kernel=f"optforge.kernels.weight_only:{name}",
        label=f"{_storage(product)}, {product.dtype}, tile {tile}",
        signature={name: f"*{dtype}" for name, (dtype, _) in pointers.items()}
        | _integer_types(integers)
        | {"factor": "fp32"}
        | dict.fromkeys(constants, "constexpr"),
        constants=constants | {name: 1 for name, value in integers.items() if value == 1},
        aligned=(*pointers, *(name for name, value in integers.items() if value % ALIGNMENT == 0)),
        small=tuple(name for name, (dtype, count) in pointers.items() if BYTES[dtype] * count <= SMALL),
    )


def _integer_types(values: Mapping[str, int]) -> dict[str, str]:
    return {name: "constexpr" if value == 1 else "i32" if value < 2**31 else "i64" for name, value in values.items()}


def _storage(product: Product) -> str:
    """`int4 group 64 + zero points + bias`."""
    kind = product.operator.removesuffix("_weight") + (f" group {product.group}" if product.group else "")
    extras = {"one scale": product.per_tensor, "zero points": product.zero, "bias": product.bias}
    return " + ".join([kind, *(word for word, there in extras.items() if there)])


DECLARED: dict[str, Callable[[Product], Configuration]] = dict.fromkeys(STORED, _weight_only)
"""Operator, without `optforge.` -> what it launches."""
