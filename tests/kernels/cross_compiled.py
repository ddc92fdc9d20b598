"""Compiles the weight-only kernels for one arch and prints what each became. Run by test_cross_compile.py."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optforge.kernels.weight_only import FP8, INT4, INT8, matmul_kernel, matmul_sizes, matvec_kernel, matvec_sizes

POINTERS = ("x_ptr", "w_ptr", "scale_ptr", "zero_ptr", "bias_ptr", "y_ptr")
STORED = {INT8: "*i8", FP8: "*u8", INT4: "*u8"}
ALIGNED = {*POINTERS, "N", "K", "stride_xm", "stride_wn"}
"""What the launcher finds to be multiples of 16 for the layers of real models."""


def target(arch: str) -> GPUTarget:
    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)


def build(kernel: object, kind: int, dtype: str, sizes: dict[str, int], arch: str) -> object:
    """One kernel as the launcher would compile it."""
    names = kernel.arg_names  # type: ignore[attr-defined]  # a JITFunction
    constants = {"KIND": kind, "GROUP": 64 if kind == INT4 else 0, "HAS_ZERO": kind == INT4, "HAS_BIAS": True, **sizes}
    types = {"x_ptr": f"*{dtype}", "w_ptr": STORED[kind], "scale_ptr": "*fp32", "zero_ptr": "*u8" if kind == INT4 else "*fp32"}
    types |= {"bias_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "factor": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in ALIGNED}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target(arch))


def main(arch: str) -> None:
    for kind in (INT8, FP8, INT4):
        for dtype in ("bf16", "fp16"):
            for kernel, sizes in ((matvec_kernel, matvec_sizes(kind, 64)), (matmul_kernel, matmul_sizes(kind, 64, 256))):
                built = build(kernel, kind, dtype, sizes, arch)
                text = built.asm["ptx" if arch.startswith("sm_") else "amdgcn"]  # type: ignore[attr-defined]  # a CompiledKernel
                product = "mma" if arch.startswith("sm_") else "mfma"
                assert kernel is matvec_kernel or product in text, "the tiled product does not use the matrix units"
                print(arch, kernel.fn.__name__, kind, dtype, "compiled,", built.metadata.shared, "bytes of shared memory")


if __name__ == "__main__":
    main(sys.argv[1])
