"""One kernel through Triton's compiler, for an arch that need not be here, and what is read off the binary.

Runs where the compiler may end the process (`cross_compile` starts one). Triton itself is imported inside the functions, so
that whoever only reads results does not load it.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optforge.kernels.launches import ALIGNMENT, Configuration

COMPILED, REFUSED = "compiled", "refused"
MATRIX, TF32, ORDINARY = "matrix", "tf32", "ordinary"

TENSOR_MEMORY_COLUMNS = 512
"""Blackwell's tensor memory (PTX ISA, tcgen05.alloc: 512 columns); Triton refuses to launch what takes more."""

SAID = "said.txt"
"""Where the compilers' descriptors lead."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What became of one configuration on one arch; None where it is not known."""

    arch: str
    status: str
    """`compiled` or `refused`."""
    registers: int | None = None
    """32-bit registers of one thread (AMD: vector registers of one lane)."""
    shared_memory_bytes: int | None = None
    """Of one thread block."""
    spills: int | None = None
    """32-bit registers of one thread that had to move to memory."""
    warps: int | None = None
    stages: int | None = None
    """Loads that the compiler keeps ahead of the product."""
    units: str | None = None
    """What multiplies: `matrix` units, `tf32` (matrix units that round fp32 operands to a 10-bit mantissa) or `ordinary` cores; None
    for a kernel without a product."""
    seconds: float | None = None
    reason: str = ""
    """Why it was refused: the compiler's own words, one line."""


def compile_here(configuration: Configuration, arch: str, work: Path) -> Compiled:
    """Compiles in this process, which the compiler may end.

    Args:
        work: a folder for the binary; `said.txt` in it takes what the compilers print.
    """
    import triton

    begin = time.perf_counter()
    try:
        built = triton.compile(source(configuration, arch), target=target(arch), options=dict(configuration.options))
    except Exception as error:  # whatever a compiler raises is its answer, and is written down
        return Compiled(arch=arch, status=REFUSED, reason=reason_of(error, said(work)), seconds=time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    columns = getattr(built.metadata, "tmem_size", None) or 0
    fits = columns <= TENSOR_MEMORY_COLUMNS
    registers, spills = _nvidia_registers(built.asm["cubin"], work) if arch.startswith("sm_") else _amd_registers(built.asm["amdgcn"])
    return Compiled(
        arch=arch,
        status=COMPILED if fits else REFUSED,
        registers=registers,
        shared_memory_bytes=built.metadata.shared,
        spills=spills,
        warps=built.metadata.num_warps,
        stages=built.metadata.num_stages,
        units=_units(built.asm, arch),
        seconds=seconds,
        reason="" if fits else f"needs {columns} columns of tensor memory, the device has {TENSOR_MEMORY_COLUMNS}",
    )


def source(configuration: Configuration, arch: str) -> Any:
    """The configuration as Triton's launcher hands it to the compiler (`triton.compiler.ASTSource`)."""
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(configuration.module), configuration.name)
    names: list[str] = kernel.arg_names
    aligned = {argument: [["tt.divisibility", ALIGNMENT]] for argument in configuration.aligned}
    ranged = {argument: [["tt.pointer_range", 32]] for argument in configuration.small if _ranges(arch)}
    attributes = {(index,): found for index, name in enumerate(names) if (found := aligned.get(name, []) + ranged.get(name, []))}
    return ASTSource(
        fn=kernel,
        signature={name: configuration.signature[name] for name in names},
        constexprs=dict(configuration.constants),
        attrs=attributes,
    )


def _ranges(arch: str) -> bool:
    """Whether the launcher tells the compiler of small storages: for AMD, unless buffer operations are switched off."""
    from triton import knobs

    return arch.startswith("gfx") and bool(knobs.amd.use_buffer_ops)


def target(arch: str) -> Any:
    """Triton's name for an arch: `sm_90` is ("cuda", 90), `gfx942` is ("hip", "gfx942"), with the threads that run in step."""
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(re.sub(r"\D", "", arch)), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def _nvidia_registers(cubin: bytes, work: Path) -> tuple[int | None, int | None]:
    """Registers of one thread and spilled ones, by the `cuobjdump` that Triton's package carries.

    Triton's kernels keep nothing else on the stack, so its bytes are spilled registers of four (Triton counts them so).
    """
    from triton import knobs

    file = work / "kernel.cubin"
    file.write_bytes(cubin)
    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError:  # a build of Triton without NVIDIA's tools: not known, and so shown
        return None, None
    usage = subprocess.run([tool, "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    return (int(found[1]), int(found[2]) // 4) if found else (None, None)


def _amd_registers(assembly: str) -> tuple[int | None, int | None]:
    """Vector registers of one lane and spilled ones, from the metadata at the end of the assembly."""
    used, spilled = (re.search(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "vgpr_spill_count"))
    return int(used[1]) if used else None, int(spilled[1]) if spilled else None


def _units(assembly: Any, arch: str) -> str | None:
    """Read off the instructions, since the compiler chooses them and does not always keep to the precision that was asked for."""
    if "tt.dot" not in assembly["ttir"]:
        return None
    text = assembly["ptx" if arch.startswith("sm_") else "amdgcn"]
    products = re.findall(r"mma[.]\S+|v_(?:mfma|wmma|smfmac)_\S+", text)
    if not products:
        return ORDINARY
    return TF32 if any("tf32" in product or "xf32" in product for product in products) else MATRIX


COMPLAINTS = (r"LLVM ERROR: .*", r"ptxas\S* .*(?:error|fatal) .*", r"Assertion .* failed.*", r"(?<=error: ).*")


def reason_of(error: BaseException, printed: str) -> str:
    """The one line that tells why: the front end's message, else what the back end printed, else the exception's own."""
    while error.__cause__ is not None:  # the front end wraps what it was told in the kernel's source lines
        error = error.__cause__
    own = str(getattr(error, "error_message", None) or error)
    first = next((line.strip() for line in own.splitlines() if line.strip()), "")
    return complaint(own) or complaint(printed) or f"{type(error).__name__}: {first}"


def complaint(text: str) -> str:
    """The first line that a compiler's back end marks as its error, without what stands before it; empty where there is none."""
    found = next((match for pattern in COMPLAINTS if (match := re.search(pattern, text))), None)
    return found[0].strip() if found else ""


def said(work: Path) -> str:
    """What the compilers printed for the kernel they are at."""
    file = work / SAID
    return file.read_text(errors="replace") if file.exists() else ""
