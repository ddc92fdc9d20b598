"""The table of schemes: how each stores weights, what it does to activations, and where its product really runs.

One place, as data: `optforge list schemes` prints it, docs/schemes.md holds it, a quantize step takes its scheme from it, and the
plan asks it what a target lacks. `native` means that the product runs in the scheme's own numbers, or that a kernel reads the
stored weight; `emulated` means the same numbers by way of the model's dtype, which saves memory and no time.

Sources of the formats: OCP 8-bit floating point specification 1.0; OCP microscaling formats (MX) specification 1.0, sections 5
and 6; 128 x 128 blocks: DeepSeek-V3 technical report, 2024, section 3.3; NVFP4: NVIDIA, Pretraining large language models with
NVFP4, 2025, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from optforge.measure.utilization import has_units
from optforge.spec import Hardware, Scheme

NATIVE, EMULATED, LACKING = "native", "emulated", "lacking"
BACKENDS = ("nvidia", "amd", "cpu", "xla")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One scheme of the table. The four backends say in words how it runs there."""

    scheme: Scheme
    storage: str
    """Parameters of a layer of N outputs and K inputs."""
    nvidia: str
    amd: str
    cpu: str
    xla: str
    weight_only: str | None = None
    """The scheme that runs where a target lacks the units; None where there is nothing to lack."""
    microscaled: bool = False
    """Native units multiply blocks together with their scales."""
    kernel: bool = True
    """This package or a library multiplies it natively; False: emulated even where the target has units for it."""


_KERNEL = "native, Triton kernel"
_UNTRIED = "native, Triton kernel, never run there"
_DEQUANTIZED = "emulated, dequantized first"
_TRACED = "emulated, plain operators"
_WEIGHT = {"nvidia": _KERNEL, "amd": _UNTRIED, "cpu": _DEQUANTIZED, "xla": _TRACED}
_PLAIN = {"nvidia": _DEQUANTIZED, "amd": _DEQUANTIZED, "cpu": _DEQUANTIZED, "xla": _TRACED}
_INT8 = {
    "nvidia": "native from sm_75",
    "amd": "native, never run there",
    "cpu": "native, oneDNN",
    "xla": "native where the profile has int8 units",
}
_FP8 = {
    "nvidia": "native from sm_89, else {0}",
    "amd": "native (MI300: FNUZ), never run there",
    "cpu": "no units: {0}",
    "xla": "emulated where the profile has fp8 units, else {0}",
}
_MX = {
    "nvidia": "emulated where units exist (sm_100 and up), else {0}",
    "amd": "emulated where units exist (gfx950), else {0}",
    "cpu": "no units: {0}",
    "xla": "no units: {0}",
}
_NVFP4 = _MX | {"amd": "no units: {0}"}
_BLOCK = {
    "nvidia": "emulated from sm_89, else {0}",
    "amd": "emulated",
    "cpu": "no units: {0}",
    "xla": "emulated where the profile has fp8 units, else {0}",
}


def _entry(
    name: str,
    storage: str,
    runs: dict[str, str],
    scheme: Scheme,
    weight_only: str | None = None,
    *,
    microscaled: bool = False,
    kernel: bool = True,
) -> Entry:
    nvidia, amd, cpu, xla = (runs[backend].format(weight_only) for backend in BACKENDS)
    return Entry(
        scheme=replace(scheme, name=name),
        storage=storage,
        nvidia=nvidia,
        amd=amd,
        cpu=cpu,
        xla=xla,
        weight_only=weight_only,
        microscaled=microscaled,
        kernel=kernel,
    )


def _rounding(scheme: Scheme, granularity: str, *, static: bool = False) -> Scheme:
    """The scheme with activations rounded to the dtype of its weights."""
    return replace(scheme, activation_dtype=scheme.weight_dtype, activation_granularity=granularity, static=static)


