"""What every kernel of OptForge becomes on every GPU family, on a machine without any: the table of docs/kernels.md.

    python benchmarks/cross_compile.py                     # print the section, all arches (two minutes on two cores)
    python benchmarks/cross_compile.py --arch sm_80 gfx942
    python benchmarks/cross_compile.py --write             # replace the section in docs/kernels.md

Results are kept in the user's cache (`OPTFORGE_CACHE`) by source, arch and Triton's version; after a change of a kernel
run it again with --write. tests/kernels/test_kernel_docs.py holds the committed table against a fresh one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from optforge import config
from optforge.kernels.compiler import Compiled
from optforge.kernels.cross_compile import compile_all, triton_version
from optforge.kernels.launches import DECLARED, Configuration, Product, declared
from optforge.plan.kernels import COMPILED, judged

PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
BEGIN, END = "<!-- made by: python benchmarks/cross_compile.py --write -->", "<!-- end of what is made -->"

PROFILES = {
    "sm_75": "t4",
    "sm_80": "a100",
    "sm_86": None,
    "sm_89": "l4",
    "sm_90": "h100",
    "sm_100": "b200",
    "sm_103": "b300",
    "sm_120": "rtx5090",
    "gfx942": "mi300x",
    "gfx950": "mi350x",
}
"""Arch -> a hardware profile of it; None where there is none (sm_86: A10, RTX 30)."""

SM_86_SHARED_MEMORY = 101376
"""CUDA C++ Programming Guide, technical specifications per compute capability: 99 KB per thread block at 8.6."""

ROWS = (1, 16, 128, 256)
"""One for each tile that is launched: the matrix-vector kernel, and tiles of 16, 64 and 128 rows."""

WIDTH = 4096
"""N and K: multiples of 16, as in nearly every model."""

MARKS = {"ordinary": "†", "tf32": "‡", "matrix": ""}
"""What multiplies."""


def products(dtypes: Sequence[str] = ("bf16", "fp16", "fp32")) -> list[Product]:
    """Every operator, dtype and tile; int4 in groups of 64 with zero points, nothing with a bias."""
    return [
        Product(operator=operator, dtype=dtype, rows=rows, outputs=WIDTH, columns=WIDTH, group=64 * int4, zero=bool(int4))
        for rows in ROWS
        for operator in DECLARED
        for dtype in dtypes
        for int4 in [int(operator == "int4_weight")]
    ]


def limit(arch: str) -> int | None:
    """Bytes of shared memory that a thread block may use."""
    profile = PROFILES[arch]
    return config.hardware(profile).shared_memory_bytes if profile else SM_86_SHARED_MEMORY


def table(arches: Sequence[str], dtypes: Sequence[str] = ("bf16", "fp16", "fp32")) -> str:
    """The Markdown table: a row for each kernel, a column for each arch."""
    kernels = [declared(product) for product in products(dtypes)]
    results = iter(compile_all([(kernel, arch) for kernel in kernels for arch in arches]))
    lines = [f"| kernel | {' | '.join(arches)} |", f"|---|{'---|' * len(arches)}"]
    refusals: dict[str, int] = {}
    for kernel in kernels:
        cells = [cell(next(results), limit(arch), refusals) for arch in arches]
        lines.append(f"| {name(kernel)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in refusals.items())]).rstrip() + "\n"


def name(kernel: Configuration) -> str:
    return f"{kernel.name.removesuffix('_kernel')}: {kernel.label}"


def cell(compiled: Compiled, limit: int | None, refusals: dict[str, int]) -> str:
    """`184 / 40,960`: registers and shared memory, then spills where there are any, and a mark for what multiplies."""
    status, reason = judged(compiled, limit)
    if status != COMPILED:
        return f"{status.replace('_', ' ')} ({refusals.setdefault(reason, len(refusals) + 1)})"
    spills = f" / **{compiled.spills:,}**" if compiled.spills else ""
    mark = f" {MARKS[compiled.units]}" if compiled.units else ""
    return f"{compiled.registers} / {compiled.shared_memory_bytes or 0:,}{spills}{mark}".rstrip()


def section(arches: Sequence[str]) -> str:
    limits = ", ".join(f"{arch} {limit(arch) or 0:,}" for arch in arches)
    return (
        f"{date.today():%Y-%m-%d}, triton {triton_version()}. N = K = {WIDTH:,}.\n\n"
        f"Shared memory that a thread block may use: {limits}.\n\n{table(arches)}"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--arch", nargs="+", choices=list(PROFILES), default=list(PROFILES))
    options.add_argument("--write", action="store_true", help="replace the section in docs/kernels.md")
    chosen = options.parse_args()
    if not chosen.write:
        print(section(chosen.arch))
        return
    if chosen.arch != list(PROFILES):
        sys.exit("--write takes all arches; leave --arch out")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{section(chosen.arch)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
