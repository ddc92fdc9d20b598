"""The kernels that a pass launches, compiled for the target before anything runs there.

Only the Triton kernels of this package are compiled here: a library's kernels come with the library, and those that
Inductor writes exist only once it runs on the device. What is not checked is listed as such, never left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from optforge.kernels import cross_compile
from optforge.kernels.compiler import ORDINARY, TF32, Compiled
from optforge.kernels.cross_compile import triton_version
from optforge.kernels.launches import BYTES, DECLARED, Configuration, Product, declared
from optforge.plan.graph import ATTENTION, CONVOLUTION, FUSIBLE, OPTIMIZER, PRODUCT, Graph, Operator
from optforge.progress import Progress
from optforge.spec import Hardware, Json

COMPILED, REFUSED, OVER_SHARED_MEMORY, LIBRARY = "compiled", "refused", "over_shared_memory", "library"
NOT_CHECKED = "not_checked"

UNITS = {
    ORDINARY: "the product runs on the ordinary cores, not on matrix units",
    TF32: "the product rounds its fp32 operands to tf32, a 10-bit mantissa",
}
"""What a reader should know of the units that multiply."""

PREFIX = "optforge."
GPUS = ("nvidia", "amd")
"""Backends whose targets launch the Triton kernels."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One kernel of a pass, and how often it is launched there."""

    kernel: str
    """The Triton kernel's name, or the library operator's."""
    configuration: Configuration | None
    """None for a library's kernel."""
    count: int
    """Launches in one pass of the workload."""
    example: str
    """Dotted path of the first module that launches it."""


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel on one arch; None where it is not known or does not apply."""

    kernel: str
    configuration: str
    """Storage, activations and tile in words; empty for a library's kernel."""
    modules: int
    """Launches in one pass of the workload."""
    example: str
    arch: str
    status: str
    """`compiled`, `refused` (with the compiler's reason), `over_shared_memory`, `library` (nothing to compile), or `not_checked`
    (there is no Triton here)."""
    registers: int | None = None
    """32-bit registers of one thread."""
    shared_memory_bytes: int | None = None
    """Of one thread block."""
    shared_memory_limit: int | None = None
    """The most that the target gives one thread block."""
    spills: int | None = None
    """32-bit registers of one thread that had to move to memory."""
    warps: int | None = None
    units: str | None = None
    """What multiplies: `matrix` units, `tf32` (matrix units that round fp32 operands) or `ordinary` cores; None for a kernel without
    a product."""
    seconds: float | None = None
    """What compiling took, when it was done."""
    reason: str = ""

    def describe(self) -> dict[str, Json]:
        return asdict(self)


def launched(graph: Graph, hardware: Hardware) -> list[Launched]:
    """The distinct kernels of one pass that are this package's or a library's, each once, in the order of their first launch.

    Empty for a backend without Triton kernels; `notes` then says so. What Inductor fuses is not among them.
    """
    if hardware.backend not in GPUS:
        return []
    counts: Counter[str] = Counter()
    first: dict[str, tuple[str, Configuration | None, str]] = {}
    for operator in graph.operators:
        if operator.kind not in (PRODUCT, ATTENTION, CONVOLUTION):
            continue
        configuration = _configuration(operator)
        kernel = operator.name if configuration is None else configuration.name
        key = repr((kernel, configuration))
        counts[key] += 1
        first.setdefault(key, (kernel, configuration, operator.module))
    return [
        Launched(kernel=kernel, configuration=configuration, count=counts[key], example=module)
        for key, (kernel, configuration, module) in first.items()
    ]


def check(kernels: Sequence[Launched], hardware: Hardware, progress: Progress | None = None) -> list[KernelReport]:
    """What became of each kernel on the target's arch, in their order.

    Args:
        kernels: from `launched`.
        progress: advances by one for each kernel of this package.

    Raises:
        OutputError: the cache folder cannot be written.
    """
    own = [(kernel.configuration, hardware.arch) for kernel in kernels if kernel.configuration is not None]
    present = triton_version() is not None
    results = iter(cross_compile.compile_all(own, progress) if present and own else [])
    return [_report(kernel, hardware, next(results) if kernel.configuration is not None and present else None) for kernel in kernels]