_int8 = Scheme(name="int8", weight_dtype="int8", weight_bits=8, granularity="channel")
_int4 = Scheme(name="int4", weight_dtype="int4", weight_bits=4, granularity="group", group_size=64, symmetric=False)
_fp8 = Scheme(name="fp8", weight_dtype="fp8", weight_bits=8, granularity="channel")
_fp8_block = replace(_fp8, granularity="block", group_size=128)
_mxfp8 = replace(_fp8, granularity="group", group_size=32, scale_dtype="e8m0")
_mxfp4 = replace(_mxfp8, weight_dtype="fp4", weight_bits=4)
_nvfp4 = replace(_mxfp4, group_size=16, scale_dtype="fp8")
"""What is stored; the entries name it."""

_BYTES, _PACKED = "int8 [N, K], fp32 scale [N, 1]", "uint8 [N, ceil(K/2)], two values a byte"
_BITS = "uint8 [N, K], the bits of e4m3, fp32 scale [N, 1]"
_BLOCKS = "uint8 [N, K], the bits of e4m3, fp32 scale [ceil(N/128), ceil(K/128)]"
_E8M0 = "uint8 scale [N, ceil(K/32)], a power of two"
_TWO = "uint8 scale [N, ceil(K/16)], the bits of e4m3, one fp32 scale [1]"
_GROUPS = "fp32 scale [N, groups], uint8 zero point [N, groups]"

TABLE: tuple[Entry, ...] = (
    _entry("int8_weight", _BYTES, _WEIGHT | {"cpu": "native up to 7 rows of bf16, above dequantized first"}, _int8),
    _entry("int8_dynamic", f"{_BYTES}, fp32 row sum [N]", _INT8, _rounding(_int8, "row"), "int8_weight"),
    _entry(
        "int8_static",
        f"{_BYTES}, fp32 row sum [N], fp32 input scale [1] and offset [1]",
        _INT8,
        _rounding(_int8, "tensor", static=True),
        "int8_weight",
    ),
    _entry("int4_weight", f"{_PACKED}, {_GROUPS}", _WEIGHT, _int4),
    _entry("fp8_weight", _BITS, _WEIGHT, _fp8),
    _entry("fp8_dynamic", _BITS, _FP8, _rounding(_fp8, "row"), "fp8_weight"),
    _entry("fp8_static", f"{_BITS}, fp32 input scale [1]", _FP8, _rounding(_fp8, "tensor", static=True), "fp8_weight"),
    _entry("fp8_block_weight", _BLOCKS, _PLAIN, _fp8_block, kernel=False),
    _entry("fp8_block", _BLOCKS, _BLOCK, _rounding(_fp8_block, "group"), "fp8_block_weight", kernel=False),
    _entry("mxfp8_weight", f"uint8 [N, K], the bits of e4m3fn, {_E8M0}", _PLAIN, _mxfp8, kernel=False),
    _entry(
        "mxfp8",
        f"uint8 [N, K], the bits of e4m3fn, {_E8M0}",
        _MX,
        _rounding(_mxfp8, "group"),
        "mxfp8_weight",
        microscaled=True,
        kernel=False,
    ),
    _entry("mxfp4_weight", f"{_PACKED} (e2m1), {_E8M0}", _PLAIN, _mxfp4, kernel=False),
    _entry("mxfp4", f"{_PACKED} (e2m1), {_E8M0}", _MX, _rounding(_mxfp4, "group"), "mxfp4_weight", microscaled=True, kernel=False),
    _entry("nvfp4_weight", f"{_PACKED} (e2m1), {_TWO}", _PLAIN, _nvfp4, kernel=False),
    _entry("nvfp4", f"{_PACKED} (e2m1), {_TWO}", _NVFP4, _rounding(_nvfp4, "group"), "nvfp4_weight", microscaled=True, kernel=False),
)
ENTRIES = {entry.scheme.name: entry for entry in TABLE}
SCHEMES: dict[str, Scheme] = {name: entry.scheme for name, entry in ENTRIES.items()}
"""Scheme name -> what `quantize/<name>` means with the defaults of its option file."""


def runs(scheme: Scheme, hardware: Hardware) -> str:
    """`native`, `emulated`, or `lacking`: the target has no units for the product, and `weight_only` runs instead."""
    entry = ENTRIES[scheme.name]
    if scheme.activation_dtype is not None and not has_product(scheme, hardware):
        return LACKING
    return NATIVE if entry.kernel else EMULATED


def note(scheme: Scheme, hardware: Hardware) -> str | None:
    """What a user should know of a scheme that no kernel multiplies; None where one does."""
    if runs(scheme, hardware) != EMULATED:
        return None
    if scheme.activation_dtype is None:
        return f"{scheme.name} is emulated: weights are dequantized before each product, which saves memory and no time"
    return f"{hardware.name} has units for {scheme.name} and no kernel here uses them: it is emulated, and predicted as such"


def has_product(scheme: Scheme, hardware: Hardware) -> bool:
    """Whether `hardware` has units that multiply what the scheme makes of weights and activations.

    Units for microscaled blocks came with those for fp4: on NVIDIA with sm_100, on AMD with gfx950, which takes no e4m3 scales.
    """
    if scheme.activation_dtype is None:
        return True
    if not ENTRIES[scheme.name].microscaled:
        return has_units(hardware, scheme.activation_dtype)
    if scheme.scale_dtype == "fp8" and hardware.backend != "nvidia":
        return False
    return has_units(hardware, "fp4") and has_units(hardware, scheme.activation_dtype)


def units(scheme: Scheme) -> str:
    """What the product of a scheme needs, in a word: `int8`, `fp8`, `mxfp4`."""
    return scheme.name if ENTRIES[scheme.name].microscaled else str(scheme.activation_dtype)


def weights_text(scheme: Scheme) -> str:
    """`int4, group of 64, asymmetric`."""
    scales = {"e8m0": ", e8m0 scale", "fp8": ", e4m3 scale"}.get(scheme.scale_dtype, "")
    dtype = {"fp8": "fp8 e4m3", "fp4": "fp4 e2m1"}.get(scheme.weight_dtype, scheme.weight_dtype)
    size = scheme.group_size
    spread = {"channel": "per output channel", "group": f"groups of {size}", "block": f"blocks of {size} x {size}", "tensor": "one scale"}
    others = "" if scheme.symmetric else " (or 16 to 256, or per output channel), with or without zero points"
    return f"{dtype}, {spread[scheme.granularity]}{scales}{others}"


def activations_text(scheme: Scheme) -> str:
    """`int8, per token, as it runs`; `as they are` where they are not rounded."""
    if scheme.activation_dtype is None:
        return "as they are"
    spread = {"row": "per token", "tensor": "one scale", "group": f"groups of {scheme.group_size}"}[scheme.activation_granularity or "row"]
    return f"{scheme.activation_dtype}, {spread}, {'calibrated' if scheme.static else 'as it runs'}"


def rows() -> Iterator[tuple[str, ...]]:
    """The table's cells, scheme by scheme, in the order of `COLUMNS`."""
    for entry in TABLE:
        scheme = entry.scheme
        where = tuple(getattr(entry, backend) for backend in BACKENDS)
        yield scheme.name, weights_text(scheme), activations_text(scheme), entry.storage, *where


COLUMNS = ("scheme", "weights", "activations", "storage", *BACKENDS)


def markdown() -> str:
    """The table as docs/schemes.md holds it."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*lines, *("| " + " | ".join((f"`{row[0]}`", *row[1:])) + " |" for row in rows())]) + "\n"


def page(text: str) -> str:
    """docs/schemes.md with the table between its two marks renewed."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{markdown()}\n{END}{rest.partition(END)[2]}"


BEGIN, END = "<!-- made by: python -m optforge.schemes -->", "<!-- end of what is made -->"

if __name__ == "__main__":
    from pathlib import Path

    path = Path("docs/schemes.md")
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