def notes(graph: Graph, hardware: Hardware, *, compiled: bool) -> list[str]:
    """What `check` does not cover, a line each.

    Args:
        compiled: the recipe compiles the model, so its small operators become Inductor's kernels.
    """
    if hardware.backend not in GPUS:
        return [f"{hardware.name} runs no Triton kernel: the {hardware.backend} backend compiles through {_compiler(hardware.backend)}"]
    said = []
    if triton_version() is None and any(_configuration(operator) for operator in graph.operators):
        said.append("the kernels were not compiled: Triton is not installed; pip install triton (it exists for Linux)")
    small = sum(operator.kind in (*FUSIBLE, OPTIMIZER) for operator in graph.operators)
    if small and compiled:
        said.append(
            f"not checked: the kernels that Inductor fuses from {small:,} small operators; it writes and tunes them on the device itself"
        )
    elif small:
        said.append(f"not checked: {small:,} small operators, which run as PyTorch's own kernels")
    return [*said, *(f"not checked: {name}, whose kernel is not known" for name in sorted(set(_unknown(graph))))]


def _compiler(backend: str) -> str:
    return {"cpu": "Inductor's C++ and oneDNN", "xla": "XLA"}.get(backend, "its own compiler")


def _unknown(graph: Graph) -> Iterator[str]:
    """Operators of this package or a stranger's that are neither declared nor a library's."""
    for operator in graph.unknown_operators():
        yield operator.name
    for operator in graph.operators:
        if operator.kind == PRODUCT and operator.name.startswith(PREFIX) and _configuration(operator) is None:
            yield operator.name


def _configuration(operator: Operator) -> Configuration | None:
    """What the operator launches; None if that is no kernel of this package."""
    name = operator.name.removeprefix(PREFIX)
    if operator.kind != PRODUCT or name == operator.name or name not in DECLARED or operator.dtype not in BYTES:
        return None
    _, rows, outputs, columns = operator.size
    said = dict(part.partition("=")[::2] for part in operator.detail.split(",") if part)
    return declared(
        Product(
            operator=name,
            dtype=operator.dtype,
            rows=rows,
            outputs=outputs,
            columns=columns,
            group=int(said.get("group", 0)),
            zero="zero" in said,
            bias="bias" in said,
            per_tensor="per_tensor" in said,
        )
    )


def _report(kernel: Launched, hardware: Hardware, compiled: Compiled | None) -> KernelReport:
    common = KernelReport(
        kernel=kernel.kernel,
        configuration=kernel.configuration.label if kernel.configuration else "",
        modules=kernel.count,
        example=kernel.example,
        arch=hardware.arch,
        status=LIBRARY if kernel.configuration is None else NOT_CHECKED,
        reason="nothing to compile" if kernel.configuration is None else "Triton is not installed",
    )
    if compiled is None:
        return common
    return KernelReport(
        **(
            asdict(common)
            | {name: getattr(compiled, name) for name in ("registers", "shared_memory_bytes", "spills", "warps", "units", "seconds")}
            | dict(zip(("status", "reason"), judged(compiled, hardware.shared_memory_bytes), strict=True))
            | {"shared_memory_limit": hardware.shared_memory_bytes}
        )
    )


def judged(compiled: Compiled, limit: int | None) -> tuple[str, str]:
    """Status and reason of a compiled kernel where a thread block may use `limit` bytes of shared memory (None: not known)."""
    if compiled.status != COMPILED:
        return REFUSED, compiled.reason
    needed = compiled.shared_memory_bytes or 0
    if limit is not None and needed > limit:
        return OVER_SHARED_MEMORY, f"needs {needed:,} bytes of shared memory, a thread block has {limit:,}"
    said = [UNITS[compiled.units]] if compiled.units in UNITS else []
    if compiled.spills:
        said.append(f"{compiled.spills:,} registers of each thread spill to memory")
    return COMPILED, "; ".join(said)
